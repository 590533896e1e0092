"""Rows of closed-loop measurements, as the recipes of Figs. 3, 7, 8 and 9 read them."""

from pathlib import Path

import reproduced
from reproduced import Row, Rows

from bench.aggregate import LOOP_FIELDS

FILES = ("closed_loop.json", "cpu/closed_loop.json")
"""Measured on GPUs; small runs on a CPU."""


def read_loops(folder: Path) -> Rows:
    """The rows of every closed-loop file about models that count, not those of dry runs."""
    rows = [row for name in FILES for row in reproduced.read(name, LOOP_FIELDS, folder)]
    return [row for row in rows if reproduced.kind_of(row["model"])]


def loops(rows: Rows) -> str:
    """Under which conditions closed loops ran, in words."""

    def span(key: str) -> str:
        values = sorted({row[key] for row in rows if row.get(key) is not None})
        return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"

    kind = "".join(
        f"simulated acceptance (trace {name}), " for name in {r["trace"] for r in rows} if name
    )
    replayed = "replayed bucket times, " if any(r["source"] == "replayed" for r in rows) else ""
    return (
        f"{kind}{replayed}concurrency {span('concurrency')}, temperature {span('temperature')}, "
        f"{span('requests')} requests of at most {span('output_cap')} tokens, medians of "
        f"{span('repetitions')}, {reproduced.conditions(rows)}"
    )


def is_simulated(row: Row) -> bool:
    """Whether acceptance was simulated."""
    return bool(row["acceptance"] == "simulated")

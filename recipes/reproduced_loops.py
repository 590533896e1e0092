"""Rows of closed-loop measurements, as the recipes of Figs. 3, 7, 8 and 9 read them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import reproduced
from reproduced import Row, Rows, where

from bench.aggregate import CELL, LOOP_FIELDS

FILES = ("closed_loop.json", "cpu/closed_loop.json")
"""Measured on GPUs; small runs on a CPU."""


def read_loops(folder: Path, files: Sequence[str] = FILES) -> Rows:
    """The rows of every closed-loop file about models that count, not those of dry runs; of every
    cell those that can be compared."""
    cells: dict[tuple[object, ...], Rows] = defaultdict(list)
    for name in files:
        for row in reproduced.read(name, LOOP_FIELDS, folder):
            if reproduced.kind_of(row["model"]):
                cells[row["gpu"], *(row[key] for key in CELL)].append(row)
    return [row for rows in cells.values() for row in comparable(rows)]


def comparable(rows: Rows) -> Rows:
    """Of one cell the rows of the control's commit, and of the repetitions that most modes have:
    a ratio is then of one program and of the same requests and draws."""
    control = where(rows, mode="dflash", budget=None)
    if control:
        rows = where(rows, commit=min(control, key=lambda row: row["repetition"])["commit"])
    modes = Counter(row["repetition"] for row in rows)
    return [row for row in rows if modes[row["repetition"]] == max(modes.values())]


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

"""Fig. 11 and the profile of section II: step intervals, shares of draft, verify and the
allocator, masked tile rows, graph-pool memory.

    python -m bench.decode_step --models 8b 4b --parts steps gains profile ragged
    python recipes/reproduce_steps.py
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reproduced
from reproduced import Experiment, Row, Rows, kind_of, where
from reproduced_loops import read_loops
from reproduced_steps import draw, section

from bench.aggregate import medians

STEP_FIELDS = ("model", "mode", "budget", "tile", "sampling", "requests", "rows", "context",
               "decide_ms", "verify_ms", "step_ms")  # fmt: skip
GAIN_FIELDS = ("model", "mode", "budget", "tile", "requests", "prompt", "trace", "step_ms",
               "rows_per_step")  # fmt: skip
SAMPLING_FIELDS = ("model", "mode", "budget", "sampling", "requests", "context", "over_greedy")
FLOOR_FIELDS = ("model", "mode", "requests", "rows", "context", "floor_ms", "over_floor")
POOL_FIELDS = ("model", "mode", "budget", "graph_pool_mib")
ABOUT = ("gpu", "torch", "commit", "date", "dtype", "model", "mode", "budget", "tile", "requests")


def compute(folder: Path) -> Rows:
    """Rows of five kinds: "interval" (steps of the engine's own loop), "stages" (one step over and
    over, at the longest context), "sampling" (such a step sampled over a greedy one), "pool"
    (after a ragged run that captured every bucket), "floor" (graphs over what memory traffic or
    arithmetic alone would take)."""
    gains = reproduced.newest(reproduced.read("mode_gains.json", GAIN_FIELDS, folder))
    gains = reproduced.one_trace(gains)
    steps = where(reproduced.read("decode_step.json", STEP_FIELDS, folder), sampling="greedy")
    pools = reproduced.read("graph_counters.json", POOL_FIELDS, folder)
    loops = where(read_loops(folder), set="gsm8k", temperature=0.0, acceptance="real")
    loops = medians(row for row in loops if row["gpu"] != reproduced.CPU)
    found = [
        interval(row, f"prompt {row['prompt']}, trace {row['trace']}")
        for row in at_end(gains, "prompt", min)
    ]
    found += [
        interval(row | {"requests": row["concurrency"]}, "closed loop, GSM8K")
        for row in at_end(loops, "requests", max)
    ]
    found += [stages(row) for row in at_end(steps, "context", max)]
    sampled = reproduced.read("sampling_cost.json", SAMPLING_FIELDS, folder)
    found += [
        kept(row, "sampling") | {k: row[k] for k in ("sampling", "context", "over_greedy")}
        for row in sampled
        if row["sampling"] != "greedy"
    ]
    for graph in ("decide", "verify"):
        timed = reproduced.read(f"{graph}_graph.json", (*FLOOR_FIELDS, f"{graph}_ms"), folder)
        found += [
            kept(row, "floor") | {k: row[k] for k in FLOOR_FIELDS}
            | {"graph": graph, "ms": row[f"{graph}_ms"]}
            for row in timed
        ]  # fmt: skip
    found += [
        kept(row, "pool") | {"graph_pool_mib": row["graph_pool_mib"]}
        for row in pools
        if row["graph_pool_mib"] is not None
    ]
    return reproduced.on_gpu([row for row in found if kind_of(row["model"])])


def at_end(rows: Rows, key: str, end: Callable[..., Any]) -> Rows:
    """Of every model the rows whose field has its least or greatest value."""
    ends = {
        model: end(row[key] for row in where(rows, model=model))
        for model in {row["model"] for row in rows}
    }
    return [row for row in rows if row[key] == ends[row["model"]]]


def kept(row: Row, kind: str) -> Row:
    """What tells a row of this recipe apart, and where it comes from."""
    about = {key: row.get(key) for key in ABOUT}
    return {"kind": kind, "acceptance": row.get("acceptance", "simulated")} | about


def interval(row: Row, of: str) -> Row:
    """The time from one step to the next, and the share of attention tile rows that no candidate
    fills."""
    found = kept(row, "interval") | {"of": of, "step_ms": row["step_ms"]}
    height = re.search(r"(\d+) rows", row.get("tile") or "")
    lanes = row.get("live_per_step") or row["requests"]
    if height and row.get("rows_per_step"):
        masked = 1 - row["rows_per_step"] / (lanes * int(height[1]))
        found["masked_rows"] = round(masked, 4)
    return found


def stages(row: Row) -> Row:
    """Shares of a step's time on the GPU's clock; the allocator's of the time its kernels run."""
    draft, verify = (row[f"{name}_ms"] / row["step_ms"] for name in ("decide", "verify"))
    return kept(row, "stages") | {
        "context": row["context"],
        "step_ms": row["step_ms"],
        "draft": round(draft, 4),
        "verify": round(verify, 4),
        "outside": round(max(0.0, 1 - draft - verify), 4),
        "allocator": row.get("allocator_share"),
    }


EXPERIMENT = Experiment("steps", ("kind", *ABOUT), section, draw, compute)

if __name__ == "__main__":
    EXPERIMENT.command(__doc__)

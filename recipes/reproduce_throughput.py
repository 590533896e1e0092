"""Figs. 7 and 8: throughput and latency of closed loops by concurrency, and DScale's gains over
the DFlash control: in all, by concurrency, by data set, at temperature 1.

    python -m bench.closed_loop --prompts DATA        # the SmolLM2 pair, real acceptance
    python -m bench.closed_loop_simulated             # the paper's targets, simulated acceptance
    python recipes/reproduce_throughput.py
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import reproduced
from reproduced import Experiment, Row, Rows, where
from reproduced_loops import read_loops
from reproduced_throughput import draw, section

from bench.aggregate import CELL, gains, geometric_mean, medians

GROUP = ("model", "acceptance", "source", "trace", "temperature", "protocol", "output_cap")
BUDGETS = ("half", "auto")
CONTROL = ("dflash", None)
LATENCIES = ("mean", "p50", "p95", "p99")
CURVE = ("set", "concurrency", "mode", "budget", "tokens_per_s", "latency_ms", "repetitions")
METHODS = (("ar", None), CONTROL, ("dscale", "half"), ("dscale", "auto"))


def compute(folder: Path) -> Rows:
    """Curves (medians over repetitions), gains of every group of like cells, and how well replays
    agree with what they replay; rows of a CPU only while no GPU has any."""
    every = reproduced.on_gpu(read_loops(folder))
    checks = [row for row in every if row.get("replay_error") is not None]
    rows = [row for row in medians(row for row in every if row.get("replay_error") is None)
            if (row["mode"], row["budget"]) in METHODS]  # fmt: skip
    groups: dict[tuple[object, ...], Rows] = defaultdict(list)
    for row in rows:
        groups[tuple((row | {"protocol": protocol(row)})[key] for key in GROUP)].append(row)
    found: Rows = []
    for key, group in groups.items():
        about = dict(zip(GROUP, key, strict=True)) | reproduced.environment_of(group)
        gained = [about | {"kind": "gain"} | row for row in gains_of(group)]
        if gained:
            curves = [{key: row[key] for key in CURVE} for row in group]
            found += [about | {"kind": "curve"} | row for row in curves] + gained
    return found + [agreement(where(checks, model=m)) for m in {r["model"] for r in checks}]


def protocol(row: Row) -> str:
    """How many requests a cell serves: loops of simulated acceptance give every worker the same
    few, all others serve the same number at any concurrency."""
    if row["acceptance"] == "simulated" and row["source"] == "measured":
        return "a few requests of each worker"
    return f"{row['requests']} requests"


def agreement(checks: Rows) -> Row:
    """The largest difference in throughput between loops and their replays."""
    worst = max(abs(row["replay_error"]) for row in checks)
    about = {key: checks[0].get(key) for key in GROUP} | {"protocol": f"{len(checks)} loops"}
    return about | reproduced.environment_of(checks) | {"kind": "replay", "worst": worst}


def gains_of(group: Rows) -> Iterator[Row]:
    """Geometric means of throughput ratios over the control's, and reductions of latency, over
    all cells, and over those of every concurrency and every data set."""
    for budget in BUDGETS:
        ratio = {
            field: gains(group, ("dscale", budget), CONTROL, field)
            for field in ("tokens_per_s", *(f"latency_ms.{name}" for name in LATENCIES))
        }
        cells = list(ratio["tokens_per_s"])
        parts: dict[tuple[str, object], list[tuple[object, ...]]] = defaultdict(list)
        for cell in cells:
            fields = dict(zip(CELL, cell, strict=True))
            parts["all", None].append(cell)
            for by in ("concurrency", "set"):
                parts[by, fields[by]].append(cell)
        for (by, at), some in parts.items():
            means = {k: geometric_mean(value[cell] for cell in some) for k, value in ratio.items()}
            lower = {k: round(1 - means[f"latency_ms.{k}"], 4) for k in LATENCIES}
            gain = round(means["tokens_per_s"] - 1, 4)
            found = {"budget": budget, "by": by, "at": at, "cells": len(some)}
            yield found | {"gain": gain, "latency": lower} | spans(group)


def spans(group: Rows) -> Row:
    """Concurrencies, data sets and the least number of repetitions that a gain covers."""
    return {
        "concurrencies": sorted({row["concurrency"] for row in group}),
        "sets": list(dict.fromkeys(row["set"] for row in group)),
        "repetitions": min(row["repetitions"] for row in group),
    }


EXPERIMENT = Experiment("throughput", (*GROUP, "kind"), section, draw, compute)

if __name__ == "__main__":
    EXPERIMENT.command(__doc__)

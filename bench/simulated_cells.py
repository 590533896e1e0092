"""The cells of simulated closed loops: their requests, the traces they follow, and the rows they
leave."""

from __future__ import annotations

import argparse

import numpy as np
from torch import Tensor

from bench import recorded
from bench.aggregate import Row
from bench.loop_cells import Cell, all_cases
from bench.simulated import SETTINGS, draw
from dscale.request import Request

TRACE_STEPS = 1024
ABLATION = ("dflash", "+tiles", "+budget", "dscale-half", "dscale-auto")
HEADLINE = ("ar", "dflash", "dscale-half", "dscale-auto")
REPLAYED = ("ar", "dflash", "+tiles", "dscale-half", "dscale-auto")
"""Mode "+budget" waits for the host in the middle of a step: no table of times says how long."""

RECORDED = "recorded"
CHAT = ((60, 250), (64, 512))


def lengths(name: str, requests: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, new tokens) of each request: "prompt128-new256" and the like, all alike, or "chat",
    drawn from 60 to 250 and 64 to 512. Raises ValueError for another name."""
    if name == "chat":
        random = np.random.default_rng(seed)
        (a, b), (c, d) = CHAT
        prompts, news = random.integers(a, b + 1, requests), random.integers(c, d + 1, requests)
        return list(zip(prompts.tolist(), news.tolist(), strict=True))
    prompt, _, new = name.removeprefix("prompt").partition("-new")
    if not (prompt.isdecimal() and new.isdecimal() and int(prompt) and int(new)):
        raise ValueError(f"set: expected 'chat' or 'promptP-newN', got {name!r}")
    return [(int(prompt), int(new))] * requests


def draws(args: argparse.Namespace, trace: str, seed: int) -> tuple[Tensor, Tensor]:
    """Scores and accepted counts of a trace: drawn, or of the recorded file."""
    if trace == RECORDED:
        return recorded.load(args.recorded, TRACE_STEPS, args.slots + 1, seed)
    return draw(SETTINGS[trace], TRACE_STEPS, args.slots + 1, seed)


def requests_of(cell: Cell, vocab: int) -> list[Request]:
    """Warm-up and measured requests of a cell, random ids for prompts."""
    random = np.random.default_rng(cell.repetition)
    return [
        Request(
            prompt=random.integers(0, vocab, prompt).tolist(),
            max_new_tokens=new,
            temperature=cell.temperature,
            seed=at,
        )
        for at, (prompt, new) in enumerate(
            lengths(cell.set, cell.warmup + cell.requests, cell.repetition)
        )
    ]


def cells_of(args: argparse.Namespace, trace: str) -> list[Cell]:
    """Cells of a trace: few requests each, as many rounds of all workers at any concurrency."""
    wanted = {"paper": ABLATION, "six": HEADLINE}.get(trace, REPLAYED)
    cases = [case for case in args.modes if case in wanted]
    at = [c for c in args.concurrency if trace != "paper" or c > 1]
    cap = max(new for _, new in lengths(args.set, 1000))
    return [
        Cell(args.set, c, temperature, case, repetition, waves * c, c, cap)
        for repetition in range(args.repetitions)
        for temperature in args.temperature
        for c in at
        for case in cases
        for waves in [2 if case == "ar" else args.waves]
    ]


def row_of(cell: Cell) -> Row:
    """Fields of a simulated cell."""
    adaptive = all_cases()[cell.case].config.adaptive
    return cell.fields | {"predictor": "random" if adaptive else None, "prompts": "random ids"}


def cell_of(row: Row) -> Cell:
    """The cell a row was measured for."""
    return Cell(
        row["set"], row["concurrency"], row["temperature"], name_of(row), row["repetition"],
        row["requests"], row["warmup"], row["output_cap"],
    )  # fmt: skip


def name_of(row: Row) -> str:
    """The name of a row's mode among the cases."""
    wanted = {name: row[name] for name in ("mode", "budget", "tile")}
    names = [
        name
        for name, case in all_cases().items()
        if {key: case.fields[key] for key in wanted} == wanted
    ]
    if not names:
        raise ValueError(f"row: expected a known mode, got {wanted}")
    return names[0]

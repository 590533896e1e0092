"""The configurations of closed-loop measurements: one cell is one run of a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.step_cases import CASES, Case
from bench.workload import MEASURED, SETS, WARM_UP

CONCURRENCIES = (8, 12, 16, 20, 24, 28, 32)
"""The paper's sweep (IV-A)."""

MODES = ("ar", "dflash", "+tiles", "+budget", "dscale-half", "dscale-auto")
PAIR = ("dflash", "dscale-auto")
WIDTHS = (4, 6, 8, 10, 12, 14, 16)
"""Rows of every request in the paper's experiment with fixed widths (Fig. 3)."""

OUTPUT_CAP, REDUCED_CAP = 2048, 512


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `case`: a key of `all_cases()`."""

    set: str
    concurrency: int
    temperature: float
    case: str
    repetition: int
    requests: int
    warmup: int = WARM_UP
    output_cap: int = OUTPUT_CAP

    @property
    def fields(self) -> dict[str, Any]:
        """As result rows carry them."""
        case = all_cases()[self.case]
        return {
            "set": self.set,
            "mode": case.mode,
            "budget": case.fields["budget"],
            "tile": case.fields["tile"],
            "concurrency": self.concurrency,
            "temperature": self.temperature,
            "requests": self.requests,
            "warmup": self.warmup,
            "output_cap": self.output_cap,
            "repetition": self.repetition,
        }


def all_cases() -> dict[str, Case]:
    """Modes by name: those of the ablation, and "dflash-4" and the like of a fixed width."""
    return CASES | {f"dflash-{width}": Case("dflash", width) for width in WIDTHS if width < 16}


def grid(
    sets: Sequence[str],
    concurrencies: Sequence[int],
    cases: Sequence[str],
    *,
    repetitions: int,
    requests: int,
    temperature: float = 0.0,
    warmup: int = WARM_UP,
    output_cap: int = OUTPUT_CAP,
) -> list[Cell]:
    """Every combination, repetitions outermost and modes innermost, so that what drifts over time
    meets all modes alike."""
    return [
        Cell(name, c, temperature, case, repetition, requests, warmup, output_cap)
        for repetition in range(repetitions)
        for name in sets
        for c in concurrencies
        for case in cases
    ]


def full() -> list[Cell]:
    """The paper's whole protocol: every set, concurrency, temperature and mode, 512 requests, five
    repetitions. Hours."""
    return [
        cell
        for temperature in (0.0, 1.0)
        for cell in grid(
            SETS, CONCURRENCIES, MODES,
            repetitions=5, requests=MEASURED, temperature=temperature,
        )
    ]  # fmt: skip


def committed() -> list[Cell]:
    """What the repository keeps: temperature 0 in every mode at 8, 16 and 32; temperature 1 for
    two of them; one full sweep for two of them on one set. Answers have at most 512 tokens, which
    a quarter of the small pair's reach."""
    at, few = (8, 16, 32), {"repetitions": 3, "requests": 128, "output_cap": REDUCED_CAP}
    sweep = {"repetitions": 1, "requests": MEASURED, "output_cap": REDUCED_CAP}
    return [
        *grid(SETS, at, MODES, **few),
        *grid(SETS, at, PAIR, temperature=1.0, **few),
        *grid(SETS[:1], CONCURRENCIES, PAIR, **sweep),
    ]


def reduced() -> list[Cell]:
    """Minutes: 64 requests of at most 512 tokens."""
    few = {"repetitions": 3, "requests": 64, "warmup": 8, "output_cap": REDUCED_CAP}
    return grid(SETS, (8, 16, 32), MODES, **few)


def widths() -> list[Cell]:
    """Fixed widths against the full one, on GSM8K at 8 workers as in the paper (Fig. 3)."""
    cases = [f"dflash-{width}" for width in WIDTHS if width < 16] + ["dflash"]
    return grid(SETS[:1], (8,), cases, repetitions=3, requests=128)


GRIDS = {"full": full, "committed": committed, "reduced": reduced, "widths": widths}


def shard(cells: Sequence[Cell], which: str) -> list[Cell]:
    """The cells of one of n processes, "0/4" to "3/4": sets are dealt out, so that all modes of a
    set run in one process. Raises ValueError for anything else."""
    number, _, count = which.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ValueError(f"shard: expected i/n with i below n, got {which!r}")
    sets = list(dict.fromkeys(cell.set for cell in cells))
    return [cell for cell in cells if sets.index(cell.set) % int(count) == int(number)]

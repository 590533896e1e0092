"""Measured milliseconds that a replay counts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dscale.policy import Cost
from dscale.timing import MeasuredCosts


@dataclass(frozen=True, slots=True)
class Times:
    """Measured milliseconds. `steps`: captured buckets, rows None for a uniform step. `launch`:
    the host's time to start a step; `finish`: to hand out its results. Prefills by their tokens
    together: `prefill` for the whole round when nothing else runs, `prefill_gpu` of the GPU
    alone."""

    steps: MeasuredCosts
    prefill: Sequence[tuple[int, float]]
    prefill_gpu: Sequence[tuple[int, float]]
    launch: float = 0.3
    finish: float = 0.1

    def of_step(self, lanes: int, rows: int | None) -> Cost:
        """The measured bucket, or the next larger one of as many lanes. Raises ValueError where
        there is none."""
        table = self.steps.table
        if rows:
            larger = [n for count, n in table if count == lanes and n is not None and n >= rows]
            rows = min(larger, default=rows)
        if (lanes, rows) not in table:
            raise ValueError(f"steps: expected a time of {lanes} lanes, {rows} rows, got none")
        return table[lanes, rows]

    def of_prefill(self, tokens: int) -> tuple[float, float]:
        """(round, GPU) time of a prefill of so many tokens."""
        return _interpolated(tokens, self.prefill), _interpolated(tokens, self.prefill_gpu)


def _interpolated(at: int, table: Sequence[tuple[int, float]]) -> float:
    x, y = ([pair[i] for pair in table] for i in (0, 1))
    return float(np.interp(at, x, y))

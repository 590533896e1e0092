"""The budget policy: how many rows a step verifies in all.

Everything here comes from values the host already has, one step old; no stage waits for it.
Shapes: N live requests, C = 15 candidates each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dscale.compiled.attention import VERIFY_TILE

MULTIPLES = (2, 3, 4, 6, 8, 12, 16)
"""Rows per lane a drafted step may have: each is a captured bucket."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of a step: capacity `rows` in all, at most `average` per live request; `draft` False
    for one row each without drafting."""

    rows: int
    average: int
    draft: bool = True


class Policy(Protocol):
    """What the decoding loop asks before each step and tells after it."""

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        """Rows of a step of `lanes` lanes; `score_NC`: latest scores of the N live requests, NaN
        where there are none yet; `context`: their committed tokens together."""

    def observe(self, score_NC: Floats, length_N: Floats, accepted_N: Floats) -> None:
        """What a drafted step scored, verified and accepted, for its N live requests."""


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """`average` rows per live request in every step."""

    average: int

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        """The same share for every request."""
        return Choice(lanes * self.average, self.average)

    def observe(self, score_NC: Floats, length_N: Floats, accepted_N: Floats) -> None:
        """Nothing changes it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step: `base` + `per_token` * committed tokens of all its lanes."""

    base: float
    per_token: float = 0.0

    def at(self, context: int) -> float:
        """Milliseconds at a total context, never 0."""
        return max(self.base + self.per_token * context, 1e-6)


class Costs(Protocol):
    """Measured times of steps."""

    def of(self, lanes: int, rows: int) -> Cost:
        """Of a drafted step, or with rows 0 of a plain one."""


# While plain decoding wins, one drafted step in PROBE_FIRST looks again, later one in PROBE_LAST.
PROBE_FIRST, PROBE_LAST = 16, 256
# Weight of what is known already when a step adds to the ratio of accepted to expected.
_MEMORY = 0.97
# Expected acceptance before anything is known: each candidate at 0.7 of the one before.
_PRIOR = np.float32(0.7) ** np.arange(1, VERIFY_TILE, dtype=np.float32)


@dataclass(slots=True)
class AutoBudget:
    """The capacity that maximises expected progress over time.

    Expected progress of a capacity is one token per request plus the best scores that fit in the
    remaining rows, times the running ratio of accepted to expected. The scores are one step old:
    they tell how confident the drafts are lately, not which of them will survive. Where plain
    decoding promises more, nothing is drafted but for a probe, after 16 steps at first and after
    up to 256 while the answer stays the same: at most 1/16 of the steps are probes."""

    costs: Costs
    _accepted: float = 8.0
    _expected: float = 8.0
    _mean_C: Floats = field(default_factory=_PRIOR.copy)
    _plain: bool = False
    _wait: int = 0
    _interval: int = PROBE_FIRST
    _probed: bool = False

    @property
    def calibration(self) -> float:
        """Accepted over expected candidates, lately."""
        return self._accepted / self._expected

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        """The best capacity among the captured ones, or none."""
        plain = Choice(lanes, 1, draft=False)
        best, rate = self._best(lanes, score_NC, context)
        if self._plain and not self._probed:
            self._wait -= 1
            # Below 0 the probe's scores are still on their way.
            return best if self._wait == 0 else plain
        self._probed = False
        if score_NC.shape[0] / self.costs.of(lanes, 0).at(context) > rate:
            self._plain, self._wait = True, self._interval
            self._interval = min(2 * self._interval, PROBE_LAST)
            return plain
        self._plain, self._interval = False, PROBE_FIRST
        return best

    def _best(self, lanes: int, score_NC: Floats, context: int) -> tuple[Choice, float]:
        """The drafted choice with the most expected progress per millisecond, and how much."""
        live, candidates = score_NC.shape
        known_NC = np.where(np.isnan(score_NC), self._mean_C[:candidates], score_NC)
        gain = np.concatenate(([0.0], np.cumsum(-np.sort(-known_NC, axis=None))))
        rates = []
        for multiple in MULTIPLES:
            extra = min(multiple * lanes - live, len(gain) - 1)
            progress = live + self.calibration * float(gain[extra])
            rates.append(progress / self.costs.of(lanes, multiple * lanes).at(context))
        best = int(np.argmax(rates))
        return Choice(MULTIPLES[best] * lanes, VERIFY_TILE), rates[best]

    def observe(self, score_NC: Floats, length_N: Floats, accepted_N: Floats) -> None:
        """Update the ratio, and the mean scores that stand in for unknown ones."""
        score_NC = np.nan_to_num(score_NC)
        column_C = np.arange(score_NC.shape[1])
        expected = float(score_NC[column_C < length_N[:, None] - 1].sum())
        self._expected = _MEMORY * self._expected + expected + 1e-6
        self._accepted = _MEMORY * self._accepted + float(accepted_N.sum()) + 1e-6
        mean_C = self._mean_C[: len(column_C)]
        mean_C += np.float32(0.1) * (score_NC.mean(0) - mean_C)
        self._probed = self._plain and self._wait <= 0

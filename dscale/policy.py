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
MULTIPLE_M = np.array(MULTIPLES)

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


class Observer(Protocol):
    """What hears how long steps took."""

    def observe(self, lanes: int, rows: int | None, context: int, milliseconds: float) -> None:
        """Of a step of so much total context; rows 0 for a plain one, None for a uniform one."""


# While plain decoding wins, one drafted step in PROBE_FIRST looks again, later one in PROBE_LAST,
# unless drafting would cost less than _CLOSE tells.
PROBE_FIRST, PROBE_LAST = 16, 256
_CLOSE = 0.85
# Weight of what is known already when one more request's step adds to it: of the gain of rows, and
# of the ratio of accepted to expected, which is noisier. One step of one request says little.
_MEMORY, _RATIO_MEMORY = 0.98, 0.995
# Most that a single probe may change.
_PROBE_WEIGHT = 0.3
# Expected acceptance before anything is known: each candidate at 0.7 of the one before.
_PRIOR = np.float32(0.7) ** np.arange(1, VERIFY_TILE, dtype=np.float32)
_PRIOR_STEPS = 8


@dataclass(slots=True)
class AutoBudget:
    """The capacity that maximises expected progress over time.

    Expected progress of a capacity is one token per request plus the best scores that fit in the
    remaining rows, averaged over the latest steps (one step's scores say how that draft fares, not
    the next), times the running ratio of accepted to expected. Where plain decoding promises more,
    nothing is drafted but for a probe, after 16 steps at first and, while the answer stays clear,
    after up to 256: at most 1/16 of the steps are probes. A request that has never been scored
    brings the next probe forward to 16 steps."""

    costs: Costs
    _accepted: float = 8.0  # candidates, decayed
    _expected: float = 8.0  # by their scores, decayed alike
    # Scores that 0, 1, ... C more rows per request bring, averaged over steps.
    _gain: Floats = field(default_factory=lambda: np.append(np.float32(0), _PRIOR.cumsum()))
    _samples: int = _PRIOR_STEPS  # requests' steps behind the gain
    _age: int = 0  # choices since a drafted step was last heard of
    _plain: bool = False  # plain decoding wins
    _wait: int = 0  # steps until the next probe
    _interval: int = PROBE_FIRST  # and from that one to the one after
    _probed: bool = False  # a probe's results have come

    @property
    def calibration(self) -> float:
        """Accepted over expected candidates, lately."""
        return self._accepted / self._expected

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        """The best capacity among the captured ones, or none."""
        self._age += 1
        live, candidates = score_NC.shape
        plain = Choice(lanes, 1, draft=False)
        best, rate = self._best(lanes, live, candidates, context)
        if self._plain and not self._probed:
            if np.isnan(score_NC).any():
                self._wait, self._interval = min(self._wait, PROBE_FIRST), PROBE_FIRST
            # At -1 the probe's results are on their way; after that they got lost, as when every
            # request had ended in the step before.
            self._wait = self._wait - 1 if self._wait >= 0 else 0
            return best if self._wait == 0 else plain
        self._probed = False
        alone = live / self.costs.of(lanes, 0).at(context)
        if alone <= rate:
            self._plain, self._interval = False, PROBE_FIRST
            return best
        self._interval = PROBE_FIRST if rate > _CLOSE * alone else self._interval
        self._plain, self._wait = True, self._interval
        self._interval = min(2 * self._interval, PROBE_LAST)
        return plain

    def _best(self, lanes: int, live: int, candidates: int, context: int) -> tuple[Choice, float]:
        """The drafted choice with the most expected progress per millisecond, and how much."""
        each = (MULTIPLE_M * lanes - live) / live
        gain_M = np.interp(each, np.arange(candidates + 1), self._gain[: candidates + 1])
        progress_M = live * (1 + self.calibration * gain_M)
        rate_M = progress_M / [self.costs.of(lanes, m * lanes).at(context) for m in MULTIPLES]
        best = int(rate_M.argmax())
        return Choice(MULTIPLES[best] * lanes, VERIFY_TILE), float(rate_M[best])

    def observe(self, score_NC: Floats, length_N: Floats, accepted_N: Floats) -> None:
        """Update the gain of 0 to C more rows per request, and the ratio."""
        score_NC = np.nan_to_num(score_NC)
        live, candidates = score_NC.shape
        expected = float(score_NC[np.arange(candidates) < length_N[:, None] - 1].sum())
        self._expected = _RATIO_MEMORY**live * self._expected + expected + 1e-6
        self._accepted = _RATIO_MEMORY**live * self._accepted + float(accepted_N.sum()) + 1e-6
        best = np.cumsum(-np.sort(-score_NC, axis=None))
        gain = np.append(np.float32(0), best[live - 1 :: live] / live)
        weight = max(1 - _MEMORY ** (live * max(1, self._age)), live / (live + self._samples))
        if self._plain:
            weight = min(weight, _PROBE_WEIGHT)
        self._age, self._samples = 0, self._samples + live
        known = self._gain[: candidates + 1]
        known += np.float32(weight) * (gain - known)
        self._probed = self._plain and self._wait <= 0

"""Step times that served steps correct: the arithmetic, and what it does for budget "auto"."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from budget_simulator import Always, World, simulate

from dscale.policy import MULTIPLES, AutoBudget, Choice, Cost, Floats
from dscale.timing import (
    CORRECTION,
    KNOWN_AFTER,
    LARGEST_ERROR,
    OPTIMISM,
    MeasuredCosts,
    cost_of,
)


def table() -> MeasuredCosts:
    return MeasuredCosts({(8, 64): Cost(8.0, 1e-3), (8, 0): Cost(5.0), (8, None): Cost(9.0)})


def test_a_step_corrects_its_bucket_alone() -> None:
    for rows, context, cost in ((64, 2000, 10.0), (0, 7, 5.0), (None, 0, 9.0)):
        costs = table()
        before = dict(costs.table)
        costs.observe(8, rows, context, 1.03 * cost)
        assert costs.table[8, rows].at(context) == pytest.approx(cost * (1 + 0.03 * CORRECTION))
        assert {k: v for k, v in costs.table.items() if before[k] != v}.keys() == {(8, rows)}
        assert costs.observed == {(8, rows): 1}
    costs = table()
    costs.observe(8, 64, 2000, 9.7)
    assert costs.table[8, 64].base == pytest.approx(8.0 * (1 - 0.03 * CORRECTION))
    assert costs.table[8, 64].per_token == pytest.approx(1e-3 * (1 - 0.03 * CORRECTION))


@pytest.mark.parametrize(("took", "share"), [(300.0, LARGEST_ERROR), (0.1, -LARGEST_ERROR)])
def test_one_step_moves_little(took: float, share: float) -> None:
    costs = table()
    costs.observe(8, 64, 0, took)
    assert costs.table[8, 64].base == pytest.approx(8.0 * (1 + CORRECTION * share))
    assert abs(costs.table[8, 64].base / 8.0 - 1) < 0.006


@pytest.mark.parametrize("took", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_and_a_bucket_that_is_none(took: float) -> None:
    costs = table()
    costs.observe(8, 64, 100, took)
    for lanes, rows in ((8, 48), (4, 64), (4, None), (16, 0)):
        costs.observe(lanes, rows, 100, 7.0)
    assert costs == table()


def test_times_come_true_and_stay_positive() -> None:
    """Too fast, too slow, and far too dear a context: its share does not end up below nothing."""
    draws = np.random.default_rng(0)
    for truth in (8.56, 7.5, 12.0):
        costs = table()
        for at in range(100):
            held_up = 3 * truth if at % 20 == 10 else 0.0
            costs.observe(8, 64, 0, held_up or truth * (1 + 0.01 * draws.normal()))
            if at == 24 and truth < 10:
                assert costs.table[8, 64].at(0) == pytest.approx(truth, rel=0.015)
        assert costs.table[8, 64].at(0) == pytest.approx(truth, rel=0.01)
        assert costs.observed[8, 64] == 100
    costs = MeasuredCosts({(8, 64): Cost(8.0, 1e-3)})
    for _ in range(400):
        costs.observe(8, 64, 100_000, 20.0)
    assert costs.table[8, 64].at(100_000) == pytest.approx(20.0, rel=1e-3)
    assert costs.table[8, 64].at(0) > 1


def test_a_line_through_two_times() -> None:
    for near, far in ((1024, 8192), (128, 256)):
        cost = cost_of(5.0, 6.0, near, far)
        assert (cost.at(near), cost.at(far)) == pytest.approx((5.0, 6.0))
        assert cost_of(5.0, 4.0, near, far) == Cost(5.0)
    assert cost_of(5.0, 6.0, 256, 256) == cost_of(5.0, 6.0, 0, 0) == Cost(5.0)


def test_no_step_is_free_without_context() -> None:
    """Where lanes have few pages, a disturbance looks like a dear context."""
    costs = MeasuredCosts({(8, 64): cost_of(5.0, 11.0, 1024, 2048)})
    assert costs.table[8, 64].at(1024) == pytest.approx(5.0)
    for _ in range(200):
        costs.observe(8, 64, 2048, 5.0)
    assert costs.table[8, 64].at(2048) == pytest.approx(5.0, rel=0.01)
    assert costs.table[8, 64].at(0) > 1


TRUE = {
    8: {0: 5.1, 2: 6.1, 3: 6.3, 4: 6.35, 6: 6.4, 8: 6.45, 12: 7.0, 16: 7.3},
    16: {0: 5.4, 2: 6.5, 3: 6.9, 4: 7.0, 6: 7.2, 8: 7.5, 12: 8.6, 16: 9.6},
    32: {0: 5.8, 2: 7.7, 3: 8.6, 4: 8.3, 6: 10.1, 8: 10.9, 12: 13.6, 16: 16.6},
}
"""Milliseconds by rows per lane, in the manner of 8B shapes on an H200. Eight are best."""

STEPS = 400


class Truth:
    """Steps that take what they take."""

    def of(self, lanes: int, rows: int) -> Cost:
        return Cost(TRUE[lanes][rows // lanes])


class Serving(AutoBudget):
    """Budget "auto" over a table that is wrong by `errors`, each step of which says a step late
    how long it took: 1 % of noise, and one in thirty was held up. Nobody listens for the first
    `deaf` steps."""

    def __init__(self, lanes: int, errors: dict[int, float], deaf: int = 0) -> None:
        wrong = {m: cost * (1 + errors.get(m, 0.0)) for m, cost in TRUE[lanes].items()}
        self.times = MeasuredCosts({(lanes, m * lanes): Cost(c) for m, c in wrong.items()})
        super().__init__(self.times)
        self.deaf, self.picked = deaf, list[int]()
        self.draws = np.random.default_rng(lanes)

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        if len(self.picked) > self.deaf:
            last = self.picked[-1]
            took = TRUE[lanes][last] * (1 + 0.01 * self.draws.normal())
            took *= 1.5 if self.draws.random() < 1 / 30 else 1
            self.times.observe(lanes, last * lanes, context, took)
        choice = super().choose(lanes, score_NC, context)
        self.picked.append(choice.rows // lanes if choice.draft else 0)
        return choice

    @property
    def settled(self) -> int:
        """What most of the last hundred steps had."""
        return Counter(self.picked[-100:]).most_common(1)[0][0]


def rate(lanes: int, policy: Any) -> float:
    return simulate(World(lanes, 0.75, 1.0), Truth(), policy, STEPS)


@pytest.fixture(scope="module")
def fixed() -> dict[int, dict[int, float]]:
    return {lanes: {m: rate(lanes, Always(m)) for m in (0, *MULTIPLES)} for lanes in TRUE}


@pytest.mark.parametrize(
    ("lanes", "errors"),
    [
        (8, {12: -0.05, 16: -0.07}),
        (16, {6: -0.07, 12: -0.07, 0: -0.04}),
        (32, {4: -0.07, 6: -0.07}),
        (32, {2: -0.05, 3: -0.07, 4: -0.02, 6: -0.06, 8: -0.01, 12: -0.07, 16: -0.04}),
    ],
)
def test_too_fast_a_table_comes_true(
    lanes: int, errors: dict[int, float], fixed: dict[int, dict[int, float]]
) -> None:
    best = max(fixed[lanes], key=fixed[lanes].__getitem__)
    assert best == 8
    believed, served = Serving(lanes, errors, deaf=STEPS), Serving(lanes, errors)
    assert rate(lanes, believed) < 0.99 * fixed[lanes][best]
    assert believed.settled != best
    assert rate(lanes, served) > 0.985 * fixed[lanes][best]
    assert served.settled == best


def test_little_known_buckets_count_as_cheaper() -> None:
    """Drafted ones, less and less with every step of their own."""
    costs = table()
    assert costs.of(8, 64) == Cost(8.0 * (1 - OPTIMISM), 1e-3 * (1 - OPTIMISM))
    assert costs.of(8, 0) == Cost(5.0)
    for at in range(1, KNOWN_AFTER + 5):
        costs.observe(8, 64, 0, 8.0)
        share = max(0.0, 1 - at / KNOWN_AFTER)
        assert costs.of(8, 64).base == pytest.approx(8.0 * (1 - OPTIMISM * share))


@pytest.mark.parametrize("lanes", list(TRUE))
def test_too_slow_a_bucket_waits_for_its_turn(
    lanes: int, fixed: dict[int, dict[int, float]]
) -> None:
    """What is never used is never corrected. By 7 % too slow it is tried all the same, as one that
    is little known; by 15 % it is not: what that costs is what the next best one lacks, at most
    the error."""
    best, behind = sorted(fixed[lanes].values())[:-3:-1]
    found, lost = (Serving(lanes, {8: error}, deaf=100) for error in (0.07, 0.15))
    rate(lanes, found)
    assert found.settled == 8
    assert found.times.table[lanes, 8 * lanes].base == pytest.approx(TRUE[lanes][8], rel=0.015)
    assert best > rate(lanes, lost) > 0.98 * behind
    assert lost.settled != 8
    assert lost.times.observed[lanes, 8 * lanes] < 10

"""The budget policy: what it picks for given times, how it probes, and that it loses to nobody."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from budget_simulator import Always, Prices, World, simulate

from dscale.policy import MULTIPLES, AutoBudget, Choice, Cost, Costs, FixedBudget, Floats

H200 = Prices(0.8, 4.0, 0.02, free=128)
CPU = Prices(2.0, 10.0, 1.0)
DEAR = Prices(8.0, 4.0, 0.2)


def falling_scores(requests: int, keep: float) -> Floats:
    """Each candidate at `keep` of the one before."""
    row = keep ** np.arange(1, 16, dtype=np.float32)
    return np.tile(row, (requests, 1)).astype(np.float32)


def tell(policy: AutoBudget, score_NC: Floats, share: float = 1.0) -> None:
    """A step at full width that accepted `share` of what the scores expected."""
    length_N = np.full(len(score_NC), 16, np.float32)
    policy.observe(score_NC, length_N, share * score_NC.sum(1))


def taught(costs: Costs, requests: int, keep: float, share: float = 1.0) -> AutoBudget:
    policy = AutoBudget(costs)
    for _ in range(1500):
        tell(policy, falling_scores(requests, keep), share)
    return policy


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(("live", "lanes"), [(1, 2), (3, 4), (8, 8), (29, 32)])
@pytest.mark.parametrize("costs", [H200, CPU, DEAR], ids=str)
def test_the_best_capacity_for_given_times(
    costs: Prices, live: int, lanes: int, keep: float, share: float
) -> None:
    score_NC = falling_scores(live, keep)
    best_first = np.sort(score_NC, axis=None)[::-1]
    rates = {0: live / costs.of(lanes, 0).at(0)}
    for multiple in MULTIPLES:
        progress = live + share * best_first[: multiple * lanes - live].sum()
        rates[multiple] = progress / costs.of(lanes, multiple * lanes).at(0)
    policy = taught(costs, live, keep, share)
    choice = policy.choose(lanes, score_NC, 0)
    picked = choice.rows // lanes if choice.draft else 0
    assert choice.rows == lanes * max(1, picked)
    assert rates[picked] >= 0.999 * max(rates.values())


def test_times_grow_with_the_context() -> None:
    @dataclass
    class Growing:
        def of(self, lanes: int, rows: int) -> Cost:
            return Cost(1.0 + 0.02 * rows, 2e-5 * rows + 2e-4)

    policy = taught(Growing(), 4, 0.9)
    short, long = (policy.choose(4, falling_scores(4, 0.9), c) for c in (0, 10_000))
    assert 4 < long.rows < short.rows


def test_a_block_gains_nothing_beyond_its_candidates() -> None:
    flat = Prices(0.1, 1.0, 1e-4)
    policy = AutoBudget(flat)
    for _ in range(5):
        policy.observe(np.full((2, 6), 0.99, np.float32), np.full(2, 7.0), np.full(2, 6.0))
    assert policy.choose(2, np.full((2, 6), 0.99, np.float32), 0) == Choice(16, 16)


def play(policy: AutoBudget, keep: Callable[[int], float], steps: int, late: bool) -> list[bool]:
    """Which of the steps drafted; results come at once or one step late."""
    known, drafted = np.full((1, 15), np.nan, np.float32), []
    arriving: Floats | None = None
    for index in range(steps):
        choice = policy.choose(2, known, 0)
        drafted.append(choice.draft)
        score = falling_scores(1, keep(index)) if choice.draft else None
        if late:
            score, arriving = arriving, score
        if score is not None:
            known = score
            tell(policy, score)
    return drafted


@pytest.mark.parametrize("late", [False, True])
def test_probes_are_rare_and_grow_rarer(late: bool) -> None:
    policy = taught(DEAR, 1, 0.1)
    drafted = play(policy, lambda index: 0.1, 3000, late)
    probes = [index for index, draft in enumerate(drafted) if draft]
    gaps = np.diff(probes)
    assert not drafted[0]
    assert probes[0] == 16
    assert (gaps >= 16).all()
    assert (np.diff(gaps) >= 0).all()
    assert set(gaps[-5:]) == {257 + late}
    for start in range(0, 2000, 100):
        assert sum(drafted[start : start + 160]) <= 10


@pytest.mark.parametrize("late", [False, True])
def test_drafting_resumes_when_drafts_get_good(late: bool) -> None:
    policy = taught(DEAR, 1, 0.1)
    drafted = play(policy, lambda index: 0.1 if index < 200 else 0.98, 800, late)
    assert sum(drafted[:200]) <= 200 / 16
    assert all(drafted[-100:])
    policy = taught(DEAR, 1, 0.98)
    drafted = play(policy, lambda index: 0.98 if index < 100 else 0.1, 1000, late)
    assert all(drafted[:100])
    assert sum(drafted[-500:]) <= 500 / 16


def test_a_lost_probe_is_repeated() -> None:
    """Every request may have ended in the step before the probe: then nothing is observed."""
    policy = taught(DEAR, 1, 0.1)
    seen = falling_scores(1, 0.1)
    drafted = [policy.choose(2, seen, 0).draft for _ in range(40)]
    assert drafted.index(True) == 16
    assert sum(drafted[16:]) > 5
    tell(policy, seen)
    assert not any(policy.choose(2, seen, 0).draft for _ in range(20))


def test_new_requests_bring_the_probe_forward() -> None:
    policy = taught(DEAR, 1, 0.1)
    play(policy, lambda index: 0.1, 1500, late=False)
    seen, new = falling_scores(3, 0.1), np.full((3, 15), np.nan, np.float32)
    assert not any(policy.choose(4, seen, 0).draft for _ in range(30))
    new[:2] = seen[:2]
    drafted = [policy.choose(4, new, 0).draft for _ in range(17)]
    assert 0 < sum(drafted) <= 2


@pytest.mark.parametrize("share", [0.25, 1.0, 1.5])
def test_calibration_converges(share: float) -> None:
    policy = taught(H200, 4, 0.6, share)
    assert policy.calibration == pytest.approx(share, rel=0.01)
    # Only candidates that were verified count.
    policy = AutoBudget(H200)
    score_NC = falling_scores(4, 0.6)
    for _ in range(1500):
        policy.observe(score_NC, np.full(4, 3.0, np.float32), share * score_NC[:, :2].sum(1))
    assert policy.calibration == pytest.approx(share, rel=0.01)
    for _ in range(50):
        policy.observe(
            np.full((4, 15), np.nan, np.float32),
            np.full(4, 3, np.float32),
            np.zeros(4, np.float32),
        )
    # Drafts that are not numbers expect nothing.
    assert policy.calibration == pytest.approx(share, rel=0.01)
    assert not policy.choose(4, score_NC, 0).draft


@pytest.mark.parametrize("average", [1, 8, 16])
def test_fixed_budgets_never_change(average: int) -> None:
    policy = FixedBudget(average)
    for keep in (0.1, 0.9):
        policy.observe(falling_scores(3, keep), np.full(3, 2, np.float32), np.zeros(3, np.float32))
        assert policy.choose(4, falling_scores(3, keep), 0) == Choice(4 * average, average)


WORLDS = [
    World(1, 0.85, 0.5), World(1, 0.5, 2.5), World(1, 0.4, 1.0), World(1, 0.6, 1.0, claim=2.0),
    World(8, 0.6, 1.0), World(8, 0.25, 1.0), World(8, 0.6, 1.0, claim=0.5), World(32, 0.6, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("costs", [H200, CPU], ids=["H200", "CPU"])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_no_fixed_budget_is_better(world: World, costs: Prices) -> None:
    steps = 1000
    fixed = {m: simulate(world, costs, Always(m), steps) for m in (0, *MULTIPLES)}
    auto = simulate(world, costs, AutoBudget(costs), steps)
    assert auto >= 0.975 * max(fixed.values()), fixed


@pytest.mark.parametrize("requests", [1, 8])
def test_it_follows_a_change(requests: int) -> None:
    """Better than any fixed budget where one half of the run wants one and the other another."""
    costs = Prices(3.0, 4.0, 0.3)
    for keep, later in ((0.15, 0.93), (0.93, 0.15)):
        world = World(requests, keep, 0.5, later=later)
        fixed = [simulate(world, costs, Always(m), 2000) for m in (0, *MULTIPLES)]
        assert simulate(world, costs, AutoBudget(costs), 2000) > max(fixed)

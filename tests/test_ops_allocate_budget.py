"""allocate_budget against the sequential loop, and against every possible allocation."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from ops_runs import RUNS, room, runner
from torch import Tensor

from dscale.kernels.reference_rows import SEEDS

Scores = list[list[float]]


def exact(score: Tensor) -> Scores:
    """Scores cleaned: NaN is 0, clamped to 0..1, never rising along a request."""
    rows = []
    for row in score.tolist():
        clean = [0.0 if math.isnan(s) else min(max(s, 0.0), 1.0) for s in row]
        rows.append(list(itertools.accumulate(clean, min)))
    return rows


def seeds(score: Scores, live: list[bool], most: list[int], seed: str) -> list[int]:
    length = []
    for row, is_live, limit in zip(score, live, most, strict=True):
        rounded = math.floor(sum(map(Fraction, row)) + Fraction(1, 2))
        start = {"paper": rounded, "plus_anchor": 1 + rounded, "none": 1}[seed]
        length.append(min(max(start, 1), limit) if is_live else 0)
    return length


def loop(
    score: Scores, live: list[bool], most: list[int], total: int, start: list[int]
) -> list[int]:
    """Algorithm 1 as the paper has it: one update at a time."""
    length, lanes = list(start), range(len(live))
    while sum(length) < total:
        open_lanes = [i for i in lanes if live[i] and length[i] < most[i]]
        length[max(open_lanes, key=lambda i: (score[i][length[i] - 1], -i))] += 1
    while sum(length) > total:
        open_lanes = [i for i in lanes if length[i] > 1]
        length[min(open_lanes, key=lambda i: (score[i][length[i] - 2], -i))] -= 1
    return length


def check(run: str, score: Tensor, live: Tensor, limit: Tensor, rows: int, budget: int) -> None:
    before = score.clone(), live.clone(), limit.clone()
    clean, is_live = exact(score), live.tolist()
    width = score.shape[1] + 1
    most = [min(max(k, 1), width) if on else 0 for k, on in zip(limit, is_live, strict=True)]
    most = [int(k) for k in most]
    total = min(rows, budget * sum(is_live), sum(most))
    for seed in SEEDS:
        got = runner("allocate_budget", run)(score, live, limit, room(rows, budget), seed)
        assert got.dtype == torch.int32
        length = got.tolist()
        assert sum(length) == total
        assert all(on <= k <= m for on, k, m in zip(is_live, length, most, strict=True))
        assert length == loop(clean, is_live, most, total, seeds(clean, is_live, most, seed)), seed
    for x, y in zip((score, live, limit), before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def full(lanes: int, limit: int = 1000) -> tuple[Tensor, Tensor]:
    return torch.ones(lanes, dtype=torch.bool), torch.full((lanes,), limit, dtype=torch.int32)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("lanes", [1, 7, 33, 256])
@pytest.mark.parametrize("levels", [0, 3])
def test_equals_the_loop(run: str, lanes: int, levels: int) -> None:
    """Random scores; with few levels there are ties everywhere."""
    generator = torch.Generator().manual_seed(lanes + 1000 * levels)
    score = torch.rand(lanes, 15, generator=generator).pow(0.3).cumprod(1)
    if levels:
        score = (score * levels).round() / levels
    live = torch.rand(lanes, generator=generator) < 0.7
    limit = torch.randint(0, 25, (lanes,), generator=generator, dtype=torch.int32)
    check(run, score, *full(lanes), 8 * lanes, 8)
    check(run, score, live, limit, 5 * lanes + 3, 7)
    if lanes < 100:  # the loop is slow
        check(run, score, live, limit, lanes, 16)
        check(run, score, *full(lanes), 12 * lanes + 1, 16)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.5, float("nan"), 1e-30, 7.0, -1.0])
def test_constant_scores(run: str, value: float) -> None:
    for lanes, budget in ((1, 16), (13, 1), (13, 5)):
        check(run, torch.full((lanes, 15), value), *full(lanes), 16 * lanes, budget)


@pytest.mark.parametrize("run", RUNS)
def test_ties_go_to_the_first_requests(run: str) -> None:
    score = torch.full((3, 15), 0.25)
    allocate = runner("allocate_budget", run)
    # round(15 / 4) = 4 rows each; 15 rows grow the first, 10 shrink from the last.
    assert allocate(score, *full(3), room(48, 5), "paper").tolist() == [7, 4, 4]
    assert allocate(score, *full(3), room(10, 16), "paper").tolist() == [4, 4, 2]
    assert allocate(score, *full(3), room(48, 8), "none").tolist() == [16, 7, 1]


@pytest.mark.parametrize("run", RUNS)
def test_seeds(run: str) -> None:
    score = torch.zeros(4, 15)
    score[0, :2] = torch.tensor([1.0, 0.5])  # 1.5 rounds half up
    score[1, :3] = torch.tensor([1.0, 0.9, 0.4])
    score[2] = 1.0
    limit = torch.tensor([16, 16, 3, 16], dtype=torch.int32)
    live, rows = torch.ones(4, dtype=torch.bool), 64
    totals = {"paper": [2, 2, 3, 1], "plus_anchor": [3, 3, 3, 1], "none": [1, 1, 1, 1]}
    for seed, want in totals.items():
        # With a budget that equals the seed's sum the seed is kept, where one exists.
        got = runner("allocate_budget", run)(score, live, limit, room(sum(want), 16), seed)
        assert got.tolist() == want
    assert (
        runner("allocate_budget", run)(score, live, limit, room(rows, 1), "paper").tolist()
        == [1] * 4
    )


@pytest.mark.parametrize("run", RUNS)
def test_nobody_or_one_is_live(run: str) -> None:
    allocate = runner("allocate_budget", run)
    score, (live, limit) = torch.rand(12, 15), full(12)
    for seed in SEEDS:
        assert allocate(score, ~live, limit, room(96, 8), seed).tolist() == [0] * 12
        one = torch.arange(12) == 11
        assert allocate(score, one, limit, room(96, 8), seed).tolist() == [0] * 11 + [8]
        # All of the rows belong to live requests while others are inactive.
        half = torch.arange(12) < 6
        got = allocate(score, half, limit, room(48, 8), seed)
        assert got[:6].sum() == 48
        assert got[6:].sum() == 0


@pytest.mark.parametrize("run", RUNS)
def test_nan_and_rising_scores(run: str) -> None:
    generator = torch.Generator().manual_seed(3)
    score = torch.rand(11, 15, generator=generator)
    score[torch.rand(11, 15, generator=generator) < 0.1] = float("nan")
    score[0], score[1, 0] = float("nan"), float("nan")
    check(run, score, *full(11), 88, 8)
    got = runner("allocate_budget", run)(score, *full(11), room(30, 16), "none")
    assert got[:2].tolist() == [1, 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_allocation_is_better(seed: str) -> None:
    """Optimum of the sum of kept scores among all lengths on the seed's side of the budget."""
    generator = torch.Generator().manual_seed(7)
    allocate = runner("allocate_budget", "op")
    for trial in range(60):
        lanes = 1 + trial % 4
        score = torch.rand(lanes, 4, generator=generator).cummin(1).values
        if trial % 3 == 0:
            score = (score * 4).round() / 4
        live = torch.rand(lanes, generator=generator) < 0.8
        limit = torch.randint(1, 7, (lanes,), generator=generator, dtype=torch.int32)
        clean, is_live = exact(score), live.tolist()
        most = [min(k, 5) * on for k, on in zip(limit.tolist(), is_live, strict=True)]
        start = seeds(clean, is_live, most, seed)
        for rows in range(lanes, 5 * lanes + 1):
            total = min(rows, sum(most))
            length = allocate(score, live, limit, room(rows, 5), seed).tolist()
            grow = total > sum(start)
            spans = [
                range(s, m + 1) if grow else range(min(s, 1), s + 1)
                for s, m in zip(start, most, strict=True)
            ]
            gains = {
                k: sum(
                    sum(map(Fraction, row[: n - 1])) for row, n in zip(clean, k, strict=True) if n
                )
                for k in itertools.product(*spans)
                if sum(k) == total
            }
            assert gains[tuple(length)] == max(gains.values())

"""Retention: batched allocation against the operator's reference, tallies against brute force."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dscale.kernels.reference_rows import SEEDS, allocate_budget

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import predictor_report as reporting
import predictor_retention as retaining


def falling_scores(cohorts: int, lanes: int, candidates: int, seed: int) -> Tensor:
    """Random scores with many ties, zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(cohorts, lanes, candidates, generator=generator)
    score[::3] = (score[::3] * 4).round() / 4
    return score.cummin(2).values


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", [1, 2, 4, 8, 15, 16])
def test_batched_allocation_is_the_operator_s(seed: str, budget: int) -> None:
    for lanes in (1, 3, 8):
        score = falling_scores(7, lanes, 15, lanes)
        live = torch.ones(lanes, dtype=torch.bool)
        limit = torch.full((lanes,), 99, dtype=torch.int32)
        room = torch.tensor([16 * lanes, budget], dtype=torch.int32)
        ours = retaining.allocate(score, budget, seed)
        for one, k in zip(score, ours, strict=True):
            assert k.tolist() == allocate_budget(one, live, limit, room, seed).tolist()
            assert int(k.sum()) == budget * lanes
    raw = retaining.seed_lengths(score, seed)
    shift = {"paper": 0, "plus_anchor": 1}
    expected = [
        1 if seed == "none" else min(max(int(float(s.sum()) + 0.5) + shift[seed], 1), 16)
        for s in score.flatten(0, 1)
    ]
    assert raw.flatten().tolist() == expected


def test_the_oracle_retains_what_no_choice_of_lengths_beats() -> None:
    """Brute force over every way of sharing the rows of three requests."""
    candidates, budget = 4, 3
    accepted = torch.tensor([[0, 4, 2], [4, 4, 4], [1, 0, 0], [3, 3, 1]])
    position = torch.arange(1, candidates + 1)
    score = (position <= accepted[..., None]).float()
    length = retaining.allocate(score, budget, "none")
    for y, k in zip(accepted, length, strict=True):
        best = max(
            sum(min(int(a), n - 1) for a, n in zip(y, lengths, strict=True))
            for lengths in itertools.product(range(1, candidates + 2), repeat=3)
            if sum(lengths) == budget * 3
        )
        assert int(torch.minimum(y, k - 1).sum()) == best
        assert retaining.retention(y, k) == pytest.approx(best / int(y.sum()))


def test_retention_written_out() -> None:
    accepted, length = torch.tensor([5, 0, 3]), torch.tensor([4, 2, 16])
    assert retaining.retention(accepted, length) == pytest.approx((3 + 0 + 3) / 8)


def test_tallies_per_prompt_and_every_policy() -> None:
    generator = torch.Generator().manual_seed(3)
    accepted = torch.randint(0, 16, (64,), generator=generator)
    prompt = torch.randint(0, 5, (64,), generator=generator)
    score, product = (falling_scores(1, 64, 15, s)[0] for s in (1, 2))
    cohorts = retaining.cohorts_of(64, 8, 2, 0)
    total, found = retaining.tallies(accepted, prompt, score, product, cohorts, 4)
    assert sorted(cohorts.flatten().tolist()) == sorted([*range(64)] * 2)
    assert total.tolist() == [2 * int(accepted[prompt == q].sum()) for q in range(5)]
    assert found.keys() == {
        ("fixed", "none"), ("oracle", "none"),
        *((p, s) for p in ("raw", "predictor", "running_product") for s in SEEDS),
    }  # fmt: skip
    kept, taken = torch.zeros(5, dtype=torch.float64), 0.0
    for cohort in cohorts:
        k = retaining.allocate(score[cohort][None], 4, "paper")[0]
        for i, n in zip(cohort, k, strict=True):
            kept[prompt[i]] += min(int(accepted[i]), int(n) - 1)
            taken += float(score[i, : int(n) - 1].sum())
    assert found["predictor", "paper"].kept_Q.tolist() == kept.tolist()
    assert found["predictor", "paper"].rows == 4.0
    assert found["predictor", "paper"].promised == pytest.approx(taken / float(2 * score.sum()))
    assert found["fixed", "none"].kept_Q.sum() == 2 * accepted.clamp(max=3).sum()
    assert found["oracle", "none"].kept_Q.sum() >= found["predictor", "none"].kept_Q.sum()


def test_rows_hold_intervals_around_their_values() -> None:
    generator = torch.Generator().manual_seed(4)
    accepted = torch.randint(0, 16, (320,), generator=generator)
    prompt = torch.arange(320) // 8
    position = torch.arange(1, 16)
    good = torch.sigmoid((accepted[:, None] - position).float())
    poor = falling_scores(1, 320, 15, 5)[0]
    total, found = retaining.tallies(
        accepted, prompt, good, poor, retaining.cohorts_of(320, 8, 1, 0), 8
    )
    weights = retaining.resamples(40, 500, 0)
    assert (weights.sum(1) == 40).all()
    rows = list(retaining.policy_rows(8, 8, total, found, weights))
    assert len(rows) == 11
    for row in rows:
        assert row["low"] <= row["retention"] <= row["high"]
    best = next(r for r in rows if r["policy"] == "predictor" and r["seed"] == "none")
    assert best["of_oracle"] == 1.0
    assert best["over_fixed_low"] > 0
    assert best["over_running_product"] > 0.1


def test_rank_correlation_and_explained_variance() -> None:
    a = torch.tensor([1.0, 2.0, 2.0, 9.0])
    assert reporting.ranks(a).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert reporting.spearman(a, a.exp()) == pytest.approx(1.0)
    assert reporting.spearman(a, -a) == pytest.approx(-1.0)
    assert reporting.spearman(a, torch.ones(4)) == 0.0
    assert reporting.r_squared(a, a) == 1.0
    assert reporting.r_squared(torch.full((4,), 3.5), a) == pytest.approx(0.0)


def test_calibration_counts_every_score() -> None:
    score = torch.tensor([[0.95, 0.5, 0.05], [1.0, 0.55, 0.0]])
    table = reporting.calibration(score, torch.tensor([1, 2]))
    assert [row["count"] for row in table] == [2, 0, 0, 0, 0, 2, 0, 0, 0, 2]
    assert table[5]["predicted"] == pytest.approx(0.525)
    assert [table[i]["observed"] for i in (0, 5, 9)] == [0.0, 0.5, 1.0]
    assert reporting.calibration_error(table) == pytest.approx((0.05 + 0.05 + 0.05) / 6, abs=1e-4)

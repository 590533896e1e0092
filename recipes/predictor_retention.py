"""How many accepted tokens a budget retains: cohorts of passes, policies, bootstrap intervals.

Shapes: G cohorts, N requests in each, C draft positions, P passes, B resamples, Q prompts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dscale.kernels.reference_rows import SEEDS

_FIXED_BITS = 24  # of the seed's fixed-point sum, as in allocate_budget


def seed_lengths(score_GNC: Tensor, seed: str) -> Tensor:
    """Raw windows [G, N] int64, 1 to C + 1: what Algorithm 1 starts from."""
    width = score_GNC.shape[2] + 1
    if seed == "none":
        return torch.ones_like(score_GNC[..., 0], dtype=torch.int64)
    total = (score_GNC * 2.0**_FIXED_BITS).long().sum(2)
    rounded = (total + (1 << (_FIXED_BITS - 1))) >> _FIXED_BITS
    return (rounded + (seed == "plus_anchor")).clamp(1, width)


def allocate(score_GNC: Tensor, budget: int, seed: str) -> Tensor:
    """`allocate_budget` for many cohorts at once: rows per request [G, N] int64.

    Scores fall along C; every request is live and may emit more than a block. Each cohort shares
    `budget` * N rows."""
    cohorts, lanes, candidates = score_GNC.shape
    start_GN = seed_lengths(score_GNC, seed)
    gap_G = (lanes * budget - start_GN.sum(1))[:, None]
    inside = torch.arange(1, candidates + 1, device=score_GNC.device) < start_GN[..., None]
    grow_G = gap_G > 0
    # Growing takes the head of the order outside the seed; shrinking keeps the head inside it.
    take_G = torch.where(grow_G, gap_G, inside.sum((1, 2))[:, None] + gap_G)
    base_GN = torch.where(grow_G, start_GN, 1)
    eligible = inside ^ grow_G[..., None]
    key_GX = torch.where(eligible, score_GNC, -1.0).flatten(1)
    order = key_GX.argsort(dim=1, descending=True, stable=True)
    head = torch.arange(order.shape[1], device=order.device) < take_G
    taken = torch.zeros_like(head).scatter_(1, order, head)
    return base_GN + taken.view(cohorts, lanes, candidates).sum(2)


def retention(accepted: Tensor, length: Tensor) -> float:
    """sum min(y, k - 1) / sum y (paper, section IV)."""
    kept = torch.minimum(accepted, length - 1).sum()
    return float(kept / accepted.sum())


@dataclass(slots=True)
class Tally:
    """Accepted tokens kept by one policy, per prompt, float64 [Q]; its rows per request; and the
    retention its scores promise, which is about the true one where they are calibrated."""

    kept_Q: Tensor
    rows: float
    promised: float | None = None


def cohorts_of(count: int, size: int, draws: int, seed: int) -> Tensor:
    """Random disjoint cohorts of `size` passes, `draws` times over all: [G, size] int64."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(count, generator=generator) for _ in range(draws)]
    return torch.cat([index[: count // size * size].view(-1, size) for index in drawn])


def tallies(
    accepted_P: Tensor,
    prompt_P: Tensor,
    score_PC: Tensor,
    product_PC: Tensor,
    cohort_GN: Tensor,
    budget: int,
) -> tuple[Tensor, dict[tuple[str, str], Tally]]:
    """Run every policy and seed over the cohorts: (accepted per prompt [Q], tallies).

    Policies: "raw" (the predictor's windows before adjustment), "fixed", "running_product",
    "predictor", "oracle" (scores 1 for what is accepted, 0 for the rest)."""
    accepted_GN = accepted_P[cohort_GN].long()
    prompt_X = prompt_P[cohort_GN].flatten().long()
    num_prompts = int(prompt_P.max()) + 1
    position_C = torch.arange(1, score_PC.shape[1] + 1, device=score_PC.device)
    scores = {
        "predictor": score_PC[cohort_GN],
        "running_product": product_PC[cohort_GN],
        "oracle": (position_C <= accepted_GN[..., None]).float(),
    }

    def per_prompt(value_GN: Tensor) -> Tensor:
        zeros = torch.zeros(num_prompts, dtype=torch.float64, device=value_GN.device)
        return zeros.index_add(0, prompt_X, value_GN.flatten().double())

    def tally(length_GN: Tensor) -> Tally:
        kept = torch.minimum(accepted_GN, length_GN - 1)
        return Tally(per_prompt(kept), float(length_GN.double().mean()))

    found = {("fixed", "none"): tally(torch.full_like(accepted_GN, budget))}
    for seed in SEEDS:
        found["raw", seed] = tally(seed_lengths(scores["predictor"], seed))
        for policy in ("running_product", "predictor"):
            length_GN = allocate(scores[policy], budget, seed)
            found[policy, seed] = tally(length_GN)
            taken = scores[policy] * (position_C < length_GN[..., None])
            found[policy, seed].promised = float(taken.sum() / scores[policy].sum())
    found["oracle", "none"] = tally(allocate(scores["oracle"], budget, "none"))
    return per_prompt(accepted_GN), found


def resamples(num_prompts: int, count: int, seed: int) -> Tensor:
    """How often each prompt is drawn in each of `count` bootstrap resamples, float64 [B, Q]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(num_prompts, (count, num_prompts), generator=generator)
    return torch.zeros(count, num_prompts, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(count, num_prompts, dtype=torch.float64)
    )


def interval(value_B: Tensor) -> tuple[float, float]:
    """The central 95 % of bootstrap values."""
    low, high = torch.quantile(value_B, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return round(float(low), 5), round(float(high), 5)


def policy_rows(
    budget: int,
    cohort: int,
    total_Q: Tensor,
    found: dict[tuple[str, str], Tally],
    weight_BQ: Tensor,
) -> Iterator[dict[str, Any]]:
    """One result row a policy and seed, with 95 % intervals over prompts.

    The predictor's rows also hold its lead over fixed width and over the running product (the best
    of its three seeds), and its share of the oracle's retention."""
    total_B = weight_BQ @ total_Q
    sampled = {key: weight_BQ @ t.kept_Q / total_B for key, t in found.items()}
    value = {key: float(t.kept_Q.sum() / total_Q.sum()) for key, t in found.items()}
    best = max((k for k in found if k[0] == "running_product"), key=lambda k: value[k])
    others = {"fixed": ("fixed", "none"), "running_product": best}
    for (policy, seed), tally in found.items():
        key = (policy, seed)
        low, high = interval(sampled[key])
        row = {
            "budget_per_request": budget,
            "cohort": cohort,
            "policy": policy,
            "seed": seed if policy not in ("fixed", "oracle") else None,
            "retention": round(value[key], 5),
            "low": low,
            "high": high,
            "rows_per_request": round(tally.rows, 4),
        }
        if tally.promised is not None:
            row["promised"] = round(tally.promised, 5)
        if policy == "predictor":
            for name, other in others.items():
                low, high = interval(sampled[key] - sampled[other])
                lead = round(value[key] - value[other], 5)
                row |= {f"over_{name}": lead, f"over_{name}_low": low, f"over_{name}_high": high}
            row["of_oracle"] = round(value[key] / value["oracle", "none"], 5)
        yield row

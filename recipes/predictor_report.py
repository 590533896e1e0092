"""A predictor's figures: fit, calibration, retention, result rows, model card."""

from collections.abc import Sequence
from typing import Any

import predictor_retention as retaining
import predictor_training as training
import torch
from predictor_traces import Traces
from torch import Tensor

from dscale.compiled.predictor import Predictor

BUDGETS, COHORTS, BINS = (4, 6, 8, 12), (8, 16, 32), 10


def product_scores(traces: Traces) -> Tensor:
    """The running product of top-1 probabilities, [P, C], from the log-probability feature."""
    product = traces.feature[..., 16].clamp(max=0.0).cumsum(1).exp()
    return torch.where(product.isnan(), 0.0, product)


def ranks(x: Tensor) -> Tensor:
    """Ranks of values [P], equal values sharing their mean rank, float64."""
    _, inverse, count = torch.unique(x, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[inverse]


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two [P]; 0 where one is constant."""
    a, b = (ranks(x) - ranks(x).mean() for x in (a, b))
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale else 0.0


def r_squared(predicted: Tensor, y: Tensor) -> float:
    """Share of the variance of y [P] that a prediction explains."""
    residual = (y.double() - predicted.double()).square().sum()
    return float(1 - residual / (y.double() - y.double().mean()).square().sum())


def calibration(score: Tensor, accepted: Tensor) -> list[dict[str, float]]:
    """Ten equal bins of the scores s_ij: how many, their mean, and the share that came true."""
    label = training.labels(accepted, score.shape[1]).flatten().double()
    flat = score.flatten().double()
    index = (flat * BINS).long().clamp(0, BINS - 1)
    zeros = torch.zeros(BINS, dtype=torch.float64, device=score.device)
    count, total, true = (
        zeros.index_add(0, index, x) for x in (torch.ones_like(flat), flat, label)
    )
    return [
        {
            "bin": round(i / BINS, 1),
            "count": int(count[i]),
            "predicted": round(float(total[i] / count[i].clamp(min=1)), 4),
            "observed": round(float(true[i] / count[i].clamp(min=1)), 4),
        }
        for i in range(BINS)
    ]


def calibration_error(table: Sequence[dict[str, float]]) -> float:
    """Mean distance of predicted from observed, over the bins' counts."""
    total = sum(row["count"] for row in table)
    error = sum(row["count"] * abs(row["predicted"] - row["observed"]) for row in table)
    return round(error / total, 4)


def fit_of(predictor: Predictor, traces: Traces) -> dict[str, Any]:
    """R^2 and Spearman of the summed scores against the accepted counts, beside those of the
    Top1-Top2 gap (of the first position, and the mean of all) and of the running product."""
    score = training.scores(predictor, traces, training.fixed_context(traces, 16, 8.0))
    product, y = product_scores(traces), traces.accepted
    tables = calibration(score, y), calibration(product, y)
    return {
        "r2": round(r_squared(score.sum(1), y), 4),
        "spearman": round(spearman(score.sum(1), y), 4),
        "spearman_gap": round(spearman(traces.feature[:, 0, 1], y), 4),
        "spearman_mean_gap": round(spearman(traces.feature[..., 1].mean(1), y), 4),
        "r2_running_product": round(r_squared(product.sum(1), y), 4),
        "spearman_running_product": round(spearman(product.sum(1), y), 4),
        "calibration_error": calibration_error(tables[0]),
        "calibration_error_running_product": calibration_error(tables[1]),
        "mean_accepted": round(float(y.double().mean()), 4),
        "mean_predicted": round(float(score.double().sum(1).mean()), 4),
        "passes": len(traces),
        "prompts": int(traces.prompt.unique().numel()),
        "calibration": tables[0],
        "calibration_running_product": tables[1],
    }


def retention_rows(
    predictor: Predictor, traces: Traces, *, draws: int = 4, boots: int = 1000, seed: int = 0
) -> list[dict[str, Any]]:
    """Result rows of every budget, cohort size (that the traces fill), policy and seed."""
    product = product_scores(traces)
    present_Q = torch.zeros(int(traces.prompt.max()) + 1, dtype=torch.bool)
    present_Q[traces.prompt.long().cpu()] = True
    weight_BQ = retaining.resamples(int(present_Q.sum()), boots, seed)
    rows: list[dict[str, Any]] = []
    for cohort in (size for size in COHORTS if size <= len(traces)):
        index = retaining.cohorts_of(len(traces), cohort, draws, seed).to(product.device)
        for budget in BUDGETS:
            context = training.fixed_context(traces, cohort, float(budget))
            score = training.scores(predictor, traces, context)
            total_Q, found = retaining.tallies(
                traces.accepted, traces.prompt, score, product, index, budget
            )
            for tally in found.values():
                tally.kept_Q = tally.kept_Q.cpu()[present_Q]
            total_Q = total_Q.cpu()[present_Q]
            rows += retaining.policy_rows(budget, cohort, total_Q, found, weight_BQ)
    return rows


def best_seed(rows: Sequence[dict[str, Any]]) -> str:
    """The seed with which the predictor retains most, over all budgets and cohorts; "none" where
    there were too few passes for a cohort."""
    total: dict[str, float] = {}
    for row in rows:
        if row["policy"] == "predictor":
            total[row["seed"]] = total.get(row["seed"], 0.0) + row["retention"]
    return max(total, key=lambda seed: total[seed], default="none")

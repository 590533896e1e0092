"""Eager reference of the row statistics and the predictor's features made from them: the
specification, and the implementation on the CPU.

Shapes: R rows, V vocabulary, N requests, C draft positions per request."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TOP = 16
"""Largest logits kept per row: the best and the 15 it is compared with (paper, section III-C)."""

NUM_FEATURES = 18
"""Features per draft position: top logit, 15 gaps, top log-probability, entropy."""

GAP_MAX = 100.0
"""Gaps are cut here, so that a masked logit or a vocabulary below 16 tokens stays finite."""


class RowStatistics(NamedTuple):
    """What is kept of a row of logits.

    `top_RT` float32 [R, 16]: the largest logits, descending, -inf past the vocabulary. `index_R`
    int64: argmax, the lowest index among equals. `lse_R` float32: log-sum-exp. `entropy_R`
    float32: of the softmax, in nats."""

    top_RT: Tensor
    index_R: Tensor
    lse_R: Tensor
    entropy_R: Tensor


def row_statistics(logit_RV: Tensor) -> RowStatistics:
    """Statistics of logits `[R, V]` (bfloat16, float16 or float32), computed in float32.

    Infinities are limits: c entries of +inf (or a row of c entries, all -inf) have entropy log c.
    A row with a NaN has NaN in every float, and the index of its first NaN, as argmax."""
    value = logit_RV.float()
    vocab = value.shape[1]
    peak = value.amax(1, keepdim=True)
    below = torch.where(value == peak, 0.0, value - peak)
    weight = below.exp()
    total = weight.sum(1)
    mean = torch.where(weight == 0, 0.0, below * weight).sum(1) / total
    top = F.pad(value.topk(min(TOP, vocab), 1).values, (0, max(0, TOP - vocab)), value=-torch.inf)
    return RowStatistics(
        torch.where(peak.isnan(), torch.nan, top),
        value.argmax(1),
        peak[:, 0] + total.log(),
        total.log() - mean,
    )


def features_from_statistics(statistics: RowStatistics, positions: int) -> Tensor:
    """The predictor's confidence features, float32 `[N, positions, 18]`, from the statistics of
    N * positions rows (request major): top logit, its gaps to ranks 2 to 16, top log-probability,
    entropy (paper, section III-C).

    Gaps are at most GAP_MAX. A row with a NaN has NaN features; the budget gives its request the
    anchor's row first."""
    top = statistics.top_RT[:, :1]
    gap = torch.clamp(top - statistics.top_RT[:, 1:], max=GAP_MAX)
    log_probability = top - statistics.lse_R[:, None]
    feature = torch.cat((top, gap, log_probability, statistics.entropy_R[:, None]), 1)
    return feature.view(-1, positions, NUM_FEATURES)

"""The acceptance predictor: how likely verification is to keep at least j drafted tokens.

Paper, section III-C. Shapes: N requests, C = block size - 1 draft positions, F = 18 confidence
features, D drafter hidden size, J projected size, X = 6 context values, K = 3 recent passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscale.kernels.reference_statistics import NUM_FEATURES, RowStatistics

NUM_CONTEXT = 6
"""Batch-context values per request, see `batch_context`."""

RECENT = 3
"""Passes whose accepted counts the context holds."""

# Standardised inputs are cut here: an outlier (or infinity) moves the scores, but not without end.
_LIMIT = 8.0
# log(running product) is kept in this range, where its logit is finite and exact in float32.
_LOG_PRODUCT = (-25.0, -1e-4)
_LOG_PROBABILITY = 16  # column of the top log-probability among the 18 features


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """Shape of a predictor. `hidden_size`, `block_size`: the drafter's. `projected`: dims kept of
    a hidden state. `widths`: the two hidden layers. `drafter`: fingerprint of the drafter it was
    made for, "" where that is unknown."""

    hidden_size: int
    block_size: int
    projected: int = 8
    widths: tuple[int, int] = (208, 128)
    drafter: str = ""

    @property
    def num_candidates(self) -> int:
        """Draft positions per request: the block without its anchor."""
        return self.block_size - 1

    @property
    def num_inputs(self) -> int:
        """Inputs of the first layer: 396 for a block of 16 and 8 projected dims."""
        return self.num_candidates * (NUM_FEATURES + self.projected) + NUM_CONTEXT


class Predictor(nn.Module):
    """An MLP over standardised inputs that corrects the log-odds of the running product of the
    drafter's top-1 probabilities; with its last layer at zero it is that product.

    `projection` [D, J] and `hidden_mean` [D] map a final-normed drafter hidden state to J values;
    `mean`, `std` [inputs] standardise confidence features, projected states and context, in this
    order. All float32, also where the drafter is bfloat16. `dropout`: of hidden activations, in
    training mode."""

    projection: Tensor
    hidden_mean: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, config: PredictorConfig) -> None:
        """Random first layers, a zero last layer, an identity standardisation, a zero
        projection."""
        super().__init__()
        self.config = config
        self.dropout = 0.0
        c, (first, second) = config, config.widths
        self.first = nn.Linear(c.num_inputs, first)
        self.second = nn.Linear(first, second)
        self.last = nn.Linear(second, c.num_candidates)
        self.gain = nn.Parameter(torch.ones(c.num_candidates))
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.register_buffer("projection", torch.zeros(c.hidden_size, c.projected))
        self.register_buffer("hidden_mean", torch.zeros(c.hidden_size))
        self.register_buffer("mean", torch.zeros(c.num_inputs))
        self.register_buffer("std", torch.ones(c.num_inputs))

    def forward(self, feature_NCF: Tensor, hidden_NCD: Tensor, context_NX: Tensor) -> Tensor:
        """Scores s_ij = P(request i keeps at least j drafted tokens), float32 [N, C], never rising
        along a row.

        `feature_NCF` float32 [N, C, 18]: `features_from_statistics`. `hidden_NCD` [N, C, D]:
        final-normed hidden states of the drafted rows, any float dtype. `context_NX` float32
        [N, 6]: `batch_context`. A request with a NaN among its inputs scores 0 everywhere."""
        return falling(self.raw(feature_NCF, self.project(hidden_NCD), context_NX))

    def project(self, hidden_NCD: Tensor) -> Tensor:
        """Hidden states [..., D] of any float dtype to the predictor's J dims, float32."""
        return (hidden_NCD.float() - self.hidden_mean) @ self.projection

    def raw(self, feature_NCF: Tensor, projected_NCJ: Tensor, context_NX: Tensor) -> Tensor:
        """The sigmoids before the cumulative minimum, float32 [N, C]; what training looks at.

        `projected_NCJ` float32 [N, C, J]: `project` of the hidden states."""
        return torch.sigmoid(self.log_odds(feature_NCF, projected_NCJ, context_NX))

    def log_odds(self, feature_NCF: Tensor, projected_NCJ: Tensor, context_NX: Tensor) -> Tensor:
        """Log-odds of `raw`, float32 [N, C]; -inf for a request with a NaN among its inputs."""
        x = torch.cat((feature_NCF.flatten(1), projected_NCJ.flatten(1), context_NX), 1)
        unknown_N = x.isnan().any(1, keepdim=True)
        x = ((x - self.mean) / self.std).clamp(-_LIMIT, _LIMIT)
        x = torch.where(unknown_N, 0.0, x)
        for layer in (self.first, self.second):
            x = F.silu(few_rows(layer, x))
            if self.training:
                x = F.dropout(x, self.dropout)
        log_probability_NC = feature_NCF[..., _LOG_PROBABILITY].clamp(_LOG_PRODUCT[0], 0.0)
        log_product_NC = log_probability_NC.cumsum(1).clamp(*_LOG_PRODUCT)
        odds_NC = log_product_NC - torch.log(-torch.expm1(log_product_NC))
        last_NC = few_rows(self.last, x)
        return torch.where(unknown_N, -torch.inf, last_NC + self.gain * odds_NC)


def few_rows(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer; in a captured stage as a sum of products, which Inductor fuses.

    cuBLAS takes 40 us for a float32 product of 8 rows (396 x 208, H200)."""
    if torch.compiler.is_compiling():
        return (x[:, None] * layer.weight).sum(-1) + layer.bias
    out: Tensor = layer(x)
    return out


def falling(score_NC: Tensor) -> Tensor:
    """Cumulative minimum along each row of [N, C]."""
    # A masked minimum over [N, C, C] fuses with its neighbours; torch.cummin is a call of its own.
    position_C = torch.arange(score_NC.shape[1], device=score_NC.device)
    ahead_CC = position_C[None, :] > position_C[:, None]
    return torch.where(ahead_CC, torch.inf, score_NC[:, None, :]).amin(2)


def batch_context(
    live_N: Tensor, budget: float | Tensor, recent_NK: Tensor, context_N: Tensor
) -> Tensor:
    """The batch context of every request, float32 [N, 6], all values about 0 to 1.

    `live_N` bool: their number counts, as log2(1 + live) / 8. `budget`: rows per live request, one
    number or [N] float32, over 16. `recent_NK` int32 [N, 3]: drafted tokens accepted in the last
    passes, newest first, -1 where there was none yet, over 15. `context_N` int32: committed
    tokens, as log2(1 + context) / 16."""
    lanes = live_N.shape[0]
    live = torch.log2(1.0 + live_N.sum().float()) / 8
    rows = torch.as_tensor(budget, dtype=torch.float32, device=live_N.device) / 16
    columns = (
        live.expand(lanes),
        rows.expand(lanes),
        *(recent_NK[:, :RECENT].float() / 15).unbind(1),
        torch.log2(1.0 + context_N.float()) / 16,
    )
    return torch.stack(columns, 1)


def running_product(statistics: RowStatistics, lanes: int) -> Tensor:
    """Scores without a trained predictor, float32 [N, C]: the running product of the drafter's
    top-1 probabilities.

    `statistics`: of `lanes` * C rows, request major. A NaN in a row makes its score and those
    after it 0."""
    log_probability_NC = (statistics.top_RT[:, 0] - statistics.lse_R).view(lanes, -1)
    score_NC = log_probability_NC.clamp(max=0.0).cumsum(1).exp()
    return torch.where(score_NC.isnan(), 0.0, score_NC)

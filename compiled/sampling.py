"""Choosing a token from logits: argmax, or Gumbel-max after temperature, top-k, top-p and min-p.

Shapes: R rows, V vocabulary, C candidates kept per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dscale.kernels import ops
from dscale.kernels.reference import position_gumbel

NO_TOKEN = -1
"""What is chosen from logits that hold a NaN or an infinity above all others. No candidate equals
it."""


class Sampling(NamedTuple):
    """Sampling settings per row, `[R]` each.

    `temperature` float32 (0 means greedy), `top_k` int64 (0 means off), `top_p` float32 (1 means
    off), `min_p` float32 (0 means off), `seed` int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


@dataclass(frozen=True, slots=True)
class Chooser:
    """How a stage chooses tokens, fixed at trace time.

    `sample` False: argmax for every row, the settings are not read. `max_candidates`: the sorted
    candidates kept per row, at least the largest top_k of any row; 0 for the whole vocabulary
    unsorted, right only when no row has top-k, top-p or min-p. `penalty`: whether a row may have a
    repetition penalty; the stage then penalises its logits before it calls `choose`."""

    sample: bool = False
    max_candidates: int = 0
    penalty: bool = False


def choose(logit_RV: Tensor, position_R: Tensor, sampling: Sampling, chooser: Chooser) -> Tensor:
    """Choose the token at absolute position `position_R` from the logits that predict it. Returns
    `[R]` int64.

    Filters apply in transformers' order (temperature, top-k, top-p, min-p); ties at the k-th value
    are cut by sort order. Rows with temperature 0 are greedy. NO_TOKEN where the logits are not
    finite."""
    token_R = _choose(logit_RV, position_R, sampling, chooser)
    # A NaN or an infinity wins every choice, so the chosen one's logit tells of them all.
    best_R = torch.gather(logit_RV, 1, token_R[:, None])[:, 0]
    return torch.where(torch.isfinite(best_R), token_R, NO_TOKEN)


def best_tokens(logit_RV: Tensor) -> Tensor:
    """argmax of each row, `[R]` int64. On a CPU torch's own, which is compiled together with what
    is around it."""
    return ops.argmax(logit_RV) if logit_RV.is_cuda else logit_RV.argmax(-1)


def _choose(logit_RV: Tensor, position_R: Tensor, sampling: Sampling, chooser: Chooser) -> Tensor:
    if not chooser.sample:
        return best_tokens(logit_RV)
    vocab, temperature = logit_RV.shape[-1], sampling.temperature[:, None]
    if chooser.max_candidates:
        top_RC, token_RC = torch.topk(logit_RV, min(chooser.max_candidates, vocab), dim=-1)
        value_RC = top_RC.float()
        # Of the differences to the best, so that a tiny temperature cannot overflow to infinity.
        scaled = (value_RC - value_RC[:, :1]) / torch.clamp(temperature, min=1e-30)
        value_RC = torch.where(kept_candidates(scaled, sampling), value_RC, -torch.inf)
    else:
        value_RC = logit_RV.float()
        token_RC = torch.arange(vocab, device=logit_RV.device).expand_as(logit_RV)
    noise = position_gumbel(sampling.seed[:, None], position_R[:, None], token_RC)
    # Scaling the noise up instead of the logits down is the same choice, and greedy at 0.
    best = (value_RC + temperature * noise).argmax(-1, keepdim=True)
    return torch.gather(token_RC, 1, best)[:, 0]


def kept_candidates(value_RC: Tensor, sampling: Sampling) -> Tensor:
    """Which of the descending candidates survive top-k, top-p and min-p. Returns a bool mask `[R,
    C]`.

    The first candidate always survives. Each filter renormalises over what the one before it kept.
    """
    rank = torch.arange(value_RC.shape[1], device=value_RC.device)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, value_RC.shape[1])
    keep = rank < top_k[:, None]
    probability = torch.softmax(torch.where(keep, value_RC, -torch.inf), -1)
    before = probability.cumsum(-1) - probability
    keep &= (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
    keep &= probability >= sampling.min_p[:, None] * probability[:, :1]
    return keep | (rank == 0)

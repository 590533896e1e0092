"""Soft cross-entropy through a frozen LM head, with the gradient formed in the forward pass.

The labels are a few (token, probability) pairs a row, so the target's own logits are never made
again: one product for the logits, one pass for their log-sum-exp, one that writes the gradient in
their place, and one product back to the hidden states.

Shapes: R rows, C rows of a chunk, D hidden, V vocabulary, K label tokens a row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Chunk = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_loss(
    hidden_CD: Tensor, head_VD: Tensor, token_CK: Tensor, mass_CK: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss (a float32 scalar) and its gradient by `hidden_CD`.

    `token_CK` int64, distinct in each row; `mass_CK` float32 label probabilities, summing to one.
    """
    logit_CV = hidden_CD @ head_VD.T
    norm_C = logit_CV.float().logsumexp(-1)
    picked_CK = logit_CV.gather(1, token_CK).float()
    loss = (weight_C * (norm_C - (mass_CK * picked_CK).sum(-1))).sum()
    scale_C1, norm_C1 = weight_C[:, None], norm_C[:, None]
    slope_CV = ((logit_CV.float() - norm_C1).exp() * scale_C1).to(logit_CV.dtype)
    label_CK = ((picked_CK - norm_C1).exp() - mass_CK) * scale_C1
    slope_CV = slope_CV.scatter(1, token_CK, label_CK.to(logit_CV.dtype))
    return loss, slope_CV @ head_VD


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        token_RK: Tensor,
        mass_RK: Tensor,
        weight_R: Tensor,
        rows: int,
        function: Chunk,
    ) -> Tensor:
        narrow = hidden_RD.detach().to(head_VD.dtype)
        slope, losses = torch.empty_like(narrow), []
        for start in range(0, narrow.shape[0], rows):
            part = slice(start, start + rows)
            loss, slope[part] = function(
                narrow[part], head_VD, token_RK[part], mass_RK[part], weight_R[part]
            )
            losses.append(loss)
        ctx.save_for_backward(slope)
        ctx.dtype = hidden_RD.dtype
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return (slope.float() * grads[0]).to(ctx.dtype), None, None, None, None, None, None


def soft_cross_entropy(
    hidden_RD: Tensor,
    head_VD: Tensor,
    token_RK: Tensor,
    mass_RK: Tensor,
    weight_R: Tensor,
    *,
    rows: int = 2048,
    function: Chunk = chunk_loss,
) -> Tensor:
    """Sum over rows of `weight * cross-entropy(label distribution, softmax(hidden @ head.T))`.

    Rows are taken `rows` at a time; pad R to a multiple of it (weight 0) when `function` is
    compiled, so that it sees one shape. No gradient reaches `head_VD`.
    """
    if token_RK.shape != mass_RK.shape or token_RK.shape[0] != hidden_RD.shape[0]:
        raise ValueError(
            f"token_RK, mass_RK: expected [{hidden_RD.shape[0]}, K] both, "
            f"got {list(token_RK.shape)} and {list(mass_RK.shape)}"
        )
    loss: Tensor = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_RD, head_VD, token_RK, mass_RK, weight_R, rows, function
    )
    return loss

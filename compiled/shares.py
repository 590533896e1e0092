"""Keys of lanes shared out among sub-lanes: where each reads, and FlexAttention's own
log-sum-exps.

Shapes: N lanes, X sub-lanes, L pages of a lane, P physical pages, K KV heads, Q rows of a tile, E
head_dim, S keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from dscale.compiled.kv import PAGE, Paging

PARTS = 16
"""Sub-lanes of a step on a GPU, where it has no more lanes: with 8 KV heads they are 128 programs
for an H200's 132 multiprocessors."""


def sub_paging(paging: Paging, lane_X: Tensor, first_X: Tensor, held_X: Tensor) -> Paging:
    """The paging of sub-lanes, each as if it were a lane whose text is one stretch of its lane's
    (`lane_X`, `first_X`, `held_X`: see `kernels.ops.share_pages`). Positions count from the
    stretch's beginning, so its context may be below 0, or larger than the stretch."""
    logical_pages, first_X1 = paging.page_NL.shape[1], first_X[:, None]
    logical_XL = first_X1 + torch.arange(logical_pages, device=first_X1.device)
    logical_XL = torch.clamp(logical_XL, max=logical_pages - 1)
    page_XL = paging.page_NL[lane_X[:, None], logical_XL]
    logical_XP = paging.logical_NP[lane_X] - first_X1
    is_held_XP = (logical_XP >= 0) & (logical_XP < held_X[:, None])
    logical_XP = torch.where(is_held_XP, logical_XP, -1).int()
    context_X = paging.context_N[lane_X] - first_X * PAGE
    return Paging(page_XL, logical_XP, context_X.int())


def attend_shares(
    q_XKQE: Tensor,
    pool: tuple[Tensor, Tensor],
    block_mask: BlockMask,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Attention of sub-lanes `[X, K, Q, E]` and its log-sum-exps `[X, K, Q]`, float32 in base 2,
    -inf where a row saw no key (the result is 0 there). `pool` `[S, K, E]`; `options` of
    FlexAttention's kernel."""
    key, value = (x.transpose(0, 1)[None] for x in pool)
    flex = _flex if q_XKQE.device.type == "cpu" else _compiled_flex
    return flex(q_XKQE, key, value, block_mask, dict(options))


def _flex(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    # torch's own function multiplies them by ln 2, which is a kernel more.
    if torch.compiler.is_dynamo_compiling():
        for x in (query, key, value):
            torch._dynamo.mark_static(x, -3)
            torch._dynamo.mark_static(x, -1)
    kernel_options = {**_OPTIONS, **options}
    scale = query.shape[-1] ** -0.5
    out, lse, _ = flex_attention(
        query, key, value, _as_it_is, block_mask.as_tuple(), scale, kernel_options
    )
    return out, lse


def _as_it_is(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


_OPTIONS: dict[str, Any] = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
"""What torch's own function adds to the options it is given."""

# Inlined when a layer is compiled.
_compiled_flex = torch.compile(_flex, dynamic=True)

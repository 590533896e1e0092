"""Keys of lanes shared out among sub-lanes: which pages each reads, and FlexAttention's own
log-sum-exps.

Shapes: N lanes, X sub-lanes, L pages of a lane, P physical pages, K KV heads, Q rows of a tile, E
head_dim, S keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from dscale.compiled.kv import PAGE, Paging

PARTS = 16
"""Sub-lanes of a step on a GPU, where it has no more lanes: with 8 KV heads they are 128 programs
for an H200's 132 multiprocessors."""


class Shares(NamedTuple):
    """Which pages of which lane each sub-lane reads, all int64.

    `lane_X`, `first_X`, `held_X`: the lane, the first of its pages and how many, 0 for a sub-lane
    without any. `start_N`, `count_N`: a lane's first sub-lane and how many it has, one after the
    other."""

    lane_X: Tensor
    first_X: Tensor
    held_X: Tensor
    start_N: Tensor
    count_N: Tensor


def shares(used_N: Tensor, parts: int, most: int) -> Shares:
    """Share the first `used_N` pages of each lane (1 to `most`, integers) out among `parts`
    sub-lanes, or as many as lanes if those are more, so that the largest share is as small as can
    be. As many sub-lanes as lanes are the lanes themselves.

    Their number is an expression of the number of lanes in a graph that is being traced."""
    lanes, device = used_N.shape[0], used_N.device
    parts = torch.sym_max(lanes, parts)
    used_N = used_N.long()
    # The fewest pages a share with which all lanes together need no more than there are.
    size_L = torch.arange(1, most + 1, device=device)
    needed_L = ceil_div(used_N, size_L[:, None]).sum(1)
    count_N = ceil_div(used_N, (needed_L > parts).sum() + 1)
    index_N, index_X = torch.arange(lanes, device=device), torch.arange(parts, device=device)
    end_N = torch.where(index_N <= index_N[:, None], count_N, 0).sum(1)
    start_N = end_N - count_N
    lane_X = torch.clamp((end_N <= index_X[:, None]).sum(1), max=lanes - 1)
    # A lane's shares are alike.
    size_X = ceil_div(used_N, count_N)[lane_X]
    first_X = (index_X - start_N[lane_X]) * size_X
    held_X = torch.clamp(torch.minimum(used_N[lane_X] - first_X, size_X), min=0)
    return Shares(lane_X, first_X, held_X, start_N, count_N)


def sub_paging(paging: Paging, part: Shares) -> Paging:
    """Where each sub-lane's context lives, as if it were a lane whose text is a stretch of its
    lane's: so its context ends before it begins (below 0), in it or behind it."""
    logical_pages, first_X1 = paging.page_NL.shape[1], part.first_X[:, None]
    logical_XL = first_X1 + torch.arange(logical_pages, device=first_X1.device)
    logical_XL = torch.clamp(logical_XL, max=logical_pages - 1)
    page_XL = paging.page_NL[part.lane_X[:, None], logical_XL]
    logical_XP = paging.logical_NP[part.lane_X] - first_X1
    is_held_XP = (logical_XP >= 0) & (logical_XP < part.held_X[:, None])
    logical_XP = torch.where(is_held_XP, logical_XP, -1).int()
    context_X = paging.context_N[part.lane_X] - part.first_X * PAGE
    return Paging(page_XL, logical_XP, context_X.int())


def ceil_div(a: Tensor, b: Tensor) -> Tensor:
    """a / b rounded up, of integers above 0."""
    return (a + b - 1) // b


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

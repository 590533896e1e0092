"""Keys of few lanes shared out among sub-lanes: which pages each reads, and attention over a lane
from attention over its shares.

Shapes: N lanes, X sub-lanes, L pages of a lane, P physical pages, R rows, T tile rows, K tiles of
heads, G heads of a tile, E head_dim."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from dscale.compiled.kv import PAGE, Paging

FEW_LANES = 8
"""Lanes of a step, at most, whose keys are shared out on a GPU: with 8 KV heads, 16 lanes are 128
programs for an H200's 132 multiprocessors."""

PARTS = 16
"""Sub-lanes of such a step."""


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
    sub-lanes, at least as many as lanes, so that the largest share is as small as can be.

    Raises ValueError for more lanes than sub-lanes."""
    lanes, device = used_N.shape[0], used_N.device
    if lanes > parts:
        raise ValueError(f"used_N: expected at most {parts} lanes, got {lanes}")
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


def merge(
    out_XTKGE: Tensor, lse_XTKG1: Tensor, start_R: Tensor, count_R: Tensor, tile_row_R: Tensor
) -> Tensor:
    """Rows `[R, K, G, E]` of attention over all keys, from attention over each share of them.

    `out_XTKGE`: a sub-lane's own result; `lse_XTKG1` float32: the log-sum-exp of its scores, -inf
    where it saw no key. Such a share counts nothing, and where no share saw any, the result is 0.
    `start_R`, `count_R`: the row's sub-lanes. Computed in float32, returned in the dtype of `out`.
    """
    index_P = torch.arange(out_XTKGE.shape[0], device=start_R.device)
    # Past a row's sub-lanes the last one again, which is in the cache.
    part_RP = start_R[:, None] + torch.minimum(index_P, count_R[:, None] - 1)
    is_own = (index_P < count_R[:, None])[..., None, None, None]
    cell = (part_RP, tile_row_R[:, None])
    # At full width from here on, or Inductor makes more than one kernel of it.
    lse = torch.where(is_own, lse_XTKG1[cell], -inf).expand(-1, -1, -1, -1, out_XTKGE.shape[-1])
    top = lse.amax(1, keepdim=True)
    weight = torch.exp(lse - torch.where(top == -inf, 0.0, top))
    total = weight.sum(1)
    term = torch.where(lse == -inf, 0.0, weight * out_XTKGE[cell].float())
    return (term.sum(1) / torch.where(total == 0, 1.0, total)).to(out_XTKGE.dtype)

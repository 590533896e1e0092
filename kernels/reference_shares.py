"""Pages shared out among sub-lanes, and attention over all keys from attention over shares of
them, in eager code: the specification of `share_pages` and `merge_shares`, and their
implementation on the CPU.

Shapes: N lanes, X sub-lanes, R rows, T tile rows, K tiles of heads, G heads of a tile, E
head_dim."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor


class Shares(NamedTuple):
    """Which pages of which lane each sub-lane reads, all int64.

    `lane_X`, `first_X`, `held_X`: the lane, the first of its pages and how many, 0 for a sub-lane
    without any. `start_R`, `count_R`: the first sub-lane of a row's lane and how many it has, one
    after the other."""

    lane_X: Tensor
    first_X: Tensor
    held_X: Tensor
    start_R: Tensor
    count_R: Tensor


def share_pages(used_N: Tensor, lane_R: Tensor, parts: int, most: int) -> Shares:
    """Share the first `used_N` pages of each lane (int32, 1 to `most`) out among `parts`
    sub-lanes, or as many as lanes if those are more, so that the largest share is as small as can
    be. As many sub-lanes as lanes are the lanes themselves. `lane_R` int64: rows' lanes."""
    lanes, device = used_N.shape[0], used_N.device
    parts, used_N = max(lanes, parts), used_N.long()
    # The fewest pages a share with which all lanes together need no more than there are.
    size_L = torch.arange(1, most + 1, device=device)
    needed_L = _ceil_div(used_N, size_L[:, None]).sum(1)
    count_N = _ceil_div(used_N, (needed_L > parts).sum() + 1)
    end_N = count_N.cumsum(0)
    start_N, index_X = end_N - count_N, torch.arange(parts, device=device)
    lane_X = torch.clamp((end_N <= index_X[:, None]).sum(1), max=lanes - 1)
    # A lane's shares are alike.
    size_X = _ceil_div(used_N, count_N)[lane_X]
    first_X = (index_X - start_N[lane_X]) * size_X
    held_X = torch.clamp(torch.minimum(used_N[lane_X] - first_X, size_X), min=0)
    return Shares(lane_X, first_X, held_X, start_N[lane_R], count_N[lane_R])


def _ceil_div(a: Tensor, b: Tensor) -> Tensor:
    """a / b rounded up, of integers above 0."""
    return (a + b - 1) // b


def merge_shares(
    out_XKQE: Tensor,
    lse_XKQ: Tensor,
    first_R: Tensor,
    count_R: Tensor,
    tile_row_R: Tensor,
    height: int,
) -> Tensor:
    """Packed rows `[R, K * G * E]`, heads in the tiles' order, in the dtype of `out_XKQE`.

    `out_XKQE` `[X, K, G * T, E]`: attention of a sub-lane's tile over its own keys. `lse_XKQ`
    float32: log-sum-exp of the scores, in base 2, -inf where there was no key. Such a share counts
    nothing, and where no share had a key, the result is 0. `first_R`, `count_R` int64: sub-lanes
    of a row's lane, one after the other; `tile_row_R` int64: its place in their tiles; `height`:
    T. Computed in float32 and rounded once; the row of an only sub-lane is copied as it is."""
    index_P = torch.arange(out_XKQE.shape[0], device=first_R.device)
    is_own_RP = index_P < count_R[:, None]
    at = torch.where(is_own_RP, first_R[:, None] + index_P, 0), tile_row_R[:, None]

    def gather(tile_XKQY: Tensor) -> Tensor:
        parts, tiles, queries, width = tile_XKQY.shape
        cells = tile_XKQY.view(parts, tiles, queries // height, height, width)
        return cells.permute(0, 3, 1, 2, 4)[at].flatten(2, 3)

    lse = torch.where(is_own_RP[..., None, None], gather(lse_XKQ[..., None]), -inf)
    top = lse.amax(1, keepdim=True)
    weight = torch.exp2(lse - torch.where(top == -inf, 0.0, top))
    total = weight.sum(1)
    out = torch.where(lse == -inf, 0.0, weight * gather(out_XKQE).float()).sum(1)
    out = (out / torch.where(total == 0, 1.0, total)).to(out_XKQE.dtype)
    only = gather(out_XKQE)[:, 0]
    return torch.where((count_R == 1)[:, None, None], only, out).flatten(1)

"""Attention over all keys from attention over shares of them, in eager code: the specification of
`merge_shares`, and its implementation on the CPU.

Shapes: X sub-lanes, R rows, T tile rows, K tiles of heads, G heads of a tile, E head_dim."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor


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

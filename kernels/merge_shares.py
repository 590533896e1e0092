"""Triton launcher of merge_shares: one program per row and block of heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.dependent import launch_options, starts_early

CHUNK = 8
"""Shares read at once, so that no load waits for another; 16 would take registers from programs
that copy."""

HEADS = 4
"""Heads of a program of two warps. With one warp each, 256 rows of 32 heads were 8,192 programs,
whose start takes longer than the copy."""


def merge_shares(
    out_XKQE: Tensor,
    lse_XKQ: Tensor,
    first_R: Tensor,
    count_R: Tensor,
    tile_row_R: Tensor,
    height: int,
) -> Tensor:
    """The reference's contract, on a GPU or under Triton's interpreter. One launch."""
    _, tiles, queries, head_dim = out_XKQE.shape
    heads, (rows,) = tiles * queries // height, first_R.shape
    merged = out_XKQE.new_empty((rows, heads * head_dim))
    if not rows:
        return merged
    early = starts_early(out_XKQE.device)
    _merge_shares[(rows, triton.cdiv(heads, HEADS))](
        out_XKQE.contiguous(),
        lse_XKQ.contiguous(),
        first_R.contiguous(),
        count_R.contiguous(),
        tile_row_R.contiguous(),
        merged,
        height,
        heads,
        head_dim,
        CHUNK,
        HEADS,
        triton.next_power_of_2(head_dim),
        early,
        num_warps=2,
        **launch_options(early),
    )
    return merged


@triton.jit(do_not_specialize=["height"])  # type: ignore[untyped-decorator]
def _merge_shares(
    out: tl.tensor,
    lse: tl.tensor,
    first_of: tl.tensor,
    count_of: tl.tensor,
    tile_row_of: tl.tensor,
    merged: tl.tensor,
    height: tl.tensor,
    H: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    H_BLOCK: tl.constexpr,
    E_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """H_BLOCK heads of a row: its only share as it is, or a running softmax over its shares."""
    row = tl.program_id(0)
    head, at = tl.program_id(1) * H_BLOCK + tl.arange(0, H_BLOCK), tl.arange(0, E_BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, count = tl.load(first_of + row), tl.load(count_of + row)
    is_head = head < H
    is_cell = is_head[:, None] & (at < E)[None, :]
    to = merged + (row.to(tl.int64) * H + head)[:, None] * E + at[None, :]
    # A sub-lane's queries lie head by head, whichever heads share a tile.
    line = first * (H * height) + head * height + tl.load(tile_row_of + row)
    if count == 1:
        only = tl.load(out + line[:, None] * E + at[None, :], mask=is_cell)
        tl.store(to, only, mask=is_cell)
    else:
        top = tl.full([H_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([H_BLOCK], tl.float32)
        acc = tl.zeros([H_BLOCK, E_BLOCK], tl.float32)
        for start in range(0, count, CHUNK):
            higher = top
            for i in tl.static_range(CHUNK):
                share = line + (start + i) * (H * height)
                is_own = is_head & (start + i < count)
                own = tl.load(lse + share, mask=is_own, other=float("-inf"))
                higher = tl.maximum(higher, own)
            # Where no share has had a key yet, exponents must not be inf - inf.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            scale = tl.exp2(top - level)
            acc, total, top = acc * scale[:, None], total * scale, higher
            for i in tl.static_range(CHUNK):
                share = line + (start + i) * (H * height)
                is_own = is_head & (start + i < count)
                own = tl.load(lse + share, mask=is_own, other=float("-inf"))
                is_part = is_cell & (start + i < count)
                part = tl.load(out + share[:, None] * E + at[None, :], mask=is_part, other=0.0)
                weight = tl.exp2(own - level)
                weighted = weight[:, None] * part.to(tl.float32)
                acc += tl.where((own == float("-inf"))[:, None], 0.0, weighted)
                total += weight
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(to, result.to(merged.dtype.element_ty), mask=is_cell)

"""Triton launcher of merge_shares: one program of one warp per row and head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.dependent import launch_options, starts_early

CHUNK = 16
"""Shares read at once: as many as a row has in decode steps, so that no load waits for another."""


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
    _merge_shares[(rows, heads)](
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
        triton.next_power_of_2(head_dim),
        early,
        num_warps=1,
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
    E_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first, count = tl.load(first_of + row), tl.load(count_of + row)
    # A sub-lane's queries lie head by head, whichever heads share a tile.
    query = head * height + tl.load(tile_row_of + row)
    at = tl.arange(0, E_BLOCK)
    top, total = float("-inf"), 0.0
    acc = tl.zeros([E_BLOCK], tl.float32)
    for start in range(0, count, CHUNK):
        index = start + tl.arange(0, CHUNK)
        line = (first + index) * (H * height) + query
        own = tl.load(lse + line, mask=index < count, other=float("-inf"))
        is_part = (index < count)[:, None] & (at < E)[None, :]
        part = tl.load(out + line[:, None] * E + at[None, :], mask=is_part, other=0.0)
        higher = tl.maximum(top, tl.max(own, 0))
        # Where no share has had a key yet, exponents must not be inf - inf.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight, scale = tl.exp2(own - level), tl.exp2(top - level)
        weighted = weight[:, None] * part.to(tl.float32)
        weighted = tl.where((own == float("-inf"))[:, None], 0.0, weighted)
        acc = acc * scale + tl.sum(weighted, 0)
        total = total * scale + tl.sum(weight, 0)
        top = higher
    result = acc / tl.where(total == 0.0, 1.0, total)
    to = merged + (row.to(tl.int64) * H + head) * E + at
    tl.store(to, result.to(merged.dtype.element_ty), mask=at < E)

"""Triton launcher of share_pages: every program finds the shares of all lanes, few as they are."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64


def share_pages(
    used_N: Tensor, lane_R: Tensor, parts: int, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reference's contract, on a GPU or under Triton's interpreter. One launch."""
    (lanes,), (rows,) = used_N.shape, lane_R.shape
    sub_lanes = max(lanes, parts)
    lane_X, first_X, held_X = (lane_R.new_empty((sub_lanes,)) for _ in range(3))
    start_R, count_R = lane_R.new_empty((rows,)), lane_R.new_empty((rows,))
    _share_pages[(triton.cdiv(max(sub_lanes, rows), BLOCK),)](
        used_N.contiguous(),
        lane_R.contiguous(),
        lane_X,
        first_X,
        held_X,
        start_R,
        count_R,
        lanes,
        rows,
        sub_lanes,
        triton.next_power_of_2(parts),
        lanes < parts,
        BLOCK,
    )
    return lane_X, first_X, held_X, start_R, count_R


@triton.jit(do_not_specialize=["lanes", "rows", "parts"])  # type: ignore[untyped-decorator]
def _share_pages(
    used: tl.tensor,
    lane_of: tl.tensor,
    lane_out: tl.tensor,
    first_out: tl.tensor,
    held_out: tl.tensor,
    start_out: tl.tensor,
    count_out: tl.tensor,
    lanes: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    LANES: tl.constexpr,
    SPARE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK of `parts` sub-lanes, and as many rows. SPARE: there are more sub-lanes than lanes;
    else each lane is its own."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_part, is_row = at < parts, at < rows
    row_lane = tl.load(lane_of + at, mask=is_row, other=0).to(tl.int32)
    if SPARE:
        lane = tl.arange(0, LANES)
        pages = tl.load(used + lane, mask=lane < lanes, other=0)
        # Shares of `high` pages need no more sub-lanes than there are, those of `low` do.
        low, high = 0, tl.max(pages, 0)
        while high - low > 1:
            size = (low + high) // 2
            fits = tl.sum((pages + size - 1) // size, 0) <= parts
            low, high = tl.where(fits, low, size), tl.where(fits, size, high)
        count = (pages + high - 1) // high
        end = tl.cumsum(count, 0)
        start, size = end - count, (pages + count - 1) // tl.maximum(count, 1)
        own = tl.sum(((end[None, :] <= at[:, None]) & (lane < lanes)[None, :]).to(tl.int32), 1)
        own = tl.minimum(own, lanes - 1)
        is_own = own[:, None] == lane[None, :]
        own_size = tl.sum(tl.where(is_own, size[None, :], 0), 1)
        first = (at - tl.sum(tl.where(is_own, start[None, :], 0), 1)) * own_size
        left = tl.sum(tl.where(is_own, pages[None, :], 0), 1) - first
        held = tl.maximum(tl.minimum(left, own_size), 0)
        is_own = row_lane[:, None] == lane[None, :]
        row_start = tl.sum(tl.where(is_own, start[None, :], 0), 1)
        row_count = tl.sum(tl.where(is_own, count[None, :], 0), 1)
    else:
        own, first = at, tl.zeros_like(at)
        held = tl.load(used + at, mask=is_part, other=0)
        row_start, row_count = row_lane, tl.full([BLOCK], 1, tl.int32)
    tl.store(lane_out + at, own.to(tl.int64), mask=is_part)
    tl.store(first_out + at, first.to(tl.int64), mask=is_part)
    tl.store(held_out + at, held.to(tl.int64), mask=is_part)
    tl.store(start_out + at, row_start.to(tl.int64), mask=is_row)
    tl.store(count_out + at, row_count.to(tl.int64), mask=is_row)

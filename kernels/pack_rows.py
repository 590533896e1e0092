"""Triton launcher of pack_rows: every program finds its rows' lanes by counting prefix sums."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.reference_rows import TILE

BLOCK = 64


def pack_rows(
    length_N: Tensor,
    candidate_NC: Tensor,
    anchor_N: Tensor,
    context_N: Tensor,
    page_NL: Tensor,
    rows: int,
    page: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The reference's contract, on a GPU or under Triton's interpreter. One launch."""
    lanes, candidates = candidate_NC.shape
    padded = triton.next_power_of_2(lanes)
    token_M, position_M, slot_M, lane_M, tile_row_M = (
        anchor_N.new_empty((rows,)) for _ in range(5)
    )
    offset_N = anchor_N.new_empty((lanes,))
    row_NT = anchor_N.new_empty((lanes, TILE))
    _pack[(triton.cdiv(rows, BLOCK),)](
        length_N.contiguous(),
        candidate_NC.contiguous(),
        anchor_N.contiguous(),
        context_N.contiguous(),
        page_NL.contiguous(),
        offset_N,
        token_M,
        position_M,
        slot_M,
        lane_M,
        tile_row_M,
        row_NT,
        lanes,
        rows,
        page_NL.shape[1],
        page,
        candidates,
        padded,
        TILE,
        BLOCK,
        num_warps=8 if padded > 64 else 4,
    )
    return offset_N, token_M, position_M, slot_M, lane_M, tile_row_M, row_NT


@triton.jit(do_not_specialize=["lanes", "rows"])  # type: ignore[untyped-decorator]
def _pack(
    length: tl.tensor,
    candidate: tl.tensor,
    anchor: tl.tensor,
    context: tl.tensor,
    page_table: tl.tensor,
    offset_out: tl.tensor,
    token_out: tl.tensor,
    position_out: tl.tensor,
    slot_out: tl.tensor,
    lane_out: tl.tensor,
    tile_row_out: tl.tensor,
    row_out: tl.tensor,
    lanes: tl.tensor,
    rows: tl.tensor,
    logical_pages: tl.tensor,
    PAGE: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK packed rows; the first program writes the offsets and tile cells of all lanes, too."""
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    is_lane = lane < lanes
    count = tl.load(length + lane, mask=is_lane, other=0)
    end = tl.cumsum(count, 0)
    used = tl.sum(count, 0)

    row = program * BLOCK + tl.arange(0, BLOCK)
    is_row = row < rows
    is_used = row < tl.minimum(used, rows)
    is_past = end[None, :] <= row[:, None]
    at = tl.where(is_used, tl.sum(is_past.to(tl.int32), 1), 0)
    tile_row = row - tl.sum(tl.where(is_past, count[None, :], 0), 1)
    tile_row = tl.where(is_used, tile_row, 0)
    position = tl.load(context + at, mask=is_used, other=0) + tile_row
    logical = tl.minimum(position // PAGE, logical_pages - 1)
    physical = tl.load(page_table + at * logical_pages + logical, mask=is_used, other=0)
    slot = physical.to(tl.int64) * PAGE + position % PAGE
    is_anchor = tile_row == 0
    token = tl.load(anchor + at, mask=is_used & is_anchor, other=0)
    drafted = candidate + at * C + tile_row - 1
    token += tl.load(drafted, mask=is_used & (tile_row > 0), other=0)
    tl.store(token_out + row, token, mask=is_row)
    tl.store(position_out + row, position.to(tl.int64), mask=is_row)
    tl.store(slot_out + row, tl.where(is_used, slot, 0), mask=is_row)
    tl.store(lane_out + row, at.to(tl.int64), mask=is_row)
    tl.store(tile_row_out + row, tile_row.to(tl.int64), mask=is_row)

    if program == 0:
        offset = tl.where(count > 0, end - count, used)
        tl.store(offset_out + lane, offset.to(tl.int64), mask=is_lane)
        cell = tl.arange(0, TILE)[None, :]
        filled = tl.minimum(cell, tl.maximum(count - 1, 0)[:, None])
        in_cell = tl.minimum(offset[:, None] + filled, rows - 1)
        tl.store(row_out + lane[:, None] * TILE + cell, in_cell.to(tl.int64), is_lane[:, None])

"""Triton launcher of accept_prefix over packed rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.reference_rows import TILE

BLOCK = 32


def accept_prefix(
    candidate_NC: Tensor, length_N: Tensor, offset_N: Tensor, choice_M: Tensor
) -> tuple[Tensor, Tensor]:
    """The contract of the reference's accept_rows, on a GPU or under Triton's interpreter. One
    launch."""
    lanes, candidates = candidate_NC.shape
    accepted_N = offset_N.new_empty((lanes,))
    successor_N = offset_N.new_empty((lanes,))
    if lanes:
        _accept[(triton.cdiv(lanes, BLOCK),)](
            candidate_NC.contiguous(),
            length_N.contiguous(),
            offset_N.contiguous(),
            choice_M.contiguous(),
            accepted_N,
            successor_N,
            lanes,
            choice_M.shape[0],
            candidates,
            TILE,
            BLOCK,
            num_warps=1,
        )
    return accepted_N, successor_N


@triton.jit(do_not_specialize=["lanes", "rows"])  # type: ignore[untyped-decorator]
def _accept(
    candidate: tl.tensor,
    length: tl.tensor,
    offset: tl.tensor,
    choice: tl.tensor,
    accepted_out: tl.tensor,
    successor_out: tl.tensor,
    lanes: tl.tensor,
    rows: tl.tensor,
    C: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK lanes: where their candidates part from the choices, and what was chosen there."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_lane = lane < lanes
    count = tl.load(length + lane, mask=is_lane, other=0)
    first = tl.load(offset + lane, mask=is_lane, other=0)
    column = tl.arange(0, TILE)[None, :]
    is_candidate = column < tl.minimum(count - 1, C)[:, None]
    drafted = tl.load(candidate + lane[:, None] * C + column, mask=is_candidate, other=-1)
    row = tl.minimum(first[:, None] + column, rows - 1)
    chosen = tl.load(choice + row, mask=is_candidate, other=-2)
    accepted = tl.min(tl.where(drafted == chosen, TILE, column), 1)
    row = tl.minimum(first + accepted, rows - 1)
    successor = tl.load(choice + row, mask=count > 0, other=0)
    tl.store(accepted_out + lane, accepted.to(tl.int64), mask=is_lane)
    tl.store(successor_out + lane, successor, mask=is_lane)

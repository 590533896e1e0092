"""Triton launcher of allocate_budget: Algorithm 1 as one program, by bisection on score bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.reference_rows import SEEDS, TILE


def allocate_budget(
    score_NC: Tensor, live_N: Tensor, limit_N: Tensor, room: Tensor, seed: str
) -> Tensor:
    """The reference's contract, on a GPU or under Triton's interpreter. One launch."""
    lanes, candidates = score_NC.shape
    length_N = score_NC.new_empty((lanes,), dtype=torch.int32)
    if lanes:
        padded = triton.next_power_of_2(lanes)
        _allocate[(1,)](
            score_NC.contiguous(),
            live_N.contiguous(),
            limit_N.contiguous(),
            room.contiguous(),
            length_N,
            lanes,
            SEEDS.index(seed),
            candidates,
            padded,
            TILE,
            num_warps=max(1, min(8, padded * TILE // 512)),
        )
    return length_N


@triton.jit(do_not_specialize=["lanes"])  # type: ignore[untyped-decorator]
def _allocate(
    score: tl.tensor,
    live: tl.tensor,
    limit: tl.tensor,
    room: tl.tensor,
    length: tl.tensor,
    lanes: tl.tensor,
    SEED: tl.constexpr,
    C: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Cell (i, j) of the tiles is row j of request i; column 0 is the anchor, always kept."""
    lane = tl.arange(0, LANES)
    slot = tl.arange(0, WIDTH)[None, :]
    is_lane = lane < lanes
    is_live = tl.load(live + lane, mask=is_lane, other=0).to(tl.int32) != 0
    most = tl.load(limit + lane, mask=is_lane, other=0)
    most = tl.where(is_live, tl.minimum(tl.maximum(most, 1), C + 1), 0)
    running = tl.full([LANES], 1.0, tl.float32)
    value = tl.full([LANES, WIDTH], 0.0, tl.float32)
    for j in tl.static_range(C):
        one = tl.load(score + lane * C + j, mask=is_lane, other=0.0)
        one = tl.where(one > 0.0, one, 0.0)  # NaN and -0.0 too
        running = tl.minimum(running, tl.where(one < 1.0, one, 1.0))
        value = tl.where(slot == j + 1, running[:, None], value)

    anchor = is_live.to(tl.int32)
    start = anchor
    if SEED != 2:
        fixed = tl.sum((value * 16777216.0).to(tl.int32), 1)
        rounded = (fixed + 8388608) >> 24
        if SEED == 1:
            rounded += 1
        start = tl.minimum(tl.maximum(rounded, 1), most)
    num_live = tl.sum(anchor, 0)
    used = tl.minimum(tl.load(room), tl.load(room + 1) * num_live)
    used = tl.minimum(used, tl.sum(most, 0))
    gap = used - tl.sum(start, 0)

    # Growing takes the head of the order outside the seed; shrinking keeps the head inside it.
    grow = gap > 0
    take = tl.where(grow, gap, tl.sum(start, 0) - num_live + gap)
    base = tl.where(grow, start, anchor)
    end = tl.where(grow, most, start)
    is_eligible = (slot >= tl.maximum(base, 1)[:, None]) & (slot < end[:, None])
    # Bits of scores in 0..1 order like the scores, below 1 << 30.
    key = tl.where(is_eligible, value.to(tl.int32, bitcast=True), -1)
    # Bisection: at least `take` keys are >= low, fewer are >= high.
    low = 0
    high = 1 << 30
    for _ in range(30):
        middle = (low + high) // 2
        is_enough = tl.sum(tl.sum((key >= middle).to(tl.int32), 1), 0) >= take
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    above = tl.sum((key > low).to(tl.int32), 1)
    tied = tl.sum((key == low).to(tl.int32), 1)
    left = take - tl.sum(above, 0)
    before = tl.cumsum(tied, 0) - tied
    tied = tl.minimum(tl.maximum(left - before, 0), tied)
    tl.store(length + lane, base + above + tied, mask=is_lane)

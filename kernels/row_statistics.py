"""Triton launcher of row_statistics: one pass over the logits, split over parts of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.reference_statistics import TOP

BLOCK = 2048
MAX_PARTS = 8
ENOUGH_PROGRAMS = 512  # a few per multiprocessor of a large GPU


def num_parts(rows: int, vocab: int) -> int:
    """Parts a row is split into (a power of two): more while the grid is small and parts long."""
    parts = 1
    while parts < MAX_PARTS and rows * parts < ENOUGH_PROGRAMS and vocab > 8 * BLOCK * parts:
        parts *= 2
    return parts


def row_statistics(logit_RV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference's contract, on a GPU or under Triton's interpreter. Two launches."""
    rows, vocab = logit_RV.shape
    logit_RV = logit_RV if logit_RV.stride(1) == 1 else logit_RV.contiguous()
    parts = num_parts(rows, vocab)
    floats = logit_RV.new_empty((rows, parts, TOP + 3), dtype=torch.float32)
    indices = logit_RV.new_empty((rows, parts), dtype=torch.int32)
    top_RT = logit_RV.new_empty((rows, TOP), dtype=torch.float32)
    index_R = logit_RV.new_empty((rows,), dtype=torch.int64)
    lse_R = logit_RV.new_empty((rows,), dtype=torch.float32)
    entropy_R = torch.empty_like(lse_R)
    if rows:
        span = triton.cdiv(triton.cdiv(vocab, parts), BLOCK) * BLOCK
        _part_statistics[(rows, parts)](
            logit_RV, floats, indices, vocab, logit_RV.stride(0), span, BLOCK, TOP, num_warps=4
        )
        _join_parts[(rows,)](
            floats, indices, top_RT, index_R, lse_R, entropy_R, parts, TOP, num_warps=4
        )
    return top_RT, index_R, lse_R, entropy_R


@triton.jit  # type: ignore[untyped-decorator]
def _part_statistics(
    logit: tl.tensor,
    floats: tl.tensor,
    indices: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    span: tl.tensor,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """Of columns part * span on: the TOP largest (in no order), peak, sum of exp(x - peak), sum of
    (x - peak) exp(x - peak), and the index of the peak, or of the first NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * span
    last = tl.minimum(first + span, vocab)
    inf = float("inf")
    top = tl.full([TOP], -inf, tl.float32)
    rank = tl.arange(0, TOP)
    least = -inf
    peak = -inf
    total = 0.0
    weighted = 0.0
    index = first
    nan_at = vocab
    logit += row * row_stride
    column = first + tl.arange(0, BLOCK)
    loaded = tl.load(logit + column, mask=column < last, other=-inf)
    for _ in range(first, last, BLOCK):
        is_inside = column < last
        x = loaded.to(tl.float32)
        # Read ahead, so that the next chunk is on its way while this one is worked on.
        following = column + BLOCK
        loaded = tl.load(logit + following, mask=following < last, other=-inf)
        is_nan = x != x
        x = tl.where(is_nan, -inf, x)
        highest = tl.max(x, 0)
        if highest > peak:
            index = tl.min(tl.where(x == highest, column, vocab), 0)
        old_peak = peak
        peak = tl.maximum(peak, highest)
        scale = tl.where(old_peak == peak, 1.0, tl.exp(old_peak - peak))
        shift = tl.where((old_peak == peak) | (scale == 0.0), 0.0, old_peak - peak)
        below = tl.where(x == peak, 0.0, x - peak)
        weight = tl.where(is_nan, float("nan"), tl.where(is_inside, tl.exp(below), 0.0))
        weighted = (weighted + shift * total) * scale
        weighted += tl.sum(tl.where(weight == 0.0, 0.0, below * weight), 0)
        total = total * scale + tl.sum(weight, 0)
        if (total != total) & (nan_at == vocab):
            nan_at = tl.min(tl.where(is_nan, column, vocab), 0)
        # Take the chunk's values from the highest down, all equal ones at once, while they beat
        # the least of the top; each replaces that many of the smallest.
        while highest > least:
            hits = tl.sum((x == highest).to(tl.int32), 0)
            is_before = (top[None, :] < top[:, None]) | (
                (top[None, :] == top[:, None]) & (rank[None, :] < rank[:, None])
            )
            from_least = tl.sum(is_before.to(tl.int32), 1)
            top = tl.where((from_least < hits) & (top < highest), highest, top)
            least = tl.min(top, 0)
            x = tl.where(x == highest, -inf, x)
            highest = tl.max(x, 0)
        column = following
    cell = row * tl.num_programs(1) + part
    out = floats + cell * (TOP + 3)
    tl.store(out + rank, top)
    tl.store(out + TOP, peak)
    tl.store(out + TOP + 1, total)
    tl.store(out + TOP + 2, weighted)
    tl.store(indices + cell, tl.where(nan_at < vocab, nan_at, index))


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(
    floats: tl.tensor,
    indices: tl.tensor,
    top_out: tl.tensor,
    index_out: tl.tensor,
    lse_out: tl.tensor,
    entropy_out: tl.tensor,
    PARTS: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    base = floats + (row * PARTS + part) * (TOP + 3)
    peak = tl.load(base + TOP)
    total = tl.load(base + TOP + 1)
    weighted = tl.load(base + TOP + 2)
    index = tl.load(indices + row * PARTS + part)
    best = tl.max(peak, 0)
    scale = tl.where(peak == best, 1.0, tl.exp(peak - best))
    shift = tl.where((peak == best) | (scale == 0.0), 0.0, peak - best)
    row_weighted = tl.sum((weighted + shift * total) * scale, 0)
    row_total = tl.sum(total * scale, 0)
    is_nan = row_total != row_total
    is_winner = tl.where(is_nan, total != total, peak == best)
    tl.store(index_out + row, tl.min(tl.where(is_winner, index, 2147483647), 0).to(tl.int64))
    log_total = tl.log(row_total)
    tl.store(lse_out + row, tl.where(is_nan, row_total, best + log_total))
    tl.store(entropy_out + row, log_total - row_weighted / row_total)

    item = tl.arange(0, PARTS * TOP)
    value = tl.load(floats + (row * PARTS + item // TOP) * (TOP + 3) + item % TOP)
    is_before = (value[None, :] > value[:, None]) | (
        (value[None, :] == value[:, None]) & (item[None, :] < item[:, None])
    )
    rank = tl.sum(is_before.to(tl.int32), 1)
    value = tl.where(is_nan, row_total, value)
    tl.store(top_out + row * TOP + rank, value, mask=rank < TOP)

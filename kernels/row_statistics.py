"""Triton launcher of row_statistics: one pass over the logits, split over parts of a row, then one
program a row.

The first kernel keeps a maximum for every group of columns, by shuffles inside a warp alone. The
16 groups with the largest maxima hold 16 largest logits, so the second looks for them there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.reference_statistics import TOP

GROUPS = 256
RUN = 16
"""Columns side by side in a group; a group has as many in every chunk of GROUPS * RUN."""
CHUNK = GROUPS * RUN
MAX_CHUNKS = 8
LEAST = tl.constexpr(-200.0)  # exp of it is 0 in float32


def split(vocab: int) -> tuple[int, int]:
    """Parts of a row (a power of two) and chunks of a part."""
    chunks = triton.cdiv(vocab, CHUNK)
    parts = triton.next_power_of_2(triton.cdiv(chunks, MAX_CHUNKS))
    return parts, triton.cdiv(chunks, parts)


def row_statistics(logit_RV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference's contract, on a GPU or under Triton's interpreter. Two launches."""
    rows, vocab = logit_RV.shape
    logit_RV = logit_RV if logit_RV.stride(1) == 1 else logit_RV.contiguous()
    parts, chunks = split(vocab)
    sums = logit_RV.new_empty((rows, parts, 3), dtype=torch.float32)
    nan_at = logit_RV.new_empty((rows, parts), dtype=torch.int32)
    peak = logit_RV.new_empty((rows, parts, GROUPS), dtype=torch.float32)
    at = logit_RV.new_empty((rows, parts, GROUPS), dtype=torch.int32)
    top_RT = logit_RV.new_empty((rows, TOP), dtype=torch.float32)
    index_R = logit_RV.new_empty((rows,), dtype=torch.int64)
    lse_R = logit_RV.new_empty((rows,), dtype=torch.float32)
    entropy_R = torch.empty_like(lse_R)
    if rows:
        _group_statistics[(rows, parts)](
            logit_RV, sums, nan_at, peak, at, vocab, logit_RV.stride(0),
            chunks, GROUPS, RUN, num_warps=4,
        )  # fmt: skip
        _join_groups[(rows,)](
            logit_RV, sums, nan_at, peak, at, top_RT, index_R, lse_R, entropy_R, vocab,
            logit_RV.stride(0), parts, chunks, triton.next_power_of_2(chunks), GROUPS, RUN, TOP,
            num_warps=4,
        )  # fmt: skip
    return top_RT, index_R, lse_R, entropy_R


@triton.jit  # type: ignore[untyped-decorator]
def _group_statistics(
    logit: tl.tensor,
    sums: tl.tensor,
    nan_at: tl.tensor,
    peak_out: tl.tensor,
    at_out: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Of a part of a row: each group's peak and the first column of the run that holds it first;
    the part's peak, sum of exp(x - peak), sum of (x - peak) exp(x - peak) and first NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cell = row * tl.num_programs(1) + part
    inf = float("inf")
    group = tl.arange(0, GROUPS)
    start = part * (CHUNKS * GROUPS * RUN) + group * RUN
    column = start[:, None] + tl.arange(0, RUN)[None, :]
    logit += row * row_stride
    peak = tl.full([GROUPS], -inf, tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    weighted = tl.zeros([GROUPS], tl.float32)
    at = start
    last = tl.minimum((part + 1) * (CHUNKS * GROUPS * RUN), vocab)
    loaded = tl.load(logit + column, mask=column < last, other=-inf)
    for chunk in range(CHUNKS):
        x = loaded.to(tl.float32)
        # Read ahead, so that the next chunk is on its way while this one is worked on.
        column += GROUPS * RUN
        loaded = tl.load(logit + column, mask=column < last, other=-inf)
        highest = tl.max(x, 1)
        at = tl.where(highest > peak, start + chunk * (GROUPS * RUN), at)
        old_peak = peak
        peak = tl.maximum(peak, highest)
        shift = _below(old_peak, peak)
        scale = tl.exp(shift)
        weighted = (weighted + shift * total) * scale
        total = total * scale
        below = _below(x, peak[:, None])
        weight = tl.exp(below)
        weighted += tl.sum(below * weight, 1)
        total += tl.sum(weight, 1)
    tl.store(peak_out + cell * GROUPS + group, peak)
    tl.store(at_out + cell * GROUPS + group, at)
    best, row_total, row_weighted = _joined(peak, total, weighted)
    first_nan = vocab
    if (row_total != row_total) | (best == inf):
        # Rare: find the NaN, or count the infinities, which are all that weighs.
        row_total, row_weighted = 0.0, 0.0
        column = start[:, None] + tl.arange(0, RUN)[None, :]
        for _ in range(CHUNKS):
            x = tl.load(logit + column, mask=column < last, other=0.0).to(tl.float32)
            lowest = tl.min(tl.min(tl.where(x != x, column, vocab), 1), 0)
            first_nan = tl.minimum(first_nan, lowest)
            row_total += tl.sum(tl.sum((x == inf).to(tl.float32), 1), 0)
            column += GROUPS * RUN
        row_total = tl.where(first_nan < vocab, float("nan"), row_total)
    tl.store(sums + cell * 3, best)
    tl.store(sums + cell * 3 + 1, row_total)
    tl.store(sums + cell * 3 + 2, row_weighted)
    tl.store(nan_at + cell, first_nan)


@triton.jit  # type: ignore[untyped-decorator]
def _below(x: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """x - peak, cut where exp is 0 anyway, so that no infinity meets a zero; a NaN stays one."""
    lowest: tl.constexpr = -3.4028234663852886e38
    below = x - tl.maximum(peak, lowest)
    return tl.maximum(below, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(
    peak: tl.tensor, total: tl.tensor, weighted: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The three sums of several sets of columns, over all of them."""
    best = tl.max(peak, 0)
    shift = tl.where(peak == best, 0.0, _below(peak, best))
    scale = tl.exp(shift)
    return best, tl.sum(total * scale, 0), tl.sum((weighted + shift * total) * scale, 0)


@triton.jit(do_not_specialize=["vocab"])  # type: ignore[untyped-decorator]
def _join_groups(
    logit: tl.tensor,
    sums: tl.tensor,
    nan_at: tl.tensor,
    peak_in: tl.tensor,
    at_in: tl.tensor,
    top_out: tl.tensor,
    index_out: tl.tensor,
    lse_out: tl.tensor,
    entropy_out: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """A row from its parts: sums joined, the argmax, and TOP largest logits out of the TOP groups
    with the largest peaks."""
    row = tl.program_id(0).to(tl.int64)
    logit += row * row_stride
    inf = float("inf")
    part = row * PARTS + tl.arange(0, PARTS)
    best, total, weighted = _joined(
        tl.load(sums + part * 3), tl.load(sums + part * 3 + 1), tl.load(sums + part * 3 + 2)
    )
    is_nan = total != total
    # A row of -inf alone: all of them are its peak.
    total = tl.where(best == -inf, vocab.to(tl.float32), total)
    log_total = tl.log(total)
    tl.store(lse_out + row, tl.where(is_nan, total, best + log_total))
    tl.store(entropy_out + row, log_total - weighted / total)

    group = tl.arange(0, PARTS * GROUPS)
    peak = tl.load(peak_in + row * (PARTS * GROUPS) + group)
    at = tl.load(at_in + row * (PARTS * GROUPS) + group)
    run = tl.min(tl.where(peak == best, at, vocab), 0) + tl.arange(0, RUN)
    x = tl.load(logit + run, mask=run < vocab, other=-inf).to(tl.float32)
    index = tl.min(tl.where((x == best) & (run < vocab), run, vocab), 0)
    index = tl.where(is_nan, tl.min(tl.load(nan_at + part), 0), index)
    tl.store(index_out + row, index.to(tl.int64))

    rank = tl.arange(0, TOP)
    chosen = tl.full([TOP], -1, tl.int32)
    for place in range(TOP):
        highest, which = tl.max(peak, 0, return_indices=True)
        # Groups that are left have nothing above -inf, which is what fills the places.
        chosen = tl.where(rank == place, tl.where(highest > -inf, which, -1), chosen)
        peak = tl.where(group == which, -inf, peak)
    chunk = tl.arange(0, CHUNKS_BLOCK)[None, :, None]
    start = chosen // GROUPS * (CHUNKS * GROUPS * RUN) + chosen % GROUPS * RUN
    column = start[:, None, None] + chunk * (GROUPS * RUN) + tl.arange(0, RUN)[None, None, :]
    mask = (chosen >= 0)[:, None, None] & (chunk < CHUNKS) & (column < vocab)
    x = tl.load(logit + column, mask=mask, other=-inf).to(tl.float32)
    x = tl.reshape(x, [TOP * CHUNKS_BLOCK * RUN], can_reorder=True)
    item = tl.arange(0, TOP * CHUNKS_BLOCK * RUN)
    top = tl.full([TOP], -inf, tl.float32)
    for place in range(TOP):
        highest, which = tl.max(x, 0, return_indices=True)
        top = tl.where(rank == place, highest, top)
        x = tl.where(item == which, -inf, x)
    tl.store(top_out + row * TOP + rank, tl.where(is_nan, total, top))

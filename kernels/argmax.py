"""Triton launcher of argmax: one pass over the logits, split over parts of a row, then one small
program a row.

The pass keeps the maximum of every group of columns and the chunk that it came from; which column
of the group's few it was is looked up once a row, by the second kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOAD = 16
"""Bytes of a load, which a thread reduces by itself; its columns are called a run."""
CHUNK = 4096
"""Columns of a chunk at 2 bytes each; half of that at 4."""
PROGRAMS = 528
"""At most so many when the rows are fewer: four for each multiprocessor of an H200."""


def split(rows: int, vocab: int, chunk: int) -> tuple[int, int]:
    """Parts of a row and chunks of a part."""
    chunks = triton.cdiv(vocab, chunk)
    in_part = triton.cdiv(chunks, max(1, min(chunks, PROGRAMS // rows)))
    return triton.cdiv(chunks, in_part), in_part


def argmax(logit_RV: Tensor) -> Tensor:
    """torch.argmax of every row, on a GPU or under Triton's interpreter. Two launches."""
    rows, vocab = logit_RV.shape
    logit_RV = logit_RV if logit_RV.stride(1) == 1 else logit_RV.contiguous()
    index_R = logit_RV.new_empty((rows,), dtype=torch.int64)
    if rows == 0:
        return index_R
    run = LOAD // logit_RV.itemsize
    groups = CHUNK * 2 // LOAD
    parts, chunks = split(rows, vocab, groups * run)
    best = logit_RV.new_empty((rows, parts), dtype=torch.int64)
    _best_runs[(rows, parts)](
        logit_RV, best, vocab, logit_RV.stride(0), chunks, groups, run, num_warps=8
    )
    # At least as many as any number of rows gives, so that a vocabulary compiles one kernel.
    most = triton.next_power_of_2(min(PROGRAMS, triton.cdiv(vocab, groups * run)))
    _first_best[(rows,)](
        logit_RV, best, index_R, vocab, logit_RV.stride(0), parts, most, run, num_warps=1
    )
    return index_R


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator]
def _best_runs(
    logit: tl.tensor,
    best_out: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    chunks: tl.tensor,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Of a part of a row: its largest logit, or NaN, and the first column of the run that holds it
    first, as one number of which the larger wins."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * (chunks * GROUPS * RUN) + tl.arange(0, GROUPS) * RUN
    column = start[:, None] + tl.arange(0, RUN)[None, :]
    last = tl.minimum((part + 1) * (chunks * GROUPS * RUN), vocab)
    logit += row * row_stride
    peak = tl.full([GROUPS], -float("inf"), tl.float32)
    at = start  # of the run in which the peak was first seen
    loaded = tl.load(logit + column, mask=column < last, other=-float("inf"))
    for chunk in range(chunks):
        x = loaded
        # Read ahead, so that the next chunk is on its way while this one is worked on.
        column += GROUPS * RUN
        loaded = tl.load(logit + column, mask=column < last, other=-float("inf"))
        old = peak
        peak = _max(old, _run_max(x.to(tl.float32)))
        # Not equal is true of a NaN as well: the first one is noted, and is never replaced.
        at = tl.where((peak != old) & (old == old), start + chunk * (GROUPS * RUN), at)
    tl.store(best_out + row * tl.num_programs(1) + part, tl.max(_key(peak, at), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _max(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _run_max(x: tl.tensor) -> tl.tensor:
    """Maximum of each row of 4 or 8, or NaN. By halves, as tl.max passes over a NaN."""
    GROUPS: tl.constexpr = x.shape[0]
    left, right = tl.split(tl.reshape(x, [GROUPS, x.shape[1] // 2, 2]))
    half = _max(left, right)
    if x.shape[1] == 8:
        left, right = tl.split(tl.reshape(half, [GROUPS, 2, 2]))
        half = _max(left, right)
    left, right = tl.split(half)
    return _max(left, right)


@triton.jit  # type: ignore[untyped-decorator]
def _key(x: tl.tensor, column: tl.tensor) -> tl.tensor:
    """int64 in the order of the numbers, NaN first of all; among equals the lowest column wins."""
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 too
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (order.to(tl.int64) << 32) | (column ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit(do_not_specialize=["parts"])  # type: ignore[untyped-decorator]
def _first_best(
    logit: tl.tensor,
    best_in: tl.tensor,
    index_out: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    parts: tl.tensor,
    MOST: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Of a row: the first column of its best run that holds its largest logit, or NaN."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MOST)
    lowest: tl.constexpr = -(2**63)
    best = tl.max(tl.load(best_in + row * parts + part, mask=part < parts, other=lowest), 0)
    order = (best >> 32).to(tl.int32)
    largest = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    column = (best.to(tl.int32) ^ 0x7FFFFFFF) + tl.arange(0, RUN)
    x = tl.load(logit + row * row_stride + column, mask=column < vocab, other=0.0).to(tl.float32)
    # In a run without a NaN no entry differs from itself; in one with a NaN none is the largest.
    # What is past the vocabulary comes after the one that there is.
    found = (x == largest) | (x != x)
    tl.store(index_out + row, tl.min(tl.where(found, column, vocab), 0).to(tl.int64))

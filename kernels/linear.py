"""Triton launcher of linear: the weight read once, in tiles that several programs share along K.

Passes of 16 to 256 rows are bound by reading the weight, and a library's tile leaves
multiprocessors idle where the weight is small (qkv and o of an 8B model: 96 and 64 tiles for
132)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dscale.kernels.dependent import launch_options, starts_early
from dscale.kernels.linear_plans import Plan, plan


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, turn: Tensor) -> Tensor:
    """The reference's contract on a GPU: by this kernel where a plan says it is faster, else by
    the library."""
    found = plan(x, weight)
    if found is None or found.tiles(x.shape[0], weight.shape[0]) > turn.numel():
        return torch.nn.functional.linear(x, weight, bias)
    return split_linear(x, weight, bias, turn, found)


def split_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    turn: Tensor,
    plan: Plan,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x `[M, K]` by weight `[N, K]` transposed, in the tiles of a plan. One launch, and the same
    result every time: the last program of a tile adds all parts, in their order.

    `turn`: int32 zeros, one for each tile at least; zeros again afterwards. `scales` float32 `[M]`
    and `[N]`: of 8-bit operands, whose results have `dtype`."""
    rows, inner = x.shape
    columns = weight.shape[0]
    out = x.new_empty((rows, columns), dtype=dtype)
    parts, early = plan.parts, starts_early(x.device)
    summed = (parts, rows, columns) if parts > 1 else (1,)
    part_sum = x.new_empty(summed, dtype=torch.float32)
    x = x.contiguous()
    _split_linear[(plan.tiles(rows, columns) * parts,)](
        TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k]),
        TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k]),
        x if bias is None else bias,
        *(scales or (x, x)),
        out,
        part_sum,
        turn,
        rows,
        columns,
        inner,
        parts,
        bias is not None,
        scales is not None,
        plan.block_m,
        plan.block_n,
        plan.block_k,
        early,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(early),
    )
    return out


@triton.jit(do_not_specialize=["rows", "parts"])  # type: ignore[untyped-decorator]
def _split_linear(
    x_tiles: tl.tensor,
    weight_tiles: tl.tensor,
    bias: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    out: tl.tensor,
    part_sum: tl.tensor,
    turn: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    parts: tl.tensor,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One part along K of a tile of the result. The last program of a tile to finish, as `turn`
    counts them, adds its parts up."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    across = tl.cdiv(rows, BLOCK_M)
    tiles = across * tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    tile, part = program % tiles, program // tiles
    # Tiles of the same weight rows side by side: the second reads them from the L2 cache.
    row_0, column_0 = tile % across * BLOCK_M, tile // across * BLOCK_N
    blocks = tl.cdiv(inner, BLOCK_K)
    first, last = part * blocks // parts, (part + 1) * blocks // parts
    # Hopper sums products of 8-bit floats in 14 bits or so: no longer than over one block.
    IMPRECISE: tl.constexpr = BLOCK_K if SCALED else None
    # It multiplies 64 rows at least, of the left operand: few of x stand on the right.
    if SCALED and BLOCK_M < 64:
        turned = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in range(first, last):
            left = x_tiles.load([row_0, block * BLOCK_K])
            right = weight_tiles.load([column_0, block * BLOCK_K])
            turned = tl.dot(right, left.T, turned, max_num_imprecise_acc=IMPRECISE)
        total = turned.T
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(first, last):
            left = x_tiles.load([row_0, block * BLOCK_K])
            right = weight_tiles.load([column_0, block * BLOCK_K])
            total = tl.dot(left, right.T, total, max_num_imprecise_acc=IMPRECISE)
    row = row_0 + tl.arange(0, BLOCK_M)
    column = column_0 + tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    if parts > 1:
        size = rows.to(tl.int64) * columns
        tl.store(part_sum + part * size + at, total, mask=mask)
        # All threads' sums are written before one of them says so.
        tl.debug_barrier()
        is_last = tl.atomic_add(turn + tile, 1, sem="acq_rel") == parts - 1
        if is_last:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in range(parts):
                total += tl.load(part_sum + other * size + at, mask=mask, cache_modifier=".cg")
            tl.store(turn + tile, 0)
            if SCALED:
                total = _scaled(total, x_scale, weight_scale, row, column, rows, columns)
            _finish(total, bias, out, at, column, columns, mask, BIASED)
    else:
        if SCALED:
            total = _scaled(total, x_scale, weight_scale, row, column, rows, columns)
        _finish(total, bias, out, at, column, columns, mask, BIASED)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(
    total: tl.tensor,
    x_scale: tl.tensor,
    weight_scale: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
) -> tl.tensor:
    left = tl.load(x_scale + row, mask=row < rows, other=0.0)
    right = tl.load(weight_scale + column, mask=column < columns, other=0.0)
    return total * left[:, None] * right[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _finish(
    total: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    at: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    BIASED: tl.constexpr,
) -> None:
    if BIASED:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)

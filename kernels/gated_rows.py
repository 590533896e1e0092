"""Triton launcher of gated_rows: one program reads a row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.dependent import launch_options, starts_early
from dscale.kernels.reference_scaled import E4M3, LARGEST


def gated_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's contract on a GPU."""
    x = x.contiguous()
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=E4M3, device=x.device)
    scale = x.new_empty((rows,), dtype=torch.float32)
    block, early = triton.next_power_of_2(inner), starts_early(x.device)
    _gated_rows[(rows,)](
        x, out, scale, inner, block, LARGEST, early,
        num_warps=8 if block <= 4096 else 16, **launch_options(early),
    )  # fmt: skip
    return out, scale


@triton.jit  # type: ignore[untyped-decorator]
def _gated_rows(
    x: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    inner: tl.tensor,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One row: silu(gate) * up, its scale, and the numbers in 8 bits."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(x + row * 2 * inner + column, mask=mask, other=0.0)
    up = tl.load(x + row * 2 * inner + inner + column, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded after silu and after the product, as two operations are.
    gated = (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up
    wide = gated.to(tl.float32)
    size = tl.abs(wide)
    largest = tl.max(size)
    # The reduction leaves NaNs out.
    largest += tl.sum(tl.where(size == size, 0.0, size))
    by = tl.maximum(largest / LARGEST, 1.1754943508222875e-38, tl.PropagateNan.ALL)
    tl.store(out + row * inner + column, (wide / by).to(out.dtype.element_ty), mask=mask)
    tl.store(scale + row, by)

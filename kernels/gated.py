"""Triton launcher of gated: programs of a row's columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.dependent import launch_options, starts_early

BLOCK = 2048
"""Columns of a program: 16 numbers of each operand a thread, two loads of 16 bytes."""


def gated(x: Tensor) -> Tensor:
    """The reference's contract on a GPU."""
    x = x.contiguous()
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    # Rows first: a grid's other dimensions end at 65,535.
    grid = (rows, triton.cdiv(inner, BLOCK))
    _gated[grid](x, out, inner, BLOCK, early, num_warps=4, **launch_options(early))
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gated(
    x: tl.tensor, out: tl.tensor, inner: tl.tensor, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(x + row * 2 * inner + column, mask=mask)
    up = tl.load(x + row * 2 * inner + inner + column, mask=mask)
    wide = gate.to(tl.float32)
    # Rounded after silu and after the product, as two operations are.
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * inner + column, silu * up, mask=mask)

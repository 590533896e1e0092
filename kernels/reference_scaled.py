"""Products of 8-bit floats in eager code: the specification of `scaled_linear` and `gated_rows`,
and their implementation on the CPU.

Shapes: M rows, N columns, K inner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscale.kernels.reference import gated

E4M3 = torch.float8_e4m3fn

LARGEST = 448.0
"""Of the format's numbers."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats `[M, K]` as (float8_e4m3fn `[M, K]`, float32 scale `[M]`), scale times numbers: the
    largest of each row becomes 448.

    A row's result depends on that row alone. One of zeros stays so; one with a NaN keeps it, and
    its scale is NaN."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scale[:, None]).to(E4M3), scale


def gated_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of silu(gate) * up, x `[M, 2 * K]` being gate and up side by side."""
    return quantize_rows(gated(x))


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    turn: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Of scaled rows and a scaled weight; see `scaled_linear_ops`."""
    total = F.linear(x.float(), weight.float()) * x_scale[:, None] * weight_scale
    return (total if bias is None else total + bias).to(dtype)

"""Launcher of scaled_linear: the split kernel of kernels/linear.py where a plan says it is faster,
else the library's product of 8-bit floats with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.kernels.linear import split_linear
from dscale.kernels.linear_plans import plan


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    turn: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The reference's contract on a GPU."""
    found = None if turn is None else plan(x, weight)
    if found is None or turn is None or found.tiles(x.shape[0], len(weight)) > turn.numel():
        return library(x, x_scale, weight, weight_scale, bias, dtype)
    return split_linear(x, weight, bias, turn, found, scales=(x_scale, weight_scale), dtype=dtype)


def library(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The same by PyTorch alone, with sums that leave Hopper's imprecise accumulators in time."""
    return torch._scaled_mm(
        x.contiguous(),
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=weight_scale[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,
    )

"""The few layers both decoders are made of: rotary table, residual sum, SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.compiled.packed import linear
from dscale.compiled.quantized import gated_linear
from dscale.kernels import ops, reference


def rotary_table(
    position_R: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each `[R, 1, head_dim / 2]`, of integer positions `[R]`, computed in
    float32."""
    angle = position_R.float()[:, None, None] * inv_freq
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, for the residual stream.

    Inductor would make one addmm of the sum and the product before it, which copies `x` first (2
    us each, two a layer); widened, the sum joins the norm after it instead, with the same result.
    """
    if torch.compiler.is_compiling():
        return (x.float() + y.float()).to(x.dtype)
    return x + y


def swiglu(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    gate_up_aid: Tensor | None,
    down_aid: Tensor | None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """Gated feed-forward of x `[R, D]`: down(silu(gate x) * up x), gate and up in one weight.

    `gate_up` `[2 * intermediate, D]`; aids and scales: see `packed.linear`.
    """
    both = linear(x, gate_up, gate_up_bias, gate_up_aid, gate_up_scale)
    if down_scale is not None:
        return gated_linear(both, down, down_scale, down_bias, down_aid)
    inner = ops.gated(both) if both.is_cuda else reference.gated(both)
    return linear(inner, down, down_bias, down_aid)


def frozen(tensor: Tensor | None) -> torch.nn.Parameter | None:
    """Wrap a tensor as a parameter that never asks for a gradient; shares its storage."""
    return None if tensor is None else torch.nn.Parameter(tensor.detach(), requires_grad=False)

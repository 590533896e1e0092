"""The few layers both decoders are made of: RMS norm, rotary embedding, fused projections,
SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dscale.compiled.packed import linear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, rounded as transformers rounds it.

    The scale is computed in float32, the result rounded to `x.dtype`, then multiplied by `weight`.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotary_table(
    position_R: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each `[R, 1, head_dim / 2]`, of integer positions `[R]`, computed in
    float32."""
    angle = position_R.float()[:, None, None] * inv_freq
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def rotate(x_RHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the half-split rotary embedding (dimension i pairs with i + head_dim / 2)."""
    a, b = x_RHE.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def swiglu(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    packed: Mapping[str, Tensor],
) -> Tensor:
    """Gated feed-forward: down(silu(gate x) * up x), gate and up stacked in one weight.

    `gate_up` `[2 * intermediate, D]`; `packed` may hold packed copies of "gate_up" and "down".
    """
    gate, up = linear(x, gate_up, gate_up_bias, packed.get("gate_up")).chunk(2, -1)
    return linear(F.silu(gate) * up, down, down_bias, packed.get("down"))


def frozen(tensor: Tensor | None) -> torch.nn.Parameter | None:
    """Wrap a tensor as a parameter that never asks for a gradient; shares its storage."""
    return None if tensor is None else torch.nn.Parameter(tensor.detach(), requires_grad=False)

"""Projections in 8-bit floats: float8_e4m3fn numbers with a float32 scale for each row of the
weight and for each row of what it multiplies, chosen as it comes.

Shapes: M rows, N columns, K inner."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dscale.compiled.capture import fixed
from dscale.kernels import ops
from dscale.kernels.reference_scaled import E4M3, quantize_rows

PIECE = 2**26
"""Numbers of a weight that are widened at a time."""

CAPABILITY = (8, 9)
"""Of the first GPUs whose tensor cores multiply them."""


def check_quantizable(
    device: torch.device, dtype: torch.dtype, sizes: Iterable[int] = (), wanted: str = "fp8"
) -> None:
    """Raise ValueError unless a model of this device and dtype can have such projections. `sizes`:
    all N and K, multiples of 16 on a GPU. On a CPU any model can. `wanted`: the setting."""
    if device.type == "cpu":
        return
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or torch.version.hip or found < CAPABILITY:
        name = device.type if found is None else f"capability {found[0]}.{found[1]}"
        raise ValueError(
            f"weights: expected 'model' on a device without tensor cores for 8-bit floats (NVIDIA "
            f"GPUs of capability {CAPABILITY[0]}.{CAPABILITY[1]} or more have them), got "
            f"{wanted!r} on {name}"
        )
    if dtype != torch.bfloat16:
        raise ValueError(f"weights: expected 'model' for a {dtype} model on a GPU, got {wanted!r}")
    odd = [size for size in sizes if size % 16]
    if odd:
        raise ValueError(
            f"weights: expected 'model' for projections of {odd[0]} numbers, not a multiple of "
            f"16, got {wanted!r}"
        )


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight's copy `[N, K]` and scales `[N]`, at fixed addresses. On a CPU the copy is
    float32, of the same values: a CPU would widen it in every pass."""
    dtype = torch.float32 if weight.device.type == "cpu" else E4M3
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, PIECE // weight.shape[1])
    for at in range(0, len(weight), step):  # so that an LM head needs no gigabytes at once
        rows = slice(at, at + step)
        values[rows], scale[rows] = quantize_rows(weight.detach()[rows])
    return fixed(values), fixed(scale)


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, turn: Tensor | None
) -> Tensor:
    """`F.linear` of rows `[M, K]`, quantized here, and a weight of `quantize`, in x's dtype.
    `turn`: see `packed.turns`; None for the library's product."""
    values, x_scale = quantize_rows(x)
    return ops.scaled_linear(values, x_scale, weight, scale, bias, turn, x.dtype)


def gated_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, turn: Tensor | None
) -> Tensor:
    """`linear` of silu(gate) * up, x `[M, 2 * K]` being gate and up side by side."""
    values, x_scale = ops.gated_rows(x)
    return ops.scaled_linear(values, x_scale, weight, scale, bias, turn, x.dtype)

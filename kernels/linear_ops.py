"""The custom operation of a projection: the library's product, or on a GPU one split along K.

Shapes: M rows, N columns, K inner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscale.kernels.registry import expect, implement

torch.library.define(
    "dscale::linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor turn) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_linear: Any = torch.ops.dscale.linear.default


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, turn: Tensor) -> Tensor:
    """`F.linear` of x `[M, K]` and weight `[N, K]`, to `[M, N]`, summed in float32 and rounded
    once; on a GPU in the tiles that kernels/linear_plans has for the shape.

    `turn` int32 `[T]`: zeros, which programs that share a tile count in and leave as zeros, so
    every product of a device may use the same ones, one at a time. A plan of more than T tiles
    is not used. Raises ValueError for other shapes or dtypes."""
    out: Tensor = _linear(x, weight, bias, turn)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, turn: Tensor) -> None:
    ok = weight.ndim == 2 and weight.is_floating_point()
    expect(ok, "weight", "floats [N, K]", f"{weight.dtype} {list(weight.shape)}")
    ok = x.ndim == 2 and x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
    expected = f"{weight.dtype} [M, {weight.shape[1]}]"
    expect(ok, "x", expected, f"{x.dtype} {list(x.shape)}")
    if bias is not None:
        ok = bias.dtype == x.dtype and bias.shape == weight.shape[:1]
        expected = f"{x.dtype} [{weight.shape[0]}]"
        expect(ok, "bias", expected, f"{bias.dtype} {list(bias.shape)}")
    ok = turn.dtype == torch.int32 and turn.ndim == 1
    expect(ok, "turn", "torch.int32 [T]", f"{turn.dtype} {list(turn.shape)}")


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, turn: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, turn: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


implement("linear", _check, _reference, _fake)

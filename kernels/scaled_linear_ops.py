"""The custom operations of a projection in 8-bit floats, and of rows that come from a gate to one:
rows of either operand have a scale each.

Shapes: M rows, N columns, K inner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscale.kernels import reference_scaled
from dscale.kernels.gated_ops import check_gated
from dscale.kernels.reference_scaled import E4M3
from dscale.kernels.registry import expect, expect_tensor, implement

torch.library.define(
    "dscale::scaled_linear",
    "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? turn,"
    " ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_scaled_linear: Any = torch.ops.dscale.scaled_linear.default
torch.library.define(
    "dscale::gated_rows", "(Tensor x) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
_gated_rows: Any = torch.ops.dscale.gated_rows.default


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    turn: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`F.linear` of x times x_scale, row by row, and weight times weight_scale, to `[M, N]` of
    `dtype`: products of 8-bit floats summed in float32, scaled, and rounded once.

    `x` float8_e4m3fn `[M, K]`, `weight` the same `[N, K]`, or on a CPU its values in float32;
    `x_scale` float32 `[M]`, `weight_scale` float32 `[N]`; `bias` `[N]` of `dtype`. `turn`: as in
    `linear`; without it the library does the product. On a GPU that takes K and N that are
    multiples of 16 and bfloat16 for `dtype`. Raises ValueError for other shapes or dtypes."""
    out: Tensor = _scaled_linear(x, x_scale, weight, weight_scale, bias, turn, dtype)
    return out


def _check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    turn: Tensor | None,
    dtype: torch.dtype,
) -> None:
    widened = weight.device.type == "cpu" and weight.dtype == torch.float32
    ok = weight.ndim == 2 and (weight.dtype == E4M3 or widened)
    expect(ok, "weight", f"{E4M3} [N, K]", f"{weight.dtype} {list(weight.shape)}")
    columns, inner = weight.shape
    ok = x.ndim == 2 and x.dtype == E4M3 and x.shape[1] == inner
    expect(ok, "x", f"{E4M3} [M, {inner}]", f"{x.dtype} {list(x.shape)}")
    expect_tensor("x_scale", x_scale, torch.float32, (x.shape[0],))
    expect_tensor("weight_scale", weight_scale, torch.float32, (columns,))
    if bias is not None:
        expect_tensor("bias", bias, dtype, (columns,))
    if turn is not None:
        ok = turn.dtype == torch.int32 and turn.ndim == 1
        expect(ok, "turn", "torch.int32 [T]", f"{turn.dtype} {list(turn.shape)}")
    if x.device.type != "cpu":
        ok = columns % 16 == 0 and inner % 16 == 0
        expect(ok, "weight", "multiples of 16 [N, K] on a GPU", list(weight.shape))
        expect(dtype == torch.bfloat16, "dtype", "torch.bfloat16 on a GPU", dtype)


def _fake(x: Tensor, x_scale: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=rest[-1])


def gated_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in 8-bit floats, x `[M, 2 * K]` being gate and up side by side: numbers
    float8_e4m3fn `[M, K]` and float32 scales `[M]`, as `reference_scaled.quantize_rows` has them.

    One kernel, as the compiler's two read x twice (10 us a layer of 8B at 256 rows). Raises
    ValueError for other shapes or dtypes."""
    out: tuple[Tensor, Tensor] = _gated_rows(x)
    return out


def _fake_gated(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    scale = x.new_empty((rows,), dtype=torch.float32)
    return x.new_empty((rows, columns // 2), dtype=E4M3), scale


implement("scaled_linear", _check, reference_scaled.scaled_linear, _fake)
implement("gated_rows", check_gated, reference_scaled.gated_rows, _fake_gated)

"""The custom operation between the two products of a gated feed-forward.

Shapes: M rows, K inner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscale.kernels import reference
from dscale.kernels.registry import expect, implement

torch.library.define("dscale::gated", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_gated: Any = torch.ops.dscale.gated.default


def gated(x: Tensor) -> Tensor:
    """silu(gate) * up `[M, K]`, x `[M, 2 * K]` being gate and up side by side, in x's dtype and
    rounded after either.

    Raises ValueError for other shapes or dtypes."""
    out: Tensor = _gated(x)
    return out


def check_gated(x: Tensor) -> None:
    """Raise ValueError unless `x` is gate and up side by side."""
    ok = x.ndim == 2 and x.is_floating_point() and x.shape[1] % 2 == 0 and x.shape[1] > 0
    expect(ok, "x", "floats [M, 2 * K]", f"{x.dtype} {list(x.shape)}")


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


implement("gated", check_gated, reference.gated, _fake)

"""Linear layers of few rows, faster than the library's: over weights in oneDNN's blocked layout on
a CPU, split along K on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dscale.compiled.capture import fixed
from dscale.compiled.quantized import linear as quantized_linear
from dscale.kernels import ops
from dscale.kernels.linear_plans import plans_for

PACK_ROWS = 16
"""Rows that oneDNN is told to choose the layout for: a full block."""

MAX_TILES = 4096
"""Tiles of a split product at most; the largest of the table, an LM head, has 2,374."""


def check_packable(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless weights of this device and dtype can be packed here."""
    if device.type != "cpu" or dtype != torch.float32:
        raise ValueError(
            f"pack_weights: expected a float32 model on a CPU, got {dtype} on {device}"
        )
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise ValueError("pack_weights: expected a PyTorch with oneDNN, got one without")


def pack(weight: Tensor) -> Tensor:
    """Copy a float32 `[out, in]` weight into the blocked layout (an opaque tensor)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)
    return packed


def turns(device: torch.device) -> Tensor:
    """Counters of a model's split products, int32 zeros, one for each tile of the largest: by them
    the programs of a tile find out which of them is the last (`kernels.ops.linear`). One buffer
    serves all products of a model, one after the other."""
    return fixed(torch.zeros(MAX_TILES, dtype=torch.int32, device=device))


def is_split(weight: Tensor) -> bool:
    """Whether some product with this weight is split on the GPU it is on."""
    return any(plan is not None for plan in plans_for(weight).values())


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    aid: Tensor | None,
    scale: Tensor | None = None,
) -> Tensor:
    """`F.linear` of rows `[M, K]` and a weight `[N, K]`. `aid`: what a faster product needs, on a
    CPU the weight's `pack`, on a GPU `turns`; None for the library's product. `scale` float32
    `[N]`: of a weight that `quantized.quantize` made, None for one in x's dtype."""
    if scale is not None:
        return quantized_linear(x, weight, scale, bias, aid)
    if aid is None:
        return F.linear(x, weight, bias)
    if aid.dtype == torch.int32:
        return ops.linear(x, weight, bias, aid)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, aid, bias, "none", [], "")
    return out

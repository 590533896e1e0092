"""Linear layers over weights in oneDNN's blocked layout, for passes of a few rows on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 16
"""Rows the layout is chosen for: a full block."""


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """`F.linear`, through the packed copy of the weight where there is one."""
    if packed is None:
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out

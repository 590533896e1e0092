"""The fingerprint of a checkpoint, by which a predictor knows the drafter it was made for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor


def fingerprint_of(stored: Iterable[tuple[str, Tensor]], mask: Tensor | None = None) -> str:
    """sha256, in hex, over stored tensors in the given order: name, dtype, shape and raw bytes.

    `mask` [D]: the drafter's own mask embedding, taken as bfloat16 so that the dtype it was loaded
    in plays no part."""
    digest = hashlib.sha256()
    own = [("mask_embedding", mask.bfloat16())] if mask is not None else []
    for name, tensor in chain(own, stored):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        raw: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(memoryview(raw))
    return digest.hexdigest()

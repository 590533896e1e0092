"""Programmatic dependent launch: a kernel that starts while the one before it on the stream ends.

Such a kernel waits itself (`gdc_wait`) before it reads or writes anything an earlier kernel might
write or read; every program of it does, so whoever waits for it has waited for those, too."""

from __future__ import annotations

from functools import cache

import torch
import triton

HOPPER = 9
"""The capability (major) that knows it first."""


def starts_early(device: torch.device) -> bool:
    """Whether kernels on a device may be launched so; not under Triton's interpreter."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return _major(torch.cuda.current_device() if device.index is None else device.index) >= HOPPER


@cache
def _major(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]

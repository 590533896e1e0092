"""Programmatic dependent launch: a kernel that starts while the one before it on the stream ends.

Such a kernel waits itself (`gdc_wait`) before it reads or writes anything an earlier kernel might
write or read; every program of it does, so whoever waits for it has waited for those, too."""

from __future__ import annotations

import torch

from dscale.kernels.linear_plans import device_kind

CAPABILITY = "9.0"
"""The capability it was measured on; others launch kernels one after the other."""


def starts_early(device: torch.device) -> bool:
    """Whether kernels on a device are launched so; not under Triton's interpreter."""
    if device.type != "cuda" or torch.version.hip:
        return False
    import triton  # not everywhere that there is no GPU

    if triton.knobs.runtime.interpret:
        return False
    return device_kind(device)[0] == CAPABILITY


def launch_options(early: bool) -> dict[str, bool]:
    """What a launch says for it; nothing otherwise, as not every backend knows the word."""
    return {"launch_pdl": True} if early else {}

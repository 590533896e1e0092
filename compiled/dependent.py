"""Programmatic dependent launch (kernels/dependent.py) of the kernels that Inductor writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dscale.kernels.dependent import starts_early


def compile_for(
    function: Callable[..., Any], device: torch.device | None, mode: str | None = None
) -> Callable[..., Any]:
    """`torch.compile(function, mode=mode, fullgraph=True)`; where kernels of `device` start early,
    Inductor's do, too."""
    if device is None or not starts_early(device) or not wait_first():
        return torch.compile(function, mode=mode, fullgraph=True)
    # A mode is a set of options, and torch.compile takes one or the other.
    options = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    return torch.compile(function, options={**options, "triton.enable_pdl": True}, fullgraph=True)


def wait_first() -> bool:
    """Let every kernel that Inductor launches early begin with its wait; False where this PyTorch
    writes them in another way, and they must not start early.

    By itself (torch 2.11 to 2.13) Inductor lets a kernel read before it waits what the operation
    right before it in the graph did not write, and does not let one wait that reads nothing. But
    one before that may still be running, and an operator with several results is not recognized
    as their writer."""
    from torch._inductor.codegen.triton import TritonKernel

    if not hasattr(TritonKernel, "_filter_pdl"):
        return False
    kernels: Any = TritonKernel
    kernels._filter_pdl = _begin_with_wait
    return True


def _begin_with_wait(kernel: Any, body: Any) -> None:
    """Finish a kernel's body: wait for the kernel before it, let the one behind it begin."""
    if not kernel._enable_pdl_codegen():
        return
    marks = (kernel.GDC_WAIT, kernel.GDC_LAUNCH)
    lines = [x for x in body._lines if not (isinstance(x, str) and any(m in x for m in marks))]
    body._lines = [*marks, *lines]

"""How a custom operation is checked and registered, without Triton.

An operation `x` has its schema, checks and result shapes in one of the files `*ops.py`, its eager
reference in one of `reference_*.py`, and its launcher in `x.py`, imported when it first runs on a
GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def expect(condition: bool, name: str, expected: str, received: object) -> None:
    """Raise ValueError about an argument unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {received}")


def expect_tensor(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor has this dtype and shape."""
    ok = x.dtype == dtype and tuple(x.shape) == shape
    expect(ok, name, f"{dtype} {list(shape)}", f"{x.dtype} {list(x.shape)}")


def implement(
    name: str,
    check: Callable[..., None],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Register an operation's CPU implementation, its Triton launcher `kernels/<name>.py` and its
    result shapes; `check` runs before either."""

    def on_cpu(*args: Any) -> Any:
        check(*args)
        return reference(*args)

    def on_cuda(*args: Any) -> Any:
        check(*args)
        launch = getattr(import_module(f"dscale.kernels.{name}"), name)
        with torch.cuda.device(args[0].device):
            return launch(*args)

    torch.library.impl(f"dscale::{name}", "cpu", on_cpu)
    torch.library.impl(f"dscale::{name}", "cuda", on_cuda)
    torch.library.register_fake(f"dscale::{name}", fake)

"""The two ways the tests run a custom operation: the op on the CPU, and its Triton kernel, on a
GPU or under Triton's interpreter (test_ops_interpreted.py starts that one)."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from dscale.kernels import ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_kernel = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="needs a CUDA device; test_ops_interpreted.py runs it under the interpreter",
)
RUNS = ["op", pytest.param("kernel", marks=[pytest.mark.gpu, needs_kernel])]


def runner(name: str, run: str) -> Callable[..., Any]:
    """The operation `name` as a function of CPU tensors that returns CPU tensors."""
    op = getattr(ops, name)
    if run == "op":
        return op  # type: ignore[no-any-return]
    if INTERPRETED:
        return getattr(import_module(f"dscale.kernels.{name}"), name)  # type: ignore[no-any-return]

    def on_gpu(*args: Any) -> Any:
        out = op(*(x.cuda() if isinstance(x, Tensor) else x for x in args))
        return out.cpu() if isinstance(out, Tensor) else tuple(x.cpu() for x in out)

    return on_gpu


def room(rows: int, budget: int) -> Tensor:
    """The budget's capacity and rows per live request, as allocate_budget reads them."""
    return torch.tensor([rows, budget], dtype=torch.int32)


def assert_same(got: Any, want: Any) -> None:
    """Tuples of tensors are equal in dtype, shape and every entry."""
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)

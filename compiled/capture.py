"""Compiling a stage for a GPU: one dynamic compile, and one captured graph for each bucket of its
sizes."""

from __future__ import annotations

import ctypes
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dscale.compiled.dependent import compile_for


def capture(stage: nn.Module) -> Callable[..., Any]:
    """Compile a stage with CUDA graphs; every new bucket of input shapes is captured at its first
    calls.

    The stage reads and writes fixed-address buffers only and returns nothing, so each bucket is
    one recording. `fullgraph` makes a graph break an error rather than a slow step."""
    weight = next(stage.parameters(), None)
    device = None if weight is None else weight.device
    return compile_for(own_forward(stage), device, mode="reduce-overhead")


def own_forward(stage: nn.Module) -> Callable[..., Any]:
    """The stage's forward as a function of its own.

    Compiled code is kept, and its number limited, per function: stages of one class, say for
    greedy and for sampled requests, would use up one another's limit."""
    shared: Any = type(stage).forward
    own = types.FunctionType(
        shared.__code__.replace(),
        shared.__globals__,
        shared.__name__,
        shared.__defaults__,
        shared.__closure__,
    )
    return types.MethodType(own, stage)


def fixed(tensor: Tensor) -> Tensor:
    """Tell the compiler that a tensor keeps its address, so that graphs read and write it in
    place."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


def send(host: Tensor, target: Tensor) -> None:
    """Copy a host tensor over one on a device. The host does not wait for a GPU: what is copied is
    pinned, and kept until it is done."""
    if target.device.type == "cuda":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)


def begin_step() -> None:
    """Mark the start of a step, so that CUDA-graph trees may reuse the last step's memory.

    Where nothing has loaded them there is nothing to mark; loading them takes seconds."""
    if "torch._inductor.cudagraph_trees" in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def many_sizes() -> AbstractContextManager[None]:
    """While buckets are captured: PyTorch need not warn of as many graphs as there are."""
    from torch._inductor import config  # where nothing is compiled, it would take seconds

    patch: AbstractContextManager[None]
    patch = config.patch({"triton.cudagraph_dynamic_shape_warn_limit": None})
    return patch


def load_trees() -> None:
    """Load PyTorch's CUDA-graph trees on this thread, before a thread of ours does.

    Up to torch 2.12 they belong to the thread that loads them: that must be one of the caller's,
    or his own `torch.compile(mode="reduce-overhead")` would fail an assertion."""
    import torch._inductor.cudagraph_trees  # noqa: F401


@contextmanager
def own_trees() -> Iterator[None]:
    """CUDA-graph trees for this thread, let go at the end.

    PyTorch makes them on the thread that loads them, and for autograd's threads; on any other the
    first recording fails an assertion (torch 2.11)."""
    from torch._inductor import cudagraph_trees as trees

    containers: dict[int, Any] = {}
    locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
    for name, value in (("tree_manager_containers", containers), ("tree_manager_locks", locks)):
        setattr(trees.local, name, value)
        _stash(name, value)
    try:
        yield
    finally:
        for container in containers.values():
            if container.tree_manager is not None:
                container.tree_manager.shutdown()
        containers.clear()


def _stash(name: str, value: object) -> None:
    """Hand an object to PyTorch's thread-local storage, which lets go of it as the thread ends.

    torch 2.11 lets go of a reference that it never took: the object would be freed twice, under
    whatever runs by then."""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))

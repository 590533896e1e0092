"""The layer's operator and its code: compiled once for all layers and sizes, with the same
results."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_target import check_all
from tiny import tiny_model
from torch import Tensor

import dscale.compiled.layer
from dscale.compiled.capture import own_function
from dscale.compiled.layer import Shared, run, run_compiled


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Compile eager layers, too, without a GPU; lists the signature of every compile."""
    torch._dynamo.reset()
    signatures: list[object] = []
    functions: dict[object, Any] = {}
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def compile_once(signature: object) -> Callable[..., Any]:
        def backend(graph: Any, inputs: Any) -> Any:
            signatures.append(signature)
            return aot_eager(graph, inputs)

        if signature not in functions:
            own = own_function(run)
            functions[signature] = torch.compile(own, fullgraph=True, backend=backend)
        function: Callable[..., Any] = functions[signature]
        return function

    def as_allocated(x: Tensor, branch: Tensor, shared: Shared, *rest: Any) -> Any:
        """With the strides that compiled code gives tables of one row a position."""
        cos, sin = (t.as_strided(t.shape, (t.shape[2], t.numel(), 1)) for t in shared[:2])
        return run_compiled(x, branch, shared._replace(cos=cos, sin=sin), *rest)

    if not torch.cuda.is_available():
        # In a CUDA build of torch 2.11 this crashes on a thread of its own when there is no GPU.
        guard = "_ensureCUDADeviceGuardSet"
        monkeypatch.setattr(torch._C, guard, lambda: None, raising=False)
    monkeypatch.setattr(dscale.compiled.layer, "_compiled", compile_once)
    monkeypatch.setattr(dscale.compiled.layer, "run", as_allocated)
    yield signatures
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_one_compile_for_all_layers_and_sizes(family: str, compiled: list[object]) -> None:
    with torch.no_grad():
        check_all(tiny_model(family), flex=True, size=300)
    assert len(compiled) == len(set(compiled)) > 1

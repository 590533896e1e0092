"""The layer's operator and its code: compiled once for all layers and sizes, with the same
results."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_target
import torch
from paged import shuffled_paging
from test_target import check_all
from tiny import VOCAB, tiny_model
from torch import Tensor

import dscale.compiled.layer
from dscale.compiled.attention import Rows, Tile
from dscale.compiled.capture import own_forward
from dscale.compiled.flow import uniform_rows
from dscale.compiled.kv import KVPool, Paging
from dscale.compiled.layer import Code, Shared, run, run_compiled
from dscale.load import build_target

PAGES, NUM_PAGES = 2, 65


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Compile eager layers, too, without a GPU; lists the signature of every compile."""
    torch._dynamo.reset()
    signatures: list[object] = []
    functions: dict[object, Any] = {}
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def compile_once(*signature: Any) -> Callable[..., Any]:
        def backend(graph: Any, inputs: Any) -> Any:
            signatures.append(signature)
            inputs_of = graph.graph.find_nodes(op="placeholder")
            sources = [n.meta["grapharg"].source.name for n in inputs_of if "grapharg" in n.meta]
            assert sources
            named = [str(name() if callable(name) else name) for name in sources]
            assert not any("form" in name or "eps" in name for name in named), named
            return aot_eager(graph, inputs)

        if signature not in functions:
            own = own_forward(Code(*signature[1:]))
            functions[signature] = torch.compile(own, fullgraph=True, backend=backend)
        function: Callable[..., Any] = functions[signature]
        return function

    def as_allocated(x: Tensor, branch: Tensor, shared: Shared, *rest: Any) -> Any:
        """With the strides that compiled code gives tables of one row a position."""
        if torch.compiler.is_compiling():
            return run(x, branch, shared, *rest)
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


@pytest.mark.parametrize(("family", "parts"), [("qwen3", 0), ("llama", 0), ("qwen3", 16)])
def test_one_compile_for_all_layers_and_sizes(
    family: str, parts: int, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tile(height: int, flex: bool) -> Tile:
        return Tile(height=height, flex=flex, parts=parts if height == 16 else 0)

    monkeypatch.setattr(test_target, "Tile", tile)
    with torch.no_grad():
        check_all(tiny_model(family), flex=True, size=300)
    assert len(compiled) == len(set(compiled)) > 1


class Stage(torch.nn.Module):
    """One pass over a target's layers into a buffer."""

    def __init__(self, tile: Tile) -> None:
        super().__init__()
        self.target, self.tile = build_target(tiny_model(), (0,)), tile
        c, norm = self.target.config, self.target.norm
        self.pool = KVPool(
            c.num_layers, NUM_PAGES, c.num_kv_heads, c.head_dim, norm.dtype, norm.device
        )

    def forward(self, token_R: Tensor, rows: Rows, paging: Paging, hidden_RD: Tensor) -> None:
        hidden, _ = self.target(token_R, rows, paging, self.pool, self.tile)
        hidden_RD.copy_(hidden)


@pytest.mark.parametrize(
    ("tile", "steps"),
    [
        (Tile(height=16, flex=False), [(3, 16), (3, 16), (2, 16), (2, 16)]),
        (Tile(height=16, parts=16), [(2, 8), (17, 2), (16, 1), (8, 2), (3, 16)]),
        (Tile(height=16, parts=16), [(16, 1), (2, 8), (32, 1), (9, 1)]),
    ],
)
@torch.no_grad()
def test_only_the_first_call_of_a_compiled_stage_compiles_a_layer(
    tile: Tile,
    steps: list[tuple[int, int]],
    compiled: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one is recorded as a CUDA graph, and compiling would break the recording. Lanes and
    rows of each, as many sub-lanes as lanes or rows among them."""
    stage, eager = Stage(tile), Stage(tile)
    graphs: list[object] = []
    inductor = torch._dynamo.lookup_backend("inductor" if tile.parts == 0 else "aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return inductor(graph, inputs)

    run_stage = torch.compile(own_forward(stage), fullgraph=True, backend=backend)
    for lanes, width in steps:
        paging = shuffled_paging([37 * n % 240 for n in range(lanes)], PAGES, NUM_PAGES)
        rows = Rows(*(x.contiguous() for x in uniform_rows(paging, width, 16)))
        token_R = torch.arange(width * lanes) % VOCAB
        got, want = torch.zeros(2, width * lanes, stage.target.norm.shape[0]).unbind()
        for moving in (token_R, got, *rows, *paging):
            torch._dynamo.mark_dynamic(moving, 0)
        run_stage(token_R, rows, paging, got)
        assert len(compiled) == len(graphs) == 1
        with monkeypatch.context() as plain:
            plain.setattr(dscale.compiled.layer, "run", run)
            eager(token_R, rows, paging, want)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_threads_that_make_a_layers_code_at_once_get_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the code a stage warms up with is not the one that it is recorded with."""
    used: dict[int, list[object]] = {}

    def compile_slowly(*arguments: Any) -> Callable[..., Any]:
        time.sleep(0.05)

        def code(x: Tensor, branch: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            used.setdefault(threading.get_ident(), []).append(code)
            return x, branch

        return code

    monkeypatch.setattr(dscale.compiled.layer, "compile_for", compile_slowly)
    monkeypatch.setattr(dscale.compiled.layer, "run", run_compiled)
    dscale.compiled.layer._compiled.cache_clear()
    stage, paging = Stage(Tile(height=16, flex=False)), shuffled_paging([5, 260], PAGES, NUM_PAGES)
    arguments = torch.arange(32), uniform_rows(paging, 16, 16), paging
    threads = [
        threading.Thread(target=stage, args=(*arguments, hidden_RD))
        for hidden_RD in torch.zeros(2, 32, stage.target.norm.shape[0])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dscale.compiled.layer._compiled.cache_clear()
    first, second = used.values()
    assert len(set(first + second)) == 1
    assert len(first) == len(stage.target.layers) > 1

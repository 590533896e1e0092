"""Compiled stages: whole graphs, one compile for all batches, and on a GPU the captured run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, left_padded, plain, prompt, tiny_drafter, tiny_model
from torch import nn

import dscale
import dscale.engine
from dscale.engine import Engine

LENGTHS = [3, 130, 17, 1, 64, 9, 5, 77, 2]
POOL = 12 * 128
SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_k": 7, "top_p": 0.9, "seed": 5},
]


def rows(count: int) -> dict[str, torch.Tensor]:
    return left_padded([prompt(n) for n in LENGTHS[:count]], pad=VOCAB - 1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compile the stages without a GPU; lists the stage of every graph compiled."""
    torch._dynamo.reset()
    compiled: list[str] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def trace(stage: nn.Module) -> Callable[..., Any]:
        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(type(stage).__name__)
            return aot_eager(graph, inputs)

        wrapped: Callable[..., Any] = torch.compile(stage, fullgraph=True, backend=backend)
        return wrapped

    monkeypatch.setattr(dscale.engine, "capture", trace)
    monkeypatch.setattr(Engine, "flex", property(lambda self: True))
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield compiled
    assert not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_stages_are_whole_graphs_for_every_batch(
    settings: dict[str, Any], graphs: list[str], tmp_path: Path
) -> None:
    model, theirs = tiny_model(num_hidden_layers=3), tiny_model(num_hidden_layers=3)

    def same(count: int) -> None:
        inputs, kwargs = rows(count), {"max_new_tokens": 4, **settings}
        if settings:
            with dscale.attach(theirs, mode="ar", capture=False):
                want = theirs.generate(**inputs, **kwargs)
        else:
            want = plain(theirs, **inputs, **kwargs)
        assert torch.equal(model.generate(**inputs, **kwargs), want), count

    drafter = tiny_drafter(tmp_path, model)
    with dscale.attach(model, drafter, pool_tokens=POOL, prefill_chunk=128):
        for count in (9, 3, 4):
            same(count)
        assert graphs == ["Decide", "Verify"]
        for count in (1, 3, 1) if not settings else ():
            same(count)
        assert settings or sorted(graphs) == ["Decide", "Decide", "Verify", "Verify"]


def test_plain_mode_and_budgets_are_whole_graphs_too(graphs: list[str], tmp_path: Path) -> None:
    model = tiny_model()
    want = plain(model, **rows(1), max_new_tokens=4)
    drafter = tiny_drafter(tmp_path, model)
    for stages, attach in (
        (["Verify"], {"mode": "ar"}),
        (["Decide", "Verify"], {"drafter": drafter, "budget": 5}),
    ):
        graphs.clear()
        with dscale.attach(model, pool_tokens=POOL, prefill_chunk=128, **attach):
            assert torch.equal(model.generate(**rows(1), max_new_tokens=4), want)
        assert graphs == stages


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_captured_run_equals_the_eager_one(settings: dict[str, Any], tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = tiny_model(head_dim=16).cuda()
    drafter = tiny_drafter(tmp_path, model)
    outs: dict[bool, list[torch.Tensor]] = {}
    for captured in (False, True):
        with dscale.attach(model, drafter, capture=captured, pool_tokens=POOL, prefill_chunk=128):
            outs[captured] = [
                model.generate(
                    **{k: v.cuda() for k, v in rows(count).items()}, max_new_tokens=20, **settings
                )
                for count in (9, 3, 4, 1, 2, 5, 9, 1)
            ]
    assert all(map(torch.equal, outs[False], outs[True]))
    if not settings:
        inputs = {k: v.cuda() for k, v in rows(9).items()}
        assert torch.equal(outs[True][0], plain(model, **inputs, max_new_tokens=20))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"]

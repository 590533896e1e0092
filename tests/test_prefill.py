"""Chunks of prompts, and the pass over them compiled once for all sizes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import shuffled_paging
from tiny import VOCAB, left_padded, plain, prompt, tiny_drafter, tiny_model
from torch import Tensor

import dscale
from dscale.compiled.capture import own_forward
from dscale.compiled.prefill import Chunk, PromptPass
from dscale.core import Core
from dscale.prefill import idle_chunk, make_chunk
from dscale.request import Request

CPU = torch.device("cpu")
IDLE = 9


def requests_of(*prompts: tuple[int, int]) -> list[Request]:
    """Requests by (prompt length, tokens already prefilled), each with its own slot and pages."""
    found = []
    for slot, (length, done) in enumerate(prompts):
        pages = [7 * slot + page for page in range(1, 1 + -(-length // 128))]
        found.append(Request(prompt=list(range(length)), max_new_tokens=1, pages=pages, slot=slot))
        found[-1].prefilled = done
    return found


def test_wide_tiles_cover_every_row_once() -> None:
    requests = requests_of((300, 0), (5, 2), (700, 256))
    chunk = make_chunk(requests, [300, 3, 200], CPU, wide=True)
    assert chunk.slot_X.tolist() == [0, 0, 0, 1, 2, 2]
    assert chunk.start_X.tolist() == [0, 128, 256, 2, 256, 384]
    assert chunk.ends_N.tolist() == [True, True, False]
    assert chunk.last_N.tolist() == [299, 302, 502]
    rows = chunk.rows
    assert rows.row_NT.shape == (6, 128)
    found = rows.row_NT[rows.lane_R, rows.tile_row_R]
    assert torch.equal(found, torch.arange(503))
    assert torch.equal(rows.position_R, chunk.start_X[rows.lane_R] + rows.tile_row_R)
    assert torch.equal(chunk.token_R, rows.position_R)
    for slot, request in enumerate(requests):
        own = chunk.slot_X[rows.lane_R] == slot
        pages = torch.tensor(request.pages)[rows.position_R[own] // 128]
        assert torch.equal(rows.slot_R[own], pages * 128 + rows.position_R[own] % 128)
        # Empty cells hold a row of the same request.
        cells = rows.row_NT[chunk.slot_X == slot]
        assert own[cells].all()


def test_a_single_request_gets_an_idle_lane_before_the_beginning() -> None:
    chunk = make_chunk(requests_of((4, 1)), [3], CPU, wide=True, idle_slot=IDLE)
    assert chunk.slot_X.tolist() == [0, IDLE]
    assert chunk.rows.position_R.tolist() == [1, 2, 3, -1]
    assert chunk.rows.slot_R[-1] < 128  # the scratch page
    assert chunk.last_N.tolist() == [2, 3]
    assert chunk.ends_N.tolist() == [True, False]
    two = make_chunk(requests_of((4, 1), (9, 0)), [3, 9], CPU, wide=True, idle_slot=IDLE)
    assert IDLE not in two.slot_X.tolist()
    assert idle_chunk(IDLE, CPU).slot_X.tolist() == [IDLE, IDLE]


def test_one_graph_for_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    model = tiny_model(num_hidden_layers=2)
    monkeypatch.setattr(Core, "flex", property(lambda self: True))
    with dscale.attach(model, tiny_drafter(tmp_path, model), capture=False) as spec:
        core = spec.engine.batcher.core
        core.make_room([Request(prompt=[0] * 400, max_new_tokens=9) for _ in range(3)])
        workspace = core.workspace
        assert workspace is not None
        stage = core.prompt
        assert isinstance(stage, PromptPass)
        compiled = torch.compile(own_forward(stage), fullgraph=True, backend=backend)
        paging = shuffled_paging([0] * 3, 4, workspace.num_pages)
        for slot in range(3):
            workspace.requests.page_SL[slot, :4] = paging.page_NL[slot]
            workspace.requests.logical_SP[slot] = paging.logical_NP[slot]

        def logits(run: Any, chunk: Chunk) -> Tensor:
            out: Tensor = run(workspace.requests, chunk)
            return out

        with torch.no_grad():
            logits(compiled, idle_chunk(workspace.max_requests, CPU))
            for lengths in ([3], [130, 20], [1, 1, 300]):
                some = [
                    Request(prompt=prompt(n), max_new_tokens=1, slot=slot,
                            pages=paging.page_NL[slot].tolist())
                    for slot, n in enumerate(lengths)
                ]  # fmt: skip
                chunk = make_chunk(some, lengths, CPU, wide=True, idle_slot=workspace.max_requests)
                got, want = logits(compiled, chunk), logits(stage, chunk)
                assert got.shape == (max(2, len(lengths)), VOCAB)
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_compiled_prefill_serves_one_request_and_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain_model = tiny_model(), tiny_model()
    monkeypatch.setattr("dscale.stages.compiled", lambda stage: stage)
    with dscale.attach(model, tiny_drafter(tmp_path, model), budget="half") as spec:
        core = spec.engine.batcher.core
        core.config = dataclasses.replace(core.config, compile_prefill=True)
        for lengths in ([5], [130, 9], [300]):
            inputs = left_padded([prompt(n) for n in lengths], pad=VOCAB - 1)
            got = model.generate(**inputs, max_new_tokens=8)
            assert torch.equal(got, plain(plain_model, **inputs, max_new_tokens=8))

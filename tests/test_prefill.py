"""Chunks of prompts, packed and in fixed buffers, and the pass over them compiled once for all
sizes."""

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
from dscale.prefill import FILL_ROWS, TILES, ChunkBuffers, bucket_of_tiles, packed_chunk, tiles_of
from dscale.request import Request

IDLE = 9
ROW = torch.zeros(8)


def requests_of(*prompts: tuple[int, int]) -> list[Request]:
    """Requests by (prompt length, tokens already prefilled), each with its own slot and pages."""
    found = []
    for slot, (length, done) in enumerate(prompts):
        pages = [7 * slot + page for page in range(1, 1 + -(-length // 128))]
        tokens = [1000 * slot + i for i in range(length)]
        found.append(Request(prompt=tokens, max_new_tokens=1, pages=pages, slot=slot))
        found[-1].prefilled = done
    return found


def check_rows(chunk: Chunk, requests: list[Request], lengths: list[int]) -> None:
    """Every prompt token has one row, in a tile of its request, and each tile cell its row."""
    rows = chunk.rows
    assert torch.equal(rows.row_NT[rows.lane_R, rows.tile_row_R], torch.arange(len(rows.lane_R)))
    in_tile = chunk.start_X[rows.lane_R] + rows.tile_row_R
    assert torch.equal(rows.position_R, in_tile.where(chunk.slot_X[rows.lane_R] != IDLE, 0))
    for lane, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        start = request.prefilled
        own = (chunk.slot_X[rows.lane_R] == request.slot).nonzero()[:, 0]
        assert torch.equal(rows.position_R[own[:length]], torch.arange(start, start + length))
        assert chunk.token_R[own[:length]].tolist() == request.prompt[start : start + length]
        position = rows.position_R[own[:length]]
        pages = torch.tensor(request.pages)[position // 128]
        assert torch.equal(rows.slot_R[own[:length]], pages * 128 + position % 128)
        # What is left of its last tile goes to the scratch page.
        assert (rows.slot_R[own[length:]] < 128).all()
        assert own[length - 1] == chunk.last_N[lane]
        # Empty cells hold a row of the same request.
        assert torch.isin(rows.row_NT[chunk.slot_X == request.slot], own).all()
        assert bool(chunk.ends_N[lane]) == (start + length == len(request.prompt))


CASES = [([(300, 0), (5, 2), (700, 256)], [300, 3, 200]), ([(4, 1)], [3]), ([(128, 64)], [64])]


@pytest.mark.parametrize(("prompts", "lengths"), CASES, ids=str)
def test_packed_chunks(prompts: list[tuple[int, int]], lengths: list[int]) -> None:
    requests = requests_of(*prompts)
    chunk = packed_chunk(requests, lengths, ROW)
    check_rows(chunk, requests, lengths)
    assert chunk.token_R.shape == (sum(lengths),)
    assert chunk.rows.row_NT.shape == (len(lengths), max(lengths))
    assert chunk.hidden_ND.shape == (len(lengths), 8)


@pytest.mark.parametrize(("prompts", "lengths"), CASES, ids=str)
def test_chunks_in_fixed_buffers(prompts: list[tuple[int, int]], lengths: list[int]) -> None:
    requests = requests_of(*prompts)
    used = sum(map(tiles_of, lengths))
    buffers = ChunkBuffers(12, IDLE, ROW)
    before = [x.data_ptr() for x in (*buffers.chunk.rows, buffers.chunk.token_R)]
    # Filled by something else before.
    buffers.fill(requests_of((700, 0)), [700])
    chunk = buffers.fill(requests, lengths)
    assert [x.data_ptr() for x in (*chunk.rows, chunk.token_R)] == before
    check_rows(chunk, requests, lengths)
    assert chunk.slot_X[used:].tolist() == [IDLE] * (12 - used)
    rest = slice(64 * used, None)
    assert (chunk.rows.slot_R[rest] < 128).all()
    assert chunk.token_R[rest].count_nonzero() == 0
    assert chunk.start_X[used:].count_nonzero() == chunk.ends_N[len(lengths) :].sum() == 0


def test_buckets_of_tiles() -> None:
    assert [bucket_of_tiles(n) for n in (0, 1, 2, 3, 9, 32, 33, 70)] == [
        2,
        2,
        2,
        4,
        12,
        32,
        64,
        128,
    ]
    assert FILL_ROWS == 64 * TILES[-1]
    # Addresses of what lies behind in a chunk's buffer stay multiples of 16 bytes.
    assert all(tiles % 2 == 0 for tiles in TILES)


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

        def hidden(run: Any, chunk: Chunk) -> Tensor:
            run(workspace.requests, chunk)
            return chunk.hidden_ND.clone()

        with torch.no_grad():
            hidden(compiled, workspace.chunk([], [], 4))
            for lengths in ([3], [130, 20], [1, 1, 300]):
                some = [
                    Request(prompt=prompt(n), max_new_tokens=1, slot=slot,
                            pages=paging.page_NL[slot].tolist())
                    for slot, n in enumerate(lengths)
                ]  # fmt: skip
                chunk = workspace.chunk(some, lengths)
                got, want = hidden(compiled, chunk), hidden(stage, chunk)
                lanes = len(lengths)
                assert got.shape[0] == bucket_of_tiles(sum(map(tiles_of, lengths))) >= lanes
                torch.testing.assert_close(got[:lanes], want[:lanes], atol=1e-4, rtol=1e-4)
                # As packed rows give it.
                packed = packed_chunk(some, lengths, workspace.norm)
                plain_rows = hidden(stage, packed)
                torch.testing.assert_close(got[:lanes], plain_rows, atol=1e-4, rtol=1e-4)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_fixed_buffers_serve_one_request_and_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the engine, as on a GPU but for the attention."""
    model, plain_model = tiny_model(), tiny_model()
    gathered = lambda *args: PromptPass(*args[:-1], flex=False)  # noqa: E731
    with dscale.attach(model, tiny_drafter(tmp_path, model), budget="half") as spec:
        core, filled = spec.engine.batcher.core, []
        monkeypatch.setattr("dscale.stages.PromptPass", gathered)

        def fixed(requests: list[Request], lengths: list[int], norm: Tensor) -> Chunk:
            assert core.workspace is not None
            filled.append(core.workspace.chunk(requests, lengths))
            return filled[-1]

        monkeypatch.setattr("dscale.core.packed_chunk", fixed)
        for lengths in ([5], [130, 9], [300], [1, 64, 65, 2]):
            inputs = left_padded([prompt(n) for n in lengths], pad=VOCAB - 1)
            got = model.generate(**inputs, max_new_tokens=8)
            assert torch.equal(got, plain(plain_model, **inputs, max_new_tokens=8))
        assert {len(chunk.slot_X) for chunk in filled} >= {2, 6}

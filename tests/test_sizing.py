"""The size of the workspace: chosen from free memory by an engine that serves, by need for calls
of generate, and what is said where memory does not suffice."""

import logging
import weakref
from typing import Any

import pytest
import torch
from tiny import VOCAB, plain, prompt, tiny_drafter, tiny_model

import dscale
import dscale.core
import dscale.sizing
from bench.soak_load import WAIT
from dscale.batcher import Batcher
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import PAGE
from dscale.config import EngineConfig
from dscale.core import Core
from dscale.request import Request
from dscale.sizing import (
    CALL_PAGES,
    HOST_PAGES,
    MOST_PAGES,
    Memory,
    Sizes,
    free_bytes,
    needed,
    roomy,
)
from dscale.workspace import Workspace

GIB = 1 << 30
GPU, CPU = torch.device("cuda"), torch.device("cpu")
Pair = tuple[Any, Drafter]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model to attach to, and a random drafter for it."""
    model = tiny_model()
    return model, tiny_drafter(tmp_path_factory.mktemp("drafter"), model)


def request(length: int = 9, new: int = 40, **settings: Any) -> Request:
    return Request(prompt=prompt(length), max_new_tokens=new, **settings)


def workspace_of(batcher: Batcher) -> Workspace:
    assert batcher.core.workspace is not None
    return batcher.core.workspace


@pytest.mark.parametrize(
    ("device", "free", "page", "serving", "call"),
    [
        (GPU, 120 * GIB, 20 << 20, 4874, 512),  # an 8B model on an H200
        (GPU, 7 * GIB, 20 << 20, 245, 44),  # on 24 GB
        (GPU, 120 * GIB, 3 << 20, MOST_PAGES, CALL_PAGES),
        (GPU, GIB // 2, 3 << 20, 0, 21),
        (CPU, 16 * GIB, 6 << 20, HOST_PAGES, 0),
        (CPU, GIB, 6 << 20, 21, 0),
    ],
)
def test_pages_for_free_memory(
    device: torch.device, free: int, page: int, serving: int, call: int
) -> None:
    memory = Memory(device, free, page)
    assert (memory.serving_pages, memory.call_pages) == (serving, call)
    assert memory.serving_pages * page <= 0.8 * free


def test_free_memory_is_a_plausible_number() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


def wanted(config: EngineConfig, memory: Memory, serving: bool, **old: int) -> Sizes:
    shape = dscale.load.target_config(tiny_model(max_position_embeddings=40960))
    need = needed(config, shape, [request(300, 200)], None)
    return roomy(need, old, config, shape, memory, serving)


def test_a_serving_engine_never_needs_more() -> None:
    memory = Memory(GPU, 7 * GIB, 20 << 20)
    made = wanted(EngineConfig(max_concurrency=32), memory, serving=True)
    assert made == {
        "max_requests": 32, "num_pages": 245, "pages_per_request": 245, "stop_ids": 8,
        "seen": VOCAB,
    }  # fmt: skip
    large = wanted(EngineConfig(), Memory(GPU, 120 * GIB, 20 << 20), serving=True)
    # Wide enough for the longest text of the model, and no wider.
    assert (large["num_pages"], large["pages_per_request"]) == (4874, 321)
    assert large["max_requests"] == 256


def test_calls_take_a_part_and_then_twice_as_much() -> None:
    memory = Memory(GPU, 120 * GIB, 20 << 20)
    first = wanted(EngineConfig(), memory, serving=False)
    assert (first["max_requests"], first["num_pages"]) == (32, 512)
    small = Memory(GPU, 2 * GIB, 20 << 20)
    grown = wanted(EngineConfig(), small, False, **first | {"num_pages": 4})
    assert grown["num_pages"] == 16  # what is needed
    config, shape = EngineConfig(), dscale.load.target_config(tiny_model())
    need = needed(config, shape, [request(1000, 1000) for _ in range(8)], None)
    old = {"num_pages": 100}
    assert (
        roomy(need, old, config, shape, Memory(GPU, 8 * GIB, 20 << 20), False)["num_pages"] == 200
    )
    # Never so much that little more would fit.
    assert (
        roomy(need, old, config, shape, Memory(GPU, 4 * GIB, 20 << 20), False)["num_pages"] == 163
    )
    assert roomy(need, {}, config, shape, Memory(CPU, 8 * GIB, 20 << 20), False) == need


def test_a_fixed_pool_stays_as_it_is_set() -> None:
    config = EngineConfig(pool_tokens=20 * PAGE, max_concurrency=4)
    for serving in (False, True):
        made = wanted(config, Memory(GPU, 120 * GIB, 20 << 20), serving)
        assert (made["max_requests"], made["num_pages"]) == (4, 21)


def test_serving_chooses_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """A call first, then requests one by one, more than the pool holds at a time among them."""
    model, drafter = pair
    with (
        dscale.attach(model, drafter, max_concurrency=3) as spec,
        caplog.at_level(logging.INFO, "dscale"),
    ):
        ids = torch.tensor([prompt(9)])
        model.generate(ids, max_new_tokens=12)
        small = workspace_of(spec.engine.batcher)
        lengths = [(9, 40), (300, 20), (1000, 30), (9, 12), (129, 5)]
        handles = [spec.engine.submit(prompt(n), max_new_tokens=new) for n, new in lengths]
        handles.append(spec.engine.submit(prompt(9), max_new_tokens=4, repetition_penalty=1.2))
        want = plain(model, torch.tensor([prompt(300)]), max_new_tokens=20)[0, 300:].tolist()
        assert handles[1].result(WAIT).generated_tokens == want
        assert all(h.result(WAIT).finish_reason == "length" for h in handles)
        chosen = workspace_of(spec.engine.batcher)
        model.generate(ids, max_new_tokens=12)
        assert workspace_of(spec.engine.batcher) is chosen
        assert chosen.num_pages == HOST_PAGES > small.num_pages
        assert spec.engine.batcher.num_free_slots == 3
    told = [r.getMessage() for r in caplog.records if r.name == "dscale"]
    assert len(told) == 2
    assert f"pool of {(HOST_PAGES - 1) * PAGE} tokens" in told[1]


def test_an_old_workspace_is_gone_before_a_new_one_is_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would have to fit."""
    made: list[weakref.ref[Workspace]] = []

    def counted(*arguments: Any, **sizes: int) -> Workspace:
        assert all(old() is None for old in made)
        workspace = Workspace(*arguments, **sizes)
        made.append(weakref.ref(workspace))
        return workspace

    monkeypatch.setattr(dscale.sizing, "Workspace", counted)
    with dscale.attach(*pair, budget="half") as spec:
        for length in (9, 300, 900):
            spec.model.generate(torch.tensor([prompt(length)]), max_new_tokens=9)
        spec.engine.submit(prompt(9), max_new_tokens=9).result(WAIT)
        spec.engine.submit(prompt(9), max_new_tokens=9, stop_strings=None).result(WAIT)
        spec.engine.warm_up([request(stop_ids=tuple(range(20)))])
    assert len(made) == 5
    assert made[-1]() is None


def test_requests_take_turns_in_a_chosen_pool(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dscale.sizing, "HOST_PAGES", 12)
    with dscale.attach(*pair, prefix_cache=False) as spec, torch.no_grad():
        batcher = spec.engine.batcher
        items = [request(260, 30) for _ in range(9)]  # three pages each
        batcher.add(items, serving=True)
        most = 0
        while batcher.busy:
            batcher.round()
            most = max(most, len(batcher.live) + len(batcher.filling))
        assert [r.finish_reason for r in items] == ["length"] * 9
        assert (most, workspace_of(batcher).num_pages) == (3, 12)
        # One that is larger than the pool has it made larger, alone.
        batcher.add([request(1990, 20), request()], serving=True)
        while batcher.busy:
            batcher.round()
        assert workspace_of(batcher).num_pages == 1 + 16
        # On a GPU that would compile everything anew.
        monkeypatch.setattr(Core, "flex", property(lambda self: True))
        spec.engine.check(request(1990, 20))
        with pytest.raises(ValueError, match=r"pool_tokens: expected at least 2176 .*, got 2048"):
            spec.engine.check(request(1990, 120))


def test_too_little_memory_is_told_before_it_is_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dscale.sizing, "free_bytes", lambda device: 1 << 20)
    with dscale.attach(*pair) as spec:
        match = "lower pool_tokens, max_concurrency or max_new_tokens"
        with pytest.raises(ValueError, match=match):
            spec.engine.warm_up([request(9, 2000)])
        for _ in range(2):  # without a pool, then with one
            with pytest.raises(ValueError, match=match):
                spec.engine.submit(prompt(9), max_new_tokens=2000)
            handle = spec.engine.submit(prompt(9), max_new_tokens=12)
            assert handle.result(WAIT).finish_reason == "length"


def test_a_pool_that_cannot_be_had_is_halved(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def scarce(*arguments: Any, num_pages: int, **sizes: int) -> Workspace:
        asked.append(num_pages)
        if num_pages > 70:
            raise torch.OutOfMemoryError("out of memory")
        return Workspace(*arguments, num_pages=num_pages, **sizes)

    monkeypatch.setattr(dscale.sizing, "Workspace", scarce)
    with dscale.attach(*pair) as spec:
        handle = spec.engine.submit(prompt(9), max_new_tokens=12)
        assert handle.result(WAIT).finish_reason == "length"
        assert asked == [256, 128, 64]
        late = spec.engine.submit(prompt(9), max_new_tokens=9000).result(WAIT)
        assert late.error is not None
        assert "lower pool_tokens, max_concurrency or max_new_tokens (out of memory)" in late.error


def test_out_of_memory_in_a_step_says_what_to_lower(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    match = "lower pool_tokens, max_concurrency or prefill_chunk"
    with dscale.attach(*pair, pool_tokens=20 * PAGE) as spec:
        with monkeypatch.context() as patch:
            patch.setattr(Core, "prepare", full)
            with pytest.raises(ValueError, match=match):
                spec.engine.warm_up([request()])
            assert spec.engine.batcher.core.workspace is None
        with monkeypatch.context() as patch:
            patch.setattr(Core, "decoding", full)
            with pytest.raises(ValueError, match=match):
                spec.model.generate(torch.tensor([prompt(9)]), max_new_tokens=12)
        out = spec.model.generate(torch.tensor([prompt(9)]), max_new_tokens=12)
        assert out.shape == (1, 21)


def test_a_prefill_pass_has_only_so_many_rows(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, passes = Core.prefill, list[list[int]]()

    def watched(core: Core, requests: list[Request], lengths: list[int]) -> list[Request]:
        passes.append(lengths)
        return prefill(core, requests, lengths)

    monkeypatch.setattr(Core, "prefill", watched)
    with dscale.attach(*pair, prefill_chunk=128, prefix_cache=False) as spec, torch.no_grad():
        batcher = spec.engine.batcher

        def run(lengths: list[int], most: int) -> None:
            monkeypatch.setattr("dscale.prefill.FILL_ROWS", most)
            passes.clear()
            batcher.add([request(n, 2) for n in lengths])
            while batcher.busy:
                batcher.round()

        run([9, 3, 129, 17, 1, 9, 260, 40, 3, 127], 512)
        # All padded to the longest one's 128 rows: four requests at most, in order.
        assert passes[0] == [9, 3, 128, 17]
        assert all(len(lengths) <= 4 for lengths in passes)
        assert sum(map(sum, passes)) == 598
        # A chunk that is more by itself runs alone.
        run([9, 3], 100)
        assert passes == [[9], [3]]

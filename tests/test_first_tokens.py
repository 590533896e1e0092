"""First tokens handed out after the next step has been started, as on a GPU: the batcher's rounds
taken one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from listed_attention import listed_attention
from soak import References
from tiny import VOCAB, prompt, tiny_drafter, tiny_model

import dscale
import dscale.compiled.attention
from dscale.batcher import Batcher
from dscale.compiled.kv import KVPool
from dscale.core import Core
from dscale.decode import Decoding, Launch
from dscale.prefix import PagePool
from dscale.request import Request
from dscale.results import FirstTokens

MODES = ["ar", "dflash", "dscale"]
PAGES = 24
POISON = VOCAB - 1
"""A token whose embedding is NaN."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps and first tokens in the order they come."""
    order = []
    launch, finish = Decoding.launch, FirstTokens.finish

    def launched(self: Decoding, live: list[Request], *, timed: bool = True) -> Launch:
        order.append(f"step {len(live)}")
        return launch(self, live, timed=timed)

    def finished(self: FirstTokens) -> list[Request]:
        order.append(f"first {len(self.requests)}")
        return finish(self)

    monkeypatch.setattr(Core, "captured", property(lambda self: True))
    monkeypatch.setattr("dscale.stages.capture", lambda stage: stage)
    monkeypatch.setattr(Decoding, "launch", launched)
    monkeypatch.setattr(FirstTokens, "finish", finished)
    return order


def batcher_of(mode: Any, folder: Path, model: Any, **settings: Any) -> Batcher:
    drafter = None if mode == "ar" else tiny_drafter(folder, model)
    settings = {"pool_tokens": PAGES * 128, "max_concurrency": 4, "budget": None} | settings
    if mode == "dscale":
        settings["budget"] = "half"
    return dscale.attach(
        model, drafter, mode=mode, compile_prefill=False, **settings
    ).engine.batcher


def to_end(batcher: Batcher) -> None:
    for _ in range(2000):
        if not batcher.busy:
            return
        batcher.round()
    raise AssertionError("the batcher never came to an end")


def started(batcher: Batcher, order: list[str]) -> None:
    """Let four requests run and one, so that theirs are no bucket's first step any more."""
    for count in (4, 1):
        batcher.add([Request(prompt=prompt(9), max_new_tokens=4) for _ in range(count)])
        to_end(batcher)
    batcher.core.stats.reset()
    order.clear()


def all_free(batcher: Batcher) -> bool:
    return (batcher.num_free_pages, batcher.num_free_slots) == (PAGES, 4)


@pytest.mark.parametrize("mode", MODES)
def test_the_next_step_starts_first(
    mode: str, late: list[str], references: References, tmp_path: Path
) -> None:
    batcher = batcher_of(mode, tmp_path, tiny_model())
    items = [Request(prompt=prompt(n), max_new_tokens=20) for n in (9, 130, 3, 40, 17)]
    with torch.no_grad():
        started(batcher, late)
        batcher.add(items)
        to_end(batcher)
    assert late[:3] == ["step 4", "first 4", "step 4"]
    assert [r.tokens for r in items] == [references.text(len(r.prompt))[:20] for r in items]
    assert batcher.core.stats.prefill_seconds > 0
    assert batcher.core.stats.decode_seconds > 0
    assert all_free(batcher)


@pytest.mark.parametrize("mode", MODES)
def test_a_first_token_may_be_the_last(
    mode: str, late: list[str], references: References, tmp_path: Path
) -> None:
    """By its number no step is taken; by a stop token the lane is dead in the step under way."""
    batcher = batcher_of(mode, tmp_path, tiny_model())
    first = references.text(40)[0]
    single, stopped = Request(prompt=prompt(9), max_new_tokens=1), prompt(40)
    ends = Request(prompt=stopped, max_new_tokens=20, stop_ids=(first,))
    with torch.no_grad():
        batcher.add([single])
        batcher.round()
        assert late == ["first 1"]
        assert not batcher.busy
        batcher.add([ends, Request(prompt=prompt(17), max_new_tokens=1)])
        batcher.round()
        assert late[1:] == ["step 1", "first 2"]
        to_end(batcher)
    assert single.tokens == references.text(9)[:1]
    assert (ends.tokens, ends.finish_reason) == ([first], "eos")
    assert batcher.core.stats.passes == 0
    assert all_free(batcher)


def test_a_prompt_that_fails_does_so_alone(
    late: list[str], references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes part in one step as a dead lane, and its pages are shared with nobody."""
    monkeypatch.setattr(Core, "flex", property(lambda self: True))
    monkeypatch.setattr(dscale.compiled.attention, "flex_attention", listed_attention)
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
        batcher = batcher_of("dscale", tmp_path, model, prefix_cache=True)
        poisoned = Request(prompt=[*prompt(140), POISON], max_new_tokens=20)
        healthy = Request(prompt=prompt(17), max_new_tokens=20)
        batcher.add([poisoned, healthy])
        to_end(batcher)
    assert (poisoned.tokens, poisoned.finish_reason) == ([], "error")
    assert healthy.tokens == references.text(17)[:20]
    assert batcher.pages.allocator.num_shared == 0
    assert all_free(batcher)


def test_a_step_that_breaks_takes_new_requests_with_it(
    late: list[str], references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those too whose first token was under way and who wanted no other."""
    batcher = batcher_of("ar", tmp_path, tiny_model())
    items = [Request(prompt=prompt(n), max_new_tokens=m) for n, m in ((9, 1), (3, 12), (5, 12))]
    working = Core.decoding

    def broken(*arguments: Any) -> Any:
        monkeypatch.setattr(Core, "decoding", working)
        raise RuntimeError("broken")

    after = Request(prompt=prompt(17), max_new_tokens=12)
    with torch.no_grad():
        started(batcher, late)
        monkeypatch.setattr(Core, "decoding", broken)
        batcher.add(items)
        with pytest.raises(RuntimeError) as raised:
            batcher.round()
        batcher.fail(raised.value)
        batcher.add([after])
        to_end(batcher)
    assert [r.finish_reason for r in items] == ["error"] * 3
    assert after.tokens == references.text(17)[:12]


def test_a_step_that_may_be_compiled_is_not_waited_for(late: list[str], tmp_path: Path) -> None:
    batcher = batcher_of("ar", tmp_path, tiny_model())
    with torch.no_grad():
        for count, order in ((2, ["first 2", "step 2"]), (2, ["step 2", "first 2"])):
            late.clear()
            batcher.add([Request(prompt=prompt(9), max_new_tokens=3) for _ in range(count)])
            batcher.round()
            assert late == order
            to_end(batcher)


def test_counters_may_be_reset_under_a_late_step(
    late: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller has its tokens already when the last late step is read."""
    batcher = batcher_of("ar", tmp_path, tiny_model())
    stats, finish = batcher.core.stats, Decoding.finish
    request = Request(prompt=prompt(17), max_new_tokens=4)

    def finished(self: Decoding, launch: Launch) -> list[Request]:
        if request.finished:
            stats.reset()
        return finish(self, launch)

    monkeypatch.setattr(Decoding, "finish", finished)
    stats.prefill_seconds = 1000.0
    with torch.no_grad():
        batcher.add([request])
        to_end(batcher)
    assert 0 <= stats.decode_seconds < 100


@pytest.mark.parametrize("stopped", [False, True])
def test_warm_up_needs_no_wait_for_a_late_step(
    stopped: bool, late: list[str], references: References, tmp_path: Path
) -> None:
    """`stopped`: by its first token. The kernel that clears pages is warm then, too."""
    batcher = batcher_of("ar", tmp_path, tiny_model())
    stop = (references.text(40)[0],) if stopped else ()
    request, cleared = Request(prompt=prompt(40), max_new_tokens=3, stop_ids=stop), []
    with torch.no_grad():
        started(batcher, late)
        batcher.add([request])
        while not request.finished:
            batcher.round()
        assert batcher.busy
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVPool, "clear", lambda pool, pages: cleared.append(pages))
            batcher.warm_up([Request(prompt=prompt(9), max_new_tokens=4)])
    assert cleared == [[0]]


def test_a_request_whose_end_raises_ends(
    late: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = batcher_of("ar", tmp_path, tiny_model())
    request, share, calls = Request(prompt=prompt(9), max_new_tokens=1), PagePool.share, []

    def broken(self: PagePool, request: Request, text: list[int]) -> None:
        calls.append(len(text))
        if len(calls) == 2:
            raise MemoryError("share")
        share(self, request, text)

    monkeypatch.setattr(PagePool, "share", broken)
    with torch.no_grad():
        batcher.add([request])
        with pytest.raises(MemoryError) as raised:
            batcher.round()
        batcher.fail(raised.value)
    assert request.finish_reason == "error"

"""What prompts that rode leave on the device: what a pass of their own leaves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from riding import Make, batchers, request, take, to_end
from soak import References
from tiny import prompt, tiny_drafter, tiny_model
from torch import Tensor

import dscale.decode
from dscale.batcher import Batcher
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import PAGE
from dscale.prefill import prompt_tiles
from dscale.request import Request


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Drafter]:
    """A model to attach to, and a random drafter for it."""
    model = tiny_model()
    return model, tiny_drafter(tmp_path_factory.mktemp("drafter"), model)


@pytest.fixture
def make(pair: tuple[Any, Drafter]) -> Iterator[Make]:
    yield from batchers(pair)


def caches(batcher: Batcher, pages: list[int], tokens: int) -> list[Tensor]:
    """Keys and values of the first positions of these pages, in both pools."""
    workspace = batcher.core.workspace
    assert workspace is not None
    assert workspace.draft_pool is not None
    slot = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])[:tokens]
    pools = (workspace.pool, workspace.draft_pool)
    return [buffer[slot].clone() for pool in pools for buffer in pool.buffers()]


def just_run(batcher: Batcher, length: int) -> tuple[list[Tensor], list[Any]]:
    """Caches and state behind the prompt of a request that came while another was decoding."""
    batcher.add([request(9, 60)])
    take(batcher, 2)
    item = request(length, 20)
    batcher.add([item])
    batcher._admit()
    batcher._fill()
    if batcher._riders:
        batcher._decode()
    workspace = batcher.core.workspace
    assert workspace is not None
    state = workspace.requests
    names = ("context_S", "remaining_S", "anchor_S", "live_S", "recent_SK")
    found = caches(batcher, item.pages, length), [getattr(state, n)[item.slot] for n in names]
    idle = workspace.max_requests
    assert [int(state.context_S[idle]), bool(state.live_S[idle])] == [0, False]
    return found


@pytest.mark.parametrize(
    ("mode", "budget"), [("dflash", None), ("+budget", 5), ("dscale", "half")]
)
@pytest.mark.parametrize("length", [1, 16, 17, 250])
def test_state_is_that_of_a_pass_of_its_own(
    length: int, mode: str, budget: Any, make: Make
) -> None:
    own, its_state = just_run(make(mode, budget, ride_prompts=False), length)
    batcher = make(mode, budget)
    rode, state = just_run(batcher, length)
    assert batcher.core.stats.ridden_tokens == length
    for ours, theirs in zip(rode, own, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert [x.tolist() for x in state] == [x.tolist() for x in its_state]
    assert state[0].item() == length
    assert state[4].tolist() == [-1] * 3


@pytest.mark.parametrize("mode", ["dflash", "dscale"])
def test_tiles_may_be_in_any_order(mode: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever lane of a request is written last: but the one with its prompt's end, they leave
    it alone."""
    monkeypatch.setattr(dscale.decode, "prompt_tiles", lambda *a: prompt_tiles(*a)[::-1])
    texts, references = [], References()
    batcher = make(mode, None if mode == "dflash" else "half")
    batcher.add([request(9, 60)])
    take(batcher, 2)
    for length in (250, 33):
        item = request(length, 12)
        batcher.add([item])
        take(batcher, 2)
        texts.append((item, references.text(length)[:12]))
    to_end(batcher)
    assert batcher.core.stats.ridden_tokens == 283
    assert all(item.tokens == text for item, text in texts)


def test_shared_pages_are_not_written_to(make: Make) -> None:
    batcher, head = make(), prompt(128, 5)
    batcher.add([request(9, 100)])
    take(batcher, 2)
    items = [Request(prompt=head + prompt(n, 7), max_new_tokens=12) for n in (20, 30)]
    seen = []
    for item in items:
        batcher.add([item])
        take(batcher, 1)
        assert item.prefilled == len(item.prompt)
        seen.append(caches(batcher, items[0].pages[:1], PAGE))
    assert batcher.core.stats.ridden_tokens == 148 + 30
    assert items[0].pages[0] == items[1].pages[0]
    for ours, theirs in zip(*seen, strict=True):
        assert torch.equal(ours, theirs)

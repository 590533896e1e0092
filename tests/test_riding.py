"""Prompts that ride with a decode step's verification: the tokens are those of plain decoding."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from listed_attention import listed_attention
from scripted import overrule
from soak import References
from tiny import VOCAB, prompt, tiny_drafter, tiny_model

import dscale
import dscale.compiled.attention
import dscale.core
from dscale.batcher import Batcher
from dscale.compiled.drafter import Drafter
from dscale.core import Core
from dscale.request import Request

WAYS: list[tuple[Any, Any]] = [
    ("dflash", None), ("+tiles", None), ("+budget", "auto"),
    ("dscale", "half"), ("dscale", "auto"), ("dscale", 3),
]  # fmt: skip
LENGTHS = (1, 15, 16, 17, 128, 250)
POISON = VOCAB - 1
"""A token whose embedding is NaN."""
SAMPLED = {"temperature": 0.9, "top_k": 9, "top_p": 0.9}
Make = Callable[..., Batcher]


@pytest.fixture(scope="module")
def references() -> References:
    return References()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Drafter]:
    """A model to attach to, and a random drafter for it."""
    model = tiny_model()
    return model, tiny_drafter(tmp_path_factory.mktemp("drafter"), model)


@pytest.fixture
def make(pair: tuple[Any, Drafter]) -> Iterator[Make]:
    """Make a batcher of the pair; the test takes its rounds itself."""
    specs = []

    def batcher_of(mode: Any = "dscale", budget: Any = "half", **settings: Any) -> Batcher:
        settings = {"pool_tokens": 40 * 128, "max_concurrency": 8, "ride_prompts": True} | settings
        settings["capture"] = False
        drafter = None if mode == "ar" else pair[1]
        specs.append(dscale.attach(pair[0], drafter, mode=mode, budget=budget, **settings))
        return specs[-1].engine.batcher

    with torch.no_grad():
        yield batcher_of
    for spec in specs:
        spec.detach()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass of its own over prompts."""
    seen: list[int] = []
    prefill = Core.prefill

    def counted(self: Core, requests: list[Request], lengths: list[int]) -> Any:
        seen.append(sum(lengths))
        return prefill(self, requests, lengths)

    monkeypatch.setattr(Core, "prefill", counted)
    return seen


def made_late(patch: pytest.MonkeyPatch) -> None:
    """Results are read a step later, as on a GPU."""
    decoding = dscale.core.Decoding
    patch.setattr(dscale.core, "Decoding", lambda *a, **k: decoding(*a, **{**k, "late": True}))


def made_flex(patch: pytest.MonkeyPatch) -> None:
    """The route of a GPU: lanes in buckets, block tables."""
    patch.setattr(Core, "flex", property(lambda self: True))
    patch.setattr(dscale.compiled.attention, "flex_attention", listed_attention)


def request(length: int, new: int = 12, **settings: Any) -> Request:
    return Request(prompt=prompt(length), max_new_tokens=new, **settings)


def take(batcher: Batcher, rounds: int) -> None:
    for _ in range(rounds):
        batcher.round()


def to_end(batcher: Batcher) -> None:
    for _ in range(1000):
        if not batcher.busy:
            return
        batcher.round()
    raise AssertionError("the batcher never came to an end")


def alone(make: Make, items: list[Request]) -> list[list[int]]:
    """The tokens of requests like these by plain decoding."""
    names = ("prompt", "max_new_tokens", "stop_ids", "temperature", "top_k", "top_p", "seed")
    batcher = make("ar", None, ride_prompts=None)
    like = [Request(**{name: getattr(item, name) for name in names}) for item in items]
    batcher.add(like)
    to_end(batcher)
    batcher.core.close()
    return [item.tokens for item in like]


@pytest.mark.parametrize(("late", "flex"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("mode", "budget"), WAYS)
def test_tokens_are_those_of_plain_decoding(
    mode: str,
    budget: Any,
    sampled: bool,
    late: bool,
    flex: bool,
    pair: tuple[Any, Drafter],
    make: Make,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One prompt at a time, then several at once, while others decode."""
    how = [{**SAMPLED, "seed": n} if sampled else {} for n in range(8)]
    first = [request(n, 60, **h) for n, h in zip((9, 130), how, strict=False)]
    then = [request(n, 14, **h) for n, h in zip(LENGTHS, how[2:], strict=True)]
    want = alone(make, [*first, *then])
    pair[0]._dscale.detach()
    texts = [r.prompt + tokens for r, tokens in zip((*first, *then), want, strict=True)]
    overrule(monkeypatch, texts)
    if late:
        made_late(monkeypatch)
    if flex:
        made_flex(monkeypatch)
    passes.clear()
    batcher = make(mode, budget)
    batcher.add(first)
    take(batcher, 3)
    for group in (then[:1], then[1:4], then[4:5], then[5:]):
        batcher.add(group)
        take(batcher, 1)
    to_end(batcher)
    assert [r.tokens for r in (*first, *then)] == want
    stats = batcher.core.stats
    assert passes == [139]
    assert stats.ridden_tokens == sum(LENGTHS)
    assert stats.prompt_tokens == 139 + sum(LENGTHS)
    assert stats.tokens == 2 * 59 + len(LENGTHS) * 13
    assert stats.tokens_per_pass > 1.5
    assert (batcher.num_free_pages, batcher.num_free_slots) == (40, 8)

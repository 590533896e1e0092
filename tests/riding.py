"""What the tests of riding prompts share: batchers whose rounds they take themselves."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from listed_attention import listed_attention
from tiny import prompt

import dscale
import dscale.compiled.attention
import dscale.core
from dscale.batcher import Batcher
from dscale.compiled.drafter import Drafter
from dscale.core import Core
from dscale.request import Request

PAGES = 40
Make = Callable[..., Batcher]


def batchers(pair: tuple[Any, Drafter]) -> Iterator[Make]:
    """What makes batchers of a model and its drafter, one at a time; prompts ride."""
    specs = []

    def make(mode: Any = "dscale", budget: Any = "half", **settings: Any) -> Batcher:
        for spec in specs:
            spec.detach()
        settings = {
            "pool_tokens": PAGES * 128, "max_concurrency": 8, "ride_prompts": True,
            "capture": False,
        } | settings  # fmt: skip
        drafter = None if mode == "ar" else pair[1]
        specs.append(dscale.attach(pair[0], drafter, mode=mode, budget=budget, **settings))
        return specs[-1].engine.batcher

    with torch.no_grad():
        yield make
    for spec in specs:
        spec.detach()


def passes_of(patch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass of its own over prompts from now on."""
    seen: list[int] = []
    prefill = Core.prefill

    def counted(self: Core, requests: list[Request], lengths: list[int]) -> Any:
        seen.append(sum(lengths))
        return prefill(self, requests, lengths)

    patch.setattr(Core, "prefill", counted)
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
    """A prompt of so many tokens, and how many to add."""
    return Request(prompt=prompt(length), max_new_tokens=new, **settings)


def take(batcher: Batcher, rounds: int) -> None:
    """So many rounds."""
    for _ in range(rounds):
        batcher.round()


def to_end(batcher: Batcher) -> None:
    """Rounds until nothing is left."""
    for _ in range(1000):
        if not batcher.busy:
            return
        batcher.round()
    raise AssertionError("the batcher never came to an end")


def all_free(batcher: Batcher) -> bool:
    """Whether all pages and slots are back."""
    slots = min(batcher.core.config.max_concurrency or 0, PAGES)
    return (batcher.num_free_pages, batcher.num_free_slots) == (PAGES, slots)

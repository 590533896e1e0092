"""Prompts that ride with a decode step's verification: the tokens are those of plain decoding."""

from collections.abc import Iterator
from typing import Any

import pytest
from riding import Make, all_free, batchers, made_flex, made_late, passes_of, request, take, to_end
from scripted import overrule
from soak import References
from tiny import tiny_drafter, tiny_model

import dscale
from dscale.compiled.drafter import Drafter
from dscale.config import EngineConfig
from dscale.policy import AutoBudget, Choice
from dscale.request import Request
from dscale.riding import bucket_for, riding_buckets

WAYS: list[tuple[Any, Any]] = [
    ("dflash", None), ("+tiles", None), ("+budget", "auto"),
    ("dscale", "half"), ("dscale", "auto"), ("dscale", 3),
]  # fmt: skip
LENGTHS = (1, 15, 16, 17, 128, 250)
SAMPLED = {"temperature": 0.9, "top_k": 9, "top_p": 0.9}


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
    yield from batchers(pair)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return passes_of(monkeypatch)


def alone(make: Make, items: list[Request]) -> list[list[int]]:
    """The tokens of requests like these by plain decoding."""
    names = ("prompt", "max_new_tokens", "stop_ids", "temperature", "top_k", "top_p", "seed")
    batcher = make("ar", None, ride_prompts=None)
    like = [Request(**{name: getattr(item, name) for name in names}) for item in items]
    batcher.add(like)
    to_end(batcher)
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
    make: Make,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One prompt at a time, then several at once, while others decode."""
    how = [{**SAMPLED, "seed": n} if sampled else {} for n in range(8)]
    first = [request(n, 60, **h) for n, h in zip((9, 130), how, strict=False)]
    then = [request(n, 14, **h) for n, h in zip(LENGTHS, how[2:], strict=True)]
    want = alone(make, [*first, *then])
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
    assert stats.tokens_per_pass > 1.5 or budget == "auto"  # whose steps may be plain
    assert all_free(batcher)


def test_steps_that_draft_nothing_carry_prompts_too(
    make: Make, references: References, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_late(monkeypatch)
    observed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        AutoBudget, "choose", lambda self, lanes, *a: Choice(lanes, 1, draft=False)
    )
    monkeypatch.setattr(AutoBudget, "observe", lambda *a: observed.append((0, 0)))
    batcher = make(budget="auto")
    items = [request(n, 20) for n in (9, 240, 16)]
    batcher.add(items[:1])
    take(batcher, 2)
    batcher.add(items[1:])
    to_end(batcher)
    assert [r.tokens for r in items] == [references.text(n)[:20] for n in (9, 240, 16)]
    assert passes == [9]
    assert batcher.core.stats.drafted == 0
    assert not observed


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({}, [request(257)]),
        ({}, [request(128), request(129)]),
        ({}, [request(20, repetition_penalty=1.2)]),
        ({"ride_prompts": False}, [request(20)]),
        ({"ride_prompts": None}, [request(20)]),
        ({"mode": "dflash", "budget": 8, "ride_prompts": None}, [request(20)]),
    ],
)
def test_passes_of_their_own(
    settings: dict[str, Any], others: list[Request], make: Make, passes: list[int]
) -> None:
    """Long prompts, penalties, narrow passes; and where nobody decodes."""
    items = [
        Request(prompt=r.prompt, max_new_tokens=8, repetition_penalty=r.repetition_penalty)
        for r in others
    ]
    batcher = make(**settings)
    batcher.add([request(9, 40)])
    take(batcher, 2)
    batcher.add(items)
    to_end(batcher)
    assert sum(passes) == 9 + sum(len(r.prompt) for r in items)
    assert batcher.core.stats.ridden_tokens == 0


def test_the_rest_of_a_long_prompt_rides(
    make: Make, references: References, passes: list[int]
) -> None:
    batcher = make(prefill_chunk=128)
    items = [request(9, 40), request(260, 12)]
    batcher.add(items[:1])
    take(batcher, 2)
    batcher.add(items[1:])
    to_end(batcher)
    assert passes == [9, 128, 128]
    assert batcher.core.stats.ridden_tokens == 4
    assert items[1].tokens == references.text(260)[:12]


def test_buckets() -> None:
    """The cheapest that holds lanes and rows; of the captured ones, where there are such."""
    captured = {(8, None), (16, None), (8, 128), (16, 192), (16, 256), (16, 0), (24, 144)}
    assert bucket_for(9, None, captured, padded=True) == (16, None)
    assert bucket_for(9, 193, captured, padded=True) == (16, 256)
    assert bucket_for(8, 129, captured, padded=True) == (24, 144)
    assert bucket_for(9, 257, captured, padded=True) is None
    assert bucket_for(17, None, captured, padded=True) is None
    assert bucket_for(9, 93, None, padded=False) == (9, 93)
    assert bucket_for(9, 93, None, padded=True) == (12, 96)
    assert bucket_for(257, None, None, padded=True) is None
    auto, half = (EngineConfig(budget=b) for b in ("auto", "half"))
    assert riding_buckets(EngineConfig(mode="dflash"), [2, 4, 8]) == [(16, None), (24, None)]
    assert riding_buckets(auto, [2, 4])[:2] == [(16, 96), (16, 128)]
    assert riding_buckets(half, [32]) == [(n, m * n) for n in range(8, 49, 8) for m in (12, 16)]
    assert len(riding_buckets(auto, [2, 256])) == 0


def test_a_mode_that_cannot_carry_prompts_says_so(pair: tuple[Any, Drafter]) -> None:
    with pytest.raises(ValueError, match="ride_prompts: expected None or False in mode 'ar'"):
        dscale.attach(pair[0], mode="ar", ride_prompts=True)
    with pytest.raises(ValueError, match=r"ride_prompts: expected .* with budget 8 in mode 'dfl"):
        dscale.attach(pair[0], pair[1], mode="dflash", budget=8, ride_prompts=True)

"""How requests end whose prompts ride with a decode step, and what they leave behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from riding import (
    PAGES,
    Make,
    all_free,
    batchers,
    made_flex,
    made_late,
    passes_of,
    request,
    take,
    to_end,
)
from soak import References, soak
from tiny import VOCAB, continuation, prompt, tiny_drafter, tiny_model

import dscale
from bench.soak_load import all_back
from dscale.compiled.drafter import Drafter
from dscale.request import Request

POISON = VOCAB - 1
"""A token whose embedding is NaN."""


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


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("mode", "budget"), [("dflash", None), ("dscale", "half")])
def test_ends(
    mode: str,
    budget: Any,
    late: bool,
    make: Make,
    references: References,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stop ids in a prompt do not end it; a first token may be the last one, by its number or as a
    stop id. Lanes of tiles leave nothing behind for the requests that get their slots."""
    if late:
        made_late(monkeypatch)
    batcher = make(mode, budget)
    texts = {n: references.text(n) for n in (40, 100, 17, 33)}
    calm = [t for t in prompt(100) if t not in texts[100][:5]][:3]
    stop = texts[100][5]
    stopped = request(100, 20, stop_ids=(*calm, stop))
    at_once = request(40, 20, stop_ids=(texts[40][0],))
    single, long = request(17, 1), request(9, 120)
    batcher.add([long])
    take(batcher, 2)
    batcher.add([stopped, at_once, single])
    take(batcher, 4)
    assert [r.finish_reason for r in (at_once, single)] == ["eos", "length"]
    batcher.add([request(33, 12)])
    later = batcher.waiting[0]
    to_end(batcher)
    assert stopped.tokens == texts[100][: texts[100].index(stop) + 1]
    assert stopped.finish_reason == "eos"
    assert (at_once.tokens, single.tokens) == (texts[40][:1], texts[17][:1])
    assert later.tokens == texts[33][:12]
    assert long.tokens == references.text(9)[:120]
    assert passes == [9]
    assert all_free(batcher)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rounds", [1, 2])
def test_cancelled(
    rounds: int,
    late: bool,
    make: Make,
    references: References,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under way or just after; its slot and pages go to another, which rides too."""
    if late:
        made_late(monkeypatch)
    batcher = make(max_concurrency=2)
    long, victim, heir = request(9, 60), request(128, 20), request(100, 20)
    batcher.add([long])
    take(batcher, 2)
    batcher.add([victim, heir])
    take(batcher, rounds)
    assert victim.prefilled == 128
    assert bool(victim.tokens) is (not late or rounds == 2)
    before = list(victim.tokens)
    batcher.cancel(victim)
    to_end(batcher)
    assert (victim.finish_reason, victim.tokens) == ("cancelled", before)
    assert before == references.text(128)[: len(before)]
    assert long.tokens == references.text(9)[:60]
    assert heir.tokens == references.text(100)[:20]
    assert passes == [9]
    assert all_free(batcher)


@pytest.mark.parametrize("late", [False, True])
def test_a_known_beginning(
    late: bool,
    make: Make,
    references: References,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two prompts that begin alike the second waits for the first, and both for nobody who
    comes later; what they share is not written to by their tiles."""
    if late:
        made_late(monkeypatch)
    batcher = make()
    head, long = prompt(128, 5), request(9, 100)
    batcher.add([long])
    take(batcher, 2)
    want = alone_texts([head + prompt(n, 7) for n in (20, 30, 1, 50)], references)
    items = [Request(prompt=head + prompt(n, 7), max_new_tokens=12) for n in (20, 30, 1, 50)]
    batcher.add(items[:2])
    take(batcher, 1)
    batcher.add(items[2:3])
    take(batcher, 4)
    batcher.add(items[3:])
    to_end(batcher)
    assert [r.tokens for r in items] == want
    assert long.tokens == references.text(9)[:100]
    assert passes == [9]
    assert batcher.core.stats.prefix_hits == 3 * 128
    assert batcher.core.stats.ridden_tokens == 148 + 30 + 1 + 50


def alone_texts(prompts: list[list[int]], references: References) -> list[list[int]]:
    """Twelve greedy tokens behind each prompt."""
    return [continuation(references.model, ids, 12)[len(ids) :] for ids in prompts]


@pytest.mark.parametrize(("mode", "budget"), [("dflash", None), ("dscale", "auto")])
def test_a_prompt_that_fails_does_so_alone(
    mode: str,
    budget: Any,
    references: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_late(monkeypatch)
    made_flex(monkeypatch)
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
        spec = dscale.attach(
            model, tiny_drafter(tmp_path, model), mode=mode, budget=budget, capture=False,
            pool_tokens=PAGES * 128, max_concurrency=8, ride_prompts=True,
        )  # fmt: skip
        batcher = spec.engine.batcher
        long, healthy = request(9, 60), request(17, 20)
        poisoned = Request(prompt=[*prompt(140), POISON], max_new_tokens=20)
        batcher.add([long])
        take(batcher, 2)
        batcher.add([poisoned, healthy])
        to_end(batcher)
    assert batcher.core.stats.ridden_tokens == 158
    assert (poisoned.tokens, poisoned.finish_reason) == ([], "error")
    assert healthy.tokens == references.text(17)[:20]
    assert long.tokens == references.text(9)[:60]
    assert batcher.pages.allocator.num_shared == 0
    assert all_free(batcher)


@pytest.mark.parametrize(("mode", "budget"), [("dflash", None), ("dscale", "auto")])
def test_soak(
    mode: str,
    budget: Any,
    pair: tuple[Any, Drafter],
    references: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of all kinds, some of which ride, cancelled anywhere, with prompts that begin
    alike."""
    made_late(monkeypatch)
    with dscale.attach(
        *pair, mode=mode, budget=budget, ride_prompts=True, pool_tokens=24 * 128, max_concurrency=8
    ) as spec:
        ends = soak(spec.engine, references, 80, seed=len(mode), everything=True)
        all_back(spec.engine)
        assert ends["length"] > 30
        assert ends["cancelled"] > 0
        assert 0 < spec.stats.ridden_tokens < spec.stats.prompt_tokens

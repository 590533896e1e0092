"""The continuous batcher: the soak, and its rounds taken one by one, without its thread."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from soak import References, soak
from tiny import prompt

import dscale
from bench.soak_load import all_back
from dscale.batcher import Batcher
from dscale.compiled.drafter import Drafter
from dscale.core import Core
from dscale.request import Request

MODES = ["ar", "dflash", "+tiles", "+budget", "dscale"]
POOL = 24 * 128
Rounds = Callable[..., Batcher]


@pytest.fixture
def rounds(pair: tuple[Any, Drafter]) -> Iterator[Rounds]:
    """Make a batcher of the pair; the test takes its rounds itself."""
    specs = []

    def make(mode: Any = "dscale", **settings: Any) -> Batcher:
        model, drafter = pair
        settings = {"pool_tokens": POOL, "max_concurrency": 4, "prefill_chunk": 128} | settings
        specs.append(
            dscale.attach(model, None if mode == "ar" else drafter, mode=mode, **settings)
        )
        return specs[-1].engine.batcher

    with torch.no_grad():
        yield make
    for spec in specs:
        spec.detach()


def request(length: int, new: int, **settings: Any) -> Request:
    return Request(prompt=prompt(length), max_new_tokens=new, **settings)


def to_end(batcher: Batcher, most: int = 2000) -> None:
    for _ in range(most):
        if not batcher.busy:
            return
        batcher.round()
    raise AssertionError(f"busy after {most} rounds")


def alone(references: References, item: Request) -> list[int]:
    """The tokens of a greedy request without stop ids, by itself."""
    return references.text(len(item.prompt))[: item.max_new_tokens]


@pytest.mark.parametrize("mode", MODES)
def test_soak(mode: Any, references: References, pair: tuple[Any, Drafter]) -> None:
    model, drafter = pair
    spec = dscale.attach(
        model,
        None if mode == "ar" else drafter,
        mode=mode,
        pool_tokens=POOL,
        max_concurrency=8,
        prefill_chunk=128,
    )
    with spec:
        ends = soak(spec.engine, references, 60, seed=MODES.index(mode))
        all_back(spec.engine)
        assert ends["length"] > 20
        assert ends["eos"] > 0
        assert ends["cancelled"] > 0
        assert ends.total() == 60


def test_requests_enter_in_order(
    rounds: Rounds, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher, rng = rounds(), random.Random(0)
    items = [request(rng.choice([1, 9, 129, 260]), rng.choice([1, 9, 200])) for _ in range(30)]
    entered: list[Request] = []
    together: list[int] = []
    place = Core.place

    def watched(core: Core, requests: list[Request]) -> None:
        entered.extend(requests)
        together.append(len(batcher.live) + len(batcher.filling))
        assert len({r.slot for r in (*batcher.live, *batcher.filling)}) == together[-1]
        place(core, requests)

    monkeypatch.setattr(Core, "place", watched)
    batcher.add(items[:20])
    for _ in range(5):
        batcher.round()
    batcher.add(items[20:])
    to_end(batcher)
    # One may be placed twice, for pages that another has completed meanwhile.
    assert list(dict.fromkeys(map(id, entered))) == list(map(id, items))
    assert max(together) == 4
    assert len(together) > 5
    for item in items:
        assert item.tokens == alone(references, item)
        assert item.finish_reason == "length"


def test_a_request_that_needs_the_whole_pool_is_not_overtaken(
    rounds: Rounds, references: References
) -> None:
    batcher = rounds(pool_tokens=4 * 128, max_concurrency=4)
    small, large, late = request(9, 60), request(260, 200), request(9, 2)
    batcher.add([small, large, late])
    while not small.finished:
        batcher.round()
        assert large.slot == late.slot == -1
    to_end(batcher)
    assert large.finished_at is not None
    assert late.first_token_at is not None
    assert late.first_token_at >= large.finished_at
    assert [r.tokens for r in (small, late)] == [alone(references, r) for r in (small, late)]


STAGES: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda r: True,
    "filling": lambda r: 0 < r.prefilled < len(r.prompt),
    "decoding": lambda r: len(r.tokens) > 3,
    "finished": lambda r: r.finished,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("late", [False, True])
def test_cancel_anywhere(
    late: bool,
    stage: str,
    rounds: Rounds,
    references: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Core, "captured", property(lambda self: late))
    monkeypatch.setattr("dscale.stages.capture", lambda stage: stage)
    batcher = rounds("dflash")
    victim, others = request(300, 40), [request(n, 50) for n in (9, 3, 17, 9, 129)]
    batcher.add([*others[:2], victim, *others[2:]])
    if stage != "waiting":
        batcher.round()
    while not STAGES[stage](victim):
        batcher.round()
    pages = batcher.num_free_pages
    held = len(victim.pages)
    before = list(victim.tokens)
    batcher.cancel(victim)
    assert batcher.num_free_pages == pages + held
    batcher.cancel(victim)
    assert batcher.num_free_pages == pages + held
    assert victim.finish_reason == ("length" if stage == "finished" else "cancelled")
    to_end(batcher)
    assert victim.tokens == before == alone(references, victim)[: len(before)]
    for item in others:
        assert item.tokens == alone(references, item)
    assert batcher.num_free_pages == POOL // 128
    assert batcher.num_free_slots == 4


def test_two_requests_alike_are_two(rounds: Rounds, references: References) -> None:
    batcher = rounds(max_concurrency=1)
    first, second = request(9, 12), request(9, 12)
    batcher.add([first, second])
    batcher.cancel(second)
    to_end(batcher)
    assert first.tokens == alone(references, first)
    assert (second.tokens, second.finish_reason) == ([], "cancelled")


@pytest.mark.parametrize("stage", ["place", "prefill", "decoding", "make_room"])
def test_a_broken_step_spares_those_that_wait(
    stage: str, rounds: Rounds, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = rounds(max_concurrency=2)
    items = [request(n, 12) for n in (9, 3, 17, 129)]
    batcher.add(items)
    working = getattr(Core, stage)

    def broken(*arguments: Any) -> Any:
        monkeypatch.setattr(Core, stage, working)
        raise RuntimeError("broken")

    monkeypatch.setattr(Core, stage, broken)
    with pytest.raises(RuntimeError) as raised:
        batcher.round()
    batcher.fail(raised.value)
    hit = 1 if stage == "make_room" else 2
    assert [r.finish_reason for r in items] == ["error"] * hit + [None] * (4 - hit)
    assert all(r.error is raised.value for r in items[:hit])
    to_end(batcher)
    for item in items[hit:]:
        assert item.tokens == alone(references, item)
    assert batcher.num_free_pages == POOL // 128


def test_an_error_that_stays_ends_every_request(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = rounds()
    items = [request(9, 12) for _ in range(6)]
    batcher.add(items)

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(Core, "sizes", broken)
    for _ in range(20):
        if not batcher.busy:
            break
        with pytest.raises(RuntimeError) as raised:
            batcher.round()
        batcher.fail(raised.value)
    assert [r.finish_reason for r in items] == ["error"] * 6


@pytest.mark.parametrize("mode", ["ar", "dscale"])
def test_a_long_prompt_stalls_nobody_and_is_not_starved(
    mode: Any, rounds: Rounds, references: References
) -> None:
    batcher = rounds(mode, max_concurrency=10)
    running = [request(n, 200) for n in (3, 9, 17)]
    batcher.add(running)
    while not all(r.tokens for r in running):
        batcher.round()
    long = request(900, 4)
    batcher.add([long])
    taken = 0
    while not long.tokens:
        # Short ones keep arriving.
        batcher.add([request(1, 2)] if taken % 2 else [])
        before = [len(r.tokens) for r in running]
        batcher.round()
        taken += 1
        assert all(len(r.tokens) > n or r.finished for r, n in zip(running, before, strict=True))
        assert long.prefilled <= 128 * taken
    assert taken == 8
    to_end(batcher)
    for item in (*running, long):
        assert item.tokens == alone(references, item)


@pytest.mark.parametrize("fixed", [False, True])
def test_later_requests_run_together_too(
    fixed: bool, rounds: Rounds, references: References
) -> None:
    """The first request finds an empty engine, the others one that was made for it alone."""
    batcher = rounds(pool_tokens=POOL if fixed else None, max_concurrency=None)
    items = [request(9, 40)]
    batcher.add(items)
    batcher.round()
    batcher.round()
    items += [request(n, 40) for n in (9, 3, 17, 1, 9, 129, 40)]
    batcher.add(items[1:])
    together = 0
    while batcher.busy:
        batcher.round()
        together = max(together, len(batcher.live))
    assert together == (8 if fixed else 7)
    for item in items:
        assert item.tokens == alone(references, item)


def test_prompts_are_prefilled_together_while_nobody_decodes(rounds: Rounds) -> None:
    batcher = rounds(max_concurrency=4)
    items = [request(260, 4), request(9, 4), request(129, 4)]
    batcher.add(items)
    batcher.round()
    assert [r.prefilled for r in items] == [128, 9, 128]
    batcher.round()  # One decodes now: a chunk in all.
    assert [r.prefilled for r in items] == [256, 9, 128]
    batcher.round()
    assert [r.prefilled for r in items] == [260, 9, 129]
    to_end(batcher)

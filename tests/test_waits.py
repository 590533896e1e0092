"""Engines whose threads call one another: no ring of them waits for itself."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_own_thread import Asking
from tiny import prompt, tiny_model

import dscale
from bench.soak_load import WAIT, all_back
from dscale import Attachment
from dscale.handle import Handle
from dscale.waits import _awaited, waiting

IDS = prompt(9)
LONG = 2000


@pytest.fixture
def pair_of_engines() -> Iterator[tuple[Attachment, Attachment]]:
    with dscale.attach(tiny_model()) as one, dscale.attach(tiny_model(seed=1)) as other:
        yield one, other
        assert not _awaited


def submit(spec: Attachment, asking: Asking | None = None, length: int = 4) -> Handle:
    criteria = None if asking is None else [asking]
    return spec.engine.submit(IDS, max_new_tokens=length, stopping_criteria=criteria)


def tokens(spec: Attachment) -> list[int]:
    out: list[int] = spec.model.generate(torch.tensor([IDS]), max_new_tokens=4)[0, 9:].tolist()
    return out


def raised(answers: list[Any]) -> int:
    """How many of the answers are refusals of a ring."""
    errors = [a for a in answers if isinstance(a, Exception)]
    for error in errors:
        assert type(error) is RuntimeError
        assert "does not wait for the calling one" in str(error)
    return len(errors)


def test_another_engine_may_be_waited_for(pair_of_engines: tuple[Attachment, Attachment]) -> None:
    one, other = pair_of_engines
    want = tokens(other)
    calls: list[Callable[[], Any]] = [
        lambda: tokens(other),
        lambda: submit(other).result(WAIT).generated_tokens,
        lambda: [token for news in submit(other) for token in news],
        lambda: other.engine.generate_batch([IDS], max_new_tokens=4)["req_0"].generated_tokens,
    ]
    for call in calls:
        asking = Asking(call)
        assert submit(one, asking).result(WAIT).finish_reason == "length"
        assert asking.answers == [want]


def test_a_ring_through_another_engine(pair_of_engines: tuple[Attachment, Attachment]) -> None:
    one, other = pair_of_engines
    inner = Asking(lambda: tokens(one))
    outer = Asking(lambda: submit(other, inner).result(WAIT).generated_tokens)
    assert submit(one, outer).result(WAIT).finish_reason == "length"
    assert raised(inner.answers) == 1
    assert outer.answers == [tokens(other)]
    for spec in pair_of_engines:
        all_back(spec.engine)


@pytest.mark.parametrize("kind", ["generate", "cancel", "close"])
def test_two_that_call_each_other(
    kind: str, pair_of_engines: tuple[Attachment, Attachment]
) -> None:
    running = [submit(spec, length=LONG) for spec in pair_of_engines]
    both = threading.Barrier(2, timeout=WAIT)

    def call(spec: Attachment, handle: Handle) -> Any:
        both.wait()
        if kind == "generate":
            return tokens(spec)
        return handle.cancel() if kind == "cancel" else spec.engine.close()

    askings = [
        Asking(lambda s=spec, h=handle: call(s, h))
        for spec, handle in zip(pair_of_engines, running, strict=True)
    ]
    asked = [submit(s, a) for s, a in zip(reversed(pair_of_engines), askings, strict=True)]
    reasons = {handle.result(WAIT).finish_reason for handle in asked}
    if kind == "generate":
        assert raised([a.answers[0] for a in askings]) <= 1  # one may end before the other begins
        for handle in running:
            handle.cancel()
    assert reasons == {"cancelled" if kind == "close" else "length"}
    assert {handle.result(WAIT).finish_reason for handle in running} == {"cancelled"}
    if kind != "close":
        for spec in pair_of_engines:
            all_back(spec.engine)


def test_a_ring_that_dissolves_is_none(pair_of_engines: tuple[Attachment, Attachment]) -> None:
    one, _ = pair_of_engines
    tokens(one)  # starts its thread
    began, release = threading.Event(), threading.Event()
    here: Any = SimpleNamespace(thread=threading.current_thread())

    def wait(input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        with waiting(here) as ends:
            assert ends
            began.set()
            release.wait(WAIT)
        return torch.zeros(1, dtype=torch.bool)

    handle = one.engine.submit(IDS, max_new_tokens=1, stopping_criteria=[wait])
    assert began.wait(WAIT)
    with pytest.raises(RuntimeError, match=r"^result: .*does not wait for the calling one"):
        handle.result()
    timer = threading.Timer(0.05, release.set)
    timer.start()
    began_at = time.monotonic()
    assert handle.result(WAIT).finish_reason == "length"
    assert time.monotonic() - began_at > 0.04
    timer.join()

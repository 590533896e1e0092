"""What a stopping criterion or a logits processor may ask of the engine whose thread calls it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VOCAB, prompt

from bench.soak_load import WAIT, all_back
from dscale import Attachment
from dscale.errors import ClosedError
from dscale.handle import Handle, Result
from dscale.request import Request

IDS = prompt(9)
Attach = Callable[..., Attachment]
Ask = Callable[[], Any]


class Asking:
    """A stopping criterion or a logits processor that asks for something at its first call."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.answers: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self.answers:
            try:
                self.answers.append(self.ask())
            except BaseException as error:
                self.answers.append(error)
        return torch.zeros(len(input_ids), dtype=torch.bool) if scores is None else scores


def asked(spec: Attachment, ask: Ask, role: str = "stopping_criteria") -> tuple[Any, Result]:
    """What a submitted prompt's criterion or processor was answered, and the prompt's result."""
    asking = Asking(ask)
    handle = spec.engine.submit(IDS, max_new_tokens=6, **{role: [asking]})
    result = handle.result(WAIT)
    return asking.answers[0], result


def submitted(spec: Attachment, length: int = 2) -> Handle:
    return spec.engine.submit(IDS, request_id="own", max_new_tokens=length)


def by_id(spec: Attachment) -> Any:
    spec.engine.add_request(IDS, "own", max_new_tokens=2)
    return spec.engine.request_id_iter("own")


REQUEST = {"prompt": IDS, "max_new_tokens": 2}
WAITING: dict[str, tuple[str, Callable[[Attachment], Any]]] = {
    "model.generate": ("generate", lambda s: s.model.generate(torch.tensor([IDS]))),
    "engine.generate": ("generate", lambda s: s.engine.generate([Request(**REQUEST)])),
    "generate_batch": ("stream", lambda s: s.engine.generate_batch([IDS], max_new_tokens=2)),
    "stream": ("stream", lambda s: next(s.engine.stream([IDS], max_new_tokens=2))),
    "result": ("result", lambda s: submitted(s).result()),
    "result in time": ("result", lambda s: submitted(s).result(WAIT)),
    "tokens": ("iterating a handle", lambda s: list(submitted(s))),
    "tokens by id": ("iterating a handle", lambda s: list(by_id(s))),
    "warm_up": ("warm_up", lambda s: s.engine.warm_up([Request(**REQUEST)])),
}


@pytest.mark.parametrize("role", ["stopping_criteria", "logits_processor"])
@pytest.mark.parametrize("kind", WAITING)
def test_what_would_wait_for_itself_raises(kind: str, role: str, attach: Attach) -> None:
    spec = attach()
    call, ask = WAITING[kind]
    answer, result = asked(spec, lambda: ask(spec), role)
    assert isinstance(answer, RuntimeError)
    assert str(answer).startswith(f"{call}: expected another thread than the engine's own")
    assert (result.finish_reason, len(result.generated_tokens)) == ("length", 6)
    queued = call in ("result", "iterating a handle")
    assert spec.engine.stats.requests == 1 + queued
    all_back(spec.engine)


def test_a_processor_of_generate_hears_of_it(attach: Attach) -> None:
    spec, ids = attach(), torch.tensor([IDS])

    def ask(input_ids: Any, scores: Any) -> Any:
        return spec.model.generate(ids, max_new_tokens=2)

    with pytest.raises(RuntimeError, match=r"^generate: expected another thread"):
        spec.model.generate(ids, max_new_tokens=4, logits_processor=[ask])
    all_back(spec.engine)


def test_a_stream_that_another_thread_began(attach: Attach) -> None:
    spec = attach()
    results = spec.engine.stream([[VOCAB], IDS], max_new_tokens=1000)
    assert next(results).finish_reason == "error"  # refused; the other is queued
    answer, result = asked(spec, lambda: next(results))
    assert isinstance(answer, RuntimeError)
    assert result.finish_reason == "length"
    all_back(spec.engine)  # the rest was cancelled


def test_what_does_not_wait(attach: Attach) -> None:
    spec = attach()
    ended = spec.engine.submit(IDS, max_new_tokens=3)
    ended.result(WAIT)
    later, result = asked(spec, lambda: submitted(spec, 3))
    assert result.finish_reason == "length"
    assert later.result(WAIT).generated_tokens == ended.result().generated_tokens
    late, _ = asked(spec, lambda: submitted(spec, 3).result(0))
    assert isinstance(late, TimeoutError)
    got, _ = asked(spec, lambda: (ended.result(WAIT), list(ended)))
    assert [token for tokens in got[1] for token in tokens] == got[0].generated_tokens
    running = spec.engine.submit(IDS, max_new_tokens=1000)
    answer, result = asked(spec, running.cancel)
    assert (answer, result.finish_reason) == (None, "length")
    assert running.result(WAIT).finish_reason == "cancelled"
    all_back(spec.engine)


@pytest.mark.parametrize("end", ["close", "detach"])
def test_closing_does_not_wait(end: str, attach: Attach) -> None:
    spec = attach()
    engine = spec.engine
    answer, result = asked(spec, engine.close if end == "close" else spec.detach)
    assert (answer, result.finish_reason) == (None, "cancelled")
    with pytest.raises(ClosedError):
        engine.submit(IDS, max_new_tokens=2)

"""Stop strings, stopping criteria and time limits: every call, cut and pad as plain generate's."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import BATCH, DRAFTERS, IDS, ROWS, Letters, same
from tiny import VOCAB, always_wrong, continuation, oracle, plain, ragged, script
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation import StoppingCriteriaList

from dscale import Attachment
from dscale.compiled.target import Target

NEW = 40


@pytest.fixture(scope="module")
def texts(reference: Any) -> list[list[int]]:
    """Every row's prompt and greedy continuation."""
    return [continuation(reference, row, NEW + 24) for row in ROWS]


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Stops each row at a token of its own; keeps what it is called with."""

    def __init__(self, tokens: list[int | None]) -> None:
        self.tokens, self.calls = tokens, []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append((input_ids.tolist(), scores is None))
        last = input_ids[:, -1].tolist()
        return torch.tensor([t == own for t, own in zip(last, self.tokens, strict=True)])


class Bool(StoppingCriteria):  # type: ignore[misc]
    """Stops all rows at a step, with a plain bool; counts on one call per step."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return self.left == 0


def drafts(monkeypatch: Any, texts: list[list[int]], right: Any) -> None:
    """Script the drafter, or let the random one draft."""
    if right is not None:
        script(monkeypatch, texts, right)


@pytest.mark.parametrize("right", DRAFTERS)
@pytest.mark.parametrize("eos", [False, True])
def test_a_criterion_sees_every_step_of_the_whole_batch(
    eos: bool, right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    stops = [texts[row][len(ROWS[row]) + at] for row, at in ((0, 20), (1, 3), (2, 17), (3, 0))]
    settings = {"eos_token_id": texts[1][len(ROWS[1]) + 9], "pad_token_id": 5} if eos else {}
    made: list[Watch] = [Watch(list(stops)) for _ in range(2)]
    want = plain(reference, **BATCH, max_new_tokens=NEW, stopping_criteria=[made[0]], **settings)
    drafts(monkeypatch, texts, right)
    before = spec.stats.tokens
    ours = spec.model.generate(
        **BATCH, max_new_tokens=NEW, stopping_criteria=[made[1]], **settings
    )
    assert torch.equal(ours, want)
    assert made[1].calls == made[0].calls
    assert len(made[0].calls) == want.shape[1] - 130
    # Nothing past a stop is counted.
    counted = spec.stats.tokens - before
    ends = [21, 4, 18, 1] if eos else [want.shape[1] - 130] * 4
    assert counted == sum(ends) - 4
    assert [1 + sum(p) for p in spec.stats.last_progress] == ends
    assert spec.engine.batcher.num_free_pages == spec.engine.batcher.core.workspace.num_pages - 1


@pytest.mark.parametrize("right", [oracle, ragged])
def test_a_criterion_without_eos_at_every_step(
    right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    want = plain(reference, **BATCH, max_new_tokens=NEW)
    script(monkeypatch, texts, right)
    for steps in range(1, 35):
        out = spec.model.generate(
            **BATCH, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([Bool(steps)])
        )
        assert torch.equal(out, want[:, : 130 + steps])


@pytest.mark.parametrize("right", DRAFTERS)
def test_stop_strings_at_every_offset(
    right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    row = texts[0]
    words = Letters()
    drafts(monkeypatch, [row], right)
    for end in [*range(2, 20), 33, 34]:
        # The last tokens up to here, without their first letter and their last.
        stop = words.decode(row[9 + end - 2 : 9 + end])[1:-1]
        settings: dict[str, Any] = {"stop_strings": ["nothing", stop], "max_new_tokens": NEW}
        want = plain(reference, IDS, tokenizer=words, **settings)
        ours = spec.model.generate(IDS, tokenizer=words, **settings)
        assert torch.equal(ours, want)
        assert ours.shape[1] <= 9 + end


def test_stop_strings_differ_by_row_and_come_from_any_config(
    reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    words = Letters()
    stops = [
        words.decode(texts[r][len(ROWS[r]) + at :][:1]) for r, at in ((0, 3), (1, 21), (2, 16))
    ]
    script(monkeypatch, texts, ragged)
    settings: dict[str, Any] = {"max_new_tokens": 30, "tokenizer": words}
    padded = {"eos_token_id": VOCAB - 2, "pad_token_id": 0}
    for extra in ({}, padded):
        want = plain(reference, **BATCH, stop_strings=stops, **settings, **extra)
        ours = spec.model.generate(**BATCH, stop_strings=stops, **settings, **extra)
        assert torch.equal(ours, want)
    assert want.shape[1] < 130 + 30 or int((want == 0).sum()) > 5
    spec.model.generation_config.stop_strings = stops
    assert torch.equal(spec.model.generate(**BATCH, **settings, **padded), want)
    without = spec.model.generate(**BATCH, stop_strings=None, **settings, **padded)
    assert without.shape[1] == 160
    spec.model.generation_config.stop_strings = None


@pytest.mark.parametrize("right", [oracle, always_wrong])
def test_a_stopped_row_is_streamed_up_to_its_stop(
    right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    script(monkeypatch, texts, right)
    for inputs, rows in (({"input_ids": IDS}, 1), (BATCH, 4)):
        for at in (0, 5, 15, 16, 31):
            got: list[list[Tensor]] = []
            for generate in (lambda **kw: plain(reference, **kw), spec.model.generate):
                streamer = Puts()
                tokens = [texts[0][9 + at]] + [None] * (rows - 1)
                out = generate(
                    **inputs,
                    max_new_tokens=33,
                    stopping_criteria=[Watch(tokens)],
                    streamer=streamer,
                    eos_token_id=VOCAB - 2,
                    pad_token_id=3,
                )
                got.append([*streamer.got, out])
                assert streamer.ends == 1
            assert len(got[0]) == len(got[1])
            assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


class Puts:
    """Keeps what is put."""

    def __init__(self) -> None:
        self.got: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.got.append(value)

    def end(self) -> None:
        self.ends += 1


def test_criteria_of_transformers_replace_those_of_the_config(
    reference: Any, spec: Attachment, texts: Any
) -> None:
    eos = texts[0][9 + 12]
    for criteria in (
        lambda: [MaxLengthCriteria(140)],
        lambda: [MaxLengthCriteria(100)],
        lambda: [MaxLengthCriteria(190)],
        lambda: [EosTokenCriteria(eos)],
        lambda: [EosTokenCriteria(eos), MaxLengthCriteria(150)],
        lambda: [],
    ):
        settings = {"max_new_tokens": 25, "eos_token_id": texts[1][130 + 3], "pad_token_id": 1}
        want = plain(reference, **BATCH, stopping_criteria=criteria(), **settings)
        ours = spec.model.generate(**BATCH, stopping_criteria=criteria(), **settings)
        assert torch.equal(ours, want)


def test_a_criterion_with_an_eos_and_no_pad_is_refused_before_a_forward(
    spec: Attachment, monkeypatch: Any
) -> None:
    class Marked(Bool):
        eos_token_id = 7

    forwards: list[int] = []
    forward: Callable[..., Any] = Target.forward
    monkeypatch.setattr(Target, "forward", lambda *a: (forwards.append(1), forward(*a))[1])
    with pytest.raises(ValueError, match="pad_token_id"):
        spec.model.generate(IDS, stopping_criteria=[Marked(3)], max_new_tokens=9)
    assert not forwards


def test_an_error_in_a_criterion_reaches_the_caller(spec: Attachment) -> None:
    class Broken(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            if input_ids.shape[1] > 12:
                raise KeyError("broken")
            return False

    with pytest.raises(KeyError, match="broken"):
        spec.model.generate(IDS, max_new_tokens=30, stopping_criteria=[Broken()])
    assert spec.engine.batcher.num_free_pages == spec.engine.batcher.core.workspace.num_pages - 1
    assert spec.model.generate(IDS, max_new_tokens=30).shape[1] == 39


def test_max_time(spec: Attachment, reference: Any) -> None:
    class Slow(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            time.sleep(0.02)
            return False

    want = plain(reference, IDS, max_new_tokens=400)
    out = spec.model.generate(IDS, max_new_tokens=400, max_time=0.3, stopping_criteria=[Slow()])
    new = out.shape[1] - 9
    assert 1 <= new <= 16
    assert torch.equal(out, want[:, : 9 + new])
    assert same(spec.model.generate(IDS, max_new_tokens=20, max_time=60.0), want[:, :29])

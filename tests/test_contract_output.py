"""Outputs, submitted prompts, and the way lm-eval calls generate."""

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import BATCH, IDS, ROWS, Letters
from tiny import (
    VOCAB,
    always_wrong,
    continuation,
    left_padded,
    oracle,
    plain,
    prompt,
    ragged,
    script,
)
from torch import Tensor
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers import NoRepeatNGramLogitsProcessor as Ngrams
from transformers.generation import StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from dscale import Attachment

NEW = 40


@pytest.fixture(scope="module")
def texts(reference: Any) -> list[list[int]]:
    """Every row's prompt and greedy continuation."""
    return [continuation(reference, row, NEW + 24) for row in ROWS]


class Until(StoppingCriteria):  # type: ignore[misc]
    """lm-eval's: looks at the tail of every row's new text, keeps which rows are done, and says
    once whether all are."""

    def __init__(self, stop: str, tokenizer: Any, length: int, rows: int) -> None:
        self.done = [False] * rows
        self.stop, self.tokenizer, self.length = stop, tokenizer, length
        self.tail = len(stop) // 4 + 2

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        new = input_ids[:, self.length :][:, -self.tail :]
        for row, done in enumerate(self.done):
            if not done:
                self.done[row] = self.stop in self.tokenizer.decode(new[row])
        return False not in self.done


@pytest.mark.parametrize("right", [oracle, always_wrong, ragged, None])
@pytest.mark.parametrize("rows", [4, 3, 1])
def test_as_lm_eval_calls(
    rows: int, right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    words = Letters()
    batch = left_padded(ROWS[:rows], pad=VOCAB - 1)
    length = batch["input_ids"].shape[1]
    # Every text comes past this token; the second sequence stops nobody.
    common = set.intersection(*(set(t[len(r) :]) for t, r in zip(texts, ROWS, strict=True)))
    stops = [words.words[sorted(common)[0]], "nothing"]
    if right is not None:
        script(monkeypatch, texts[:rows], right)
    outs = []
    for model in (reference, spec.model):
        criteria = StoppingCriteriaList([Until(s, words, length, rows) for s in stops])
        call = model.generate if model is not reference else lambda **kw: plain(reference, **kw)
        with torch.autocast("cpu", enabled=False):
            outs.append(
                call(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_length=length + NEW,
                    stopping_criteria=criteria,
                    pad_token_id=0,
                    use_cache=True,
                    do_sample=False,
                )
            )
    assert torch.equal(*outs)
    assert outs[1].shape[1] < length + NEW


def test_criteria_see_the_scores_when_there_are_some(reference: Any, spec: Attachment) -> None:
    class Sure(StoppingCriteria):  # type: ignore[misc]
        def __init__(self) -> None:
            self.calls: list[int] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.calls.append(len(scores))
            assert scores[-1].shape == (4, VOCAB)
            top = scores[-1].softmax(-1).amax(-1)
            return top > 0.25

    made = Sure(), Sure()
    settings: dict[str, Any] = {
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    want = plain(reference, **BATCH, stopping_criteria=[made[0]], **settings)
    ours = spec.model.generate(**BATCH, stopping_criteria=[made[1]], **settings)
    assert torch.equal(ours.sequences, want.sequences)
    assert made[0].calls == made[1].calls == list(range(1, len(want.scores) + 1))
    assert len(ours.scores) == len(want.scores)


@pytest.mark.parametrize("right", [oracle, always_wrong, ragged, None])
def test_submitted_prompts_stop_as_generated_ones(
    right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    words = Letters()
    handles, wants = [], []
    before = spec.stats.tokens
    for row, at in zip(range(4), (0, 15, 16, 31), strict=True):
        stop = words.words[texts[row][len(ROWS[row]) + at]]
        settings = {"max_new_tokens": NEW, "stop_strings": [stop], "tokenizer": words}
        out = plain(reference, torch.tensor([ROWS[row]]), **settings)
        wants.append(out[0, len(ROWS[row]) :].tolist())
        if right is not None:
            script(monkeypatch, [texts[row]], right)
        handles.append(spec.engine.submit(ROWS[row], **settings))
        if right is not None:  # a script is for slot 0
            handles[-1].result(60)
    streamed = [[token for tokens in handle for token in tokens] for handle in handles]
    results = [handle.result(60) for handle in handles]
    assert [r.generated_tokens for r in results] == streamed == wants
    assert [r.finish_reason for r in results] == ["stop"] * 4
    assert [1 + sum(r.progress) for r in results] == [len(w) for w in wants]
    assert spec.stats.tokens - before == sum(map(len, wants)) - 4
    assert spec.engine.batcher.num_free_pages == spec.engine.batcher.core.workspace.num_pages - 1


def test_a_submitted_criterion_that_fails_ends_its_own_request(
    reference: Any, spec: Attachment
) -> None:
    def broken(input_ids: Tensor, scores: Any) -> bool:
        if input_ids.shape[1] == 14:
            raise KeyError("criterion")
        return False

    bad = spec.engine.submit(ROWS[0], max_new_tokens=20, stopping_criteria=[broken])
    good = spec.engine.submit(ROWS[0], max_new_tokens=20)
    assert (bad.result(60).finish_reason, bad.result().error) == ("error", "'criterion'")
    want = plain(reference, IDS, max_new_tokens=20)[0, 9:].tolist()
    assert bad.result().generated_tokens == want[:5]
    assert good.result(60).generated_tokens == want


def test_a_consumer_of_text_ends_when_a_criterion_fails(spec: Attachment, texts: Any) -> None:
    def broken(input_ids: Tensor, scores: Any) -> bool:
        if input_ids.shape[1] == 16:
            raise KeyError("criterion")
        return False

    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            spec.model.generate(
                IDS, max_new_tokens=20, streamer=streamer, stopping_criteria=[broken]
            )
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert not thread.is_alive()
    assert [type(e) for e in errors] == [KeyError]
    assert text == Letters().decode(texts[0][9:15])


def test_what_a_dictionary_holds(reference: Any, spec: Attachment) -> None:
    both = {"output_scores": True, "output_logits": True}
    for settings, names in (
        ({}, []),
        ({"output_scores": True}, ["scores"]),
        ({"output_logits": True}, ["logits"]),
        (both, ["scores", "logits"]),
    ):
        out = spec.model.generate(IDS, max_new_tokens=3, return_dict_in_generate=True, **settings)
        assert list(out) == ["sequences", *names]
        want = plain(reference, IDS, max_new_tokens=3, return_dict_in_generate=True, **settings)
        assert type(out) is type(want)
        for name in ("attentions", "hidden_states"):
            assert getattr(out, name) is None
        # Without a dictionary they ask for nothing, there as here.
        assert torch.equal(spec.model.generate(IDS, max_new_tokens=3, **settings), want.sequences)
    assert spec.stats.uncaptured_steps


class Lines(logging.Handler):
    """Keeps log lines and warnings of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def of(self, call: Callable[[], Any]) -> list[str]:
        """Log lines and warnings of a call, those of one time only included."""
        self.lines = []
        transformers_logging.warning_once.cache_clear()
        logger = logging.getLogger("transformers")
        logger.addHandler(self)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
        finally:
            logger.removeHandler(self)
        return self.lines + [str(w.message) for w in caught]


WARNED: list[dict[str, Any]] = [
    {},
    {"max_length": 30, "max_new_tokens": 9},
    {"max_new_tokens": 9, "temperature": 0.5},
    {"max_new_tokens": 3, "min_length": 100, "eos_token_id": 3},
    {"max_new_tokens": 9, "stopping_criteria": [MaxLengthCriteria(15)]},
    {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "logits_processor": [Ngrams(3)]},
    {"max_new_tokens": 9, "output_scores": True},
    {"generation_config": GenerationConfig(max_new_tokens=5), "eos_token_id": 3},
    {"input_ids": torch.tensor([prompt(2045)]), "max_new_tokens": 12},
]


@pytest.mark.parametrize("number", range(len(WARNED)))
def test_the_same_warnings(number: int, reference: Any, spec: Attachment) -> None:
    settings = {"input_ids": IDS, **WARNED[number]}
    lines = Lines()
    want = lines.of(lambda: plain(reference, **settings))
    assert want
    assert lines.of(lambda: spec.model.generate(**settings)) == want


def test_in_inference_mode(reference: Any, spec: Attachment) -> None:
    with torch.inference_mode():
        ids = IDS.clone()
        want = plain(reference, ids, max_new_tokens=20, no_repeat_ngram_size=1)
        out = spec.model.generate(
            ids,
            max_new_tokens=20,
            no_repeat_ngram_size=1,
            stopping_criteria=[lambda ids, scores: False],
        )
    assert torch.equal(out, want)

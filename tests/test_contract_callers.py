"""A caller's own logits processors: what they see, and what happens when they fail."""

from typing import Any

import pytest
import torch
from contract import BATCH, DRAFTERS, IDS, ONE, ROWS, check
from tiny import VOCAB, always_wrong, continuation, left_padded, oracle, plain, prompt, script
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from dscale import Attachment

NEW = 34


@pytest.fixture(scope="module")
def texts(reference: Any) -> list[list[int]]:
    """New tokens of every row, greedy."""
    return [continuation(reference, row, NEW)[len(row) :] for row in ROWS]


class Forbids(LogitsProcessor):  # type: ignore[misc]
    """Forbids what it chose two calls before: keeps state, and notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        assert scores.dtype == torch.float32
        self.seen.append(input_ids[0].tolist())
        if len(self.seen) > 2:
            scores[:, self.seen[-2][-1]] = -torch.inf
        scores[:, 7 * len(self.seen) % VOCAB] += 3.0
        return scores


@pytest.mark.parametrize("right", DRAFTERS)
def test_a_callers_processor_sees_every_token_once(
    right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    padded = left_padded([prompt(9), prompt(12)], pad=VOCAB - 1)
    padded = {name: t[:1] for name, t in padded.items()}
    eos = texts[0][20]
    for inputs in (ONE, padded):
        makers = Forbids(), Forbids()
        settings = {
            "max_new_tokens": NEW,
            "eos_token_id": [eos, 400],
            "pad_token_id": 3,
            "return_dict_in_generate": True,
            "output_scores": True,
            "output_logits": True,
        }
        want = plain(reference, **inputs, logits_processor=[makers[0]], **settings)
        if right is not None:
            ids = ROWS[0] + want.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            script(monkeypatch, [ids], right)
        ours = spec.model.generate(
            **inputs, logits_processor=LogitsProcessorList([makers[1]]), **settings
        )
        check(want, ours, inputs["input_ids"].shape[1], [eos, 400])
        assert makers[1].seen == makers[0].seen


def test_callers_processors_of_transformers_in_a_batch(reference: Any, spec: Attachment) -> None:
    def penalty() -> Any:
        by_row = torch.tensor([121, 0, 129, 60])
        try:
            return RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=by_row)
        except ValueError:  # older releases take one number
            return RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=121)

    def made() -> list[Any]:
        return [
            penalty(),
            NoRepeatNGramLogitsProcessor(2),
            MinLengthLogitsProcessor(140, torch.tensor([9]), device="cpu"),
            TemperatureLogitsWarper(0.5),
        ]

    settings = {"max_new_tokens": 20, "repetition_penalty": 1.1}
    want = plain(reference, **BATCH, logits_processor=made(), **settings)
    assert torch.equal(spec.model.generate(**BATCH, logits_processor=made(), **settings), want)


def test_allowed_tokens_by_prompt(reference: Any, spec: Attachment) -> None:
    def allowed(prompt_id: int, ids: Tensor) -> list[int]:
        assert ids.dim() == 1
        return [int(ids[-1]) // 2 + 50 * prompt_id, (len(ids) * 3) % 100 + prompt_id, 17]

    for inputs in (ONE, BATCH):
        settings: dict[str, Any] = {"max_new_tokens": 20, "prefix_allowed_tokens_fn": allowed}
        want = plain(reference, **inputs, **settings)
        assert torch.equal(spec.model.generate(**inputs, **settings), want)
        sampled = spec.model.generate(
            **inputs, **settings, do_sample=True, num_return_sequences=2, seed=1
        )
        for row, ids in enumerate(sampled):
            length = inputs["input_ids"].shape[1]
            for at in range(length, len(ids)):
                assert int(ids[at]) in allowed(row // 2, ids[:at])


def test_guided_and_unguided_requests_run_together(reference: Any, spec: Attachment) -> None:
    want = [plain(reference, torch.tensor([r]), max_new_tokens=NEW)[0, len(r) :] for r in ROWS]
    guided = [
        plain(reference, torch.tensor([r]), max_new_tokens=NEW, no_repeat_ngram_size=1)[0]
        for r in ROWS
    ]
    handles = []
    for row in ROWS:
        handles.append(spec.engine.submit(row, max_new_tokens=NEW))
        handles.append(spec.engine.submit(row, max_new_tokens=NEW, no_repeat_ngram_size=1))
    results = [h.result(60) for h in handles]
    assert [r.finish_reason for r in results] == ["length"] * 8
    assert [r.generated_tokens for r in results[::2]] == [t.tolist() for t in want]
    for row, result, ids in zip(ROWS, results[1::2], guided, strict=True):
        assert result.generated_tokens == ids[len(row) :].tolist()


class Fails(LogitsProcessor):  # type: ignore[misc]
    """Raises at a call of a given number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise KeyError("processor")
        return scores


@pytest.mark.parametrize("right", [oracle, always_wrong])
@pytest.mark.parametrize("at", [0, 1, 5, 16])
def test_a_processor_that_fails_ends_its_own_request(
    at: int, right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    row = ROWS[0] + texts[0]
    script(monkeypatch, [row] * 3, right)
    good = spec.engine.submit(ROWS[0], max_new_tokens=NEW)
    bad = spec.engine.submit(ROWS[0], max_new_tokens=NEW, logits_processor=[Fails(at)])
    result = bad.result(60)
    assert (result.finish_reason, result.error) == ("error", "'processor'")
    assert result.generated_tokens == texts[0][:at]
    assert good.result(60).generated_tokens == texts[0]
    with pytest.raises(KeyError, match="processor"):
        spec.model.generate(IDS, max_new_tokens=NEW, logits_processor=[Fails(at)])
    assert spec.engine.batcher.num_free_pages == spec.engine.batcher.core.workspace.num_pages - 1

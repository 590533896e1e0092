"""Samples on the host path: the same draws, every filter, and values that nobody takes."""

from typing import Any

import pytest
import torch
from contract import BATCH, IDS, ROWS
from tiny import continuation, plain, prompt

from dscale import Attachment

NEW = 34


@pytest.fixture(scope="module")
def texts(reference: Any) -> list[list[int]]:
    """New tokens of every row, greedy."""
    return [continuation(reference, row, NEW)[len(row) :] for row in ROWS]


SAMPLED: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "filters": {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"temperature": 1.3, "top_k": 0, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_guided_sample_is_the_unguided_one(name: str, spec: Attachment) -> None:
    settings = {"do_sample": True, "max_new_tokens": NEW, "seed": 5, **SAMPLED[name]}
    want = spec.model.generate(**BATCH, num_return_sequences=2, **settings)
    out = spec.model.generate(
        **BATCH,
        num_return_sequences=2,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    assert torch.equal(out.sequences, want)
    for step, score in enumerate(out.scores):
        chosen = score.gather(1, want[:, 130 + step, None])
        assert bool(chosen.isfinite().all())
        assert bool((score == -torch.inf).any()) == (name != "penalty")
    for row in (0, 5):
        alone = spec.model.generate(
            torch.tensor([ROWS[row // 2]]), output_logits=True, **{**settings, "seed": 5 + row}
        )
        assert torch.equal(alone[0, -NEW:], want[row, -NEW:])


@pytest.mark.parametrize(
    "settings",
    [
        {"typical_p": 0.4},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.02},
        {"top_h": 0.4},
        {"top_k": 5, "renormalize_logits": True},
    ],
)
def test_other_filters_of_samples(settings: Any, reference: Any, spec: Attachment) -> None:
    common: dict[str, Any] = {
        "do_sample": True,
        "return_dict_in_generate": True,
        "output_scores": True,
        "top_k": 0,
        **settings,
    }
    out = spec.model.generate(**BATCH, seed=3, max_new_tokens=20, **common)
    for step in (0, 1, 7, 19):
        ids = out.sequences[:, : 130 + step]
        mask = torch.nn.functional.pad(BATCH["attention_mask"], (0, step), value=1)
        want = plain(reference, ids, attention_mask=mask, max_new_tokens=1, **common)
        torch.testing.assert_close(out.scores[step], want.scores[0], rtol=1e-3, atol=1e-3)
        chosen = out.scores[step].gather(1, out.sequences[:, 130 + step, None])
        assert bool(chosen.isfinite().all())
    again = spec.model.generate(**BATCH, seed=3, max_new_tokens=20, **common)
    assert torch.equal(again.sequences, out.sequences)


BAD_VALUES: dict[str, Any] = {
    "no_repeat_ngram_size": 1.5, "bad_words_ids": [], "sequence_bias": {}, "typical_p": -0.5,
    "top_h": 3.0, "suppress_tokens": "a", "encoder_repetition_penalty": -1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_that_transformers_refuses(name: str, spec: Attachment, reference: Any) -> None:
    want = plain(reference, IDS, max_new_tokens=6)
    before = spec.stats.prompt_tokens
    for call in (spec.model.generate, lambda *a, **kw: plain(reference, *a, **kw)):
        with pytest.raises((ValueError, TypeError)):
            call(IDS, do_sample=True, max_new_tokens=5, **{name: BAD_VALUES[name]})
    assert spec.stats.prompt_tokens == before
    assert torch.equal(spec.model.generate(IDS, max_new_tokens=6), want)


def test_what_a_submitted_prompt_cannot_have(spec: Attachment) -> None:
    dictionary = {"return_dict_in_generate": True}
    for name, settings in (
        ("output_scores", {"output_scores": True, **dictionary}),
        ("output_logits", {"output_logits": True, **dictionary}),
        ("num_return_sequences", {"num_return_sequences": 2, "do_sample": True}),
    ):
        with pytest.raises(ValueError, match=name):
            spec.engine.submit(prompt(9), max_new_tokens=5, **settings)
    assert not spec.engine.batcher.busy

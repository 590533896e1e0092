"""Logits processors, scores and logits: ids and numbers of plain generate, in ragged batches."""

from typing import Any

import pytest
import torch
from contract import BATCH, DRAFTERS, ONE, ROWS, check
from tiny import (
    always_wrong,
    continuation,
    oracle,
    plain,
    ragged,
    script,
    tiny_drafter,
    tiny_model,
)

import dscale
from dscale import Attachment

NEW = 34


@pytest.fixture(scope="module")
def texts(reference: Any) -> list[list[int]]:
    """New tokens of every row, greedy."""
    return [continuation(reference, row, NEW)[len(row) :] for row in ROWS]


def configs(texts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Settings of which each changes what the greedy text would be."""
    often = [t for text in texts for t in text[:3]]
    ends = [texts[0][4], texts[1][16], texts[2][2], texts[3][30]]
    stop: dict[str, Any] = {"eos_token_id": ends, "pad_token_id": 3}
    return {
        "scores alone": {},
        "eos": stop,
        "min_length": {"min_length": 130 + 20, **stop},
        "min_new_tokens": {"min_new_tokens": 17, **stop},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[t] for t in often] + [texts[0][5:7]], **stop},
        "sequence_bias": {
            "sequence_bias": [[[often[0]], -9.0], [[40], 5.0], [texts[1][3:5], -20.0]]
        },
        "forced": {"forced_eos_token_id": 7},
        "suppress": {"suppress_tokens": often, "begin_suppress_tokens": [often[0], 40]},
        "decay": {"exponential_decay_length_penalty": (5, 1.5), **stop},
        "everything": {
            "no_repeat_ngram_size": 2,
            "repetition_penalty": 1.2,
            "min_new_tokens": 6,
            "renormalize_logits": True,
            "remove_invalid_values": True,
            "suppress_tokens": often[:2],
            **stop,
        },
    }


NAMES = list(configs([[0] * NEW] * 4))


@pytest.mark.parametrize("right", DRAFTERS)
@pytest.mark.parametrize("name", NAMES)
def test_ids_scores_and_logits(
    name: str, right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    settings = {
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        **configs(texts)[name],
    }
    for inputs, rows in ((ONE, ROWS[:1]), (BATCH, ROWS)):
        length = inputs["input_ids"].shape[1]
        want = _once(reference, name, inputs, settings)
        if right is not None:
            new = want.sequences[:, length:].tolist()
            script(monkeypatch, [a + b for a, b in zip(rows, new, strict=True)], right)
        before = spec.stats.uncaptured_steps, spec.stats.steps
        ours = spec.model.generate(**inputs, **settings)
        check(want, ours, length, settings.get("eos_token_id", ()))
        steps = spec.stats.steps - before[1]
        assert steps == spec.stats.uncaptured_steps - before[0]
        if right is oracle:
            assert steps <= 3
        scores = [
            spec.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
            for out in (want, ours)
        ]
        if "eos_token_id" not in settings:
            torch.testing.assert_close(*scores, rtol=1e-4, atol=2e-4)
        assert bool(scores[1].isfinite().all())
        bare = {k: v for k, v in settings.items() if "output" not in k and "return" not in k}
        assert torch.equal(spec.model.generate(**inputs, **bare), want.sequences)


_KEPT: dict[tuple[str, int], Any] = {}


def _once(model: Any, name: str, inputs: Any, settings: Any) -> Any:
    key = name, inputs["input_ids"].shape[0]
    if key not in _KEPT:
        _KEPT[key] = plain(model, **inputs, **settings)
    return _KEPT[key]


def test_the_settings_matter(reference: Any, texts: Any) -> None:
    greedy = plain(reference, **BATCH, max_new_tokens=NEW)
    same = plain(reference, **BATCH, max_new_tokens=NEW, **configs(texts)["eos"])
    for name in NAMES[2:]:
        settings = configs(texts)[name]
        out = plain(reference, **BATCH, max_new_tokens=NEW, **settings)
        against = same if "eos_token_id" in settings else greedy
        assert not torch.equal(out, against), name


def test_a_first_token_may_be_forced(reference: Any, spec: Attachment) -> None:
    ids = torch.tensor([[5], [6]])
    settings = {"max_new_tokens": 9, "forced_bos_token_id": 4, "begin_suppress_tokens": [4, 40]}
    want = plain(reference, ids, **settings)
    assert torch.equal(spec.model.generate(ids, **settings), want)
    assert want[:, 1].tolist() == [4, 4]


@pytest.mark.parametrize("right", [oracle, always_wrong, ragged])
def test_every_length(
    right: Any, reference: Any, spec: Attachment, texts: Any, monkeypatch: Any
) -> None:
    settings = {"no_repeat_ngram_size": 1}
    want = plain(reference, **BATCH, max_new_tokens=33, **settings)
    new = want[:, 130:].tolist()
    script(monkeypatch, [a + b for a, b in zip(ROWS, new, strict=True)], right)
    for count in (1, 2, 3, 16, 17, 33) if right is always_wrong else range(1, 34):
        out = spec.model.generate(
            **BATCH,
            max_new_tokens=count,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        assert torch.equal(out.sequences, want[:, : 130 + count])
        assert len(out.scores) == count


@pytest.mark.parametrize("right", DRAFTERS)
def test_eos_at_every_offset_of_the_block(
    right: Any, reference: Any, spec: Attachment, monkeypatch: Any
) -> None:
    settings: dict[str, Any] = {"no_repeat_ngram_size": 1, "max_new_tokens": NEW}
    new = plain(reference, **BATCH, **settings)[:, 130:]
    if right is not None:
        rows = [a + b for a, b in zip(ROWS, new.tolist(), strict=True)]
        script(monkeypatch, rows, right)
    for offset in range(NEW) if right in (oracle, ragged) else (0, 1, 16, 17):
        # Of all rows in turn; no token comes twice in one.
        eos = int(new[offset % 4, offset])
        before = ((new == eos).cumsum(1) - (new == eos).long()) == 0
        want = torch.where(before, new, 3)[:, : int(before.sum(1).max())]
        ours = spec.model.generate(**BATCH, **settings, eos_token_id=eos, pad_token_id=3)
        assert torch.equal(ours[:, 130:], want), offset
        one = spec.model.generate(**ONE, **settings, eos_token_id=int(new[0, offset]))
        assert one[0, 9:].tolist() == new[0, : offset + 1].tolist()
    assert torch.equal(
        ours, plain(reference, **BATCH, **settings, eos_token_id=eos, pad_token_id=3)
    )


@pytest.mark.parametrize("mode", ["ar", "dflash", "+tiles", "+budget"])
def test_other_modes(mode: Any, reference: Any, tmp_path: Any) -> None:
    model = tiny_model()
    drafter = None if mode == "ar" else tiny_drafter(tmp_path, model)
    settings = {"max_new_tokens": 20, "no_repeat_ngram_size": 1}
    want = plain(reference, **BATCH, **settings)
    with dscale.attach(model, drafter, mode=mode) as spec:
        assert torch.equal(spec.model.generate(**BATCH, **settings), want)

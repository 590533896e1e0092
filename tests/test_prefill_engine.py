"""Prompts through the engine as on a GPU: fixed buffers, and attention that reads the pages of the
block tables and no others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from listed_attention import listed_attention
from tiny import VOCAB, left_padded, plain, prompt, tiny_drafter, tiny_model

import dscale
import dscale.compiled.attention
import dscale.compiled.target
from dscale.choosers import GREEDY
from dscale.compiled.kv import PAGE
from dscale.core import Core
from dscale.prefill import next_length, next_lengths
from dscale.request import Request

POISON = VOCAB - 1
"""A token whose embedding is NaN in some tests."""


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Core, "flex", property(lambda self: True))
    monkeypatch.setattr("dscale.stages.capture", lambda stage: stage)
    monkeypatch.setattr(dscale.compiled.attention, "flex_attention", listed_attention)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("mode", ["ar", "dscale"])
def test_prompts_of_any_length(mode: Any, as_on_a_gpu: None, tmp_path: Path) -> None:
    model, plain_model = tiny_model(), tiny_model()
    drafter = None if mode == "ar" else tiny_drafter(tmp_path, model)
    budget = None if mode == "ar" else "half"
    with dscale.attach(model, drafter, mode=mode, budget=budget, prefill_chunk=192):
        for lengths in ([1], [63, 64, 65], [128, 700, 127, 129], [9] * 20):
            inputs = left_padded([prompt(n) for n in lengths], pad=0)
            got = model.generate(**inputs, max_new_tokens=6)
            assert torch.equal(got, plain(plain_model, **inputs, max_new_tokens=6)), lengths


def test_a_prompt_without_finite_logits_spoils_no_other(as_on_a_gpu: None) -> None:
    """Its rows behind the prompt leave NaN in the scratch page. The next prompt's first chunk is
    what is left of a pass; where that is no whole tile, its last tile ends behind its pages."""
    want = plain(tiny_model(), torch.tensor([prompt(95)]), max_new_tokens=1)[0, 95:].tolist()
    model = tiny_model()
    model.get_input_embeddings().weight[POISON] = torch.nan
    with dscale.attach(model, pool_tokens=20 * PAGE, prefill_chunk=192) as spec:
        batcher = spec.engine.batcher
        running = Request(prompt=prompt(3), max_new_tokens=60)
        batcher.add([running])
        batcher.round()
        bad = Request(prompt=[POISON] * 164, max_new_tokens=5)
        good = Request(prompt=prompt(95), max_new_tokens=1)
        batcher.add([bad, good])
        while batcher.busy:
            batcher.round()
    assert [r.finish_reason for r in (running, bad, good)] == ["length", "error", "length"]
    assert good.tokens == want


def test_chunks_are_whole_tiles_but_the_last() -> None:
    cases = [(1, 64), (64, 64), (65, 64), (700, 412), (412, 412), (413, 412), (70, 60), (60, 60)]
    assert [next_length(*case) for case in cases] == [1, 64, 64, 384, 412, 384, 0, 60]


def test_chunks_of_one_pass() -> None:
    ragged = [512, *[1] * 40]
    # 2,048 rows: as many as the longest each, or the tiles they take.
    assert next_lengths(ragged, 512, 9999, padded=True) == [512, 1, 1, 1]
    assert next_lengths(ragged, 512, 9999, padded=False) == [512, *[1] * 24]
    assert next_lengths([700, 90, 5], 512, 512, padded=False) == [512]
    assert next_lengths([90, 700, 5], 512, 512, padded=False) == [90, 384, 5]
    assert next_lengths([5000, 1], 4096, 9999, padded=False) == [4096]
    assert next_lengths([], 512, 0, padded=False) == []


def test_products_are_split_before_a_guided_request_compiles_them(
    as_on_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the pass over prompts would be compiled again for the first plain request."""
    monkeypatch.setattr(dscale.compiled.target, "is_split", lambda weight: True)
    model = tiny_model()
    with dscale.attach(model, tiny_drafter(tmp_path, model), mode="dflash") as spec:
        core, request = spec.engine.batcher.core, Request(prompt=[0] * 9, max_new_tokens=9)
        core.make_room([request])
        core._host_stages([request])
        aids: list[Any] = [dict(layer.aids) for layer in core.target.layers]
        assert all(aids)
        core.stages(GREEDY)
        assert [layer.aids for layer in core.target.layers] == aids

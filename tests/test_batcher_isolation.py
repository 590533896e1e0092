"""Requests that run together stay apart: private alphabets, unwritten cache full of NaN, a request
whose own logits are not finite."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from soak import References
from tiny import VOCAB, prompt, tiny_drafter, tiny_model

import dscale
from bench.soak_load import WAIT, all_back
from dscale.batcher import Batcher
from dscale.compiled.kv import KVPool
from dscale.request import Request

MODES = ["ar", "dflash", "+tiles", "+budget", "dscale"]
ALPHABETS, LETTERS = 16, 31
POISON = VOCAB - 1
"""A token whose embedding is NaN in some tests."""


def babel() -> Any:
    """A model that answers in the alphabet of its context: token t belongs to alphabet t // 31,
    told by one hidden dimension each, which every layer leaves alone and the head lets decide."""
    model = tiny_model(hidden_size=48)
    alphabet = torch.clamp(torch.arange(VOCAB) // LETTERS, max=ALPHABETS - 1)
    mark = torch.nn.functional.one_hot(alphabet, ALPHABETS).float()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :ALPHABETS] = 0
        model.lm_head.weight[:, :ALPHABETS] = 100 * mark
        for layer in model.model.layers:
            # Attention alone carries the mark from the context: a mean over all it sees.
            layer.self_attn.o_proj.weight[:ALPHABETS] = 0
            layer.mlp.down_proj.weight[:ALPHABETS] = 0
        first = model.model.layers[0]
        model.model.embed_tokens.weight[:, :ALPHABETS] = 4 * mark
        first.self_attn.q_proj.weight.zero_()
        first.self_attn.k_proj.weight.zero_()
        value, out = first.self_attn.v_proj.weight, first.self_attn.o_proj.weight
        value.zero_()
        out.zero_()
        value[:ALPHABETS, :ALPHABETS] = torch.eye(ALPHABETS)
        for head in range(2):
            out[:ALPHABETS, head * 16 : head * 16 + 16] = torch.eye(ALPHABETS)
    return model


def letters(alphabet: int, length: int, rng: random.Random) -> list[int]:
    return [alphabet * LETTERS + rng.randrange(LETTERS) for _ in range(length)]


@pytest.mark.parametrize("mode", MODES)
def test_private_alphabets(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = babel(), random.Random(0)
    drafter = None if mode == "ar" else tiny_drafter(tmp_path, model)
    spec = dscale.attach(
        model, drafter, mode=mode, pool_tokens=40 * 128, max_concurrency=16, prefill_chunk=128
    )
    batcher, running, done = spec.engine.batcher, dict[int, Request](), 0
    slots: dict[int, set[int]] = {alphabet: set() for alphabet in range(ALPHABETS)}
    with torch.no_grad():
        while done < 3 * ALPHABETS:
            for alphabet in range(ALPHABETS):
                if alphabet not in running and rng.random() < 0.5:
                    ids = letters(alphabet, rng.choice([1, 20, 127, 140]), rng)
                    running[alphabet] = Request(prompt=ids, max_new_tokens=rng.randint(1, 30))
                    batcher.add([running[alphabet]])
            batcher.round()
            for alphabet, request in list(running.items()):
                slots[alphabet].add(request.slot)
                # The last alphabet has what is left of the vocabulary, too.
                assert {min(t // LETTERS, ALPHABETS - 1) for t in request.tokens} <= {alphabet}
                if rng.random() < 0.01:
                    batcher.cancel(request)
                if request.finished:
                    done += request.finish_reason == "length"
                    del running[alphabet]
        for request in running.values():
            batcher.cancel(request)
        while batcher.busy:
            batcher.round()
    assert max(map(len, slots.values())) > 3
    all_back(spec.engine)
    spec.detach()


def nan_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every slot with NaN that no request has been given."""
    made = KVPool.__init__

    def filled(self: KVPool, *arguments: Any) -> None:
        made(self, *arguments)
        for buffer in self.buffers():
            buffer.fill_(torch.nan)

    monkeypatch.setattr(KVPool, "__init__", filled)


@pytest.mark.parametrize("mode", MODES)
def test_unwritten_slots_reach_nobody(
    mode: Any,
    references: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nan_pools(monkeypatch)
    model = tiny_model()
    drafter = None if mode == "ar" else tiny_drafter(tmp_path, model)
    lengths = [1, 127, 128, 129, 260, 3, 9]
    with dscale.attach(
        model, drafter, mode=mode, pool_tokens=12 * 128, max_concurrency=3, capture=False
    ) as spec:
        found = spec.engine.generate_batch([prompt(n) for n in lengths], max_new_tokens=9)
        for result, length in zip(found.values(), lengths, strict=True):
            assert result.generated_tokens == references.text(length)[:9]
        workspace = spec.engine.batcher.core.workspace
        assert workspace is not None
        assert all(b.isnan().any() for b in workspace.pool.buffers())


FAILURES = [
    # Drafts may hold the poison too, and would fail requests that never say it.
    ("ar", "text", {}),
    *(
        (mode, "prompt", settings)
        for mode in MODES
        for settings in ({}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5})
    ),
]


@pytest.mark.parametrize(("mode", "where", "settings"), FAILURES)
def test_a_request_without_finite_logits_fails_alone(
    mode: Any,
    where: str,
    settings: dict[str, Any],
    references: References,
    tmp_path: Path,
) -> None:
    model = tiny_model()
    drafter = None if mode == "ar" else tiny_drafter(tmp_path, model)
    text = references.text(9)
    poison = POISON if where == "prompt" else next(
        t for t in text[3:] if t not in text[:3] and t not in prompt(9) + prompt(3)
        and t not in references.text(3)[:20] and t not in references.text(40)[:20] + prompt(40)
    )  # fmt: skip
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    bad = [*prompt(9)[:-1], POISON] if where == "prompt" else prompt(9)
    spec = dscale.attach(model, drafter, mode=mode, pool_tokens=4 * 128, max_concurrency=3)
    batcher: Batcher = spec.engine.batcher
    with torch.no_grad():
        for _ in range(3):
            good = [Request(prompt=prompt(n), max_new_tokens=20) for n in (3, 40, 3, 40)]
            failing = Request(prompt=bad, max_new_tokens=60, **settings)
            batcher.add([good[0], failing, *good[1:]])
            while batcher.busy:
                batcher.round()
            assert failing.finish_reason == "error"
            assert "model: expected finite logits" in str(failing.error)
            cut = 0 if where == "prompt" else text.index(poison) + 1
            assert failing.tokens == text[:cut]
            for request in good:
                assert request.tokens == references.text(len(request.prompt))[:20]
                assert request.finish_reason == "length"
    all_back(spec.engine)
    with pytest.raises(ArithmeticError, match="model: expected finite logits"):
        spec.model.generate(torch.tensor([bad]), max_new_tokens=60)
    assert (
        spec.model.generate(torch.tensor([prompt(3)]), max_new_tokens=5)[0, 3:].tolist()
        == (references.text(3)[:5])
    )
    spec.detach()


GUIDED: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 3, "do_sample": True, "seed": 5},
]


@pytest.mark.parametrize("settings", GUIDED)
@pytest.mark.parametrize("mode", ["ar", "dscale"])
def test_a_guided_request_without_finite_logits_fails_alone(
    mode: Any, settings: dict[str, Any], references: References, tmp_path: Path
) -> None:
    """Unless a processor mends them, which `remove_invalid_values` asks for."""
    model = tiny_model()
    drafter = None if mode == "ar" else tiny_drafter(tmp_path, model)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    bad = [*prompt(9)[:-1], POISON]
    with dscale.attach(model, drafter, mode=mode, pool_tokens=4 * 128, max_concurrency=3) as spec:
        engine, new = spec.engine, {"max_new_tokens": 20}
        for _ in range(2):
            good = [engine.submit(prompt(n), **new) for n in (3, 40)]
            failing = engine.submit(bad, **new, **settings)
            guided = engine.submit(prompt(9), **new, suppress_tokens=[POISON])
            mended = engine.submit(bad, **new, **settings, remove_invalid_values=True)
            result = failing.result(WAIT)
            assert (result.finish_reason, result.generated_tokens) == ("error", [])
            assert (
                result.error
                == "model: expected finite logits, got NaN or infinity behind 9 tokens"
            )
            for handle, length in zip((*good, guided), (3, 40, 9), strict=True):
                assert handle.result(WAIT).generated_tokens == references.text(length)[:20]
            assert mended.result(WAIT).finish_reason == "length"
        all_back(engine)

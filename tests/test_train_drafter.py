"""The drafter's training: its graph equals inference, its loss autograd, its resume itself."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from dense_drafter import dense_block
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import dscale

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import drafter_batches as batches
import drafter_generate as generation
import drafter_replay as replaying
from drafter_data import Corpus, Prompt
from drafter_features import FeatureCache, build_cache, feature_scale
from drafter_loss import soft_cross_entropy
from drafter_model import DrafterShape, TrainableDrafter, shape_for
from drafter_report import save
from drafter_steps import TrainOptions
from drafter_training import Trainer

VOCAB, BLOCK, TAPS, MASK = 61, 5, (0, 2), 7


@pytest.fixture(scope="module")
def target() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 5e3, "rope_type": "default"},
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def shape(target: Any) -> DrafterShape:
    return shape_for(target.config, num_layers=2, taps=TAPS, mask_token_id=MASK, block_size=BLOCK)


@pytest.fixture(scope="module")
def corpus(target: Any) -> Corpus:
    """Greedy responses to 12 prompts, and noisy copies of the same."""
    rng = np.random.default_rng(0)
    out = Corpus()
    with generation.transformers_generator(target, rows=12, longest=12) as ask:
        for index in range(12):
            tokens = rng.integers(8, VOCAB, rng.integers(4, 12))
            prompt = Prompt(id=str(index), source="s", split="train", text="", tokens=tokens)
            out.prompts.append(prompt)
        greedy = ask([p.tokens for p in out.prompts], 0.0, range(12), 20)
    for index, response in enumerate(greedy):
        noisy = np.where(rng.random(len(response)) < 0.2, 9, response)
        for temperature, tokens in ((0.0, response), (0.5, noisy)):
            out.prompt_of.append(index)
            out.temperature.append(temperature)
            out.looped.append(False)
            out.responses.append(tokens)
    return out


def cache_of(target: Any, corpus: Corpus, shape: DrafterShape, chosen: list[int]) -> FeatureCache:
    return build_cache(
        target,
        corpus,
        chosen,
        shape,
        num_labels=8,
        max_bytes=1e9,
        pass_tokens=100,
        name="test",
    )


@pytest.fixture(scope="module")
def cache(target: Any, corpus: Corpus, shape: DrafterShape) -> FeatureCache:
    return cache_of(target, corpus, shape, list(range(24)))


def text_of(corpus: Corpus, index: int) -> Tensor:
    prompt = corpus.prompts[corpus.prompt_of[index]].tokens
    return torch.from_numpy(np.concatenate((prompt, corpus.responses[index])))


def scrambled(shape: DrafterShape, cache: FeatureCache) -> TrainableDrafter:
    """A drafter whose every weight, norms included, differs from a fresh one's."""
    torch.manual_seed(5)
    drafter = TrainableDrafter(shape, longest=64)
    drafter.feature_scale.copy_(feature_scale(cache))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


def folded(drafter: TrainableDrafter) -> dict[str, Tensor]:
    weights = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    weights["fc.weight"] *= drafter.feature_scale
    return weights


@pytest.mark.parametrize("greedy", [False, True])
def test_training_pass_equals_inference_at_every_anchor(
    target: Any, corpus: Corpus, cache: FeatureCache, shape: DrafterShape, greedy: bool
) -> None:
    drafter, part = scrambled(shape, cache), np.asarray([3, 0, 16, 9])
    weights, reach = folded(drafter), batches.reach(cache, greedy=greedy)
    offset = batches.draw_anchors(cache, part, 6, np.random.default_rng(1))
    batch = batches.plan(
        cache, part, offset, reach, gamma=3.0, kl=0.25, greedy=greedy, pad_length=16, pad_rows=8
    )
    embed = target.model.embed_tokens.weight
    block = embed[MASK].expand(4, 6, BLOCK, -1).clone()
    block[:, :, 0] = embed[batch.anchor_token_BA]
    got = drafter(batch.feature_BSF, block, batch.anchor_BA, batch.row_R)
    expected = []
    for row, index in enumerate(part):
        text = text_of(corpus, index)
        size = len(corpus.prompts[corpus.prompt_of[index]].tokens)
        first = target(text[None]).logits[0].argmax(-1)
        for column in range(6):
            if offset[row, column] < 0:
                continue
            anchor = size + int(offset[row, column])
            dense = dense_block(weights, target, text, anchor, shape)
            for slot in range(1, BLOCK):
                place = anchor + slot
                path = range(anchor + 1, place)
                if place < len(text) and not (
                    greedy and any(first[i - 1] != text[i] for i in path)
                ):
                    label = int(first[place - 1] if greedy else text[place])
                    expected.append((row * 6 + column, slot, label, place, text, dense[slot]))
    assert batch.num_rows == len(expected) > 20
    for found, (flat, slot, label, place, text, dense) in enumerate(expected):
        assert int(batch.row_R[found]) == flat * BLOCK + slot
        torch.testing.assert_close(got[found], dense, atol=2e-5, rtol=2e-5)
        assert float(batch.weight_R[found]) == pytest.approx(np.exp(-(slot - 1) / 3.0))
        mass = torch.zeros(VOCAB).scatter_(0, batch.token_RK[found], batch.mass_RK[found])
        top, token = target(text[None, :place]).logits[0, -1].topk(8)
        soft = torch.zeros(VOCAB).scatter_(0, token, top.softmax(-1))
        if int(text[place]) not in token.tolist():
            soft[token[-1]] = 0
            soft /= soft.sum()
        wanted = 0.25 * soft
        wanted[label] += 0.75
        torch.testing.assert_close(mass, wanted, atol=2e-3, rtol=0)
    assert batch.weight_R[batch.num_rows :].abs().sum() == 0


def test_fused_loss_and_gradient_equal_autograd() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(37, 12, requires_grad=True)
    head, weight = torch.randn(VOCAB, 12), torch.rand(37)
    token = torch.stack([torch.randperm(VOCAB)[:6] for _ in range(37)])
    mass = torch.rand(37, 6).softmax(-1)
    label = torch.zeros(37, VOCAB).scatter_(1, token, mass)
    plain = (weight * F.cross_entropy(hidden @ head.T, label, reduction="none")).sum() / 7
    (wanted,) = torch.autograd.grad(plain, hidden)
    fused = soft_cross_entropy(hidden, head, token, mass, weight, rows=16) / 7
    (got,) = torch.autograd.grad(fused, hidden)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def make_trainer(target: Any, cache: FeatureCache, shape: DrafterShape, **changes: Any) -> Trainer:
    torch.manual_seed(1)
    drafter = TrainableDrafter(shape, longest=64)
    drafter.start_from(target.model.layers, target.model.norm.weight, copy=True)
    drafter.feature_scale.copy_(feature_scale(cache))
    values: dict[str, Any] = {
        "sequences": 8, "anchors": 4, "steps": 12, "lr": 3e-3, "warmup": 3, "log_every": 3,
        "validate_every": 6, "compile": False, "pad_length": 16, "loss_rows": 32,
    }  # fmt: skip
    options = TrainOptions(**(values | changes))
    head = target.lm_head.weight  # tied to the embedding
    return Trainer(Accelerator(cpu=True), drafter, head, head, cache, cache, options)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_equals_an_uninterrupted_one(
    target: Any, cache: FeatureCache, shape: DrafterShape, tmp_path: Path, optimizer: str
) -> None:
    whole = make_trainer(target, cache, shape, optimizer=optimizer)
    (tmp_path / "whole").mkdir()
    assert whole.run(tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    first = make_trainer(target, cache, shape, optimizer=optimizer, stop_seconds=0.0)
    assert not first.run(tmp_path / "parts")
    assert first.progress.step == 3
    second = make_trainer(target, cache, shape, optimizer=optimizer)
    torch.manual_seed(99)
    assert second.resume(tmp_path / "parts")
    assert second.run(tmp_path / "parts")
    for name, value in whole.own.state_dict().items():
        assert torch.equal(value, second.own.state_dict()[name]), name
    losses = [[h["loss"] for h in t.progress.history] for t in (whole, second)]
    assert losses[0] == losses[1]


def test_loss_falls_and_drafts_get_accepted(
    target: Any, cache: FeatureCache, shape: DrafterShape, tmp_path: Path
) -> None:
    trainer = make_trainer(target, cache, shape, steps=150, log_every=15, validate_every=150)
    before = trainer.replay(cache)["all"]["tokens_per_pass"]
    trainer.run(tmp_path)
    history = trainer.progress.history
    assert history[-1]["loss"] < 0.75 * history[0]["loss"]
    assert trainer.replay(cache)["all"]["tokens_per_pass"] > max(1.3, before + 0.2)


def test_training_time_sets_the_number_of_steps(
    target: Any, cache: FeatureCache, shape: DrafterShape, tmp_path: Path
) -> None:
    trainer = make_trainer(target, cache, shape, steps=0, train_seconds=1.0, log_every=2)
    assert trainer.run(tmp_path)
    assert trainer.progress.step == trainer.progress.total > 8


def test_walk_counts_passes_as_decoding_does(cache: FeatureCache) -> None:
    lead = np.zeros(len(cache.token_T), np.int64)
    size, rest = int(cache.response_length[0]), int((cache.response_length[1:] - 1).sum())
    lead[0], lead[3] = 2, 1
    got = replaying.walk(cache, lead, ["a"] + ["b"] * (cache.num_sequences - 1))
    # Passes: 3 tokens, 2 tokens, then one a pass.
    assert got["a"]["tokens_per_pass"] == pytest.approx((size - 1) / (2 + size - 6), abs=1e-4)
    assert got["b"]["tokens_per_pass"] == 1.0
    assert got["all"]["tokens"] == size - 1 + rest


def test_saved_folder_has_the_format_of_zlab(
    cache: FeatureCache, shape: DrafterShape, tmp_path: Path
) -> None:
    save(drafter := scrambled(shape, cache), tmp_path)
    d, e, h, k, f = 24, 4, 6, 2, 40
    wanted = {"fc.weight": [d, 2 * d], "hidden_norm.weight": [d], "norm.weight": [d]}
    for index in range(2):
        at = f"layers.{index}."
        wanted |= {at + "input_layernorm.weight": [d], at + "post_attention_layernorm.weight": [d]}
        wanted |= {at + "self_attn.q_proj.weight": [h * e, d]}
        wanted |= {at + f"self_attn.{n}_proj.weight": [k * e, d] for n in "kv"}
        wanted |= {at + "self_attn.o_proj.weight": [d, h * e]}
        wanted |= {at + f"self_attn.{n}_norm.weight": [e] for n in "qk"}
        wanted |= {at + f"mlp.{n}_proj.weight": [f, d] for n in ("gate", "up")}
        wanted |= {at + "mlp.down_proj.weight": [d, f]}
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(t.shape) for name, t in tensors.items()} == wanted
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    torch.testing.assert_close(
        tensors["fc.weight"].float(), folded(drafter)["fc.weight"], atol=0, rtol=2**-8
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    assert (config["block_size"], config["num_target_layers"], config["rope_theta"]) == (5, 4, 5e3)


def test_runtime_reads_the_saved_folder(
    target: Any, cache: FeatureCache, shape: DrafterShape, tmp_path: Path
) -> None:
    save(scrambled(shape, cache), tmp_path)
    prompt = torch.arange(8, 20)[None]
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    spec = dscale.attach(target, drafter=tmp_path, mode="dflash")
    try:
        assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False), plain)
    finally:
        spec.detach()


def test_bad_shapes_are_refused(target: Any) -> None:
    good: dict[str, Any] = {"num_layers": 1, "taps": (0,), "mask_token_id": 7, "block_size": 5}
    for change, name in (
        ({"taps": (3,)}, "taps"),
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
    ):
        with pytest.raises(ValueError, match=name):
            shape_for(target.config, **(good | change))

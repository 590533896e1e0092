"""Models and settings that attach refuses, before anything is changed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import random_predictor
from tiny import VOCAB, prompt, tiny_drafter, tiny_model
from torch import nn
from torch.nn.utils import prune
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import dscale
from dscale.compiled.drafter import Drafter

IDS = torch.tensor([prompt(9)])
NEW = 20


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_model())


def changed(change: Callable[[Any], Any], family: str = "llama") -> Any:
    """A tiny model after a change in place."""
    model = tiny_model(family)
    change(model)
    return model


def wrap_up(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj)


def wrap_head(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head)


def head_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.ones(VOCAB))


def missing_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


def other_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm = nn.LayerNorm(32)


def steered(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, given, out: out + 1)


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.model.layers[1].mlp.up_proj, "weight", 0.5)


def half_head(model: Any) -> None:
    model.lm_head.to(torch.bfloat16)


def on_meta(model_class: Any) -> Any:
    with torch.device("meta"):
        return model_class(tiny_model().config)


SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a name": ("str", lambda: "owner/name"),
    "nothing": ("NoneType", lambda: None),
    "a module": ("Linear", lambda: nn.Linear(2, 2)),
    "no head": ("LlamaModel", lambda: LlamaModel(tiny_model().config)),
    "classifier": (
        "LlamaForSequenceClassification",
        lambda: LlamaForSequenceClassification(tiny_model().config),
    ),
    "encoder-decoder": (
        "encoder-decoder",
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        ),
    ),
    "gpt2": (
        "gpt2",
        lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)),
    ),
    "mistral": (
        "mistral",
        lambda: MistralForCausalLM(
            MistralConfig(
                vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1,
            )
        ),
    ),
    "sliding window": (
        "sliding_attention",
        lambda: tiny_model("qwen2", **SLIDING),
    ),
    "gelu": ("gelu", lambda: tiny_model(hidden_act="gelu")),
    "float64": ("float64", lambda: tiny_model().double()),
    "two dtypes": ("bfloat16", lambda: changed(half_head)),
    "meta": ("meta", lambda: on_meta(type(tiny_model()))),
    "wrapped projection": ("layers.1.mlp.up_proj.*Sequential", lambda: changed(wrap_up)),
    "wrapped head": ("head.*Sequential", lambda: changed(wrap_head)),
    "head with bias": ("head.*bias", lambda: changed(head_bias)),
    "bias on some": ("none of layers.1.self_attn", lambda: changed(missing_bias, "qwen2")),
    "other norm": ("LayerNorm", lambda: changed(other_norm)),
    "hook": ("no forward hooks, .*'model.layers.1'", lambda: changed(steered)),
    "pruned": ("no forward hooks, .*layers.1.mlp.up_proj", lambda: changed(pruned)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_refused_stay_as_they_were(kind: str) -> None:
    reason, make = MODELS[kind]
    model = make()
    named = list(model.named_parameters()) if isinstance(model, nn.Module) else []
    before = [(name, p.untyped_storage().data_ptr()) for name, p in named]
    for mode in ("ar", None):
        with pytest.raises(ValueError, match=f"model: .*{reason}"):
            dscale.attach(model, mode=mode)
    assert [(name, p.untyped_storage().data_ptr()) for name, p in named] == before
    assert not named or "generate" not in vars(model)


SETTINGS: list[dict[str, Any]] = [
    {"mode": "fast"}, {"mode": "ar"}, {"mode": "dflash", "drafter": None}, {"budget": 0},
    {"budget": 17}, {"budget": True}, {"budget": 2.0}, {"budget": "most"}, {"budget": ()},
    {"budget": "half", "mode": "dflash"}, {"budget": "auto", "mode": "+tiles"},
    {"budget": 0, "mode": "+budget"}, {"budget_seed": "anchor"}, {"budget_seed": None},
    {"budget_seed": "paper", "mode": "dflash"}, {"mode": ""}, {"mode": []},
    {"predictor": "/nonexistent"}, {"predictor": "/tmp", "mode": "+tiles"},
    {"budget": 4, "drafter": None}, {"prefill_chunk": 100}, {"prefill_chunk": 0},
    {"pool_tokens": 0}, {"pool_tokens": 1.5}, {"capture": True}, {"capture": "yes"},
    {"compile_prefill": True}, {"compile_prefill": 1}, {"compile_prefill": True, "capture": False},
    {"pack_weights": 1}, {"drafter": {}}, {"drafter": 3}, {"drafter": "/nonexistent"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_that_are_refused(settings: dict[str, Any], drafter: Drafter) -> None:
    model = tiny_model()
    before = [p.untyped_storage().data_ptr() for p in model.parameters()]
    name = "drafter" if settings in ({"mode": "ar"}, SETTINGS[2]) else next(iter(settings))
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        dscale.attach(model, **{"drafter": drafter, **settings})
    assert "generate" not in vars(model)
    assert [p.untyped_storage().data_ptr() for p in model.parameters()] == before


def test_hooks_of_transformers_stay() -> None:
    """They are there after a call like this one, and only look."""
    model = tiny_model()
    model(IDS, output_hidden_states=True)
    model.enable_input_require_grads()
    want = model.generate(IDS, max_new_tokens=2)
    with dscale.attach(model):
        assert torch.equal(model.generate(IDS, max_new_tokens=2), want)


def test_a_predictor_made_for_another_drafter(drafter: Drafter, tmp_path: Path) -> None:
    model, other = tiny_model(), tiny_drafter(tmp_path / "drafter", tiny_model(), seed=1)
    before = [p.untyped_storage().data_ptr() for p in model.parameters()]
    folder = random_predictor(other, tmp_path / "predictor")
    for mode in ("dscale", "+budget"):
        with pytest.raises(ValueError, match="predictor: expected one made for the drafter"):
            dscale.attach(model, drafter, predictor=folder, mode=mode)
    with pytest.raises(ValueError, match="predictor: expected None in mode 'dflash'"):
        dscale.attach(model, other, predictor=folder, mode="dflash")
    assert "generate" not in vars(model)
    assert [p.untyped_storage().data_ptr() for p in model.parameters()] == before
    with dscale.attach(model, other, predictor=folder):
        assert "generate" in vars(model)


def test_a_drafter_of_another_dtype_or_model(drafter: Drafter) -> None:
    for model in (tiny_model().to(torch.bfloat16), tiny_model(hidden_size=64), tiny_model("qwen3",
                  vocab_size=VOCAB + 1), tiny_model(num_hidden_layers=4)):  # fmt: skip
        with pytest.raises(ValueError, match="drafter"):
            dscale.attach(model, drafter)
        assert "generate" not in vars(model)


def test_a_drafter_needs_a_model_in_which_it_does_not_overflow(drafter: Drafter) -> None:
    model = tiny_model().to(torch.float16)
    for given in (drafter, copy.deepcopy(drafter).to(torch.float16), dscale.demo.drafter()):
        with pytest.raises(ValueError, match=r"^model: expected .* got torch.float16"):
            dscale.attach(model, given)
    with dscale.attach(model):
        assert model.generate(IDS, max_new_tokens=2).shape == (1, IDS.shape[1] + 2)

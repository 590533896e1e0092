"""Models whose forward is not the one that the target decoder was written after."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny import FAMILIES, prompt, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama

import dscale

IDS = torch.tensor([prompt(9)])


def of_subclass(part: str) -> Callable[[Any], None]:
    """Gives a part of a model a class derived from its own, with a forward of its own."""

    def derive(model: Any) -> None:
        module = model.get_submodule(part)
        kind = type(module)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return kind.forward(self, *args, **kwargs)

        module.__class__ = type("Own", (kind,), {"forward": forward})

    return derive


def patched(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def wrapped_around(model: Any) -> None:
    own = model.forward
    model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))


def gemma_norm(model: Any) -> None:
    model.model.norm = GemmaRMSNorm(32)


class Steering(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return output + 1


def steered_by_accelerate(model: Any) -> None:
    add_hook_to_module(model.model.layers[1].mlp, ModelHook())
    add_hook_to_module(model.model.layers[1].mlp, Steering(), append=True)


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "subclass": ("Own's from .*test_forwards' on 'it'", of_subclass("")),
    "decoder": ("Own's from .* on 'model'", of_subclass("model")),
    "layer": ("Own's from .* on 'model.layers.1'", of_subclass("model.layers.1")),
    "attention": ("Own's .* 'model.layers.1.self_attn'", of_subclass("model.layers.1.self_attn")),
    "mlp": ("Own's .* on 'model.layers.1.mlp'", of_subclass("model.layers.1.mlp")),
    "embedding": ("Own's .* on 'model.embed_tokens'", of_subclass("model.embed_tokens")),
    "rotary": ("Own's .* on 'model.rotary_emb'", of_subclass("model.rotary_emb")),
    "patched": ("LlamaMLP's from .*test_forwards' on 'model.layers.1.mlp'", patched),
    "wrapped": ("LlamaForCausalLM's from .*test_forwards' on 'it'", wrapped_around),
    "norm of gemma": ("GemmaRMSNorm's from .*gemma.* on 'model.norm'", gemma_norm),
    "hook of accelerate": ("LlamaMLP's from .*test_forwards'", steered_by_accelerate),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_other_forwards_are_refused(kind: str) -> None:
    (reason, change), model = CHANGES[kind], tiny_model()
    change(model)
    before = [p.untyped_storage().data_ptr() for p in model.parameters()]
    expected = "model: expected the forward that transformers has for llama, got "
    with pytest.raises(ValueError, match=f"^{expected}{reason}"):
        dscale.attach(model)
    assert [p.untyped_storage().data_ptr() for p in model.parameters()] == before
    assert "generate" not in vars(model)


def test_another_activation() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    with pytest.raises(ValueError, match=r"^model: expected .*act_fn to be SiLU, got GELU"):
        dscale.attach(model)
    model.model.layers[1].mlp.act_fn = nn.SiLU()
    dscale.attach(model).detach()


def test_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = tiny_model(), modeling_llama.LlamaAttention.forward
    forward = lambda self, *args, **kwargs: own(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(ValueError, match=r"^model: .*forward .*on 'model.layers.0.self_attn'"):
        dscale.attach(model)
    monkeypatch.undo()
    dscale.attach(model).detach()


class Derived(LlamaForCausalLM):
    """Everything a subclass may have that no forward of the decoder would see."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mlp = Value()
        self.model.layers[1].self_attn.probe = Value()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


class Value(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def derived(model: Any) -> Any:
    made: Any = Derived(model.config).eval()
    made.load_state_dict(model.state_dict())
    made.generation_config = model.generation_config
    return made


def with_hub_kernels(model: Any) -> Any:
    """As kernels.kernelize leaves it."""
    for module in model.modules():
        if hasattr(type(module), "kernel_layer_name"):
            module.forward = MethodType(lambda self, x: type(self).forward(self, x), module)
    model._use_kernels = True
    return model


def compiled(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    model.model.layers[1].compile(backend="eager")
    return model


STAYING: dict[str, Callable[[Any], Any]] = {
    "subclass": derived,
    "dispatched": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "dispatched twice": lambda model: add_hook_to_module(
        dispatch_model(model, {"": "cpu"}, force_hooks=True), ModelHook(), append=True
    ),
    "compiled": compiled,
    "hub kernels": with_hub_kernels,
}


@pytest.mark.parametrize("kind", STAYING)
def test_forwards_that_compute_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "kernel_layer_name"
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, kernel, "RMSNorm", raising=False)
    want = tiny_model().generate(IDS, max_new_tokens=5)
    model = STAYING[kind](tiny_model())
    with dscale.attach(model):
        assert torch.equal(model.generate(IDS, max_new_tokens=5), want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_models_of_any_attention(family: str, attention: str) -> None:
    model = tiny_model(family)
    other = AutoModelForCausalLM.from_config(model.config, attn_implementation=attention)
    other.eval().load_state_dict(model.state_dict())
    with dscale.attach(model), dscale.attach(other):
        want = model.generate(IDS, max_new_tokens=5)
        assert torch.equal(other.generate(IDS, max_new_tokens=5), want)

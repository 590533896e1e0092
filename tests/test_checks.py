"""Models that were changed after they were built, so that their own forward computes something
else than their config says: each is refused by name, or followed."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import plain, prompt, tiny_model
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import dscale

IDS = torch.tensor([prompt(9)])


def layer(model: Any) -> Any:
    return model.model.layers[1]


class Odd(torch.Tensor):
    """As a quantized or a distributed one."""


def odd_weight(model: Any) -> None:
    linear = layer(model).mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Odd))


def doubled(module: Any, *states: Any, **kwargs: Any) -> Any:
    return 2 * sdpa_attention_forward(module, *states, **kwargs)[0], None


def other_attention(model: Any) -> None:
    model.set_attn_implementation("doubled")


def called_otherwise(model: Any) -> None:
    mlp = layer(model).mlp
    mlp.__class__ = type("Own", (type(mlp),), {"__call__": lambda self, x: 0 * x})


def compiled_around(model: Any) -> None:
    layer(model).mlp.forward = lambda x: 0 * x
    model.model.layers[1] = torch.compile(layer(model), backend="eager")


def dropping(model: Any) -> None:
    layer(model).train().self_attn.attention_dropout = 0.5


def repeated(model: Any) -> None:
    model.model.layers[2] = copy.deepcopy(layer(model))


def same_weight(model: Any) -> None:
    layer(model).mlp.gate_proj.weight = model.model.layers[2].mlp.gate_proj.weight


def of(path: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute of the model, a module or its config."""

    def change(model: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            model = getattr(model, parent) if not parent.isdigit() else model[int(parent)]
        setattr(model, name, value)

    return change


ATTENTION = "model.layers.1.self_attn"
FORWARD = "the forward that transformers has for llama, got"
CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "scale": ("layers.1.self_attn.scaling 0.25, got 0.5", of(f"{ATTENTION}.scaling", 0.5)),
    "groups": (".*num_key_value_groups 2, got 1", of(f"{ATTENTION}.num_key_value_groups", 1)),
    "causal": (".*is_causal True, got False", of(f"{ATTENTION}.is_causal", False)),
    "causal by config": ("causal attention", of("config.is_causal", False)),
    "window": ("sliding_window None, got 4", of("config.sliding_window", 4)),
    "chunks": ("attention_chunk_size None, got 4", of("config.attention_chunk_size", 4)),
    "heads": (r".*q_proj.weight \(32, 32\)", of("config.num_attention_heads", 2)),
    "epsilon": ("one epsilon", of("model.layers.1.input_layernorm.variance_epsilon", 0.5)),
    "epsilon of torch": ("one epsilon .*None", of("model.norm", nn.RMSNorm(32))),
    "norm": ("norm to have a weight", of("model.norm", nn.RMSNorm(32, elementwise_affine=False))),
    "max_norm": ("embed_tokens without max_norm", of("model.embed_tokens.max_norm", 0.5)),
    "dropout": ("layers.1.self_attn.attention_dropout in training", dropping),
    "head": (r".*32\), got \(510, 32\)", of("lm_head", nn.Linear(32, 510, bias=False))),
    "subclass": (r"model.layers.1.mlp.down_proj.weight .*plain tensor, got Odd", odd_weight),
    "shared": ("no weight in two projections", same_weight),
    "repeated": ("a layer_idx of its own", repeated),
    "attention": ("transformers' own doubled, got one from .*test_checks'", other_attention),
    "call": (f"{FORWARD} Own's", called_otherwise),
    "call that is compiled": (
        f"{FORWARD} LlamaMLP's", of("model.layers.1.mlp._compiled_call_impl", lambda x: 0 * x)
    ),
    "in what is compiled": (f"{FORWARD} LlamaMLP's .*'model.layers.1._orig_mod", compiled_around),
    "of torch": (f"{FORWARD} one of another", of("model.layers.1.mlp.forward", F.relu)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def attentions() -> Iterator[None]:
    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", sdpa_mask)
    yield
    AttentionInterface._global_mapping.pop("doubled")
    AttentionMaskInterface._global_mapping.pop("doubled")


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_models_are_refused(kind: str) -> None:
    (reason, change), model = CHANGES[kind], tiny_model()
    change(model)
    before = [p.untyped_storage().data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"^model: expected {reason}"):
        dscale.attach(model)
    assert [p.untyped_storage().data_ptr() for p in model.parameters()] == before


def test_an_activation_that_is_no_module() -> None:
    model = tiny_model()
    mlp = layer(model).mlp
    del mlp.act_fn
    mlp.act_fn = F.gelu
    with pytest.raises(ValueError, match=r"^model: expected layers.1.mlp.act_fn .*silu.*gelu"):
        dscale.attach(model)
    mlp.act_fn = F.silu
    dscale.attach(model).detach()


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "create_causal_mask"])
def test_a_patched_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = tiny_model(), getattr(modeling_llama, name)
    monkeypatch.setattr(modeling_llama, name, lambda *args, **kwargs: own(*args, **kwargs))
    with pytest.raises(ValueError, match=f"^model: expected transformers' own {name}, got one"):
        dscale.attach(model)


def test_a_patched_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny_model(), tiny_model()
    model.set_attn_implementation("sdpa")
    other.set_attn_implementation("eager")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", doubled)
    with pytest.raises(ValueError, match=r"^model: expected transformers' own sdpa, got one"):
        dscale.attach(model)
    dscale.attach(other).detach()
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    with pytest.raises(ValueError, match=r"^model: expected transformers' own eager, got one"):
        dscale.attach(other)


def test_the_forward_of_a_copied_module_is_its_own() -> None:
    model = tiny_model()
    model.forward = torch.compile(model.forward, backend="eager")
    dscale.attach(model).detach()
    copied = copy.deepcopy(model)  # whose forward is still the first one's
    with pytest.raises(ValueError, match=rf"^model: expected {FORWARD} one of another module"):
        dscale.attach(copied)


def test_global_hooks() -> None:
    model = tiny_model()
    hook = torch_module.register_module_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"^model: expected no forward hooks, got one on every"):
        dscale.attach(model)
    hook.remove()
    dscale.attach(model).detach()


@pytest.mark.parametrize("name", ["OptimizedModule", "DataParallel"])
def test_wrapped_models_say_where_the_model_is(name: str) -> None:
    model = tiny_model()
    optimized = name == "OptimizedModule"
    wrapped: Any = torch.compile(model, backend="eager") if optimized else nn.DataParallel(model)
    inner = "_orig_mod" if optimized else "module"
    with pytest.raises(ValueError, match=f"^model: .*got {name}, whose {inner} may be one"):
        dscale.attach(wrapped)
    with dscale.attach(getattr(wrapped, inner)):
        assert "generate" in vars(model)


def epsilon_of_config(model: Any) -> None:
    model.config.rms_norm_eps = 0.5


def epsilon_of_modules(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 2


def cut_layers(model: Any) -> None:
    del model.model.layers[1]


FOLLOWED = [epsilon_of_config, epsilon_of_modules, fewer_layers, cut_layers]


@pytest.mark.parametrize("change", FOLLOWED)
def test_what_the_modules_say_goes(change: Callable[[Any], None]) -> None:
    model = tiny_model()
    change(model)
    want = plain(model, IDS, max_new_tokens=12)
    with dscale.attach(model):
        assert torch.equal(model.generate(IDS, max_new_tokens=12), want)

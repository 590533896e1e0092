"""What a transformers model must be, so that the target decoder computes what it does.

Everything is checked before a tensor moves and refused with a ValueError that names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import isclose
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from dscale.forwards import check_forwards, check_functions

FAMILIES = ("llama", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not change with the length of a text."""

FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module"}
WRAPPERS |= dict.fromkeys(("DistributedDataParallel", "FullyShardedDataParallel"), "module")


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError, before anything moves, for a model that the target decoder cannot run or
    whose forward computes something else.

    Those are encoder-decoder models, families outside `FAMILIES`, models without an LM head or
    with a bias there, sliding windows, attention that is not causal, activations other than SiLU,
    rotary embeddings that change with length, parameters on several devices or in several dtypes,
    projections that are not plain `nn.Linear`, norms that are not RMS norms of one epsilon,
    attention of other sizes or scale than the config says, dropout in training mode, forward
    hooks, and a `forward` or a function it calls that is not transformers' own."""
    _check_kind(model)
    _check_config(model.config)
    _check_placement(model)
    _check_modules(model)
    check_hooks(model)
    check_forwards(model)
    _check_layers(model)
    check_functions(model)


def layers_of(model: Any) -> Sequence[Any]:
    """The layers that the model's forward runs."""
    layers: Sequence[Any] = model.model.layers[: model.config.num_hidden_layers]
    return layers


def head_dim_of(config: Any) -> int:
    """Numbers of a head."""
    given: int | None = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def norm_eps(model: Any) -> float:
    """The epsilon of the model's norms, as the modules have it: a config may be changed later."""
    eps: float = _eps(model.model.norm)
    return eps


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _check_kind(model: PreTrainedModel) -> None:
    """Refuse by its config what is no decoder of a known family."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        inner = WRAPPERS.get(kind)
        hint = "" if inner is None else f", whose {inner} may be one"
        raise ValueError(f"model: expected a transformers PreTrainedModel, got {kind}{hint}")
    config: Any = model.config
    family = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model: expected a decoder-only model, got encoder-decoder {family!r}")
    if family not in FAMILIES:
        raise ValueError(f"model: expected model_type in {FAMILIES}, got {family!r}")
    if model.get_output_embeddings() is None:
        raise ValueError(f"model: expected a causal language model with an LM head, got {kind}")
    rope_type = getattr(model.model.rotary_emb, "rope_type", "default")
    if rope_type not in STATIC_ROPE:
        raise ValueError(f"model: expected rope_type in {STATIC_ROPE}, got {rope_type!r}")


def _check_config(config: Any) -> None:
    """Refuse what a config says of masks and activations."""
    kinds = getattr(config, "layer_types", None)
    windows = [kind for kind in kinds or [] if kind != "full_attention"]
    if windows:
        raise ValueError(f"model: expected layer_types all 'full_attention', got {windows[0]!r}")
    # Without layer_types transformers' cache goes by these, in whatever family.
    for name in ("sliding_window", "attention_chunk_size") if kinds is None else ():
        if getattr(config, name, None) is not None:
            raise ValueError(f"model: expected {name} None, got {getattr(config, name)!r}")
    if not getattr(config, "is_causal", True):
        raise ValueError("model: expected causal attention, got is_causal False in its config")
    if config.hidden_act != "silu":
        raise ValueError(f"model: expected hidden_act 'silu', got {config.hidden_act!r}")


def _check_placement(model: PreTrainedModel) -> None:
    """Refuse parameters on several devices or in several dtypes."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise ValueError(
            f"model: expected all parameters on one device, got {sorted(map(str, devices))}"
        )
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        raise ValueError(
            "model: expected one dtype of float32, bfloat16, float16, "
            f"got {sorted(map(str, dtypes))}"
        )


def _check_modules(model: PreTrainedModel) -> None:
    """Refuse modules that do something else than the target decoder would."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        got = type(head).__name__ + (" with bias" if type(head) is nn.Linear else "")
        raise ValueError(f"model: expected the LM head to be nn.Linear without bias, got {got}")
    decoder: Any = model.model
    shapes = [tuple(module.weight.shape) for module in (head, decoder.embed_tokens)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"model: expected an LM head of the embedding's shape {shapes[1]}, got {shapes[0]}"
        )
    for name, module in decoder.named_modules():
        kind = type(module).__name__
        if name.endswith("_proj") and type(module) is not nn.Linear:
            raise ValueError(f"model: expected {name} to be nn.Linear, got {kind}")
        if name.endswith("norm") and not kind.endswith("RMSNorm"):
            raise ValueError(f"model: expected {name} to be an RMS norm, got {kind}")
        if name.endswith("norm") and getattr(module, "weight", None) is None:
            raise ValueError(f"model: expected {name} to have a weight, got none")
        if name.endswith("act_fn") and not isinstance(module, (nn.SiLU, type(ACT2FN["silu"]))):
            raise ValueError(f"model: expected {name} to be SiLU, got {kind}")
    if decoder.embed_tokens.max_norm is not None:
        raise ValueError("model: expected embed_tokens without max_norm, got one")
    for name, parameter in model.named_parameters():
        if type(parameter.data) is not Tensor:  # quantized or spread over devices
            kind = type(parameter.data).__name__
            raise ValueError(f"model: expected {name} to be a plain tensor, got {kind}")


def check_hooks(model: PreTrainedModel) -> None:
    """Refuse forward hooks, which nobody would call: one may change what a layer computes, or set
    its weights. Those of transformers, which stay after some of its calls, only look."""
    everywhere = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    for hook in chain.from_iterable(hooks.values() for hooks in everywhere):
        _check_hook(hook, "every module")
    for name, module in model.named_modules():
        for hook in chain(module._forward_pre_hooks.values(), module._forward_hooks.values()):
            _check_hook(hook, repr(name or "it"))


def _check_hook(hook: Any, place: str) -> None:
    if not str(getattr(hook, "__module__", "")).startswith("transformers."):
        raise ValueError(f"model: expected no forward hooks, got one on {place}")


def _check_layers(model: PreTrainedModel) -> None:
    """Refuse layers that are not what the config says, or that share what is fused."""
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        for name, got, want in _properties(model.config, layer):
            if got != want:
                raise ValueError(f"model: expected layers.{index}.{name} {want}, got {got}")
        for part, names in FUSED:
            biases = {getattr(getattr(layer, part), name).bias is None for name in names}
            if len(biases) > 1:
                raise ValueError(
                    f"model: expected a bias in all or none of layers.{index}.{part}.{names}"
                )
    weights = [
        getattr(getattr(layer, part), name).weight
        for layer in layers
        for part, names in FUSED
        for name in names
    ]
    if len({id(weight) for weight in weights}) < len(weights):
        raise ValueError("model: expected no weight in two projections, got a shared one")
    if len({layer.self_attn.layer_idx for layer in layers}) < len(layers):
        raise ValueError("model: expected a layer_idx of its own in every layer, got one twice")
    eps = {_eps(norm) for norm in _norms(model)}
    if len(eps) > 1 or None in eps:
        raise ValueError(f"model: expected one epsilon in all norms, got {sorted(map(str, eps))}")


def _norms(model: Any) -> Iterator[Any]:
    yield model.model.norm
    for layer in layers_of(model):
        for name, module in layer.named_modules():
            if name.endswith("norm"):
                yield module


def _properties(config: Any, layer: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and expected value of what a layer's attention and activation go by."""
    attention, activation = layer.self_attn, layer.mlp.act_fn
    size, hidden = head_dim_of(config), config.hidden_size
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    for name, shape in (*shapes.items(), ("o", (hidden, queries))):
        weight = getattr(attention, f"{name}_proj").weight
        yield f"self_attn.{name}_proj.weight", tuple(weight.shape), shape
    yield "self_attn.head_dim", attention.head_dim, size
    yield "self_attn.num_key_value_groups", attention.num_key_value_groups, queries // keys
    scaling = attention.scaling
    yield "self_attn.scaling", scaling, scaling if isclose(scaling, size**-0.5) else size**-0.5
    yield "self_attn.is_causal", attention.is_causal, True
    dropout = attention.attention_dropout if attention.training else 0.0
    yield "self_attn.attention_dropout in training mode", dropout, 0.0
    if not isinstance(activation, nn.Module):
        yield "mlp.act_fn", activation, F.silu

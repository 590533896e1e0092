"""Loading a transformers model and building the target decoder that shares its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dscale.compiled.target import Target, TargetConfig

FAMILIES = ("llama", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not change with the length of a text."""

FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Load a causal language model through accelerate: empty init, shards straight to the device.

    `device` defaults to the first CUDA device, else the CPU. Raises what `from_pretrained` raises.
    """
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(name_or_path), dtype=dtype, device_map={"": str(device)}
    )
    return model.eval()


def target_config(model: PreTrainedModel) -> TargetConfig:
    """Read the decoder's shape from a loaded model, refusing by name what the target decoder
    cannot run.

    Raises ValueError for encoder-decoder models, families outside `FAMILIES`, models without an LM
    head or with a bias there, sliding windows, activations other than SiLU, rotary embeddings that
    change with length, parameters on several devices or in several dtypes, projections that are
    not plain `nn.Linear`, norms that are not RMS norms, and forward hooks."""
    _check_kind(model)
    _check_placement(model)
    _check_modules(model)
    _check_hooks(model)
    config: Any = model.config
    head_dim = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return TargetConfig(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        rms_eps=config.rms_norm_eps,
        rope_scaling=float(getattr(model.model.rotary_emb, "attention_scaling", 1.0)),
        max_positions=config.max_position_embeddings,
    )


def _check_kind(model: PreTrainedModel) -> None:
    """Refuse by its config what is no decoder of a known family."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a transformers PreTrainedModel, got {kind}")
    config: Any = model.config
    family = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"model: expected a decoder-only model, got encoder-decoder {family!r}")
    if family not in FAMILIES:
        raise ValueError(f"model: expected model_type in {FAMILIES}, got {family!r}")
    if model.get_output_embeddings() is None:
        raise ValueError(f"model: expected a causal language model with an LM head, got {kind}")
    windows = [
        kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"
    ]
    if windows:
        raise ValueError(f"model: expected layer_types all 'full_attention', got {windows[0]!r}")
    if config.hidden_act != "silu":
        raise ValueError(f"model: expected hidden_act 'silu', got {config.hidden_act!r}")
    rope_type = getattr(model.model.rotary_emb, "rope_type", "default")
    if rope_type not in STATIC_ROPE:
        raise ValueError(f"model: expected rope_type in {STATIC_ROPE}, got {rope_type!r}")


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
    for name, module in decoder.named_modules():
        kind = type(module).__name__
        if name.endswith("_proj") and type(module) is not nn.Linear:
            raise ValueError(f"model: expected {name} to be nn.Linear, got {kind}")
        if name.endswith("norm") and not kind.endswith("RMSNorm"):
            raise ValueError(f"model: expected {name} to be an RMS norm, got {kind}")
    for index, layer in enumerate(decoder.layers):
        for part, names in FUSED:
            biases = {getattr(getattr(layer, part), name).bias is None for name in names}
            if len(biases) > 1:
                raise ValueError(
                    f"model: expected a bias in all or none of layers.{index}.{part}.{names}"
                )


def _check_hooks(model: PreTrainedModel) -> None:
    """Refuse forward hooks, which nobody would call: one may change what a layer computes, or set
    its weights. Those of transformers, which stay after some of its calls, only look."""
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                raise ValueError(f"model: expected no forward hooks, got one on {name or 'it'!r}")


def build_target(model: PreTrainedModel, taps: tuple[int, ...] = ()) -> Target:
    """Build the target over a loaded model's weights, in place and without a second copy.

    Fused projections become the storage and the module's own parameters become views of it;
    `unfuse` gives each parameter its own storage again. Everything is checked first, so a refusal
    leaves the model untouched."""
    config = target_config(model)
    bad = [tap for tap in taps if not 0 <= tap < config.num_layers - 1]
    if bad:
        raise ValueError(f"taps: expected layer ids in 0..{config.num_layers - 2}, got {bad}")
    decoder: Any = model.model
    with torch.no_grad():
        layers = [_layer_tensors(layer) for layer in decoder.layers]
    return Target(
        config,
        embedding=decoder.embed_tokens.weight,
        layers=layers,
        norm=decoder.norm.weight,
        head=model.get_output_embeddings().weight,
        inv_freq=decoder.rotary_emb.inv_freq,
        taps=taps,
    )


def _layer_tensors(layer: Any) -> dict[str, Tensor | None]:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse([getattr(attention, name) for name in FUSED[0][1]])
    gate_up, gate_up_bias = _fuse([getattr(mlp, name) for name in FUSED[1][1]])
    return {
        "input_norm": layer.input_layernorm.weight,
        "qkv": qkv,
        "qkv_bias": qkv_bias,
        "q_norm": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        "k_norm": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        "o": attention.o_proj.weight,
        "o_bias": attention.o_proj.bias,
        "post_norm": layer.post_attention_layernorm.weight,
        "gate_up": gate_up,
        "gate_up_bias": gate_up_bias,
        "down": mlp.down_proj.weight,
        "down_bias": mlp.down_proj.bias,
    }


def _fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Stack the linears' weights (and biases) and turn each parameter into a view of the stack."""

    def stack(parameters: Sequence[Tensor]) -> Tensor:
        fused = torch.cat([p.data for p in parameters])
        for parameter, view in zip(
            parameters, torch.split(fused, [p.shape[0] for p in parameters]), strict=True
        ):
            parameter.data = view
        return fused

    weight = stack([linear.weight for linear in linears])
    biased = [linear.bias for linear in linears if linear.bias is not None]
    return weight, stack(biased) if len(biased) == len(linears) else None


def unfuse(model: PreTrainedModel) -> None:
    """Give every fused parameter its own storage again, wherever the user has put it since."""
    fused = {name for _, names in FUSED for name in names}
    for name, parameter in model.named_parameters():
        shared = parameter.untyped_storage().nbytes() > parameter.nbytes
        if shared and fused & set(name.split(".")):
            parameter.data = parameter.data.clone()

"""Loading a transformers model and building the target decoder that shares its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dscale.checks import FUSED, check_model, head_dim_of, layers_of, norm_eps
from dscale.compiled.target import Target, TargetConfig


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
    """Read the decoder's shape from a loaded model. Raises ValueError naming what the target
    decoder cannot run or would not compute alike (see `checks.check_model`)."""
    check_model(model)
    config: Any = model.config
    return TargetConfig(
        family=config.model_type,
        num_layers=len(layers_of(model)),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(config),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        rms_eps=norm_eps(model),
        rope_scaling=float(getattr(model.model.rotary_emb, "attention_scaling", 1.0)),
        max_positions=config.max_position_embeddings,
    )


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
        layers = [_layer_tensors(layer) for layer in layers_of(model)]
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

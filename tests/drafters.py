"""Random drafter checkpoints in z-lab's format, and targets they fit."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dscale.compiled.target import TargetConfig


def drafter_json(**changes: Any) -> dict[str, Any]:
    """The config.json of a tiny drafter of a 6-layer target; a change to None drops the key."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {"mask_token_id": 59, "target_layer_ids": [1, 3]},
        "num_target_layers": 6,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * changes.get("num_hidden_layers", 2),
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 60,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    merged = raw | changes
    return {key: value for key, value in merged.items() if not (key in changes and value is None)}


def nested(**changes: Any) -> dict[str, Any]:
    """`drafter_json` with changes to its `dflash_config`; a change to None drops the key."""
    inner = drafter_json()["dflash_config"] | changes
    return drafter_json(dflash_config={k: v for k, v in inner.items() if v is not None})


def drafter_tensors(
    raw: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Random weights of z-lab's names and shapes, scaled to keep attention far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, size = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = raw["num_attention_heads"] * size, raw["num_key_value_heads"] * size
    taps = len(raw["dflash_config"]["target_layer_ids"])
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, taps * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for index in range(raw["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}

    def draw(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return (noise * shape[1] ** -0.5 if len(shape) == 2 else 1 + 0.2 * noise).to(dtype)

    return {f"{name}.weight": draw(shape) for name, shape in shapes.items()}


def write_drafter(
    folder: Path,
    raw: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a drafter folder, random where nothing is given, and return it."""
    raw = drafter_json() if raw is None else raw
    tensors = drafter_tensors(raw, seed=seed, dtype=dtype) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fitting_target(raw: dict[str, Any], **changes: Any) -> TargetConfig:
    """The shape of a target that a drafter's config.json fits."""
    shape: dict[str, Any] = {
        "family": "llama",
        "num_layers": raw["num_target_layers"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": raw["vocab_size"],
        "rms_eps": 1e-6,
        "rope_scaling": 1.0,
        "max_positions": 512,
    }
    return TargetConfig(**(shape | changes))

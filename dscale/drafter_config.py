"""A drafter's config.json: reading, writing, and whether the drafter fits a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dscale.checks import STATIC_ROPE
from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.drafter import DrafterConfig
from dscale.compiled.target import TargetConfig
from dscale.config import is_int
from dscale.drafter_kinds import (
    ARCHITECTURE,
    NEUTRAL,
    SHAPE_KEYS,
    refusal,
    refuse_other_kinds,
)

DEFAULT_BLOCK_SIZE = 16
"""Block size of a checkpoint that names none, as in z-lab's own model class."""


class Tokenizer(Protocol):
    """The one method that resolving a `mask_token` string needs."""

    def convert_tokens_to_ids(self, tokens: str) -> Any: ...


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the tapped layers of a checkpoint that lists none: one per draft layer, spread out.

    z-lab's checkpoint convention, with Python's rounding: `(36, 5)` gives 1, 9, 17, 25, 33.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def parse_config(raw: Mapping[str, Any], *, tokenizer: Tokenizer | None = None) -> DrafterConfig:
    """Read a config.json in z-lab's format, refusing what would change the drafted tokens.

    `dflash_config` wins over the top level, as in z-lab's code. `tokenizer` resolves a
    `mask_token` string. Raises ValueError naming the key, what is supported and what came.
    """
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise refusal("dflash_config", "an object", nested)
    refuse_other_kinds(raw, nested)
    shape = {key: _positive(raw, key) for key in SHAPE_KEYS}
    if shape["num_attention_heads"] % shape["num_key_value_heads"]:
        expected = f"a divisor of num_attention_heads {shape['num_attention_heads']}"
        raise refusal("num_key_value_heads", expected, shape["num_key_value_heads"])
    eps = raw.get("rms_norm_eps")
    if not isinstance(eps, float | int) or isinstance(eps, bool) or eps < 0:
        raise refusal("rms_norm_eps", "a number, 0 or more", eps)
    vocab = _positive(raw, "vocab_size") if raw.get("vocab_size") is not None else None
    if raw.get("draft_vocab_size") not in (None, vocab):
        raise refusal("draft_vocab_size", f"the full vocabulary {vocab}", raw["draft_vocab_size"])
    depth = raw.get("num_target_layers")
    depth = None if depth is None else _positive(raw, "num_target_layers")
    rope = _rope_parameters(raw)
    hf = _qwen3(raw, rope, shape, float(eps))
    return DrafterConfig(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        block_size=_block_size(raw, nested),
        mask_token_id=_mask_token_id(raw, nested, tokenizer),
        taps=_taps(raw, nested, depth, shape["num_hidden_layers"]),
        rms_eps=float(eps),
        rope_scaling=float(Qwen3RotaryEmbedding(hf).attention_scaling),
        max_positions=shape["max_position_embeddings"],
        vocab_size=vocab,
        num_target_layers=depth,
        rope_parameters=dict(hf.rope_parameters),
    )


def inverse_frequencies(config: DrafterConfig) -> Tensor:
    """Return the rotary inverse frequencies `[head_dim / 2]`, float32, as in transformers."""
    hf = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=dict(config.rope_parameters),
    )
    inv_freq: Tensor = Qwen3RotaryEmbedding(hf).inv_freq
    return inv_freq


def config_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a drafter in z-lab's format, weights in `dtype`."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    optional = {"vocab_size": config.vocab_size, "num_target_layers": config.num_target_layers}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
        },
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "max_position_embeddings": config.max_positions,
        "layer_types": ["full_attention"] * config.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    } | {key: value for key, value in optional.items() if value is not None}


def check_fit(config: DrafterConfig, target: TargetConfig) -> None:
    """Raise ValueError naming both values unless the drafter fits a target of this shape."""
    pairs = (
        ("hidden_size", config.hidden_size, "hidden_size", target.hidden_size),
        ("vocab_size", config.vocab_size, "vocab_size", target.vocab_size),
        ("num_target_layers", config.num_target_layers, "num_layers", target.num_layers),
    )
    for name, drafted, target_name, wanted in pairs:
        if drafted is not None and drafted != wanted:
            raise refusal(name, f"the target's {target_name} {wanted}", drafted)
    last = target.num_layers - 1
    for tap in config.taps:
        if not 0 <= tap < last:
            raise refusal("target_layer_ids", f"target layers in 0..{last - 1}", list(config.taps))
    if not 0 <= config.mask_token_id < target.vocab_size:
        expected = f"a row of the target's embedding, 0..{target.vocab_size - 1}"
        raise refusal("mask_token_id", expected, config.mask_token_id)


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value: Any = raw.get(key)
    if not is_int(value) or value < 1:
        raise refusal(key, "a positive integer", value)
    return int(value)


def _read(raw: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> Any:
    value = nested.get(key)
    return raw.get(key) if value is None else value


def _block_size(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> int:
    value = _read(raw, nested, "block_size")
    value = DEFAULT_BLOCK_SIZE if value is None else value
    if not is_int(value) or not 2 <= value <= VERIFY_TILE:
        raise refusal("block_size", f"an integer in 2..{VERIFY_TILE}", value)
    return int(value)


def _mask_token_id(
    raw: Mapping[str, Any], nested: Mapping[str, Any], tokenizer: Tokenizer | None
) -> int:
    value = _read(raw, nested, "mask_token_id")
    token = _read(raw, nested, "mask_token")
    if value is None and token is not None:
        if tokenizer is None:
            raise refusal("mask_token", "mask_token_id, or a tokenizer to resolve it", token)
        value = tokenizer.convert_tokens_to_ids(token)
        if value is None or value == getattr(tokenizer, "unk_token_id", None):
            raise refusal("mask_token", "a token of the given tokenizer", token)
    if not is_int(value) or value < 0:
        raise refusal("mask_token_id", "a token id, 0 or more", value)
    return int(value)


def _taps(
    raw: Mapping[str, Any], nested: Mapping[str, Any], depth: int | None, num_layers: int
) -> tuple[int, ...]:
    value = _read(raw, nested, "target_layer_ids")
    if value is None:
        if depth is None:
            raise refusal(
                "target_layer_ids", "layer ids, or num_target_layers to derive them", None
            )
        return default_taps(depth, num_layers)
    if not isinstance(value, list | tuple) or not value or not all(map(is_int, value)):
        raise refusal("target_layer_ids", "a list of layer ids", value)
    return tuple(value)


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise `rope_theta` with `rope_scaling`, or `rope_parameters`, to the latter's form."""
    scaling, parameters = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is not None and not isinstance(value, Mapping):
            raise refusal(key, "an object or null", value)
    if scaling and parameters and scaling != parameters:
        raise refusal("rope_scaling", f"to equal rope_parameters {parameters!r}", scaling)
    rope = dict(parameters or scaling or {})
    legacy = rope.pop("type", None)
    rope.setdefault("rope_type", legacy or "default")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = raw.get("rope_theta")
    elif raw.get("rope_theta") not in (None, rope["rope_theta"]):
        raise refusal(
            "rope_theta", f"the other rope_theta {rope['rope_theta']}", raw["rope_theta"]
        )
    theta = rope["rope_theta"]
    if not isinstance(theta, float | int) or isinstance(theta, bool) or theta <= 0:
        raise refusal("rope_theta", "a positive number", theta)
    if rope["rope_type"] not in STATIC_ROPE:
        raise refusal("rope_type", f"one of {STATIC_ROPE}", rope["rope_type"])
    if rope.get("partial_rotary_factor") not in (None, 1):
        expected = NEUTRAL["partial_rotary_factor"][1]
        raise refusal("partial_rotary_factor", expected, rope["partial_rotary_factor"])
    if rope.get("mrope_section") is not None:
        raise refusal("mrope_section", "one-dimensional positions", rope["mrope_section"])
    original = raw.get("original_max_position_embeddings")
    if original is not None and rope["rope_type"] != "default":
        rope.setdefault("original_max_position_embeddings", original)
    return rope


def _qwen3(
    raw: Mapping[str, Any], rope: dict[str, Any], shape: Mapping[str, int], eps: float
) -> Any:
    """The transformers config, which derives layer types and completes the rotary parameters."""
    window_keys = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    kinds, layers = raw.get("layer_types"), shape["num_hidden_layers"]
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise refusal("layer_types", f"{layers} entries, one per layer", kinds)
    windows = {key: raw[key] for key in window_keys if raw.get(key) is not None}
    try:
        hf = Qwen3Config(**shape, rms_norm_eps=eps, rope_parameters=rope, **windows)
    except Exception as error:
        raise ValueError(f"drafter config: transformers refused it: {error}") from error
    for kind in hf.layer_types:
        if kind != "full_attention":
            window = raw.get("sliding_window")
            expected = f"all 'full_attention' (sliding_window is {window!r})"
            raise refusal("layer_types", expected, hf.layer_types)
    return hf

"""The keys of a drafter's config.json: read, inert, or the mark of another kind of drafter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

ARCHITECTURE = "DFlashDraftModel"

DRAFT_KEYS = frozenset({"block_size", "mask_token_id", "mask_token", "target_layer_ids"})
"""Keys read from `dflash_config` first, then from the top level."""

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((None, False), "drafters that see the whole block in both directions"),
    "causal": ((None, False), "drafters that see the whole block in both directions"),
    "projector_type": ((None, "dflash"), "plain DFlash drafters (not Domino or DSpark heads)"),
    "shift_label": ((None, False), "drafters whose row j predicts its own position"),
    "sample_from_anchor": ((None, False), "drafters whose row j predicts its own position"),
    "output_multiplier": ((None, 1), "unscaled draft logits"),
    "final_logit_softcapping": ((None, 0), "draft logits without a soft cap"),
    "input_embedding_scale": ((None, 1), "unscaled input embeddings"),
    "attention_bias": ((None, False), "projections without bias"),
    "mlp_bias": ((None, False), "projections without bias"),
    "hidden_act": ((None, "silu"), "the activation 'silu'"),
    "partial_rotary_factor": ((None, 1), "rotary embedding over the whole head"),
    "quantization_config": ((None,), "unquantised weights"),
    "model_type": ((None, "qwen3"), "drafters of Qwen3 layers"),
} | {
    key: ((None,), f"plain DFlash drafters, without the {kind} that this key belongs to")
    for kind, keys in {
        "DSpark (DeepSpec) head": (
            "markov_rank",
            "markov_head_type",
            "enable_confidence_head",
            "confidence_head_with_markov",
        ),
        "Domino head": ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),
        "DFlash2 layers": (
            "conv_kernel_size",
            "conv_group_size",
            "selector_rank",
            "selector_top_k",
        ),
        "speculators packaging": (
            "speculators_model_type",
            "speculators_config",
            "transformer_layer_config",
            "aux_hidden_state_layer_ids",
        ),
    }.items()
    for key in keys
}
"""Keys of other drafter kinds: the values that change nothing, and what is supported."""

SHAPE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
INERT = frozenset(
    {
        *(
            "auto_map",
            "dtype",
            "torch_dtype",
            "transformers_version",
            "_name_or_path",
            "use_cache",
        ),
        *("attention_dropout", "initializer_range", "tie_word_embeddings", "num_anchors"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "pretraining_tp"),
        *("_attn_implementation", "_attn_implementation_autoset"),
    }
)
"""Keys without effect on a drafted token. Any other unknown key that is set is warned about."""

READ = frozenset(
    {
        *SHAPE_KEYS,
        *("architectures", "dflash_config", "rms_norm_eps", "vocab_size", "num_target_layers"),
        *("draft_vocab_size", "layer_types", "sliding_window", "use_sliding_window"),
        *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    }
)


def refusal(key: str, expected: str, value: object) -> ValueError:
    """The error for a key of the config, with what was expected and what came."""
    return ValueError(f"drafter config: {key}: expected {expected}, got {value!r}")


def refuse_other_kinds(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Raise ValueError for a key, top level or in `dflash_config`, that asks for something else.

    Warns about unknown top-level keys that are set; unknown keys of `dflash_config` are refused.
    """
    architectures = raw.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURE]:
        raise refusal("architectures", f"[{ARCHITECTURE!r}]", architectures)
    for place, prefix in ((nested, "dflash_config."), (raw, "")):
        for key, value in place.items():
            if key in NEUTRAL and not any(_same(value, neutral) for neutral in NEUTRAL[key][0]):
                raise refusal(prefix + key, NEUTRAL[key][1], value)
    known = DRAFT_KEYS | NEUTRAL.keys()
    for key in sorted(nested.keys() - known):
        if nested[key] is not None:
            raise refusal(f"dflash_config.{key}", f"no keys but {sorted(DRAFT_KEYS)}", nested[key])
    strange = {key: raw[key] for key in sorted(raw.keys() - known - READ - INERT) if raw[key]}
    if strange:
        warnings.warn(f"drafter config: ignoring unknown keys {strange}", stacklevel=3)


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return value == neutral

"""The merged GenerationConfig of a call: which fields work, and what they mean for a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

from dscale.request import check_penalty

KNOWN = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) - {
    "transformers_version"
}
"""Fields of GenerationConfig in the installed transformers, which ignores any other attribute."""

SUPPORTED = frozenset(
    {
        "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p",
        "eos_token_id", "pad_token_id", "bos_token_id", "return_dict_in_generate",
        "num_return_sequences", "repetition_penalty", "max_time", "stop_strings", "min_length",
        "min_new_tokens", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
        "bad_words_ids", "sequence_bias", "renormalize_logits", "remove_invalid_values",
        "forced_bos_token_id",
        "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "output_scores", "output_logits",
    }
)  # fmt: skip
"""Fields of GenerationConfig that `generate` honours."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "guidance_scale": (1.0,),
    "token_healing": (False,),
    "low_memory": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "use_mtp": (False,),
    "is_assistant": (False,),
    "disable_compile": (False,),
    # Read only by transformers' own assisted decoding, which attach replaces.
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
    "max_matching_ngram_size": (2,),
}
"""Values that ask for nothing, besides None, of fields that are otherwise refused."""

_LARGEST = torch.finfo(torch.float32).max
"""Of numbers that are float32 on the device: larger ones would be an error there."""

REASONS = {
    "num_beams": "beam search has no speculative form here; set num_beams=1 or detach",
    "use_cache": "decoding runs on the paged cache; leave use_cache=True",
}


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first field of a merged config that asks for what is not
    supported, or a repetition penalty that transformers refuses too.

    Attributes that transformers ignores, as old checkpoints carry, are ignored here too."""
    for name, value in fields.items():
        if value is None or name in SUPPORTED or name not in KNOWN | NEUTRAL.keys():
            continue
        neutral = NEUTRAL.get(name, ())
        if not any(value is n or value == n for n in neutral):
            expected = f"expected {' or '.join(map(repr, (None, *neutral)))}"
            reason = f" ({REASONS[name]})" if name in REASONS else ""
            raise ValueError(
                f"{name}: not supported by dscale yet, {expected}, got {value!r}{reason}"
            )
    penalty = fields.get("repetition_penalty")
    if penalty is not None:
        check_penalty(penalty)


def request_settings(generation_config: Any) -> dict[str, Any]:
    """Sampling settings of a merged config, as keyword arguments of Request.

    Raises ValueError for values that transformers' own warpers refuse.
    """
    penalty = _or(generation_config.repetition_penalty, 1.0)
    check_penalty(penalty)
    settings: dict[str, Any] = {"repetition_penalty": min(float(penalty), _LARGEST)}
    if not generation_config.do_sample:
        return settings
    temperature = _or(generation_config.temperature, 1.0)
    if (
        not isinstance(temperature, int | float)
        or not temperature > 0
        or temperature == float("inf")
    ):
        raise ValueError(
            f"temperature: expected a positive number when sampling, got {temperature!r}"
        )
    top_k, top_p = _or(generation_config.top_k, 0), _or(generation_config.top_p, 1.0)
    min_p = _or(generation_config.min_p, 0.0)
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k: expected a non-negative integer, got {top_k!r}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a number in 0..1, got {value!r}")
    return {
        **settings,
        "temperature": min(float(temperature), _LARGEST),
        "top_k": min(top_k, 1 << 62),
        "top_p": float(top_p),
        "min_p": float(min_p),
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def row_seeds(seed: int | list[int] | None, num_rows: int) -> list[int]:
    """One noise seed per row: `seed + row` of an int, the list itself, or draws from torch's
    global generator.

    So `torch.manual_seed` makes a call reproducible, as it does for transformers. Raises
    ValueError for a list of the wrong length or a seed outside int64."""
    if seed is None:
        return [int(s) for s in torch.randint(0, 2**63 - 1, (num_rows,), dtype=torch.int64)]
    if isinstance(seed, int) and not isinstance(seed, bool):
        seeds = [seed + row for row in range(num_rows)]
    elif isinstance(seed, list | tuple) and len(seed) == num_rows:
        seeds = list(seed)
    else:
        raise ValueError(
            f"seed: expected an int or a list of {num_rows} ints (one per returned row), "
            f"got {seed!r}"
        )
    for value in seeds:
        if not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise ValueError(f"seed: expected integers of 64 bits, got {value!r}")
    return seeds

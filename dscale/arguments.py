"""Which arguments of a `generate` call can run here; the rest is refused by name before any
compute."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from dscale.sampling import KNOWN, refuse_unsupported

INPUTS = frozenset({"input_ids", "attention_mask"})
OBJECTS = frozenset(
    {"tokenizer", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"}
)
"""What a call may hand over besides tensors and fields of the config."""

ARGUMENTS = KNOWN | INPUTS | OBJECTS | {"generation_config", "streamer", "seed"}
"""What a misspelt argument may have meant."""

NEUTRAL = {"synced_gpus": False}
"""Arguments that ask for nothing with this value."""
COUNTS = ("max_new_tokens", "max_length", "num_return_sequences")


def check_arguments(
    inputs: Any, generation_config: Any, of_model: Any, kwargs: Mapping[str, Any]
) -> None:
    """Raise ValueError naming the first argument of a call that cannot run.

    `generation_config`: the call's, or None; `of_model`: the model's own, which fills its holes;
    `kwargs`: the other arguments as given, which go over both."""
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise _refusal("generation_config", "None or a GenerationConfig", generation_config)
    given = {k: v for k, v in vars(generation_config or of_model).items() if v is not None}
    fields = {**vars(of_model), **given, **{k: v for k, v in kwargs.items() if k in KNOWN}}
    refuse_unsupported(fields)
    for name, value in kwargs.items():
        neutral = value is None or value is NEUTRAL.get(name)
        if name not in KNOWN | INPUTS | OBJECTS and not neutral:
            near = get_close_matches(name, ARGUMENTS, n=1, cutoff=0.85)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"{name}: not supported by dscale yet, expected None, got "
                f"{type(value).__name__}{hint}"
            )
    for name in COUNTS:
        _check_count(name, fields.get(name))
    for name in ("stopping_criteria", "logits_processor"):
        given_list = kwargs.get(name)
        if given_list is not None and not (
            isinstance(given_list, list) and all(map(callable, given_list))
        ):
            raise _refusal(name, "a list of callables, as transformers'", given_list)
    allowed = kwargs.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise _refusal("prefix_allowed_tokens_fn", "a function", allowed)
    _check_stop_strings(fields.get("stop_strings"), kwargs.get("tokenizer"))
    if inputs is not None and kwargs.get("input_ids") is not None:
        raise ValueError("input_ids: expected None when inputs is given too")
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    if ids is None and fields.get("bos_token_id") is None:
        raise ValueError("input_ids: expected ids, or a bos_token_id to start from, got neither")
    _check_inputs(ids, kwargs.get("attention_mask"))


def _check_inputs(ids: Any, mask: Any) -> None:
    if ids is not None:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            raise _refusal("input_ids", "an integer tensor [batch, length]", ids)
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise _refusal("input_ids", "an integer tensor [batch, length]", ids)
    if mask is not None:
        shape = None if ids is None else tuple(ids.shape)
        if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
            raise _refusal("attention_mask", f"a tensor of the shape of input_ids, {shape}", mask)
        other = mask[(mask != 0) & (mask != 1)]
        if other.numel():
            raise _refusal("attention_mask", "zeros and ones", other[0].item())


def stop_strings_of(generation_config: Any, of_model: Any, kwargs: Mapping[str, Any]) -> Any:
    """The stop strings of a call after merging, or None."""
    if "stop_strings" in kwargs:
        return kwargs["stop_strings"]
    given = getattr(generation_config, "stop_strings", None)
    return given if given is not None else of_model.stop_strings


def _check_stop_strings(stop_strings: Any, tokenizer: Any) -> None:
    if stop_strings is None:
        return
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    if not (
        isinstance(strings, list | tuple) and strings and all(isinstance(s, str) for s in strings)
    ):
        raise _refusal("stop_strings", "a string or a list of strings", stop_strings)
    if tokenizer is None:
        raise ValueError(
            f"tokenizer: expected the model's tokenizer with stop_strings {stop_strings!r}, "
            "got None"
        )


def _check_count(name: str, value: Any) -> None:
    if value is None:
        return
    try:
        count = operator.index(value)
    except TypeError:
        raise _refusal(name, "an integer", value) from None
    if count < 1:
        raise _refusal(name, "at least 1", value)


def _refusal(name: str, expected: str, value: Any) -> ValueError:
    if isinstance(value, Tensor):
        got = f"{value.dtype} of shape {tuple(value.shape)}"
    else:
        got = f"{type(value).__name__} {value!r:.60}"
    return ValueError(f"{name}: expected {expected}, got {got}")

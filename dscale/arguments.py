"""Which arguments of a `generate` call can run here; the rest is refused by name before any
compute."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from dscale.sampling import KNOWN, refuse_unsupported

INPUTS = frozenset({"input_ids", "attention_mask"})
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
        if name not in KNOWN | INPUTS and value is not None:
            raise ValueError(
                f"{name}: not supported by dscale yet, expected None, got {type(value).__name__}"
            )
    for name in COUNTS:
        _check_count(name, fields.get(name))
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
    got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
    shown = str(got) if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
    return ValueError(f"{name}: expected {expected}, got {shown}")

"""`attach` and `generate`: what fits what, checked and loaded before a model is touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from dscale.attachment import Attachment
from dscale.compiled.drafter import Drafter, DrafterConfig
from dscale.compiled.packed import check_packable
from dscale.compiled.quantized import check_quantizable
from dscale.compiled.target import TargetConfig
from dscale.config import Budget, EngineConfig, Mode, WeightFormat
from dscale.drafter_config import check_fit
from dscale.drafter_files import DTYPES, load_drafter
from dscale.load import target_config
from dscale.predictor_files import load_predictor


@torch.inference_mode(False)
def attach(
    model: PreTrainedModel,
    drafter: str | Path | Drafter | None = None,
    *,
    predictor: str | Path | None = None,
    mode: Mode | None = None,
    budget: Budget = None,
    budget_seed: str = "none",
    prefill_chunk: int = 512,
    pool_tokens: int | None = None,
    max_concurrency: int | None = None,
    pack_weights: bool = False,
    capture: bool | None = None,
    compile_prefill: bool | None = None,
    prefix_cache: bool = True,
    weights: WeightFormat = "model",
) -> Attachment:
    """Replace `model.generate` by DScale's, sharing the model's weights (no second copy but with
    `pack_weights` or 8-bit `weights`).

    `drafter`: a DFlash checkpoint in z-lab's format (folder or Hub id), or a loaded Drafter.
    `predictor`: a folder that `recipes/train_predictor.py` made for this drafter; None scores
    drafts by the running product of the drafter's top-1 probabilities. `mode`: "dscale", the
    default with a drafter, "ar" without one, or another of EngineConfig's, as are the other
    settings. Raises ValueError for a model, a drafter, a predictor or a setting that does not fit,
    naming it; the model is then as it was."""
    if getattr(model, "_dscale", None) is not None:
        raise ValueError("model: already attached; call detach() on what attach returned first")
    if mode is None:
        mode = "ar" if drafter is None else "dscale"
    config = EngineConfig(
        mode=mode,
        budget=budget,
        budget_seed=budget_seed,
        prefill_chunk=prefill_chunk,
        pool_tokens=pool_tokens,
        max_concurrency=max_concurrency,
        pack_weights=pack_weights,
        capture=capture,
        compile_prefill=compile_prefill,
        prefix_cache=prefix_cache,
        weights=weights,
    )
    _check_mode(config, drafter, predictor)
    shape = target_config(model)
    _check_device(config, model)
    loaded = None if drafter is None else drafter_for(model, drafter, shape)
    if weights != "model":
        drafts = () if loaded is None else (shape.vocab_size, *sizes_of(loaded.config))
        sizes = (*sizes_of(shape), *drafts)
        check_quantizable(model.device, model.dtype, sizes, weights)
    scores = None
    if predictor is not None and loaded is not None:
        scores = load_predictor(predictor, loaded.config, loaded.fingerprint, model.device)
    return Attachment(model, loaded, scores, config)


def _check_mode(
    config: EngineConfig, drafter: str | Path | Drafter | None, predictor: str | Path | None
) -> None:
    """Raise ValueError for a drafter, a budget or a predictor that a mode lacks or cannot use."""
    mode = config.mode
    if mode == "ar":
        for name, value in (("drafter", drafter), ("budget", config.budget)):
            if value is not None:
                raise ValueError(f"{name}: expected None in mode 'ar', got {value!r}")
    elif drafter is None:
        raise ValueError(
            f"drafter: expected a checkpoint folder, a Hub id or a Drafter in mode {mode!r}, "
            "got None"
        )
    if predictor is not None and not config.adaptive:
        raise ValueError(f"predictor: expected None in mode {mode!r}, got {predictor!r}")


def _check_device(config: EngineConfig, model: PreTrainedModel) -> None:
    """Raise ValueError for a setting that the model's device or dtype cannot have."""
    if config.pack_weights:
        check_packable(model.device, model.dtype)
    for name in ("capture", "compile_prefill"):
        if getattr(config, name) and model.device.type == "cpu":
            raise ValueError(f"{name}: expected None or False for a model on the CPU, got True")


def sizes_of(shape: TargetConfig | DrafterConfig) -> tuple[int, ...]:
    """Rows and columns of the projections of a model's layers, before any are fused."""
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return shape.hidden_size, shape.intermediate_size, heads, kv_heads


def drafter_for(
    model: PreTrainedModel, drafter: str | Path | Drafter, shape: TargetConfig
) -> Drafter:
    """The drafter, loaded in the model's dtype, or a loaded one that fits. Raises ValueError."""
    if model.dtype not in DTYPES:
        raise ValueError(
            "model: expected one in float32 or bfloat16 with a drafter (which overflows in "
            f"float16), got {model.dtype}"
        )
    if isinstance(drafter, Drafter):
        check_fit(drafter.config, shape)
        placed = (drafter.norm.dtype, drafter.norm.device)
        if placed != (model.dtype, model.device):
            raise ValueError(f"drafter: expected {(model.dtype, model.device)}, got {placed}")
        return drafter
    if not isinstance(drafter, str | os.PathLike):
        raise ValueError(
            f"drafter: expected a checkpoint folder, a Hub id or a Drafter, got {drafter!r}"
        )
    return load_drafter(drafter, shape, dtype=model.dtype, device=model.device)


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    drafter: str | Path | Drafter | None = None,
    weights: WeightFormat | None = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """One `generate` call on DScale: through the model's attachment, or through one made for this
    call.

    Arguments are `Attachment.generate`'s. `drafter` and `weights`, as `attach` takes them, may be
    given only when the model is not attached."""
    attached: Attachment | None = getattr(model, "_dscale", None)
    if attached is not None:
        for name, value in (("drafter", drafter), ("weights", weights)):
            if value is not None:
                raise ValueError(f"{name}: the model is attached already; expected None")
        return attached.generate(inputs, **kwargs)
    with attach(model, drafter, weights="model" if weights is None else weights) as spec:
        return spec.generate(inputs, **kwargs)

"""Predictor folders: checking, loading, saving."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dscale.compiled.drafter import DrafterConfig
from dscale.compiled.predictor import Predictor, PredictorConfig

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
MODEL_TYPE = "dscale_predictor"
MAX_WIDTH = 1 << 16


def load_predictor(
    path: str | Path,
    drafter_config: DrafterConfig,
    fingerprint: str | None,
    device: torch.device | str,
) -> Predictor:
    """Load a predictor folder and check that it was made for this drafter.

    `fingerprint`: of the drafter that runs; None, for a drafter that came from no checkpoint,
    checks shapes alone. Returns it on `device` in float32, in eval mode, asking for no gradient.
    Raises ValueError naming what was expected and what came: no such folder, another kind of
    config, another block or hidden size, another drafter, a tensor missing, too many, of another
    shape or dtype, or not finite."""
    folder = Path(path).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"predictor: expected a folder with {CONFIG} and {WEIGHTS}, found no"
                             f" {name} in {folder}")  # fmt: skip
    config = _parse(folder / CONFIG)
    for name in ("hidden_size", "block_size"):
        if getattr(config, name) != getattr(drafter_config, name):
            raise ValueError(
                f"predictor: expected {name} {getattr(drafter_config, name)} (the drafter's),"
                f" got {getattr(config, name)} in {folder}"
            )
    if fingerprint is not None and config.drafter != fingerprint:
        raise ValueError(
            f"predictor: expected one made for the drafter with fingerprint {fingerprint}, got one"
            f" for {config.drafter or 'an unknown drafter'} in {folder}; train one with"
            " recipes/train_predictor.py"
        )
    with torch.device("meta"):
        predictor = Predictor(config)
    tensors = _checked(folder / WEIGHTS, predictor.state_dict())
    predictor.load_state_dict(tensors, assign=True)
    return predictor.to(device).eval().requires_grad_(False)


def save_predictor(predictor: Predictor, path: str | Path, report: str = "") -> None:
    """Write config.json, model.safetensors (float32) and, where there is a `report`, it as the
    model card README.md; makes the folder. Raises ValueError for a tensor that is not finite."""
    folder = Path(path)
    tensors = {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, tensor in predictor.state_dict().items()
    }
    _refuse_non_finite(tensors, "the predictor")
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"model_type": MODEL_TYPE, **asdict(predictor.config)}
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if report:
        (folder / CARD).write_text(report, encoding="utf-8")


def _parse(path: Path) -> PredictorConfig:
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"predictor: expected JSON in {path}: {error}") from error
    if not isinstance(raw, dict) or raw.get("model_type") != MODEL_TYPE:
        got = raw.get("model_type") if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"predictor: expected model_type {MODEL_TYPE!r} in {path}, got {got!r}")
    widths = raw.get("widths")
    if not isinstance(widths, list) or len(widths) != 2:
        raise ValueError(f"predictor: widths: expected two numbers in {path}, got {widths!r}")
    for name, value in (
        *((name, raw.get(name)) for name in ("hidden_size", "block_size", "projected")),
        *(("widths", width) for width in widths),
    ):
        least = 2 if name == "block_size" else 1
        if type(value) is not int or not least <= value <= MAX_WIDTH:
            raise ValueError(
                f"predictor: {name}: expected {least} to {MAX_WIDTH} in {path}, got {value!r}"
            )
    if not isinstance(raw.get("drafter"), str):
        got = raw.get("drafter")
        raise ValueError(f"predictor: drafter: expected a fingerprint in {path}, got {got!r}")
    unknown = sorted(raw.keys() - PredictorConfig.__dataclass_fields__.keys() - {"model_type"})
    if unknown:
        raise ValueError(f"predictor: expected no other key in {path}, got {unknown}")
    del raw["model_type"]
    return PredictorConfig(**(raw | {"widths": (widths[0], widths[1])}))


def _checked(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"predictor: expected safetensors in {path}: {error}") from error
    if tensors.keys() != expected.keys():
        missing = sorted(expected.keys() - tensors.keys())
        extra = sorted(tensors.keys() - expected.keys())
        raise ValueError(
            f"predictor: expected the tensors {sorted(expected)} in {path},"
            f" got {len(missing)} missing {missing} and {len(extra)} unexpected {extra}"
        )
    for name, tensor in tensors.items():
        shape = tuple(expected[name].shape)
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise ValueError(
                f"predictor: tensor {name!r}: expected {torch.float32} {shape},"
                f" got {tensor.dtype} {tuple(tensor.shape)}"
            )
    _refuse_non_finite(tensors, str(path))
    if bool((tensors["std"] <= 0).any()):
        raise ValueError(f"predictor: tensor 'std': expected positive values in {path}")
    return tensors


def _refuse_non_finite(tensors: dict[str, Tensor], where: str) -> None:
    bad = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if bad:
        raise ValueError(f"predictor: expected finite tensors in {where}, got NaN or inf in {bad}")

"""Predictor folders: the round trip, and every refusal by its words."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import drafter_json, drafter_tensors, fitting_target, write_drafter
from safetensors.torch import load_file, save_file
from torch import Tensor

import dscale.demo
from dscale.compiled.drafter import DrafterConfig
from dscale.compiled.predictor import Predictor, PredictorConfig
from dscale.drafter_files import load_drafter
from dscale.fingerprint import fingerprint_of
from dscale.predictor_files import load_predictor, save_predictor

HIDDEN = 32


def drafter_config() -> DrafterConfig:
    """Of the tiny drafter: hidden size 32, blocks of 16."""
    return DrafterConfig(
        num_layers=1, hidden_size=HIDDEN, intermediate_size=48, num_heads=4, num_kv_heads=2,
        head_dim=16, block_size=16, mask_token_id=0, taps=(0,), rms_eps=1e-6, rope_scaling=1.0,
        max_positions=64,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved random predictor for the drafter "abc"."""
    torch.manual_seed(0)
    predictor = Predictor(PredictorConfig(hidden_size=HIDDEN, block_size=16, drafter="abc"))
    for tensor in predictor.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape) + 0.1)
    save_predictor(predictor, tmp_path / "predictor", "# A card\n")
    return tmp_path / "predictor"


def test_round_trip(folder: Path, tmp_path: Path) -> None:
    predictor = load_predictor(folder, drafter_config(), "abc", "cpu")
    assert predictor.config == PredictorConfig(hidden_size=HIDDEN, block_size=16, drafter="abc")
    assert not predictor.training
    assert not any(p.requires_grad for p in predictor.parameters())
    stored = load_file(folder / "model.safetensors")
    state = predictor.state_dict()
    assert stored.keys() == state.keys()
    assert {"projection", "hidden_mean", "mean", "std", "first.weight"} < stored.keys()
    for name, tensor in stored.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, state[name])
    assert (folder / "README.md").read_text() == "# A card\n"
    save_predictor(predictor, tmp_path / "again")
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "again" / "config.json").read_bytes() == (
        folder / "config.json"
    ).read_bytes()
    load_predictor(folder, drafter_config(), None, "cpu")


def test_another_drafter_is_refused_by_both_fingerprints(folder: Path) -> None:
    with pytest.raises(ValueError, match="fingerprint def, got one for abc"):
        load_predictor(folder, drafter_config(), "def", "cpu")


CONFIG_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 64}, "expected hidden_size 32 (the drafter's), got 64"),
    ({"block_size": 8}, "expected block_size 16 (the drafter's), got 8"),
    ({"model_type": "qwen3"}, "expected model_type 'dscale_predictor'"),
    ({"projected": 0}, "projected: expected 1 to 65536"),
    ({"block_size": True}, "block_size: expected 2 to 65536"),
    ({"widths": [4]}, "widths: expected two numbers"),
    ({"widths": [4, -1]}, "widths: expected 1 to 65536"),
    ({"drafter": None}, "drafter: expected a fingerprint"),
    ({"extra": 1}, "expected no other key"),
    ({"widths": [208, 64]}, "tensor 'last.weight': expected torch.float32 (15, 64), got"),
    ({"projected": 4}, "tensor 'first.weight': expected torch.float32 (208, 336), got"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_CHANGES)
def test_config_refusals(folder: Path, change: dict[str, Any], message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_predictor(folder, drafter_config(), "abc", "cpu")


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["gain"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["third.weight"] = torch.zeros(2)


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["mean"] = tensors["mean"][:-1].clone()


def half(tensors: dict[str, Tensor]) -> None:
    tensors["last.bias"] = tensors["last.bias"].half()


def spoil(tensors: dict[str, Tensor]) -> None:
    tensors["first.weight"][3, 3] = math.nan


def flatten(tensors: dict[str, Tensor]) -> None:
    tensors["std"][7] = 0.0


TENSOR_CHANGES: list[tuple[Callable[[dict[str, Tensor]], None], str]] = [
    (drop, "1 missing ['gain'] and 0 unexpected []"),
    (add, "0 missing [] and 1 unexpected ['third.weight']"),
    (narrow, "tensor 'mean': expected torch.float32 (396,), got torch.float32 (395,)"),
    (half, "tensor 'last.bias': expected torch.float32 (15,), got torch.float16 (15,)"),
    (spoil, "got NaN or inf in ['first.weight']"),
    (flatten, "tensor 'std': expected positive values"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_CHANGES)
def test_tensor_refusals(
    folder: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)):
        load_predictor(folder, drafter_config(), "abc", "cpu")


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found no config\.json"):
        load_predictor(tmp_path / "none", drafter_config(), "abc", "cpu")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="expected safetensors in"):
        load_predictor(folder, drafter_config(), "abc", "cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON in"):
        load_predictor(folder, drafter_config(), "abc", "cpu")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="got 'list'"):
        load_predictor(folder, drafter_config(), "abc", "cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"found no model\.safetensors"):
        load_predictor(folder, drafter_config(), "abc", "cpu")


def test_a_predictor_with_nan_is_not_saved(tmp_path: Path) -> None:
    predictor = Predictor(PredictorConfig(hidden_size=HIDDEN, block_size=16))
    predictor.mean[0] = math.inf
    with pytest.raises(ValueError, match=re.escape("got NaN or inf in ['mean']")):
        save_predictor(predictor, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_drafter_s_fingerprint_is_its_checkpoint_s(tmp_path: Path) -> None:
    raw = drafter_json()
    tensors = drafter_tensors(raw)

    def loaded(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> str | None:
        folder = write_drafter(tmp_path / "drafter", tensors=tensors)
        target = fitting_target(raw)
        return load_drafter(folder, target, dtype=dtype, device="cpu").fingerprint

    first = loaded(tensors)
    assert first == fingerprint_of(sorted(tensors.items()))
    assert first == loaded(dict(reversed(tensors.items())), torch.bfloat16)
    assert first == loaded({f"model.{name}": t for name, t in tensors.items()})
    changed = tensors | {"norm.weight": tensors["norm.weight"] + 1}
    assert first != loaded(changed)
    assert first != loaded({name: t.float() for name, t in tensors.items()})
    mask = torch.ones(raw["hidden_size"])
    torch.save({"embedding": mask}, tmp_path / "drafter" / "mask_embedding.pt")
    with_mask = [loaded(tensors, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert with_mask[0] == with_mask[1] != first


def test_the_shipped_predictor_or_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dscale.demo, "drafter", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"lacks its predictor: .*predictor"):
        dscale.demo.predictor()
    (tmp_path / "predictor").mkdir()
    (tmp_path / "predictor" / "config.json").write_text("{}")
    assert dscale.demo.predictor() == tmp_path / "predictor"


def test_the_shipped_predictor_is_for_the_shipped_drafter() -> None:
    config = json.loads((dscale.demo.predictor() / "config.json").read_text())
    drafter = load_file(dscale.demo.drafter() / "model.safetensors")
    assert config["drafter"] == fingerprint_of(sorted(drafter.items()))
    weights = load_file(dscale.demo.predictor() / "model.safetensors")
    buffers = ("projection", "hidden_mean", "mean", "std")
    assert sum(x.numel() for name, x in weights.items() if name not in buffers) == 111_278

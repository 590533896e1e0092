"""Drafter folders: what loads, what is refused and by which words, and saving again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import drafter_json, drafter_tensors, fitting_target, nested, write_drafter
from safetensors.torch import load_file, save_file
from torch import Tensor

import dscale.drafter_files
from dscale.compiled.drafter import Drafter
from dscale.drafter_files import load_drafter, save_drafter


def load(folder: Path, raw: dict[str, Any] | None = None, **changes: Any) -> Drafter:
    """Load for the target the drafter fits, in bfloat16 on the CPU."""
    raw = drafter_json() if raw is None else raw
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"} | changes
    return load_drafter(folder, fitting_target(raw), **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_save_after_load_gives_the_same_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = drafter_tensors(drafter_json(), dtype=dtype)
    write_drafter(tmp_path / "a", tensors=tensors)
    drafter = load(tmp_path / "a", dtype=dtype)
    save_drafter(drafter, tmp_path / "b", dtype=dtype)
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert len(saved) == 11 * 2 + 3
    for name, tensor in tensors.items():
        assert saved[name].dtype == dtype
        assert torch.equal(saved[name], tensor), name
    again = load(tmp_path / "b", dtype=dtype)
    assert again.config == drafter.config
    assert torch.equal(again.inv_freq, drafter.inv_freq)


def test_save_writes_bfloat16_and_every_key_a_drafter_needs(tmp_path: Path) -> None:
    raw = drafter_json()
    drafter = load(write_drafter(tmp_path / "a"), dtype=torch.float32)
    save_drafter(drafter, tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert saved == {key: raw[key] for key in saved}
    with pytest.raises(ValueError, match=r"dtype: .*bfloat16, got torch.float16"):
        save_drafter(drafter, tmp_path / "c", dtype=torch.float16)
    assert not (tmp_path / "c").exists()


def test_sharded_prefixed_and_aliased_tensors_load(tmp_path: Path) -> None:
    tensors = drafter_tensors(drafter_json())
    plain = load(write_drafter(tmp_path / "plain", tensors=tensors))
    aliases = {"fc.weight": "encoder.fc.weight"}
    aliases |= {"hidden_norm.weight": "encoder.output_norm_enc.weight"}
    renamed = {aliases.get(name, f"model.{name}"): t for name, t in tensors.items()}
    renamed["model.rotary_emb.inv_freq"] = torch.ones(8)
    renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    folder = write_drafter(tmp_path / "sharded", tensors=tensors)
    (folder / "model.safetensors").unlink()
    shards = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for index, (name, tensor) in enumerate(renamed.items()):
        shards[f"model-{1 + index % 2}.safetensors"][name] = tensor
    for file, part in shards.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    loaded = load(folder).state_dict()
    assert loaded.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, loaded[name])
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected shard model-2.safetensors"):
        load(folder)


def test_loaded_weights_are_frozen_in_one_copy_and_on_the_device(tmp_path: Path) -> None:
    drafter = load(write_drafter(tmp_path))
    elements = sum(tensor.numel() for tensor in drafter_tensors(drafter_json()).values())
    assert sum(p.numel() for p in drafter.parameters()) == elements
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert {t.device.type for t in (*drafter.parameters(), *drafter.buffers())} == {"cpu"}
    assert not any(p.requires_grad for p in drafter.parameters())
    assert drafter.inv_freq.dtype == torch.float32


def test_a_half_precision_file_loads_in_bfloat16(tmp_path: Path) -> None:
    tensors = drafter_tensors(drafter_json(), dtype=torch.float16)
    drafter = load(write_drafter(tmp_path, tensors=tensors))
    assert torch.equal(drafter.fc, tensors["fc.weight"].bfloat16())


def test_mask_embedding_is_honoured_and_saved(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "a")
    row = torch.arange(32.0)
    torch.save({"embedding": row[None], "mask_token_id": 59}, folder / "mask_embedding.pt")
    drafter = load(folder)
    assert drafter.mask_embedding is not None
    assert torch.equal(drafter.mask_embedding, row.bfloat16())
    save_drafter(drafter, tmp_path / "b")
    again = load(tmp_path / "b")
    assert again.mask_embedding is not None
    assert torch.equal(again.mask_embedding, row.bfloat16())
    torch.save({"embedding": row, "mask_token_id": 7}, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match="expected mask_token_id 59, got 7"):
        load(folder)
    torch.save({"embedding": row[:3], "mask_token_id": 59}, folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match=r"shape \(32,\), got \(3,\)"):
        load(folder)
    torch.save([row], folder / "mask_embedding.pt")
    with pytest.raises(ValueError, match="expected a tensor 'embedding'"):
        load(folder)


UNFIT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"hidden_size": 64}, "hidden_size: .*64, got 32"),
    ({}, {"vocab_size": 70}, "vocab_size: .*70, got 60"),
    ({}, {"num_layers": 8}, "num_target_layers: .*8, got 6"),
    ({"target_layer_ids": [1, 5]}, {}, r"target_layer_ids: .*0\.\.4, got \[1, 5\]"),
    ({"target_layer_ids": [-1, 3]}, {}, r"target_layer_ids: .*0\.\.4, got \[-1, 3\]"),
    ({"mask_token_id": 60}, {}, r"mask_token_id: .*0\.\.59, got 60"),
]


@pytest.mark.parametrize(("inner", "shape", "words"), UNFIT, ids=[words for *_, words in UNFIT])
def test_a_drafter_of_another_target_is_refused(
    tmp_path: Path, inner: dict[str, Any], shape: dict[str, Any], words: str
) -> None:
    raw = nested(**inner)
    write_drafter(tmp_path, raw)
    target = fitting_target(raw, **shape)
    with pytest.raises(ValueError, match=words):
        load_drafter(tmp_path, target, dtype=torch.float32, device="cpu")


def test_a_config_without_target_facts_still_loads(tmp_path: Path) -> None:
    raw = drafter_json()
    del raw["vocab_size"], raw["num_target_layers"]
    write_drafter(tmp_path, raw)
    drafter = load(tmp_path)
    assert drafter.config.vocab_size is None
    assert drafter.config.num_target_layers is None


def without(name: str) -> dict[str, Tensor]:
    """The tensors but one."""
    return {key: t for key, t in drafter_tensors(drafter_json()).items() if key != name}


EMPTY = torch.zeros(60, 32)
BAD_TENSORS: list[tuple[dict[str, Tensor], str]] = [
    (
        without("layers.1.self_attn.k_norm.weight"),
        r"1 tensors missing .*layers\.1\.self_attn\.k_norm\.weight",
    ),
    (
        without("fc.weight") | {"fc.weight": torch.zeros(32, 96)},
        r"'fc.weight'.*64\), got \(32, 96",
    ),
    (without("norm.weight") | {"norm.weight": torch.ones(32).int()}, "'norm.weight': .*got I32"),
    (without("") | {"extra.weight": EMPTY}, "unexpected tensor 'extra.weight'"),
    (without("") | {"model.fc.weight": torch.zeros(32, 64)}, "'fc.weight' once"),
    (without("") | {"embed_tokens.weight": EMPTY}, "embed_tokens.weight.*DeepSpec"),
    (without("") | {"model.lm_head.weight": EMPTY}, "lm_head.weight.*DeepSpec"),
    (without("") | {"markov_head.markov_w1.weight": EMPTY}, "markov_head.*DSpark"),
    (without("") | {"prefix_gru.weight_ih_l0": EMPTY}, "prefix_gru.*Domino"),
    (without("") | {"candidate_selector.hidden_projection.weight": EMPTY}, "selector.*DFlash2"),
]


@pytest.mark.parametrize(
    ("tensors", "words"), BAD_TENSORS, ids=[words for _, words in BAD_TENSORS]
)
def test_bad_tensors_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Tensor], words: str
) -> None:
    write_drafter(tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "a")
    with pytest.raises(ValueError, match=r"revision: expected None .*got 'main'"):
        load(folder, revision="main")
    with pytest.raises(ValueError, match=r"dtype: .*float16 overflows.*got torch.float16"):
        load(folder, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"expected a folder with config.json.*config.json'"):
        load(folder / "config.json")
    with pytest.raises(ValueError, match=r"expected a folder with .*got '/nowhere/at/all'"):
        load_drafter(
            "/nowhere/at/all", fitting_target(drafter_json()), dtype=torch.float32, device="cpu"
        )
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"expected safetensors in .*model.safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected model.safetensors or model.safetensors.index"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"expected JSON in .*config.json"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"expected config.json in .*found none"):
        load(folder)


def test_hub_ids_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_drafter(tmp_path)
    asked: list[Any] = []

    def download(name: str, **settings: Any) -> str:
        asked.append((name, settings["revision"], settings["allow_patterns"]))
        if name == "none/there":
            raise ConnectionError("no route")
        return str(folder)

    monkeypatch.setattr(dscale.drafter_files, "snapshot_download", download)
    target = fitting_target(drafter_json())
    drafter = load_drafter(
        "some/drafter", target, dtype=torch.float32, device="cpu", revision="abc"
    )
    assert drafter.config.num_layers == 2
    assert asked[0][:2] == ("some/drafter", "abc")
    assert {"config.json", "*.safetensors", "mask_embedding.pt"} <= set(asked[0][2])
    with pytest.raises(OSError, match=re.escape("'none/there' is no folder")) as caught:
        load_drafter("none/there", target, dtype=torch.float32, device="cpu")
    assert "ConnectionError: no route" in str(caught.value)

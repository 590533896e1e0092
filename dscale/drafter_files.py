"""Drafter checkpoints in z-lab's format, on disk or on the Hub: checking, loading, saving."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dscale.compiled.drafter import Drafter, DrafterConfig
from dscale.compiled.target import TargetConfig
from dscale.drafter_config import (
    Tokenizer,
    check_fit,
    config_json,
    inverse_frequencies,
    parse_config,
)
from dscale.fingerprint import fingerprint_of

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MASK_EMBEDDING = "mask_embedding.pt"
DTYPES = (torch.float32, torch.bfloat16)
STORED = ("F32", "BF16", "F16")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
ROTARY = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq")
ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
OTHER_KINDS = {
    "embed_tokens.": "a DeepSpec or speculators checkpoint, which carries its own embedding",
    "lm_head.": "a DeepSpec or speculators checkpoint, which carries its own LM head",
    "markov_head.": "a DSpark checkpoint",
    "confidence_head.": "a DSpark checkpoint",
    "prefix_gru.": "a Domino checkpoint",
    "embed_proj.": "a Domino checkpoint",
    "logit_head.": "a Domino checkpoint",
    "candidate_selector.": "a DFlash2 checkpoint",
    "t2d": "a drafter with its own vocabulary",
    "d2t": "a drafter with its own vocabulary",
}


class Part(NamedTuple):
    """Where a stored tensor lives: rows from `start` of a parameter, of one layer if stacked."""

    parameter: str
    shape: tuple[int, ...]
    layer: int | None = None
    start: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        """The part's view of its parameter."""
        whole = parameter if self.layer is None else parameter[self.layer]
        return whole[self.start : self.start + self.shape[0]]


def parts_of(config: DrafterConfig) -> dict[str, Part]:
    """Map every tensor name of z-lab's format to its place in a `Drafter` (11 a layer and 3)."""
    c, hidden = config, config.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    parts = {
        "fc.weight": Part("fc", (hidden, len(c.taps) * hidden)),
        "hidden_norm.weight": Part("hidden_norm", (hidden,)),
        "norm.weight": Part("norm", (hidden,)),
    }
    for i in range(c.num_layers):
        to, inner = f"layers.{i}.", c.intermediate_size
        parts |= {
            f"{to}input_layernorm.weight": Part(f"{to}input_norm", (hidden,)),
            f"{to}post_attention_layernorm.weight": Part(f"{to}post_norm", (hidden,)),
            f"{to}self_attn.q_proj.weight": Part("qkv", (q, hidden), i),
            f"{to}self_attn.k_proj.weight": Part("qkv", (kv, hidden), i, q),
            f"{to}self_attn.v_proj.weight": Part("qkv", (kv, hidden), i, q + kv),
            f"{to}self_attn.o_proj.weight": Part(f"{to}o", (hidden, q)),
            f"{to}self_attn.q_norm.weight": Part(f"{to}q_norm", (c.head_dim,)),
            f"{to}self_attn.k_norm.weight": Part(f"{to}k_norm", (c.head_dim,)),
            f"{to}mlp.gate_proj.weight": Part(f"{to}gate_up", (inner, hidden)),
            f"{to}mlp.up_proj.weight": Part(f"{to}gate_up", (inner, hidden), None, inner),
            f"{to}mlp.down_proj.weight": Part(f"{to}down", (hidden, inner)),
        }
    return parts


def load_drafter(
    path_or_id: str | Path,
    target: TargetConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    revision: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Drafter:
    """Load a drafter folder or Hub id in z-lab's format and check that it fits the target.

    Weights go straight to `device` in `dtype` (float32 or bfloat16), each tensor into its place in
    the fused storage. `revision` names a Hub revision. `tokenizer` resolves a `mask_token` string
    in the config. The stored tensors give the drafter its `fingerprint`. Raises ValueError naming
    the key, tensor or argument and what was expected, before any tensor is read; OSError when
    neither a folder nor a download is to be had.
    """
    if dtype not in DTYPES:
        raise ValueError(
            "dtype: expected a drafter in torch.float32 or torch.bfloat16 (float16 overflows),"
            f" got {dtype}"
        )
    folder = _folder(path_or_id, revision)
    config = parse_config(_read_json(folder / CONFIG), tokenizer=tokenizer)
    check_fit(config, target)
    with ExitStack() as stack:
        handles = [stack.enter_context(_open(path, device)) for path in _shards(folder)]
        found = _match(handles, parts_of(config), folder)
        mask = _mask_embedding(folder, config, dtype)
        with init_empty_weights(include_buffers=False):
            drafter = Drafter(
                config, inverse_frequencies(config), dtype=dtype, mask_embedding=mask
            )
        _fill(drafter, found, dtype, device)
        stored = ((name, found[name][0].get_tensor(found[name][1])) for name in sorted(found))
        drafter.fingerprint = fingerprint_of(stored, mask)
    return drafter.to(device).eval()


def save_drafter(
    drafter: Drafter, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors, un-fused, in z-lab's format; makes the folder.

    A mask embedding of the drafter's own goes to mask_embedding.pt. Raises ValueError for another
    `dtype` than float32 or bfloat16.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = dict(drafter.named_parameters())
    tensors = {
        name: part.of(own[part.parameter]).detach().to("cpu", dtype, copy=True).contiguous()
        for name, part in parts_of(drafter.config).items()
    }
    text = json.dumps(config_json(drafter.config, dtype), indent=2)
    (folder / CONFIG).write_text(text + "\n")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if drafter.mask_embedding is not None:
        row = drafter.mask_embedding.detach().to("cpu", dtype)
        mask_token_id = drafter.config.mask_token_id
        torch.save({"embedding": row, "mask_token_id": mask_token_id}, folder / MASK_EMBEDDING)


def _folder(path_or_id: str | Path, revision: str | None) -> Path:
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"revision: expected None for the folder {path}, got {revision!r}")
        return path
    name = str(path_or_id)
    if path.exists() or not isinstance(path_or_id, str) or not HUB_ID.fullmatch(name):
        raise ValueError(
            f"drafter: expected a folder with {CONFIG} and {WEIGHTS}, or a Hub id 'owner/name',"
            f" got {name!r}"
        )
    patterns = [CONFIG, "*.safetensors", INDEX, MASK_EMBEDDING]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise OSError(
            f"drafter: {name!r} is no folder here, and downloading {patterns} of that Hub id"
            f" (revision {revision or 'main'}) failed: {type(error).__name__}: {error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"drafter: expected {path.name} in {path.parent}, found none")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"drafter: expected JSON in {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"drafter: expected a JSON object in {path}, got {type(content).__name__}"
        )
    return content


def _shards(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ValueError(f"drafter: expected {WEIGHTS} or {INDEX} in {folder}, found neither")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"drafter: expected a weight_map in {folder / INDEX}, got {weight_map!r}")
    shards = [folder / str(name) for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise ValueError(f"drafter: expected shard {shard.name} in {folder}, found none")
    return shards


def _open(path: Path, device: torch.device | str) -> Any:
    try:
        return safe_open(path, "pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"drafter: expected safetensors in {path}: {error}") from error


def _canonical(stored: str) -> str:
    name = stored.removeprefix("model.")
    return ALIASES.get(name, name)


def _match(
    handles: list[Any], parts: dict[str, Part], folder: Path
) -> dict[str, tuple[Any, str, Part]]:
    """Pair every expected tensor with the file that stores it and its name there, all checked."""
    found: dict[str, tuple[Any, str, Part]] = {}
    for handle, stored in ((h, key) for h in handles for key in h.keys()):
        name = _canonical(stored)
        if ROTARY.fullmatch(name):
            continue
        if name not in parts:
            kinds = [kind for prefix, kind in OTHER_KINDS.items() if name.startswith(prefix)]
            hint = f": this is {kinds[0]}; supported are plain DFlash drafters" if kinds else ""
            raise ValueError(f"drafter: unexpected tensor {stored!r} in {folder}{hint}")
        if name in found:
            raise ValueError(
                f"drafter: expected {name!r} once in {folder},"
                f" got {found[name][1]!r} and {stored!r}"
            )
        header = handle.get_slice(stored)
        shape, kind = tuple(header.get_shape()), header.get_dtype()
        if shape != parts[name].shape:
            raise ValueError(
                f"drafter: tensor {stored!r}: expected shape {parts[name].shape}, got {shape}"
            )
        if kind not in STORED:
            raise ValueError(f"drafter: tensor {stored!r}: expected one of {STORED}, got {kind}")
        found[name] = handle, stored, parts[name]
    missing = [name for name in parts if name not in found]
    if missing:
        raise ValueError(f"drafter: {len(missing)} tensors missing from {folder}: {missing}")
    return found


def _fill(
    drafter: Drafter,
    found: dict[str, tuple[Any, str, Part]],
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Put every parameter on the device, one at a time, each filled from its stored parts."""
    sources: dict[str, list[tuple[Any, str, Part]]] = {}
    for source in found.values():
        sources.setdefault(source[2].parameter, []).append(source)
    for name, parameter in list(drafter.named_parameters()):
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        for handle, stored, part in sources[name]:
            part.of(value).copy_(handle.get_tensor(stored))
        set_module_tensor_to_device(drafter, name, device, value=value, dtype=dtype)


def _mask_embedding(folder: Path, config: DrafterConfig, dtype: torch.dtype) -> Tensor | None:
    path = folder / MASK_EMBEDDING
    if not path.is_file():
        return None
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not isinstance(content.get("embedding"), Tensor):
        raise ValueError(f"drafter: expected a tensor 'embedding' in {path}")
    row: Tensor = content["embedding"]
    token = content.get("mask_token_id", config.mask_token_id)
    if token != config.mask_token_id:
        raise ValueError(
            f"drafter: {path}: expected mask_token_id {config.mask_token_id}, got {token}"
        )
    if row.numel() != config.hidden_size:
        raise ValueError(
            f"drafter: {path}: expected embedding of shape ({config.hidden_size},),"
            f" got {tuple(row.shape)}"
        )
    return row.reshape(-1).to(dtype)

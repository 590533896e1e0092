"""Checks of an installation: versions, devices, kernels, and tokens on a tiny model."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dscale.attach import attach
from dscale.compiled.drafter import Drafter, DrafterConfig
from dscale.compiled.kv import PAGE
from dscale.config import Budget, Mode
from dscale.doctor_operators import registered, try_operator
from dscale.sizing import Memory, free_bytes

PACKAGES = ("dscale", "torch", "transformers", "accelerate", "triton", "numpy")
MODES: tuple[tuple[Mode, Budget], ...] = (("ar", None), ("+tiles", None), ("dscale", "half"))
VOCAB, HIDDEN, HEADS, LAYERS = 300, 64, 4, 3


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; `ok` None where there is nothing to pass or fail."""

    name: str
    ok: bool | None
    detail: str


def checks() -> Iterator[Check]:
    """Run every check, in order, giving each result when it is there."""
    yield Check("python", None, f"{platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        try:
            yield Check(package, None, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            needed = package != "triton"
            yield Check(package, False if needed else None, "not installed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield Check("device", None, describe(device))
    yield Check("pool", None, pool(device))
    for name in registered():
        yield Check(name, *try_operator(name, device))
    for mode, budget in MODES:
        yield identity_check(mode, budget, device)


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cpu":
        return f"no CUDA device; CPU, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(device)
    capability = f"capability {found.major}.{found.minor}"
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {capability}"


def pool(device: torch.device) -> str:
    """What a serving engine's pool would take now."""
    memory = Memory(device, free_bytes(device), page=1)
    budget, free = (size / 2**30 for size in (memory.budget, memory.free))
    return (
        f"{budget:.1f} GiB of {free:.1f} GiB free, at most {memory.most_pages * PAGE} tokens, for "
        "an engine that serves; pool_tokens sets another size"
    )


def identity_check(mode: Mode, budget: Budget, device: torch.device) -> Check:
    """Whether a tiny random model says in this mode what plain `generate()` says."""
    name = f"mode {mode}"
    try:
        model, drafter = tiny_pair(device)
        ids = torch.arange(1, 23, device=device).view(2, 11) * 13 % VOCAB
        settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
        want = model.generate(ids, **settings)
        used = None if mode == "ar" else drafter
        with attach(model, used, mode=mode, budget=budget) as spec:
            got = model.generate(ids, **settings)
            passes = spec.stats.steps
    except Exception as error:  # whatever breaks is the finding
        return Check(name, False, f"{type(error).__name__}: {error}")
    same = torch.equal(got, want)
    said = "same tokens as generate()" if same else "other tokens than generate()"
    return Check(name, same, f"{said}, {passes} steps, tiny random model, float32")


def tiny_pair(device: torch.device) -> tuple[Any, Drafter]:
    """A random float32 model of 3 layers and a random drafter that fits it."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, head_dim=HIDDEN // HEADS,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig()
    shape = DrafterConfig(
        num_layers=1, hidden_size=HIDDEN, intermediate_size=96, num_heads=HEADS, num_kv_heads=2,
        head_dim=HIDDEN // HEADS, block_size=16, mask_token_id=VOCAB - 1, taps=(0, 1),
        rms_eps=1e-6, rope_scaling=1.0, max_positions=512,
    )  # fmt: skip
    size = HIDDEN // HEADS
    inv_freq = 1e4 ** -(torch.arange(0, size, 2) / size)
    drafter = Drafter(shape, inv_freq, dtype=torch.float32)
    with torch.no_grad():
        for weight in (*model.parameters(), *drafter.parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(
                1 + 0.1 * noise if weight.dim() == 1 else noise * weight.shape[-1] ** -0.5
            )
    return model.to(device), drafter.to(device)

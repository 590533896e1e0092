"""Checks of an installation: versions, devices, kernels, and tokens on a tiny model."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dscale.attach import attach
from dscale.compiled.drafter import Drafter, DrafterConfig
from dscale.compiled.kv import PAGE
from dscale.config import Budget, Mode
from dscale.kernels import ops
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
    for name in operator_arguments():
        yield kernel_check(name, device)
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


def kernel_check(name: str, device: torch.device) -> Check:
    """Whether an operator runs on the device and equals its CPU reference."""
    arguments = operator_arguments()[name]
    operator = getattr(ops, name)
    try:
        moved = tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)
        want = operator(*arguments)
        got = operator(*moved)
    except Exception as error:  # whatever a compiler raises is the finding
        return Check(name, False, f"{type(error).__name__}: {error}")
    # Arguments, too: tile_heads writes to two of them.
    pairs = zip((*as_tuple(got), *moved), (*as_tuple(want), *arguments), strict=True)
    tensors = [(x.cpu().double(), y.double()) for x, y in pairs if isinstance(x, Tensor)]
    same = all(torch.allclose(x, y, atol=1e-4) for x, y in tensors)
    kind = "reference" if device.type == "cpu" else "Triton kernel"
    return Check(name, same, f"{kind} runs" if same else f"{kind} differs from the reference")


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    """One tensor or several, as several."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


def operator_arguments() -> dict[str, tuple[Any, ...]]:
    """Small arguments of every operator but those of projections, which a float32 model leaves to
    the library: 3 lanes, 15 candidates, 24 rows."""
    generator = torch.Generator().manual_seed(0)
    score_NC = torch.rand(3, 15, generator=generator).cumprod(1)
    limit_N = torch.tensor([40, 2, 40], dtype=torch.int32)
    candidate_NC = torch.randint(9, (3, 15), generator=generator)
    length_N = torch.tensor([12, 2, 7], dtype=torch.int32)
    page_NL = torch.arange(1, 7, dtype=torch.int32).view(3, 2)
    room = torch.tensor([24, 8], dtype=torch.int32)
    offset_N = torch.tensor([0, 12, 14])
    choice_M = torch.randint(9, (24,), generator=generator)
    # 24 rows of 8 query heads and 2 KV heads of 16 dimensions; norms, cos and sin.
    shapes = ((24, 12, 16), (16,), (16,), (24, 1, 8), (24, 1, 8))
    heads = [torch.randn(shape, generator=generator) for shape in shapes]
    pools = torch.zeros(2, 24, 2, 16)
    out, lse = (torch.randn(4, 2, 64, *e, generator=generator) for e in ((16,), ()))
    cell_NT = torch.arange(48).view(3, 16) % 24
    return {
        "row_statistics": (torch.randn(5, 1000, generator=generator),),
        "argmax": (torch.randn(5, 1000, generator=generator),),
        "allocate_budget": (score_NC, limit_N > 0, limit_N, room),
        "pack_rows": (length_N, candidate_NC, candidate_NC[:, 0], limit_N, page_NL, 24, 128),
        "accept_prefix": (candidate_NC, length_N, offset_N, choice_M),
        "tile_heads": (*heads, cell_NT, torch.arange(24), *pools, 4, 1e-6),
        "share_pages": (limit_N, offset_N % 3, 16, 40),
        "merge_shares": (out, lse, offset_N // 12, torch.tensor([1, 1, 3]), length_N.long(), 16),
    }


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

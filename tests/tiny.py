"""Tiny random transformers models, drafters that fit them, and drafters scripted from a known
continuation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import drafter_json, drafter_tensors, write_drafter
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dscale.compiled.decide import Decide
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import Requests, Step
from dscale.drafter_files import load_drafter
from dscale.load import target_config

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB, HIDDEN, LAYERS = 500, 32, 3

RightFor = Callable[[int, int], int]
"""How many candidates of a block are right: (request, context length) to 0..15."""


def tiny_model(family: str = "llama", *, seed: int = 0, tied: bool = False, **changes: Any) -> Any:
    """A random model in float32 whose greedy text wanders; no eos, bos or pad token of its own."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config_class, model_class = FAMILIES[family]
    config = config_class(**(settings | changes))
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif weight.dim() == 1:
                weight.copy_(1 + 0.2 * noise)
            else:
                scaled = tied or "embed" not in name
                weight.copy_(noise * weight.shape[1] ** -0.5 if scaled else noise)
    model.generation_config = GenerationConfig()
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def left_padded(prompts: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Prompts as `input_ids` and `attention_mask`, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The generate of transformers, also on an attached model."""
    return type(model).generate(model, *args, **kwargs)


def continuation(model: Any, ids: list[int], length: int) -> list[int]:
    """The prompt and `length` greedy tokens, which no eos ends."""
    out = plain(
        model, torch.tensor([ids]), max_new_tokens=length, eos_token_id=None, do_sample=False
    )
    tokens: list[int] = out[0].tolist()
    return tokens


def tiny_drafter(folder: Path, model: Any, *, seed: int = 0, **changes: Any) -> Drafter:
    """A random drafter of a tiny model, in the model's dtype."""
    shape = target_config(model)
    inner = {"mask_token_id": shape.vocab_size - 1, "target_layer_ids": [0, shape.num_layers - 2]}
    settings: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_target_layers": shape.num_layers,
        "num_hidden_layers": 1,
        "dflash_config": inner,
    }
    raw = drafter_json(**(settings | changes))
    write_drafter(folder, raw, drafter_tensors(raw, seed=seed))
    return load_drafter(folder, shape, dtype=model.dtype, device=model.device)


def script(
    monkeypatch: pytest.MonkeyPatch,
    reference: list[list[int]],
    right_for: RightFor,
    vocab: int = VOCAB,
) -> None:
    """Make every drafter propose the reference's tokens, wrong from candidate `right_for` on.

    `reference`: each request's prompt and continuation. The anchor of every pass is checked.
    Scores, where a mode asks for them, are arbitrary but differ by request and position.
    """

    def propose(self: Decide, requests: Requests, step: Step) -> Tensor | None:
        score_NC = torch.zeros(step.candidate_NC.shape)
        for lane, slot in enumerate(step.slot_N.tolist()):
            if not requests.live_S[slot]:  # an idle lane, or a late step
                continue
            context = int(requests.context_S[slot])
            score_NC[lane] = (0.5 + (3 * slot + context) % 7 / 14) ** torch.arange(1, 16)
            assert int(requests.anchor_S[slot]) == reference[slot][context]
            block = reference[slot][context + 1 : context + 16]
            right = right_for(slot, context)
            wrong = [(token + 1) % vocab for token in block[right:]]
            row = block[:right] + wrong + [0] * (15 - len(block))
            step.candidate_NC[lane] = torch.tensor(row)
        return score_NC if self.rows is None else None

    monkeypatch.setattr(Decide, "propose", propose)


def oracle(slot: int, context: int) -> int:
    """Every candidate right."""
    return 15


def always_wrong(slot: int, context: int) -> int:
    """No candidate right."""
    return 0


def ragged(slot: int, context: int) -> int:
    """Any number of candidates right, different by request and position."""
    return (7 * slot + 5 * context) % 16

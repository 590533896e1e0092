"""Drafters overruled by a script of tensors: they draft and score for real, and then propose a
known text. Traceable, unlike `tiny.script`, so that it serves captured stages too."""

from typing import Any

import pytest
import torch
from tiny import VOCAB
from torch import Tensor

from dscale.compiled.decide import Decide
from dscale.compiled.flow import Requests, Step


def ragged_text(prompts: list[list[int]], texts: list[list[int]]) -> list[list[int]]:
    """Each prompt and its known continuation."""
    return [p + t for p, t in zip(prompts, texts, strict=True)]


def overrule(
    monkeypatch: pytest.MonkeyPatch,
    reference: list[list[int]],
    *,
    real_scores: bool = False,
    vocab: int = VOCAB,
    device: str = "cpu",
) -> None:
    """Propose the reference's tokens, wrong from candidate (7 slot + 5 context) % 16 on.

    `reference`: each request's prompt and continuation. `real_scores`: keep the drafter's, else
    scores between 0.5 and 1 to the power of the candidate, which differ by request and context."""
    longest = max(map(len, reference)) + 16
    text_SX = torch.tensor([row + [0] * (longest - len(row)) for row in reference], device=device)
    torch._dynamo.mark_static_address(text_SX)
    propose = Decide.propose

    def overruled(self: Decide, requests: Requests, step: Step) -> Tensor | None:
        score_NC = propose(self, requests, step)
        slot_N = torch.clamp(step.slot_N, max=text_SX.shape[0] - 1)
        context_N = requests.context_S[step.slot_N].long()
        ahead_C = torch.arange(1, step.candidate_NC.shape[1] + 1, device=slot_N.device)
        index_NC = torch.clamp(context_N[:, None] + ahead_C, max=text_SX.shape[1] - 1)
        right_NC = torch.gather(text_SX[slot_N], 1, index_NC)
        is_right_NC = ahead_C <= ((7 * slot_N + 5 * context_N) % 16)[:, None]
        step.candidate_NC.copy_(torch.where(is_right_NC, right_NC, (right_NC + 1) % vocab))
        if score_NC is None or real_scores:
            return score_NC
        chance_N = 0.5 + ((3 * slot_N + context_N) % 7) / 14
        return chance_N[:, None] ** ahead_C

    monkeypatch.setattr(Decide, "propose", overruled)


def right_for(slot: int, context: int) -> int:
    """How many of `overrule`'s candidates are right."""
    return (7 * slot + 5 * context) % 16


def random_predictor(drafter: Any, folder: Any, *, seed: int = 0) -> Any:
    """A folder with a random predictor for a drafter, whose scores vary a lot."""
    from dscale.compiled.predictor import Predictor, PredictorConfig
    from dscale.predictor_files import save_predictor

    config = PredictorConfig(
        hidden_size=drafter.config.hidden_size,
        block_size=drafter.config.block_size,
        drafter=drafter.fingerprint or "",
    )
    predictor = Predictor(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in predictor.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            scale = 1.0 if name in ("gain", "projection", "hidden_mean") else 0.3
            tensor.copy_(1 + noise.abs() if name == "std" else scale * noise)
    save_predictor(predictor, folder)
    return folder

"""What a command runs when options are left out: drafter, predictor, mode and budget."""

from typing import Any

import torch
from transformers import PreTrainedModel

import dscale

DEMO = "demo"

ON_CPU: dict[str, Any] = {"mode": "dflash", "budget": 8}
"""Settings where none are asked for, as the demo's: "auto" would time steps for seconds first."""


def pair(
    model: str, drafter: str | None, predictor: str | None, mode: str | None, budget: Any
) -> dict[str, Any]:
    """Drafter, predictor, mode and budget, with what was left open filled in."""
    nothing_asked = mode is None and budget is None and predictor is None
    if drafter is None and model == DEMO and mode != "ar":
        drafter = str(dscale.demo.drafter())
        if predictor is None and mode in (None, "+budget", "dscale"):
            predictor = str(dscale.demo.predictor())
    used: dict[str, Any] = {"mode": mode, "budget": budget}
    used["drafter"] = None if drafter == "none" else drafter
    used["predictor"] = None if predictor == "none" else predictor
    if nothing_asked and used["drafter"] and not torch.cuda.is_available():
        used |= ON_CPU | {"predictor": None}
    return used


def packs(name: str, model: PreTrainedModel) -> bool:
    """Whether to keep a second copy of the weights for faster passes on a CPU: the demo's, which
    are small."""
    return name == DEMO and model.device.type == "cpu" and model.dtype == torch.float32

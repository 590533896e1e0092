"""Where a submitted prompt is prepared."""

from typing import Any

import pytest
import torch
from contract import IDS, Letters
from transformers import MaxLengthCriteria
from transformers.generation import StoppingCriteriaList

from dscale import Attachment

NEW = 20

CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["cpu"]),
    ({"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 4}, ["cpu"]),
    ({"repetition_penalty": 1.3, "eos_token_id": [7, 9], "pad_token_id": 3}, ["cpu"]),
    ({"stop_strings": ["never"], "tokenizer": Letters()}, ["cpu"]),
    # Its processor runs where the logits are.
    ({"min_new_tokens": 4, "eos_token_id": 7, "pad_token_id": 3}, ["cpu", "meta"]),
    ({"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(99)])}, ["meta"]),
    ({"attention_mask": torch.ones_like(IDS)}, ["meta"]),
]


@pytest.mark.parametrize(("settings", "devices"), CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_submitted_prompt_is_prepared_off_the_device(
    settings: dict[str, Any],
    devices: list[str],
    spec: Attachment,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """On a GPU every read would wait for the step under way."""
    kind, seen, on = type(spec.model), [], Attachment._on

    def watched(self: Attachment, device: torch.device, *rest: Any) -> Any:
        seen.append(device.type)
        if device.type == "cpu":
            return on(self, device, *rest)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "device", torch.device("cpu"))
            return on(self, torch.device("cpu"), *rest)

    want = spec.model.generate(IDS, **settings, max_new_tokens=NEW)[0, IDS.shape[1] :]
    monkeypatch.setattr(Attachment, "_on", watched)
    monkeypatch.setattr(kind, "device", torch.device("meta"))
    result = spec.engine.submit(IDS[0].tolist(), **settings, max_new_tokens=NEW).result()
    assert result.generated_tokens == want.tolist()
    assert seen == devices
    assert not [w for w in recwarn if "device" in str(w.message)]

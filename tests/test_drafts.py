"""What the loop drafts is what z-lab's own code drafts from transformers' hidden states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import drafter_json, drafter_tensors, write_drafter
from tiny import HIDDEN, LAYERS, VOCAB, left_padded, prompt, tiny_model

import dscale
from dscale.compiled.decide import Decide
from dscale.compiled.flow import Packed, Requests, Step

TAPS, MASK = [1, 0], VOCAB - 3
RAW = drafter_json(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_target_layers=LAYERS,
    rope_theta=50,
    dflash_config={"mask_token_id": MASK, "target_layer_ids": TAPS},
)


def drafted(zlab: Any, model: Any, text: list[int]) -> list[int]:
    """Candidates after a text whose last token is the anchor, by z-lab's model class."""
    context = torch.tensor([text[:-1]])
    hidden = model(context, output_hidden_states=True).hidden_states
    block = torch.tensor([[text[-1]] + [MASK] * 15])
    out = zlab(
        position_ids=torch.arange(len(text) + 15)[None],
        noise_embedding=model.get_input_embeddings()(block),
        target_hidden=torch.cat([hidden[tap + 1] for tap in TAPS], -1),
        use_cache=False,
    )
    tokens: list[int] = model.lm_head(out[0, 1:]).argmax(-1).tolist()
    return tokens


@pytest.mark.parametrize("budget", [16, 5])
@torch.inference_mode()
def test_candidates_of_every_pass(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("dflash.model", reason="needs PyPI dflash (z-lab's model class)")
    from transformers import Qwen3Config

    tensors = drafter_tensors(RAW, dtype=torch.float32)
    zlab = module.DFlashDraftModel(Qwen3Config(**RAW)).eval()
    for name in tensors:
        if "q_norm" in name or "k_norm" in name:
            tensors[name] *= 3  # sharp attention, so that the positions of a block differ
    zlab.load_state_dict(tensors)
    model, theirs = tiny_model(), tiny_model()
    for each in (model, theirs):
        each.get_input_embeddings().weight.data[MASK] *= 0.01
    seen: list[tuple[int, int, list[int]]] = []
    decide = Decide.forward
    steal = {1: 3, 4: 15, 6: 1}  # in these passes so many candidates are right, as if by luck

    def watched(self: Decide, requests: Requests, step: Step, *packed: Packed) -> None:
        decide(self, requests, step, *packed)
        for lane, slot in enumerate(step.slot_N.tolist()):
            context = int(requests.context_S[slot])
            seen.append((slot, context, step.candidate_NC[lane, : budget - 1].tolist()))
            right = steal.get(len(seen) // 3, 0)
            step.candidate_NC[lane, :right] = answers[slot, context + 1 :][:right]

    lengths = [3, 125, 140]
    inputs = left_padded([prompt(n) for n in lengths])
    plain_out = theirs.generate(**inputs, max_new_tokens=60)
    answers = torch.zeros(3, 256, dtype=torch.int64)
    for slot, length in enumerate(lengths):
        answers[slot, : length + 60] = plain_out[slot, 140 - length :]
    monkeypatch.setattr(Decide, "forward", watched)
    folder = write_drafter(tmp_path, RAW, tensors)
    with dscale.attach(model, folder, mode="+tiles", budget=budget) as spec:
        out = model.generate(**inputs, max_new_tokens=30)
        assert max(spec.stats.last_progress[0]) == min(16, budget)
    assert torch.equal(out, plain_out[:, :170])
    assert len(seen) > 25
    assert sum(len(set(candidates)) for *_, candidates in seen) > len(seen) * budget / 4
    for slot, context, candidates in seen:
        text = answers[slot, : context + 1].tolist()
        assert candidates == drafted(zlab, theirs, text)[: budget - 1], (slot, context)


def test_noise_is_keyed_by_the_absolute_position() -> None:
    """A text continued from any of its points is the same text."""
    model = tiny_model()
    settings: dict[str, Any] = {"do_sample": True, "seed": 11, "temperature": 1.2}
    ids = torch.tensor([prompt(9)])
    with dscale.attach(model):
        whole = model.generate(ids, max_new_tokens=24, **settings)
        for cut in (1, 2, 11, 23):
            again = model.generate(whole[:, : 9 + cut], max_new_tokens=24 - cut, **settings)
            assert torch.equal(again, whole)

"""Traces for the predictor: labels, histories, features and projections against recomputation."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dense_drafter import dense_block
from drafters import drafter_json, drafter_tensors, write_drafter
from tiny import HIDDEN, LAYERS, VOCAB, left_padded, prompt, tiny_model

import dscale
from dscale.compiled.decide import Decide
from dscale.compiled.flow import Requests, Step
from dscale.drafter_files import load_drafter
from dscale.load import target_config

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import collect_traces as collecting
from drafter_data import Prompt
from predictor_traces import MAX_FILE_BYTES, ROW_FIELDS, Traces, load_traces, save_traces

TAPS, MASK, NEW = [1, 0], VOCAB - 3, 24
RAW = drafter_json(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_target_layers=LAYERS,
    num_hidden_layers=1,
    dflash_config={"mask_token_id": MASK, "target_layer_ids": TAPS},
)
LENGTHS = [9, 130, 4, 31, 17]
PROMPTS = [
    Prompt(id=f"set/{i}", source="tiny", split="train", text="", tokens=np.array(prompt(n)))
    for i, n in enumerate(LENGTHS)
]


def lucky(monkeypatch: pytest.MonkeyPatch, answers: list[list[int]]) -> None:
    """Let each request's context decide how many candidates are right."""
    forward = Decide.forward
    by_prompt = {tuple(a[:4]): a for a in answers}

    def patched(self: Decide, requests: Requests, step: Step, *packed: Any) -> None:
        forward(self, requests, step, *packed)
        for lane, slot in enumerate(step.slot_N.tolist()):
            text = texts[slot]
            context = int(requests.context_S[slot])
            right = min((5 * context) % 7, len(text) - context - 1)
            step.candidate_NC[lane, :right] = torch.tensor(text[context + 1 : context + 1 + right])

    texts: list[list[int]] = []
    answer = collecting.answer

    def with_texts(model: Any, prompts: Any, *args: Any, **how: Any) -> Any:
        texts[:] = [by_prompt[tuple(p.tokens[:4].tolist())] for p in prompts]
        return answer(model, prompts, *args, **how)

    monkeypatch.setattr(Decide, "forward", patched)
    monkeypatch.setattr(collecting, "answer", with_texts)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Traces of five tiny prompts, two calls, with everything needed to recompute them."""
    model, folder = tiny_model(), write_drafter(tmp_path / "drafter", RAW)
    rows = [prompt(n) for n in LENGTHS]
    out = model.generate(**left_padded(rows), max_new_tokens=NEW + 16)
    texts = [row[130 - n :].tolist() for row, n in zip(out, LENGTHS, strict=True)]
    lucky(monkeypatch, texts)
    traces = collecting.collect(model, folder, PROMPTS, batch=3, max_new=NEW, dims=6, fit_steps=4)
    return SimpleNamespace(model=model, folder=folder, texts=texts, traces=traces)


def test_labels_and_histories_follow_the_progress(traced: SimpleNamespace) -> None:
    traces, progress = traced.traces, []
    with dscale.attach(traced.model, traced.folder, mode="dflash") as spec:
        for start in (0, 3):
            collecting.answer(traced.model, PROMPTS[start : start + 3], NEW, 0.0)
            progress += spec.stats.last_progress
    assert len(traces) == sum(map(len, progress))
    assert traces.accepted.max() >= 5
    for index, counts in enumerate(progress):
        mine = traces.select(traces.prompt == index)
        accepted = [count - 1 for count in counts]
        assert mine.accepted.tolist() == accepted
        assert mine.cut.tolist() == [False] * (len(counts) - 1) + [True]
        expected = [LENGTHS[index] + sum(counts[:i]) for i in range(len(counts))]
        assert mine.position.tolist() == expected
        history = [([-1] * 3 + accepted)[i : i + 3][::-1] for i in range(len(counts))]
        assert mine.recent.tolist() == history
    fingerprint = load_drafter(
        traced.folder, target_config(traced.model), dtype=torch.float32, device="cpu"
    ).fingerprint
    assert traces.drafter == fingerprint
    assert traces.prompts == [("tiny", f"set/{i}") for i in range(5)]


@torch.no_grad()
def test_features_and_projections_are_the_dense_drafter_s(traced: SimpleNamespace) -> None:
    weights = {k: v.float() for k, v in drafter_tensors(RAW).items()}
    shape = SimpleNamespace(
        **{k: RAW[k] for k in ("head_dim", "rope_theta", "block_size")},
        rms_eps=RAW["rms_norm_eps"], taps=TAPS, mask_token_id=MASK, num_layers=1,
        num_heads=RAW["num_attention_heads"], num_kv_heads=RAW["num_key_value_heads"],
    )  # fmt: skip
    traces: Traces = traced.traces
    seen = []
    for index in range(0, len(traces), 3):
        position = int(traces.position[index])
        text = torch.tensor(traced.texts[int(traces.prompt[index])])
        hidden = dense_block(weights, traced.model, text, position, shape)[1:]
        logits = traced.model.lm_head(hidden).double()
        top = logits.topk(16, 1).values
        log_p = logits.log_softmax(1)
        entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
        gaps = top[:, :1] - top[:, 1:]
        expected = torch.cat((top[:, :1], gaps, log_p.amax(1, keepdim=True), entropy), 1)
        torch.testing.assert_close(traces.feature[index], expected.float(), atol=2e-3, rtol=2e-3)
        mine = (hidden - traces.hidden_mean) @ traces.projection
        torch.testing.assert_close(traces.projected[index], mine, atol=2e-3, rtol=2e-3)
        seen.append(traces.projected[index])
    assert torch.cat(seen).std(0).diff().max() < 0.5, "axes come in order of their variance"
    gram = traces.projection.T @ traces.projection
    torch.testing.assert_close(gram, torch.eye(6), atol=1e-4, rtol=0)


def test_misaligned_passes_are_refused(traced: SimpleNamespace) -> None:
    recorder = collecting.Recorder(4, 2)
    with dscale.attach(traced.model, traced.folder, mode="dflash") as spec, recorder.recording():
        collecting.answer(traced.model, PROMPTS[:2], 8, 0.0)
        progress = [list(p) for p in spec.stats.last_progress]
    progress[0][0] += 1
    with pytest.raises(RuntimeError, match="positions that follow from the progress"):
        recorder.finish([0, 1], LENGTHS[:2], progress, [False, False])


def test_recording_ends_and_projections_can_be_shared(traced: SimpleNamespace) -> None:
    draft = Decide.draft
    how: dict[str, Any] = {"batch": 4, "max_new": 6}
    again = collecting.collect(traced.model, traced.folder, PROMPTS[:2], like=traced.traces, **how)
    assert Decide.draft is draft
    assert torch.equal(again.projection, traced.traces.projection)
    assert traced.model.__dict__.get("_dscale") is None
    with pytest.raises(ValueError, match="two tokens or more"):
        collecting.collect(traced.model, traced.folder, PROMPTS, batch=5, max_new=1)
    one_call = collecting.collect(traced.model, traced.folder, PROMPTS, max_passes=1, **how)
    assert len(one_call.prompts) == 4
    sampled = collecting.collect(traced.model, traced.folder, PROMPTS, temperature=1.0, **how)
    assert sampled.temperature == 1.0


def test_trace_files(tmp_path: Path, traced: SimpleNamespace) -> None:
    traces = traced.traces
    many = traces.select(torch.arange(40_000) % len(traces))
    many.feature = many.feature + torch.rand(many.feature.shape)
    files = save_traces(many, tmp_path / "traces")
    assert len(files) > 2
    assert max(path.stat().st_size for path in files) <= MAX_FILE_BYTES
    assert len(load_traces(tmp_path / "traces")) == 40_000
    files = save_traces(traces, tmp_path / "traces")
    assert sorted((tmp_path / "traces").iterdir()) == files
    loaded = load_traces(tmp_path / "traces")
    for name in (*ROW_FIELDS, "projection", "hidden_mean"):
        ours, theirs = getattr(loaded, name), getattr(traces, name)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)
    for name in ("prompts", "drafter", "block_size", "temperature"):
        assert getattr(loaded, name) == getattr(traces, name)
    with pytest.raises(ValueError, match=r"expected traces-0\.npz"):
        load_traces(tmp_path)

"""Training a predictor: on traces with a known truth, its split by prompt, the whole recipe."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drafters import drafter_json, write_drafter
from tiny import HIDDEN, LAYERS, VOCAB, prompt, tiny_model

from dscale.drafter_files import load_drafter
from dscale.load import target_config
from dscale.predictor_files import load_predictor

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import collect_traces as collecting
import predictor_report as reporting
import predictor_training as training
import train_predictor
from drafter_data import Corpus, Prompt, save_corpus
from predictor_traces import Traces

RAW = drafter_json(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_target_layers=LAYERS,
    num_hidden_layers=1,
    dflash_config={"mask_token_id": VOCAB - 3, "target_layer_ids": [1, 0]},
)


def synthetic(count: int, truth: Callable[[torch.Tensor], torch.Tensor], seed: int) -> Traces:
    """Passes of 100 prompts; `truth` maps the first projected value [P, C] to the chance that a
    position is right. The drafter's own probabilities are near 0.8, whatever happens."""
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(count, 15, 18, generator=generator)
    feature[..., 16] = (0.8 + 0.02 * torch.randn(count, 15, generator=generator)).log()
    projected = torch.randn(count, 15, 8, generator=generator)
    projected[..., 0] = projected[:, :1, 0]  # how hard the pass is
    right = torch.rand(count, 15, generator=generator) < truth(projected[..., 0])
    return Traces(
        feature=feature, projected=projected, accepted=right.int().cumprod(1).sum(1).int(),
        recent=torch.zeros(count, 3, dtype=torch.int32),
        position=torch.randint(9, 300, (count,), generator=generator, dtype=torch.int32),
        prompt=torch.randint(0, 100, (count,), generator=generator, dtype=torch.int32),
        cut=torch.zeros(count, dtype=torch.bool),
        looped=torch.arange(count) % 10 == 0, projection=torch.eye(HIDDEN)[:, :8].clone(),
        hidden_mean=torch.zeros(HIDDEN), prompts=[("s", f"s/{i}") for i in range(100)],
        drafter="made up", block_size=16, temperature=0.0, max_new=64,
    )  # fmt: skip


def test_training_finds_what_the_running_product_cannot_see() -> None:
    everything = synthetic(6000, lambda z: torch.sigmoid(1.5 * z + 1.0), 1)
    train, val = training.split_prompts(everything, 0.2, 0)
    options = training.TrainOptions(epochs=12, batch_size=256)
    predictor, history = training.train(train, val, options)
    assert 1 <= history["best_epoch"] <= history["epochs"] <= 12
    context = training.fixed_context(val, 16, 8.0)
    label = training.labels(val.accepted, 15)
    score = training.scores(predictor, val, context)
    prior = training.labels(train.accepted, 15).mean(0).expand_as(label)
    product = reporting.product_scores(val)
    losses = [F.binary_cross_entropy(x, label) for x in (score, prior, product)]
    assert losses[0] < 0.85 * min(losses[1:])
    fit = reporting.fit_of(predictor, val)
    assert fit["r2"] > 0.3 > 0.05 > fit["r2_running_product"]
    assert fit["calibration_error"] < 0.05
    rows = reporting.retention_rows(predictor, val, draws=2, boots=200)
    found = [r for r in rows if r["policy"] == "predictor" and r["seed"] == "none"]
    assert {r["budget_per_request"] for r in found} == {4, 6, 8, 12}
    assert {r["cohort"] for r in found} == {8, 16, 32}
    for row in (r for r in found if r["budget_per_request"] < 12):
        assert row["over_running_product_low"] > 0
        assert row["over_fixed_low"] > 0
        assert 0.7 < row["of_oracle"] <= 1.0


def test_training_keeps_a_running_product_that_is_the_truth() -> None:
    traces = synthetic(4000, lambda z: torch.full_like(z, 0.8), 2)
    train, val = training.split_prompts(traces, 0.2, 0)
    predictor, _ = training.train(train, val, training.TrainOptions(epochs=6, batch_size=256))
    label = training.labels(val.accepted, 15)
    score = training.scores(predictor, val, training.fixed_context(val, 16, 8.0))
    loss, best = (F.binary_cross_entropy(x, label) for x in (score, reporting.product_scores(val)))
    assert loss < best + 0.01


def test_the_split_keeps_prompts_and_their_twins_apart() -> None:
    traces = synthetic(500, torch.sigmoid, 3)
    traces.prompts = [(f"code{'_stub' * (i % 2)}", f"t/{i // 2}") for i in range(100)]
    train, val = training.split_prompts(traces, 0.25, 7)
    sides = [{traces.prompts[i][1] for i in part.prompt.tolist()} for part in (train, val)]
    assert not sides[0] & sides[1]
    assert len(train) + len(val) == 500
    assert 10 <= len(sides[1]) <= 13
    with pytest.raises(ValueError, match="both sides of the split"):
        training.split_prompts(traces.select(traces.prompt == 0), 0.25, 7)


def test_usable_leaves_out_cut_labels_and_loops() -> None:
    traces = synthetic(100, torch.sigmoid, 4)
    traces.cut[3] = True
    assert len(training.usable(traces, "keep")) == 99
    assert len(training.usable(traces, "drop")) == 89
    traces.looped[:] = True
    assert len(training.usable(traces, "drop")) == 99


def test_random_contexts_cover_what_a_run_shows() -> None:
    traces = synthetic(4000, torch.sigmoid, 5)
    traces.recent[:] = torch.tensor([15, 3, -1], dtype=torch.int32)
    context = training.random_context(traces, torch.Generator().manual_seed(0))
    live, budget = torch.exp2(context[:, 0] * 8) - 1, context[:, 1] * 16
    assert live.min() == pytest.approx(1, abs=1e-3)
    assert live.max() == pytest.approx(64, abs=1e-2)
    assert sorted(set(budget.tolist())) == [float(b) for b in range(1, 17)]
    cut = (context[:, 2] * 15).round()
    assert (cut >= (budget - 1).round()).all()
    assert 0.3 < (cut == 15).float().mean() < 0.8
    assert (context[:, 4] == -1 / 15).all()
    fixed = training.fixed_context(traces, 32, 4.0)
    assert fixed[0, :2].tolist() == pytest.approx([np.log2(33) / 8, 0.25])
    assert (fixed[:, 2] == 1).all()


def prompts_of(source: str, count: int, split: str = "train") -> list[Prompt]:
    return [
        Prompt(id=f"{source}/{i}", source=source, split=split, text="x", tokens=np.array([5, i]))
        for i in range(count)
    ]


def test_prompts_that_the_drafter_has_not_seen_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*prompts_of("gsm", 30), *prompts_of("trivia", 30)]
    monkeypatch.setattr(collecting.data, "load_prompts", lambda *_, **__: list(files))
    own = [*prompts_of("self", 5, "val"), *prompts_of("gsm", 30), *prompts_of("test", 5, "eval")]
    answered = [*range(0, 5), *range(5, 25), *range(35, 40)]
    corpus = Corpus(
        prompts=own, prompt_of=answered, temperature=[0.0] * 30, looped=[False] * 30,
        responses=[np.array([1, 2, 3])] * 30,
    )  # fmt: skip
    save_corpus(corpus, tmp_path, vocab_size=100)
    base = ["--out", "x", "--prompts", "a", "--most", '{"trivia": 4}', "--num-prompts"]
    args = train_predictor.arguments([*base, "24", "--unseen-of", str(tmp_path)])
    drawn = [(p.source, p.id) for p in collecting.draw_prompts(None, args)]
    assert len(drawn) == len(set(drawn)) == 24
    unseen = {("gsm", f"gsm/{i}") for i in range(20, 30)} | {(p.source, p.id) for p in own[:5]}
    assert unseen < set(drawn)
    assert sum(source == "trivia" for source, _ in drawn) == 4
    assert sum(source == "test" for source, _ in drawn) == 0
    again = [(p.source, p.id) for p in collecting.draw_prompts(None, args)]
    assert again == drawn
    everything = train_predictor.arguments([*base, "999"])
    assert len(collecting.draw_prompts(None, everything)) == 34


def test_a_learned_projection_finds_an_axis_of_little_variance() -> None:
    traces = synthetic(3000, lambda z: torch.sigmoid(2 * z + 1.0), 6)
    traces.projected = traces.projected.flip(2)  # what matters comes last
    train, val = training.split_prompts(traces, 0.2, 0)
    common: dict[str, Any] = {"epochs": 10, "batch_size": 128, "projected": 2}
    losses = {}
    for rate in (0.0, 3.0):
        options = training.TrainOptions(**common, projection_lr=rate, projection_decay=0.0)
        predictor, history = training.train(train, val, options)
        losses[rate] = history["val_loss"]
        context = training.fixed_context(val, 16, 8.0)
        hidden = val.projected @ val.projection.T + val.hidden_mean
        mine = predictor(val.feature, hidden, context)
        torch.testing.assert_close(mine, training.scores(predictor, val, context))
        assert predictor.projection.shape == (HIDDEN, 2)
    assert losses[3.0] < 0.9 * losses[0.0]
    blind, _ = training.train(train, val, training.TrainOptions(**common, hidden=0))
    assert (blind.projection == 0).all()
    with pytest.raises(ValueError, match="at most the traces' 8 dims, got 9"):
        training.train(train, val, training.TrainOptions(projected=9))


def test_the_whole_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect, train, measure and write, as one command does, at tiny size."""
    model, folder = tiny_model(), write_drafter(tmp_path / "drafter", RAW)
    tokenizer = object()
    monkeypatch.setattr(collecting, "load_pair", lambda args: (model, tokenizer))

    def load_prompts(tokenizer: object, paths: Any, **_: Any) -> list[Prompt]:
        offset = 10 * len(str(paths[0]))
        return [
            Prompt(id=f"{paths[0]}/{i}", source=f"s{i}", split="train", text="",
                   tokens=np.array(prompt(5 + i % 4, seed=offset + i))) for i in range(16)
        ]  # fmt: skip

    monkeypatch.setattr(collecting.data, "load_prompts", load_prompts)
    out = tmp_path / "out"
    options = ["--drafter", str(folder), "--max-new", "8", "--batch", "8", "--epochs", "2"]
    options += ["--held-out", "0.4", "--draws", "1", "--save-traces", "1", "--commit", "abc"]
    train_predictor.main(["--out", str(out), "--prompts", "a", "--measured", "bb", *options])
    config = load_drafter(folder, target_config(model), dtype=torch.float32, device="cpu")
    made = load_predictor(out / "predictor", config.config, config.fingerprint, "cpu")
    assert "Acceptance predictor" in (out / "predictor" / "README.md").read_text()
    rows = json.loads((out / "predictor.json").read_text())
    assert {row["set"] for row in rows} == {"held_out", "measured"}
    assert {row["policy"] for row in rows} == {
        "fit", "raw", "fixed", "running_product", "predictor", "oracle",
    }  # fmt: skip
    assert {row["commit"] for row in rows} == {"abc"}
    report = json.loads((out / "report.json").read_text())
    assert report["parameters"] == sum(p.numel() for p in made.parameters())
    again = tmp_path / "again"
    paths = ["--traces", str(out / "traces"), "--measured-traces", str(out / "measured-traces")]
    train_predictor.main(["--out", str(again), *paths, "--epochs", "2", "--held-out", "0.4"])
    assert (again / "predictor" / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="or --traces; got none"):
        train_predictor.main(["--out", str(again)])

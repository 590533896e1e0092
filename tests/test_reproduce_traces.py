"""Figs. 2, 4 and 10 from made-up passes: counts, correlations, retention, a predictor's scores."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import reproduce_gap
import reproduce_progress
import reproduce_results
import reproduce_retention
import reproduce_traces
import reproduced_traces
from predictor_traces import Traces, save_traces
from reproduced import where
from reproduced_traces import ABOUT, Collection, read

from dscale.compiled.predictor import Predictor, PredictorConfig
from dscale.predictor_files import save_predictor

ABOUT_ROW = {
    "gpu": "none (CPU)", "torch": "2.13", "triton": None, "transformers": "5.24", "commit": "abc",
    "date": "2026-11-30", "model": "tiny", "acceptance": "real", "dtype": "float32",
    "temperature": 0.0, "max_new_tokens": 24, "batch": 4, "drafter": "x", "seconds": 1.0,
}  # fmt: skip
PASSES, HIDDEN = 96, 12


def predictor() -> Predictor:
    torch.manual_seed(0)
    made = Predictor(
        PredictorConfig(hidden_size=HIDDEN, block_size=16, projected=4, widths=(8, 8), drafter="d")
    )
    made.projection.copy_(torch.randn(HIDDEN, 4))
    made.hidden_mean.copy_(torch.randn(HIDDEN))
    torch.nn.init.normal_(made.last.weight, 0, 0.3)
    return made.eval().requires_grad_(False)


def made_up(hidden: torch.Tensor, axes: reproduce_traces.Axes) -> Traces:
    """Passes of four prompts of two sets; the gap of a pass is its accepted count, and the running
    product says which drafts survive."""
    accepted = torch.arange(PASSES) * 5 % 16
    feature = torch.zeros(PASSES, 15, 18)
    feature[..., 1] = accepted[:, None].float()
    feature[..., 16] = torch.where(torch.arange(15) < accepted[:, None], -0.01, -3.0)
    return Traces(
        feature=feature,
        projected=(hidden - axes.hidden_mean) @ axes.projection,
        recent=torch.full((PASSES, 3), -1, dtype=torch.int32),
        position=torch.arange(PASSES, dtype=torch.int32),
        accepted=accepted.int(),
        prompt=(torch.arange(PASSES) % 4).int(),
        cut=torch.arange(PASSES) >= PASSES - 4,
        looped=torch.arange(PASSES) % 4 == 3,
        projection=axes.projection,
        hidden_mean=axes.hidden_mean,
        prompts=[("gsm8k", "0"), ("gsm8k", "1"), ("mbpp", "0"), ("mbpp", "1")],
        drafter="d",
        block_size=16,
        temperature=0.0,
        max_new=24,
    )


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    return torch.randn(PASSES, 15, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, hidden: torch.Tensor) -> Collection:
    folder = tmp_path_factory.mktemp("traces")
    save_traces(made_up(hidden, reproduce_traces.axes_of(predictor())), folder)
    (folder / ABOUT).write_text(json.dumps(ABOUT_ROW))
    return read(folder)


def test_progress_counts_every_pass_but_the_last_of_an_answer(collection: Collection) -> None:
    rows = reproduce_progress.compute(collection)
    assert [row["set"] for row in rows] == ["all", "gsm8k", "mbpp", "trace"]
    accepted = [i * 5 % 16 for i in range(PASSES - 4)]
    assert rows[0]["histogram"] == [accepted.count(n) for n in range(16)]
    assert rows[0]["mean"] == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-4)
    plain = [n for i, n in enumerate(accepted) if i % 4 != 3]
    assert rows[0]["mean_no_loops"] == pytest.approx(1 + sum(plain) / len(plain), abs=1e-4)
    assert (rows[1]["prompts"], rows[1]["passes"]) == (2, (PASSES - 4) // 2)
    assert rows[3]["acceptance"] == "simulated"
    assert rows[3]["mean"] == pytest.approx(6.09, abs=0.05)
    text = "\n".join(reproduce_progress.section(rows).text)
    assert f"mean progress, simulated trace | {rows[3]['mean']:.2f} tokens (simulated)" in text


def test_a_gap_that_is_the_count_ranks_as_the_count(collection: Collection) -> None:
    rows = reproduce_gap.compute(collection)
    assert [row["spearman_mean_gap"] for row in rows] == [1.0, 1.0, 1.0]
    points = rows[0]["points"]
    assert len(points) == PASSES - 4
    assert all(gap == accepted for gap, accepted in points)


def test_retention_of_a_confident_drafter(collection: Collection) -> None:
    rows = where(reproduce_retention.compute(collection, None), set="all")
    assert {row["scores"] for row in rows} == {"running product"}
    by = {(r["budget_per_request"], r["policy"], r["seed"]): r for r in rows}
    accepted = [i * 5 % 16 for i in range(PASSES - 4)]
    fixed = sum(min(n, 7) for n in accepted) / sum(accepted)
    assert by[8, "fixed", None]["retention"] == pytest.approx(fixed, abs=0.02)
    assert by[8, "predictor", "none"]["retention"] == by[8, "oracle", None]["retention"]
    assert by[8, "predictor", "none"]["rows_per_request"] == 8.0
    assert by[8, "raw", "paper"]["retention"] < by[8, "predictor", "paper"]["retention"]


def test_scores_are_the_predictor_s_on_the_axes_it_sees(
    collection: Collection, hidden: torch.Tensor, tmp_path: Path
) -> None:
    made = predictor()
    save_predictor(made, tmp_path)
    traces = collection.traces
    loaded = reproduce_retention.predictor_for(traces, tmp_path)
    ours = reproduce_retention.scores_of(traces, loaded, 8)
    context = reproduce_retention.training.fixed_context(traces, 16, 8.0)
    expected = made(traces.feature, hidden[: len(traces)], context)
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=0)
    rows = reproduce_retention.compute(collection, tmp_path)
    assert where(rows, set="all")[0]["scores"] == "predictor"


def test_traces_that_lack_what_a_predictor_sees_are_refused(
    hidden: torch.Tensor, tmp_path: Path
) -> None:
    save_predictor(predictor(), tmp_path)
    axes = reproduce_traces.Axes(torch.eye(HIDDEN, 8), torch.zeros(HIDDEN))
    with pytest.raises(ValueError, match="lack what it sees"):
        reproduce_retention.predictor_for(made_up(hidden, axes), tmp_path)
    other = made_up(hidden, reproduce_traces.axes_of(predictor()))
    other.drafter = "another"
    with pytest.raises(ValueError, match="drafter"):
        reproduce_retention.predictor_for(other, tmp_path)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected about.json.*reproduce_traces.py"):
        read(tmp_path)


def test_plots_are_drawn_and_written_with_the_rows(
    collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots`")
    monkeypatch.setattr(sys.modules["reproduced_plots"], "PLOTS", tmp_path)
    monkeypatch.setattr(sys.modules["reproduced"], "RESULTS", tmp_path)
    monkeypatch.setattr(reproduced_traces, "read", lambda folder: collection)
    for module in (reproduce_progress, reproduce_gap):
        module.main([])
    reproduce_retention.EXPERIMENT.run(reproduce_retention.compute(collection, None))
    names = {path.name for path in tmp_path.iterdir()}
    each = ("progress", "gap", "retention")
    assert names == {f"{n}.png" for n in each} | {f"reproduce_{n}.json" for n in each}
    text = reproduce_results.page(tmp_path)
    assert "tiny with its drafter, CPU, float32" in text

"""Benches with 8-bit weights: rows of their own, floors of their bytes, their part of the page."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import reproduce_fp8

from bench import closed_loop_simulated, decode_step, graphs
from bench.shapes import SHAPES, build
from dscale.compiled.layer import PROJECTIONS

WEIGHTS = ("fp8-draft", "fp8")


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    module.main()


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shapes_are_quantized_as_the_engine_does(weights: Any) -> None:
    models = build(SHAPES["tiny"], torch.device("cpu"), torch.float32, weights=weights)
    assert set(models.drafter.layer(0).scales) == set(PROJECTIONS)
    assert models.drafter.head is not None
    assert models.target.is_quantized == (weights == "fp8")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_steps_have_rows_of_their_own(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--modes", "dscale-half", "dflash", "--parts", "steps", "gains", "--tiny")
    run(decode_step, monkeypatch, *asked, "--weights", weights, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [weights]
    for name in ("decode_step", "mode_gains"):
        rows = rows_of(tmp_path / weights / f"{name}.json")
        assert {row["weights"] for row in rows} == {weights}
    # Graphs made of them go to the same place, with floors of fewer bytes.
    steps = tmp_path / weights / "decode_step.json"
    run(graphs, monkeypatch, "--from-steps", str(steps), "--out", str(tmp_path))
    full = graphs.floors_of(SHAPES["tiny"], 4)
    for graph, smaller in (("verify", weights == "fp8"), ("decide", True)):
        for row in rows_of(tmp_path / weights / f"{graph}_graph.json"):
            assert row["weights"] == weights
            least = full[graph].milliseconds(row["rows"], row["requests"], row["context"])
            assert (row["floor_ms"] < 0.9 * least) == smaller
    assert [path.name for path in tmp_path.iterdir()] == [weights]


def test_the_verify_floor_of_8b_in_8_bits() -> None:
    """Layers of 6.95 GB and a head of 1.24 GB at 4.26 TB/s, and a context of 1,000."""
    floor = graphs.floors_of(SHAPES["8b"], 2, "fp8")["verify"]
    assert floor.milliseconds(64, 8, 1000) == pytest.approx(2.20, abs=0.005)
    same = graphs.floors_of(SHAPES["8b"], 2, "fp8-draft")["verify"]
    assert same == graphs.verify_floor(SHAPES["8b"], 2)


def test_closed_loops_have_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--tiny", "--modes", "ar", "dscale-half", "--traces", "six", "--weights", "fp8")
    with torch.no_grad():
        run(closed_loop_simulated, monkeypatch, *asked, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]
    rows = rows_of(tmp_path / "fp8" / "closed_loop.json")
    assert {(row["source"], row["weights"]) for row in rows} == {
        ("measured", "fp8"), ("replayed", "fp8")
    }  # fmt: skip


def test_the_page_shows_them_apart(tmp_path: Path) -> None:
    assert reproduce_fp8.sections(tmp_path) == []
    step: dict[str, Any] = dict.fromkeys(("gpu", "torch", "commit", "date", "dtype"), "x")
    step |= {"model": "Qwen3-8B shape", "mode": "dscale", "budget": "half", "tile": "t"}
    step |= {"sampling": "greedy", "requests": 8, "context": 128, "decide_ms": 1.1}
    step |= {"verify_ms": 5.0, "step_ms": 6.2}
    (tmp_path / "decode_step.json").write_text(json.dumps([step, step | {"requests": 9}]))
    assert reproduce_fp8.sections(tmp_path) == []
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "decode_step.json").write_text(json.dumps([step | {"verify_ms": 3.0}]))
    [section] = reproduce_fp8.sections(tmp_path)
    [(head, [line])] = section.tables
    assert tuple(head[-3:]) == ("the model's", "fp8-draft", "fp8")
    assert tuple(line[1:]) == ("8", "128", "1.10 + 5.00, 6.20", "-", "1.10 + 3.00, 6.20")
    quality = {"set": "mbpp", "weights": "fp8-draft", "prompts": 1, "new_tokens": 2}
    quality |= {"tokens_per_pass_model": 3.0, "tokens_per_pass": 2.9, "same_as_model": 1.0}
    quality |= {key: "x" for key in ("gpu", "torch", "commit", "date", "dtype")}
    (tmp_path / "fp8_quality.json").write_text(json.dumps([quality]))
    [section] = reproduce_fp8.sections(tmp_path)
    assert "| MBPP | fp8-draft | 2.90 | 3.00 | 100.0 % |" in section.text

"""The decode-step bench: a dry run at toy size, what it reads out of a profiler trace, and the
files it writes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import decode_step
from bench.profile_step import (
    Kernel,
    allocator_kernels,
    busy,
    format_table,
    graphs_of,
    growth,
    read_trace,
    step_profile,
)
from bench.result_files import ResultFile
from bench.shapes import SHAPES, build
from bench.step_bench import PARTS
from bench.step_cases import CASES
from bench.step_parts import pool_growth

ENVIRONMENT = {"gpu", "torch", "triton", "transformers", "commit", "date", "model", "dtype"}
KEYS = {"mode", "budget", "tile", "sampling", "requests"}


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_step", *args])
    decode_step.main()


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    assert all(row.keys() >= ENVIRONMENT | KEYS for row in rows)
    assert all(row["acceptance"] == "simulated" for row in rows)
    return rows


def test_tiny_run_measures_everything_a_cpu_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--tiny", "--out", str(tmp_path), "--commit", "abc")
    said = capsys.readouterr().out
    for part in ("profile", "pool"):
        assert f"{part}: skipped, it needs a CUDA device" in said
    steps = rows_of(tmp_path / "decode_step.json")
    asked = {
        "rows", "context", "decide_ms", "verify_ms", "step_ms", "idle_share", "allocator_share",
        "graph_pool_mib",
    }  # fmt: skip
    assert all(row.keys() >= asked and row["commit"] == "abc" for row in steps)
    assert len(steps) == 6 * 2 * 2  # cases, requests, contexts
    for row in steps:
        rows = {"ar": 1, "+budget": 8, "dscale": 8}.get(row["mode"], 16)
        assert row["rows"] == rows * row["requests"]
        assert row["step_ms"] >= max(row["decide_ms"], row["verify_ms"]) > 0
        assert (row["decide_ms"] == 0) == (row["mode"] == "ar")
        assert row["idle_share"] is None
    gains = rows_of(tmp_path / "mode_gains.json")
    assert len(gains) == len(CASES) * 2 * 2  # requests, prompts
    for row in gains:
        assert row["decode_tokens_per_s"] > 0
        assert 1 <= row["tokens_per_step"] <= 16
        assert (row["tokens_per_step"] == 1) == (row["rows_per_step"] == row["requests"])
        assert (row["gain"] is None) == (row["mode"] == "ar")
    half = [r for r in gains if r["budget"] == "half" and r["mode"] == "dscale"]
    full = [r for r in gains if r["mode"] == "dflash"]
    for a, b in zip(half, full, strict=True):
        assert a["rows_per_step"] == b["rows_per_step"] / 2
        assert a["tokens_per_step"] <= b["tokens_per_step"]
    (ragged,) = rows_of(tmp_path / "graph_counters.json")
    assert ragged["requests"] == 7
    assert ragged["recompiles"] == ragged["cudagraph_skips"] == ragged["graph_breaks"] == 0
    sampling = rows_of(tmp_path / "sampling_cost.json")
    assert len({row["sampling"] for row in sampling}) == len(sampling) == 3
    assert sampling[0]["over_greedy"] == 1.0


def test_a_failure_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> float:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("bench.step_parts.Stepper.times", broken)
    parts = ["--parts", "steps", "ragged", "--modes", "ar"]
    with pytest.raises(SystemExit, match="toy shape steps"):
        run(monkeypatch, "--tiny", "--out", str(tmp_path), *parts)
    assert "out of luck" in capsys.readouterr().err
    assert rows_of(tmp_path / "graph_counters.json")
    assert not (tmp_path / "decode_step.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_gpu_the_full_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--models", "8b")
    assert "needs a CUDA device" in capsys.readouterr().err


def test_drafters_have_as_many_parameters_as_the_published_ones() -> None:
    counted = {}
    for name in ("8b", "4b"):
        # A toy target: the drafter's size does not depend on its vocabulary or depth.
        from bench.shapes import _drafter_config
        from dscale.compiled.drafter import Drafter

        with torch.device("meta"):
            config = _drafter_config(SHAPES[name])
            drafter = Drafter(config, torch.ones(64), dtype=torch.bfloat16)
        counted[name] = sum(p.numel() for p in drafter.parameters())
        assert config.taps == (1, 9, 17, 25, 33)
    assert counted == {"8b": 1_048_626_432, "4b": 537_427_200}


def test_models_are_random_finite_and_of_their_shape() -> None:
    shape = SHAPES["tiny"]
    models = build(shape, torch.device("cpu"), torch.bfloat16)
    again = build(shape, torch.device("cpu"), torch.bfloat16)
    weight = models.target.layers[0].qkv
    assert isinstance(weight, torch.Tensor)
    assert weight.shape == ((4 + 2 * 2) * 16, 64)
    assert float(weight.float().std()) == pytest.approx(0.02, rel=0.1)
    for ours, theirs in zip(models.drafter.parameters(), again.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert bool(ours.isfinite().all())
    assert models.target.head is not models.target.embedding
    assert models.predictor.projection.dtype == torch.float32
    assert shape.shallow(4).tapped == (1, 1)


def graph(start: float, launch: int, names: list[str], length: float = 2.0) -> list[Kernel]:
    """Kernels 1 us apart."""
    return [Kernel(name, start + i * (length + 1), length, launch) for i, name in enumerate(names)]


DECIDE = ["gemm"] * 20 + ["sgemm_hidden", "_part_statistics", "_join_groups", "mlp", "_pack"]
VERIFY = ["gemm"] * 30


def steps(count: int) -> list[Kernel]:
    """Steps of 200 us: decide 74 us, 6 us of gap, verify 89 us, a copy of 1 us, 30 us idle."""
    found = []
    for i in range(count):
        at = 200.0 * i
        found += graph(at, 10 * i, DECIDE) + graph(at + 80, 10 * i + 1, VERIFY)
        found.append(Kernel("Memcpy", at + 169, 1.0, 10 * i + 2))
    return found


def test_a_step_is_read_out_of_its_kernels() -> None:
    found = step_profile(steps(5), 2, skip=2)
    assert found.graph_gap == pytest.approx(6)
    assert found.step_gap == pytest.approx(31)
    assert found.step == pytest.approx((2 * 200 + 169) / 3)
    assert found.busy == pytest.approx((3 * 110 + 2) / 3)
    assert found.idle_share == pytest.approx(1 - 332 / 569)
    assert found.idle_in_graphs == pytest.approx(1 - 110 / 163)
    assert found.allocator == pytest.approx(6)
    assert found.allocator_names == ("sgemm_hidden", "mlp", "_pack")
    assert found.fields["allocator_share"] == pytest.approx(3 * 6 / 332, abs=1e-4)
    assert found.kernels[0] == {
        "name": "gemm", "count": 50.0, "us": 100.0, "us_each": 2.0, "share": 0.9036,
    }  # fmt: skip
    text = format_table("title", found.kernels, most=1)
    assert text.splitlines()[0] == "title"
    assert "gemm" in text
    assert "6 more kernels" in text


def test_parts_that_need_a_gpu_write_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the profiler itself, which is given made-up kernels."""

    def record(step: Any, count: int) -> list[Kernel]:
        step()
        return steps(count)

    monkeypatch.setattr("bench.step_parts.record", record)
    for name in ("profile", "pool"):
        monkeypatch.setitem(PARTS, name, (PARTS[name][0], False))
    args = ["--parts", "steps", "profile", "pool", "--modes", "dscale-half", "dflash"]
    run(monkeypatch, "--tiny", "--out", str(tmp_path), *args)
    rows = rows_of(tmp_path / "decode_step.json")
    profiled = [row for row in rows if row["context"] == 40]
    assert len(profiled) == 2 * 2
    for row in profiled:
        assert row["step_ms"] > 0
        assert row["graph_gap_us"] == 6.0
        assert row["idle_share"] == pytest.approx(0.43, abs=0.02)
        assert row["allocator_kernels"] == ["sgemm_hidden", "mlp", "_pack"]
    text = (tmp_path / "decode_step_kernels_toy.txt").read_text()
    assert text.count("kernel\n") == 4
    (pool,) = rows_of(tmp_path / "pool_growth.json")
    assert pool["pages_large"] == 4 * pool["pages_small"]
    assert pool["grown"] == []
    assert pool["model"] == "toy shape, 4 layers"
    # A trace that cannot be read is kept, and the run ends with an error.
    monkeypatch.setattr("bench.step_parts.record", lambda step, count: steps(2))
    with pytest.raises(SystemExit, match="profile"):
        run(monkeypatch, "--tiny", "--out", str(tmp_path), "--parts", "profile")
    assert json.loads((tmp_path / "unread_trace.json").read_text())[0][0] == "gemm"


def test_a_step_of_one_graph_and_a_broken_trace() -> None:
    alone = [k for i in range(4) for k in graph(100.0 * i, i, VERIFY)]
    found = step_profile(alone, 1, skip=1)
    assert found.graph_gap is None
    assert found.step_gap == pytest.approx(11)
    assert found.allocator == 0
    with pytest.raises(ValueError, match="kernels: expected 2 graphs a step"):
        step_profile(steps(5)[:-31], 2, skip=2)


def test_overlapping_kernels_count_once() -> None:
    kernels = [Kernel("a", 0, 10, 1), Kernel("b", 5, 2, 1), Kernel("c", 8, 4, 1)]
    assert busy(kernels) == 12
    assert graphs_of(kernels) == []
    assert allocator_kernels(kernels) == []


def test_a_chrome_trace_is_read() -> None:
    event = {"ph": "X", "ts": 5.0, "dur": 2.0, "args": {"correlation": 7}}
    trace = {
        "traceEvents": [
            event | {"cat": "kernel", "name": "late", "ts": 9.0},
            event | {"cat": "gpu_memcpy", "name": "copy"},
            event | {"cat": "cuda_runtime", "name": "cudaGraphLaunch"},
            {"ph": "M", "name": "process_name", "args": {}},
        ]
    }
    assert read_trace(trace) == [Kernel("copy", 5.0, 2.0, 7), Kernel("late", 9.0, 2.0, 7)]


def test_growth_with_the_pool_is_found() -> None:
    small = step_profile(steps(5), 2, skip=2)
    slow = [k._replace(length=60.0) if k.name == "Memcpy" else k for k in steps(5)]
    grown = pool_growth(small, step_profile(slow, 2, skip=2))["grown"]
    assert [row["name"] for row in grown] == ["Memcpy"]
    assert pool_growth(small, small)["grown"] == []
    before = [
        {"name": f"triton_poi_fused_{n}", "us": us} for n, us in (("a_3", 2.0), ("b_4", 3.0))
    ]
    after = [{"name": f"triton_poi_fused_{n}", "us": us} for n, us in (("a_7", 2.0), ("c_4", 3.5))]
    assert growth(before, after) == [
        {"name": "triton_poi_fused", "us_small": 3.0, "us_large": 3.5},
        {"name": "triton_poi_fused_a", "us_small": 2.0, "us_large": 2.0},
    ]
    renamed = growth([{"name": "a", "us": 3.0}], [{"name": "b", "us": 4.0}])
    assert [(row["name"], row["us_small"], row["us_large"]) for row in renamed] == [
        ("b", 0.0, 4.0),
        ("a", 3.0, 0.0),
    ]


def test_result_files_grow_and_replace_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    first = ResultFile(path, ("model", "requests"), {"model": "a", "commit": "1"})
    first.put({"requests": 8, "step_ms": 1.0, "idle_share": None})
    first.put({"requests": 16, "step_ms": 2.0})
    first.put({"requests": 8, "idle_share": 0.1})
    assert json.loads(path.read_text())[0] == {
        "model": "a", "commit": "1", "requests": 8, "step_ms": 1.0, "idle_share": 0.1,
    }  # fmt: skip
    second = ResultFile(path, ("model", "requests"), {"model": "a", "commit": "2"})
    # Measured anew at another commit: nothing of the old row stays.
    assert second.put({"requests": 8, "idle_share": 0.2}) == {
        "model": "a", "commit": "2", "requests": 8, "idle_share": 0.2,
    }  # fmt: skip
    assert len(json.loads(path.read_text())) == 2
    with pytest.raises(ValueError, match="expected rows with"):
        ResultFile(path, ("model", "prompt"), {})

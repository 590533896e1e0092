"""The recipes of the paper's figures on made-up result files; docs/results.md up to date."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import result_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import reproduce_ablation
import reproduce_peers
import reproduce_results
import reproduce_steps
import reproduce_throughput
import reproduce_width
import reproduced
from reproduce_results import EXPERIMENTS, page
from reproduced import Line, number, percent, where
from reproduced_loops import read_loops
from reproduced_throughput import gain, gain_rows

from bench.paper import PAPER, SGLANG

COMPUTED = [each for each in EXPERIMENTS if each.compute is not None]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder where everything but passes of the pair has been measured."""
    folder = tmp_path_factory.mktemp("results")
    result_rows.write(folder)
    for each in COMPUTED:
        assert each.compute is not None
        rows = each.compute(folder)
        assert rows
        (folder / each.file).write_text(json.dumps(rows))
    return folder


def rows_of(measured: Path, module: Any) -> Any:
    return module.EXPERIMENT.read(measured)


def test_gains_are_geometric_means_of_medians(measured: Path) -> None:
    rows = rows_of(measured, reproduce_throughput)
    for kind, cells in (("8b", 7), ("4b", 7), ("pair", 12)):
        for budget, factor in (("half", 1.5), ("auto", 2.0)):
            found = gain(gain_rows(rows, kind), budget)
            assert found is not None
            assert found["gain"] == pytest.approx(factor - 1)
            assert found["latency"]["p99"] == pytest.approx(1 - 1 / factor, abs=1e-4)
            assert found["cells"] == cells
    by_set = gain(gain_rows(rows, "pair", 1.0), "auto", "set", "mbpp")
    assert by_set is not None
    assert by_set["cells"] == 3
    assert gain_rows(rows, "8b", 1.0) == []
    assert [row["worst"] for row in where(rows, kind="replay")] == [0.02, 0.02]


def test_simulated_loops_of_a_few_requests_a_worker_are_one_group(tmp_path: Path) -> None:
    rows = [row for row in result_rows.loops() if row["source"] == "measured"]
    (tmp_path / "closed_loop.json").write_text(json.dumps(rows))
    found = reproduce_throughput.compute(tmp_path)
    eight = gain(gain_rows(found, "8b"), "auto")
    assert eight is not None
    assert eight["cells"] == 4
    assert eight["protocol"] == "a few requests of each worker"


def test_loops_of_the_shapes_at_temperature_1_fill_their_lines(tmp_path: Path) -> None:
    greedy = [row for row in result_rows.loops() if row["acceptance"] == "simulated"]
    sampled = [row | {"temperature": 1.0} for row in greedy if row["mode"] != "ar"]
    (tmp_path / "closed_loop.json").write_text(json.dumps(greedy + sampled))
    rows = reproduce_throughput.compute(tmp_path)
    section = reproduce_throughput.EXPERIMENT.section(rows)
    ours = {line.what: line.ours for line in section.every}
    for kind in ("Qwen3-8B shapes", "Qwen3-4B shapes"):
        for budget, gain_of in (("half", 0.5), ("auto", 1.0)):
            what = f"the same at temperature 1, {kind}, `{budget}`"
            assert ours[what] == pytest.approx(gain_of)
        assert any(text.startswith(f"{kind} at temperature 1: ") for text in section.ours)
    # What else is made of these rows is greedy.
    for each in (reproduce_peers, reproduce_ablation, reproduce_steps):
        assert each.compute(tmp_path) == each.compute(written(tmp_path / "greedy", greedy))


def written(folder: Path, rows: list[Any]) -> Path:
    """A results folder with only these closed loops."""
    folder.mkdir(exist_ok=True)
    (folder / "closed_loop.json").write_text(json.dumps(rows))
    return folder


def test_ratios_compare_one_commit_and_the_same_repetitions(tmp_path: Path) -> None:
    cell = [row for row in result_rows.loops() if row["acceptance"] == "real"]
    cell = where(cell, set="gsm8k", concurrency=8, temperature=0.0)
    auto = where(cell, mode="dscale", budget="auto")
    once = [row for row in cell if row["repetition"] == 0 or row not in auto]
    (tmp_path / "closed_loop.json").write_text(json.dumps(once))
    assert {row["repetition"] for row in read_loops(tmp_path)} == {0}
    for row in auto:
        row["commit"] = "older"
    (tmp_path / "closed_loop.json").write_text(json.dumps(cell))
    budgets = {row["budget"] for row in reproduce_throughput.compute(tmp_path) if "gain" in row}
    assert budgets == {"half"}
    rows = result_rows.gains()
    for row in where(rows, mode="dscale", budget="auto"):
        row["commit"] = "older"
    (tmp_path / "mode_gains.json").write_text(json.dumps(rows))
    some = dict(reproduce_ablation.series_of(reproduce_ablation.compute(tmp_path)))["8b"]
    assert reproduce_ablation.gain(some, "dscale half", "dflash") == pytest.approx(0.5)
    assert reproduce_ablation.gain(some, "dscale auto", "dflash") is None
    lines = reproduce_steps.section(reproduce_steps.compute(tmp_path)).every
    ours = {line.what: line.ours for line in lines}
    assert ours["step interval shorter by, concurrency 8, Qwen3-8B shapes, `auto`"] is None
    assert ours["step interval shorter by, concurrency 8, Qwen3-8B shapes, `half`"] is not None


def test_the_trace_of_mean_six_is_taken_where_it_was_measured() -> None:
    rows = result_rows.gains()
    rows = [
        row for row in rows if row["model"] != result_rows.SHAPES["4b"] or row["trace"] != "six"
    ]
    found = {(row["model"], row["trace"]) for row in reproduced.one_trace(rows)}
    assert found == {(result_rows.SHAPES["8b"], "six"), (result_rows.SHAPES["4b"], "paper")}


def test_widths_are_relative_to_the_full_one(measured: Path) -> None:
    rows = rows_of(measured, reproduce_width)
    assert [row["width"] for row in rows] == [4, 8, 14, 16]
    assert [row["of_full"] for row in rows] == [0.625, 0.75, 0.9375, 1.0]
    text = "\n".join(reproduce_width.section(rows).text)
    assert "| throughput at width 8 against full width | -25.0 % | -15.0 % |" in text


def test_ablation_compares_each_step_with_the_one_before(measured: Path) -> None:
    rows = dict(reproduce_ablation.series_of(rows_of(measured, reproduce_ablation)))
    simulated = rows["8b"]
    assert {row["concurrency"] for row in simulated} == {1, 8, 16, 32}
    for step, over, expected in (
        ("+tiles, per head", "dflash", 1.05),
        ("+tiles", "dflash", 1.1),
        ("+budget", "+tiles", 1.25 / 1.1),
        ("dscale half", "+budget", 1.5 / 1.25),
        ("dscale auto", "dflash", 2.0),
    ):
        assert reproduce_ablation.gain(simulated, step, over) == pytest.approx(expected - 1)
    assert reproduce_ablation.gain(rows["pair"], "dscale half", "dflash") == pytest.approx(0.5)
    assert reproduce_ablation.gain(rows["pair"], "+tiles, per head", "dflash") is None
    one = [row | {"tokens_per_s": 9e9} for row in where(simulated, concurrency=1, step="+tiles")]
    others = [row for row in simulated if row["concurrency"] > 1]
    assert reproduce_ablation.gain(one + others, "+tiles", "dflash") == pytest.approx(0.1)


def test_steps_show_intervals_shares_and_masked_rows(measured: Path) -> None:
    rows = rows_of(measured, reproduce_steps)
    lines = {line.what: line.ours for line in reproduce_steps.section(rows).every}
    expected = {
        "step interval shorter by, concurrency 16, Qwen3-8B shapes, `half`": 1 - 1 / 1.5,
        "step interval shorter by, concurrency 8, SmolLM2 pair, `auto`": 0.5,
        "share of a control step: draft graph, Qwen3-8B shapes, concurrency 16": 0.1,
        "share of a control step: verify graph, Qwen3-8B shapes, concurrency 16": 0.8,
        "share of a control step: outside the graphs, Qwen3-8B shapes, concurrency 16": 0.1,
        "masked tile rows, control's 128-row tile": PAPER["masked_rows"].value,
        "masked tile rows, 16-row tile": 0.0,
        "masked tile rows, 16-row tile, `half`": 0.5,
        "graph pool, every bucket to 32 requests, Qwen3-4B shapes": 700.0,
        "temperature 1: step longer than greedy, Qwen3-8B shapes": 0.04,
    }
    for what, value in expected.items():
        assert lines[what] == pytest.approx(value, abs=1e-4), what


def test_graphs_stand_beside_their_floors(measured: Path) -> None:
    text = reproduce_steps.section(rows_of(measured, reproduce_steps)).text
    row = "| Qwen3-8B shape, verify, dscale | 8 | 64 | 1000 | 5.00 | 4.00 | 1.25 |"
    assert row in text


def test_peers_stand_beside_sglang(measured: Path) -> None:
    rows = rows_of(measured, reproduce_peers)
    ratios = reproduce_peers.over_sglang(rows, "8b")
    assert [r["requests"] for r in ratios] == [1, 8, 16, 32]
    assert ratios[1]["ratio"] == pytest.approx(9600 / SGLANG["8b"]["decode_tokens_per_s"][8])
    text = "\n".join(reproduce_peers.section(rows).text)
    assert "| concurrency 8 | 5,070 | 4,800 | 7,200 | 9,600 | 1.89 (aim 1.5) |" in text
    assert "| `dscale` | 100 | 800 |" in text


def test_a_page_without_measurements_invents_nothing(tmp_path: Path) -> None:
    text = page(tmp_path)
    lines = [line for each in EXPERIMENTS for line in each.section([]).every]
    assert all(line.ours in (None, reproduced.NOT_RUN) for line in lines)
    assert text.count(reproduced.NOT_MEASURED) > 40
    assert "](plots/" not in text
    for each in EXPERIMENTS:
        commands = each.section([]).commands
        assert commands
        assert all(command in text for command in commands)


def test_simulated_numbers_say_so(measured: Path) -> None:
    for each in EXPERIMENTS:
        for line in each.section(each.read(measured)).every:
            if isinstance(line.ours, float) and "shapes" in line.what:
                assert "(simulated)" in line.cells[1], line


def test_rows_of_dry_runs_and_of_a_cpu_beside_a_gpu_are_left_out(tmp_path: Path) -> None:
    toy = [row | {"model": "toy shape"} for row in result_rows.loops()]
    cpu = [row | {"gpu": reproduced.CPU, "tokens_per_s": 1.0} for row in result_rows.widths()]
    (tmp_path / "cpu").mkdir()
    (tmp_path / "closed_loop.json").write_text(json.dumps(toy))
    (tmp_path / "cpu" / "closed_loop.json").write_text(json.dumps(cpu))
    assert reproduce_throughput.compute(tmp_path) == []
    assert [row["of_full"] for row in reproduce_width.compute(tmp_path)] == [None] * 4
    (tmp_path / "closed_loop.json").write_text(json.dumps(toy + result_rows.widths()))
    assert reproduce_width.compute(tmp_path)[0]["of_full"] == 0.625


@pytest.mark.parametrize("each", EXPERIMENTS, ids=lambda each: each.name)
def test_a_file_of_another_schema_is_refused_by_name(each: Any, tmp_path: Path) -> None:
    (tmp_path / each.file).write_text('[{"other": 1}]')
    with pytest.raises(ValueError, match=rf"{each.file}.*expected a field"):
        page(tmp_path)
    (tmp_path / each.file).unlink()
    for name in ("closed_loop.json", "mode_gains.json", "peers.json"):
        (tmp_path / name).write_text('[{"other": 1}]')
    if each.compute is not None:
        with pytest.raises(ValueError, match="expected a field"):
            each.compute(tmp_path)


def test_lines_show_ranges_and_know_when_they_fall_short() -> None:
    assert Line("a", 0.25, (0.308, 0.525), better=1).falls_short
    assert not Line("a", 0.31, (0.308, 0.525), better=1).falls_short
    assert Line("a", 900.0, 832, number(0, "MiB"), better=-1).falls_short
    assert not Line("a", None, 832, better=1).falls_short
    assert not Line("a", 0.1, 0.2).falls_short
    assert Line("a", 0.25, (0.308, 0.525)).cells == ["a", "25.0 %", "30.8 % to 52.5 %", ""]
    assert percent(0.4393) == "43.9 %"


def test_computed_result_files_are_up_to_date() -> None:
    for each in COMPUTED:
        assert each.compute is not None
        assert each.read() == json.loads(json.dumps(each.compute(reproduced.RESULTS))), (
            f"{each.file}: run recipes/reproduce_results.py"
        )


def test_help_of_a_computed_recipe_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> Any:
        raise AssertionError("it ran")

    monkeypatch.setattr(reproduced.Experiment, "run", refused)
    for argument, code in (("--help", 0), ("--nope", 2)):
        with pytest.raises(SystemExit) as end:
            reproduce_steps.EXPERIMENT.command(reproduce_steps.__doc__, [argument])
        assert end.value.code == code
    assert "Fig. 11" in capsys.readouterr().out


def test_the_page_is_up_to_date() -> None:
    assert reproduce_results.PAGE.read_text(encoding="utf-8") == page(), (
        "docs/results.md: run recipes/reproduce_results.py"
    )


def test_every_plot_can_be_drawn(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots`")
    plots = sys.modules["reproduced_plots"]
    monkeypatch.setattr(plots, "PLOTS", tmp_path)
    for each in COMPUTED:
        each.draw(each.read(measured))
    names = {plot for each in COMPUTED for plot in each.section(each.read(measured)).plots}
    assert {path.name for path in tmp_path.iterdir()} == names

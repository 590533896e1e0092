"""The commands that serve closed loops, on toy models: which cells they measure and replay, and
what happens to those that fail or come too late."""

import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import closed_loop as real
from bench import closed_loop_simulated as simulated
from bench import graphs, operators, peers
from bench.aggregate import LOOP_FIELDS, LOOP_KEYS, read_rows
from bench.loop_cells import Cell, all_cases
from bench.result_files import ResultFile
from bench.rows import ASIDE
from bench.serving_times import read_times
from bench.simulated_cells import cell_of, lengths, name_of, requests_of
from bench.step_cases import CASES, Case
from bench.switched import SwitchedEngine
from dscale.request import Request


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_no_mode_is_timed_in_pages_that_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--tiny", "--sets", "gsm8k", "--concurrency", "2", "--modes", "ar", "+tiles"]
    use, served = SwitchedEngine.use, []

    def watched(self: SwitchedEngine, case: Case, room: Sequence[Request] = ()) -> float:
        took = use(self, case, room)
        assert self.core.workspace is not None
        served.append((len(room) > 0, self.core.workspace.served))
        return took

    monkeypatch.setattr(SwitchedEngine, "use", watched)
    run_real([*arguments, "--repetitions", "1", "--out", str(tmp_path)])
    assert [had for timed, had in served if timed] == [False, False]
    assert len(served) == 6


def test_rows_of_toys_stay_out_of_the_results() -> None:
    for parse in (real.parse, simulated.parse, operators.parse, graphs.parse, peers.parse):
        assert parse(["--tiny"]).out == ASIDE
        assert parse(["--tiny", "--out", "mine"]).out == Path("mine")
    for parse in (simulated.parse, graphs.parse):
        assert parse(["--tiny", "--weights", "fp8"]).out == ASIDE / "fp8"


def test_real_cells_are_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tiny", "--sets", "gsm8k", "--concurrency", "2", "--modes", "ar", "+tiles"]
    arguments += ["--repetitions", "1", "--out", str(tmp_path), "--commit", "one"]
    rows = [run_real(arguments), run_real(arguments), run_real([*arguments, "--commit", "two"])]
    assert "2 cells, 2 of them measured already" in capsys.readouterr().out
    assert rows[0] == rows[1]
    assert [row["commit"] for row in rows[2]] == ["two", "two"]
    for row in read_rows(tmp_path / "closed_loop.json", LOOP_FIELDS):
        assert row["acceptance"] == "real"
        assert row["output_tokens"] == 5 * 12
        assert row["capped"] == 5
        assert row["predictor"] is None
    with pytest.raises(ValueError, match="expected rows with"):
        ResultFile(written(tmp_path / "other.json", [{"a": 1}]), LOOP_KEYS, {})


def run_real(arguments: list[str]) -> list[dict[str, Any]]:
    """`python -m bench.closed_loop` with these arguments; returns the file's rows."""
    args = real.parse(arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["closed_loop", *arguments])
        real.main()
    rows: list[dict[str, Any]] = json.loads((args.out / "closed_loop.json").read_text())
    return rows


def written(path: Path, rows: object) -> Path:
    path.write_text(json.dumps(rows))
    return path


def test_simulated_loops_and_their_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["x", "--tiny", "--modes", "dflash", "dscale-half", "--traces", "six"]
    arguments += ["--temperature", "0", "1", "--out", str(tmp_path), "--commit", "one"]
    monkeypatch.setattr(sys, "argv", arguments)
    events = watched_events(monkeypatch)
    simulated.main()
    ready = {(m, t) for m in ("dflash", "dscale-half") for t in (0.0, 1.0)}
    assert set(events[:4]) == set(events[-4:]) == ready, "times before all loops, and after"
    assert events[4:-4] == ["loop"] * 8
    rows = read_rows(tmp_path / "closed_loop.json", LOOP_FIELDS)
    assert {(r["acceptance"], r["trace"], r["model"]) for r in rows} == {
        ("simulated", "six", "toy shape")
    }
    measured = [r for r in rows if r["source"] == "measured"]
    against = [r for r in rows if "replay_error" in r]
    assert len(measured) == len(against) == 8
    for row, again in zip(measured, against, strict=True):
        same = (*LOOP_KEYS[4:], "tokens_per_step", "steps", "rows_per_step", "output_tokens")
        assert [row[name] for name in same] == [again[name] for name in same]
        assert cell_of(row).case == name_of(again)
    swept = {(r["concurrency"], r["temperature"]) for r in rows if r["requests"] == 12}
    assert swept == {(2, 0.0), (2, 1.0), (3, 0.0), (3, 1.0)}
    with pytest.raises(ValueError, match=r"expected rows of .*'ar'.*, got none"):
        read_times(tmp_path, "toy shape", CASES["ar"])
    path = tmp_path / "bucket_times.json"
    times, row = read_times(tmp_path, "toy shape", CASES["dflash"])
    assert row["observed"] == 0  # uncaptured steps are not corrected
    older = [{k: v for k, v in r.items() if k != "observed"} for r in read_rows(path, ())]
    written(path, older)
    assert read_times(tmp_path, "toy shape", CASES["dflash"])[0] == times

    for modes, timed in ((["ar", "dflash"], ["dflash"]), (["ar"], None)):
        args = simulated.parse(["--tiny", "--out", str(tmp_path), "--modes", *modes])
        if timed is None:
            with pytest.raises(ValueError, match="got none"):
                simulated.timed_modes("toy shape", 0.0, args)
        else:
            assert simulated.timed_modes("toy shape", 0.0, args) == timed
        assert "ar is left out" in capsys.readouterr().out


def watched_events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What comes of a run, in order: loops, and the modes and temperatures of times."""
    events: list[Any] = []
    measure, write = simulated.measure, simulated.write_steps

    def measured(*given: Any) -> Any:
        events.append("loop")
        return measure(*given)

    def wrote(engine: Any, case: Any, file: Any, temperature: float) -> None:
        assert engine.core.case == case, "the mode in use"
        assert engine.core.workspace.served == ("loop" in events), "or no noise is in the pages"
        name = next(name for name, known in CASES.items() if known == case)
        events.append((name, temperature))
        write(engine, case, file, temperature)

    monkeypatch.setattr(simulated, "measure", measured)
    monkeypatch.setattr(simulated, "write_steps", wrote)
    return events


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_simulated_requests_are_chosen_at_their_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Loops, steps that are timed and prefills: every choice goes through the temperature's
    chooser, and a replay reads the times of its own."""
    chosen: dict[bool, float] = {}

    def watched(whole: Any) -> Any:
        def choose(logits: Any, position: Any, sampling: Any, chooser: Any) -> Any:
            highest = max(chosen.get(chooser.sample, 0.0), float(sampling.temperature.max()))
            chosen[chooser.sample] = highest
            return whole(logits, position, sampling, chooser)

        return choose

    for module in ("verify", "prefill"):
        name = f"dscale.compiled.{module}.choose"
        monkeypatch.setattr(name, watched(importlib.import_module(name[:-7]).choose))
    arguments = ["x", "--tiny", "--modes", "dflash", "--traces", "six", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--temperature", str(temperature)])
    simulated.main()
    assert chosen == {temperature > 0: temperature}
    read_times(tmp_path, "toy shape", CASES["dflash"], sampled=temperature > 0)
    with pytest.raises(ValueError, match=r"bucket_times.json: expected rows of .*, got none"):
        read_times(tmp_path, "toy shape", CASES["dflash"], sampled=temperature == 0)


def test_simulated_requests() -> None:
    assert lengths("prompt128-new256", 2) == [(128, 256)] * 2
    chat = lengths("chat", 200, seed=1)
    assert chat == lengths("chat", 200, seed=1)
    prompts, news = zip(*chat, strict=True)
    assert (min(prompts) >= 60, max(prompts) <= 250) == (True, True)
    assert (min(news) >= 64, max(news) <= 512) == (True, True)
    for wrong in ("gsm8k", "prompt0-new4", "prompt-new"):
        with pytest.raises(ValueError, match="set: expected 'chat' or 'promptP-newN'"):
            lengths(wrong, 1)
    cell = Cell("prompt8-new4", 2, 0.0, "ar", 0, requests=3, warmup=2, output_cap=4)
    assert [len(r.prompt) for r in requests_of(cell, 50)] == [8] * 5
    for name, case in all_cases().items():
        assert name_of(case.fields) == name
    with pytest.raises(ValueError, match="row: expected a known mode"):
        name_of({"mode": "medusa", "budget": None, "tile": "none"})


def test_what_fails_does_not_take_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--tiny", "--sets", "gsm8k", "--concurrency", "2", "--modes", "ar", "+tiles"]
    arguments += ["--repetitions", "1", "--out", str(tmp_path)]
    assert real.cells_of(real.parse(arguments))[0].case == "ar"
    whole = real.measure

    def measure(pair: Any, cell: Cell, prompts: Any) -> Any:
        if cell.case == "ar":
            raise ArithmeticError("not today")
        return whole(pair, cell, prompts)

    monkeypatch.setattr(real, "measure", measure)
    with pytest.raises(SystemExit, match=r"failed: .'gsm8k c=2 T=0 ar'"):
        run_real(arguments)
    assert "not today" in capsys.readouterr().err
    assert [row["mode"] for row in json.loads((tmp_path / "closed_loop.json").read_text())] == [
        "+tiles"
    ]
    run_real([*arguments, "--seconds", "0"])
    assert "time is up: 1 not measured" in capsys.readouterr().out


@pytest.mark.parametrize("module", [real, simulated])
def test_compiling_does_not_use_up_the_time(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["x", "--tiny", "--concurrency", "2", "--modes", "ar", "--seconds", "600"]
    arguments += ["--traces", "six"] if module is simulated else ["--sets", "gsm8k"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path)])
    whole = module.warm_up

    def slow(*given: Any) -> Any:
        ready = whole(*given)
        now = time.perf_counter
        monkeypatch.setattr("bench.attempts.time.perf_counter", lambda: now() + 900)
        return ready

    monkeypatch.setattr(module, "warm_up", slow)
    module.main()
    assert read_rows(tmp_path / "closed_loop.json", LOOP_FIELDS)


@pytest.mark.parametrize(
    ("arguments", "number", "requests"),
    [
        ([], 302, 128),
        (["--grid", "reduced"], 216, 64),
        (["--grid", "reduced", "--repetitions", "1"], 72, 64),
        (["--grid", "reduced", "--sets", "mbpp", "--modes", "ar", "--concurrency", "8"], 3, 64),
        (["--grid", "committed", "--temperature", "1"], 72, 128),
        (["--repetitions", "1", "--modes", "ar"], 12, 128),
        (["--temperature", "1", "--requests", "7"], 216, 7),
    ],
    ids=str,
)
def test_no_option_is_ignored(arguments: list[str], number: int, requests: int) -> None:
    cells = real.cells_of(real.parse(arguments))
    assert len(cells) == number
    assert min(cell.requests for cell in cells) == requests
    if "--temperature" in arguments:
        assert {cell.temperature for cell in cells} == {1.0}


def test_a_grid_by_name_has_its_own_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--requests", "3"], ["--warmup", "0"], ["--output-cap", "9"], ["--tiny"]):
        with pytest.raises(SystemExit):
            real.parse(["--grid", "reduced", *option])
    assert "--grid: expected without" in capsys.readouterr().err

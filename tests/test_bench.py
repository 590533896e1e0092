"""The closed-loop benches on toy models: modes share their stages, the real loop says what
`generate` says, and the replay takes the engine's own steps."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import closed_loop as real
from bench import closed_loop_simulated as simulated
from bench import switched
from bench.aggregate import LOOP_FIELDS, LOOP_KEYS, read_rows
from bench.client import closed_loop, figures
from bench.loop_cells import Cell, all_cases
from bench.replay import Replay, Times
from bench.result_files import ResultFile
from bench.serving_times import read_times
from bench.shapes import SHAPES, build
from bench.simulated import SETTINGS, Trace, draw
from bench.simulated_cells import cell_of, lengths, name_of, requests_of
from bench.step_cases import CASES, Case
from bench.switched import SharedCore, SwitchedEngine
from dscale.config import EngineConfig
from dscale.policy import Cost
from dscale.request import Request
from dscale.timing import MeasuredCosts

CPU = torch.device("cpu")
WORKERS = 3


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def engine_of(trace: Trace | None = None) -> SwitchedEngine:
    models = build(SHAPES["tiny"], CPU, torch.float32)
    settings = EngineConfig(max_concurrency=WORKERS, prefix_cache=False)
    return SwitchedEngine(models.target, models.drafter, models.predictor, settings, trace)


def requests(count: int = 7) -> list[Request]:
    draws = torch.Generator().manual_seed(5)
    return [
        Request(
            prompt=torch.randint(200, (5 + 3 * at,), generator=draws).tolist(),
            max_new_tokens=10 + 7 * (at % 3),
        )
        for at in range(count)
    ]


ROOM = [Request(prompt=[0] * 40, max_new_tokens=40)] * WORKERS


def test_modes_share_stages_and_say_the_same() -> None:
    engine, texts = engine_of(), []
    try:
        for name in ("ar", "dflash", "+tiles", "+budget", "dscale-half", "ar"):
            engine.use(CASES[name], ROOM)
            sent = requests()
            closed_loop(engine.submit, sent, WORKERS)
            engine.forget()
            texts.append([r.tokens for r in sent])
        made = set(engine.core._shared)
        engine.ask(lambda batcher: batcher.fail(ArithmeticError("broke")))
        assert engine.core.workspace is None
        engine.use(CASES["dflash"])  # what the failure took is made again, for this mode
        assert engine.core.workspace is not None
        assert len(engine.core._shared) == 3  # prompt, decide, verify
        with pytest.raises(ValueError, match="requests: expected no larger ones"):
            engine.use(CASES["ar"], [Request(prompt=[0] * 40_000, max_new_tokens=40)] * 3)
    finally:
        engine.close()
    assert all(text == texts[0] for text in texts)
    assert [len(t) for t in texts[0]] == [r.max_new_tokens for r in requests()]
    # Two decides (with and without scores), one Anchors, two prompt passes (with and without
    # drafter), and verify for: one row, the control's tile, 16 rows of each, packed rows.
    assert sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in made) == [
        "False", "False", "False", "True", "anchors", "decide", "decide", "prompt", "prompt",
    ]  # fmt: skip


def flat_times(costs: dict[tuple[int, int | None], Cost]) -> Times:
    return Times(MeasuredCosts(costs), [(1, 0.5), (4096, 1.0)], [(1, 0.25), (4096, 0.5)], 0.1, 0.1)


def costs_of(case: Case) -> dict[tuple[int, int | None], Cost]:
    kinds: tuple[int | None, ...] = (None,)
    if case.config.adaptive:
        kinds = tuple(range(17))
    return {
        (lanes, None if kind is None else kind * lanes): Cost(1.0 + 0.01 * (kind or 16) * lanes)
        for lanes in range(1, WORKERS + 1)
        for kind in kinds
    }


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["ar", "dflash", "dscale-half", "dscale-auto"])
def test_the_replay_takes_the_engine_s_steps(
    monkeypatch: pytest.MonkeyPatch, name: str, late: bool
) -> None:
    """Same trace, same requests: the same progress in every pass of every request."""
    case, slots = CASES[name], 4
    draws = draw(SETTINGS["paper"], 64, slots + 1)
    costs = costs_of(case)
    if late:
        # Captured steps are read a step late. Nothing is compiled here for real.
        monkeypatch.setattr(SharedCore, "captured", property(lambda core: True))
        monkeypatch.setattr(SharedCore, "captures_prompts", False)
        monkeypatch.setattr(switched, "capture", lambda stage: stage)
    monkeypatch.setattr(SharedCore, "_capture", lambda core, *a, **k: MeasuredCosts(costs))
    monkeypatch.setattr("dscale.core.linear_costs", lambda *a: MeasuredCosts(costs))
    engine = engine_of(Trace(*draws, CPU))
    try:
        engine.use(case, ROOM)
        sent = requests()
        closed_loop(engine.submit, sent, WORKERS)
        stats, intervals = engine.stats, engine.batcher.intervals
    finally:
        engine.close()
    loop = Replay(case, flat_times(costs), *draws, late=late, padded=False)
    replayed = requests()
    served = loop.run(replayed, WORKERS)
    assert [r.progress for r in replayed] == [r.progress for r in sent]
    counters = ("steps", "passes", "tokens", "drafted", "accepted")
    assert [getattr(loop.stats, c) for c in counters] == [getattr(stats, c) for c in counters]
    assert (loop.intervals.steps, loop.intervals.tokens) == (intervals.steps, intervals.tokens)
    assert 0 < intervals.steps < stats.steps  # some had a prefill before them
    row = figures(served, loop.stats, loop.intervals, 24)
    assert 1.0 < row["step_ms"] < 3.0
    assert row["steps"] * 1.0 < 1e3 * row["window_s"] < row["steps"] * 3.0
    if late:
        assert loop.gpu > 0


def test_a_replay_waits_for_the_later_of_host_and_gpu() -> None:
    case, draws = CASES["ar"], draw(SETTINGS["paper"], 16, 2)
    table: dict[tuple[int, int | None], Cost] = {(1, None): Cost(2.0)}
    for launch, step in ((0.5, 2.0), (5.0, 5.1)):
        times = Times(
            MeasuredCosts(table), [(1, 3.0), (8, 3.0)], [(1, 1.0), (8, 1.0)], launch, 0.1
        )
        loop = Replay(case, times, *draws, padded=False)
        [request] = [Request(prompt=[0] * 4, max_new_tokens=101)]
        served = loop.run([request], 1)
        # 100 steps one behind the other; the host's own time shows where it is the longer one.
        assert 1e3 * served.seconds == pytest.approx(3 + 100 * step, rel=0.03)
        assert request.first_token_at == pytest.approx(3e-3)
    with pytest.raises(ValueError, match="steps: expected a time of 2 lanes"):
        times.of_step(2, None)


def test_a_larger_bucket_stands_in() -> None:
    table = {(2, 4): Cost(1.0), (2, 8): Cost(2.0), (2, 0): Cost(0.5), (4, 12): Cost(9.0)}
    times = flat_times({**table})
    assert [times.of_step(2, rows).base for rows in (3, 4, 5, 0)] == [1.0, 1.0, 2.0, 0.5]
    assert times.of_prefill(4096) == (1.0, 0.5)


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


def test_simulated_loops_and_their_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["x", "--tiny", "--modes", "dflash", "dscale-half", "--traces", "six"]
    arguments += ["--temperature", "0", "1", "--out", str(tmp_path), "--commit", "one"]
    monkeypatch.setattr(sys, "argv", arguments)
    simulated.main()
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

"""The engine of the closed-loop benches on toy models: modes share their stages and say the same,
and the replay takes the engine's own steps."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import switched
from bench.client import closed_loop, figures
from bench.replay import Replay, Times
from bench.serving_times import step_rows
from bench.shapes import SHAPES, build
from bench.simulated import SETTINGS, Trace, draw
from bench.step_cases import CASES, Case
from bench.switched import SharedCore, SwitchedEngine
from dscale.compiled.sampling import Chooser
from dscale.config import EngineConfig
from dscale.decode import Decoding, Launch
from dscale.policy import Cost
from dscale.request import Request
from dscale.results import Results
from dscale.timing import MeasuredCosts, bucket_kinds

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


def steps_say_what_they_took(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    """Steps on the CPU are late as captured ones are, and take what the replay's do."""

    def tell(self: Decoding, launch: Launch) -> None:
        choice = launch.choice
        rows = None if choice is None else choice.rows if choice.draft else 0
        if self.times is not None and launch.results.began is not None:
            took = times.of_step(launch.lanes, rows).at(launch.context)
            self.times.observe(launch.lanes, rows, launch.context, took)

    def of(result_NX: torch.Tensor, *, late: bool, began: Any = None) -> Results:
        return Results(result_NX.clone(), None, began)

    monkeypatch.setattr(SharedCore, "captured", property(lambda core: True))
    monkeypatch.setattr(SharedCore, "captures_prompts", False)
    monkeypatch.setattr(switched, "capture", lambda stage: stage)
    monkeypatch.setattr("dscale.core.capture_buckets", lambda *a, **k: None)
    monkeypatch.setattr("dscale.decode.mark", lambda device: True)
    monkeypatch.setattr(Results, "of", of)
    monkeypatch.setattr(Decoding, "_observe", tell)


def test_the_replay_comes_to_know_buckets_as_the_engine_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widths so alike that what is little known is tried: the same ones, as often. Steps behind a
    prompt count in neither."""
    case, draws = CASES["dscale-auto"], draw(SETTINGS["paper"], 64, 5)
    costs: dict[tuple[int, int | None], Cost] = {
        (n, k * n): Cost(1.0 + 0.12 * k) for n in range(1, WORKERS + 1) for k in range(17)
    }
    times = flat_times(costs)
    steps_say_what_they_took(monkeypatch, times)
    engine = engine_of(Trace(*draws, CPU))
    try:
        engine.use(case, ROOM)
        known = engine.core._costs[Chooser()]
        known.table.update(costs)
        sent = requests(40)
        closed_loop(engine.submit, sent, WORKERS)
    finally:
        engine.close()
    loop = Replay(case, times, *draws, padded=False)
    replayed = requests(40)
    loop.run(replayed, WORKERS)
    assert [r.progress for r in replayed] == [r.progress for r in sent]
    assert loop._known.observed == known.observed
    assert len(known.observed) > 4, "some were tried"
    assert known.observed.total() < loop.stats.steps - 30, "as many had a prompt before them"
    assert times.steps.observed.total() == 0, "times of other replays, too"


@pytest.mark.parametrize("name", ["ar", "dflash", "dscale-half", "dscale-auto"])
def test_the_times_of_every_mode_are_corrected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As a GPU would: every step says it took 1.03 ms where 1 was measured."""
    case = CASES[name]
    kinds = bucket_kinds(case.config)
    buckets = {(n, None if k is None else k * n) for n in (1, 2, 3) for k in kinds}
    monkeypatch.setattr(SharedCore, "captured", property(lambda core: True))
    monkeypatch.setattr(SharedCore, "captures_prompts", False)
    monkeypatch.setattr(switched, "capture", lambda stage: stage)
    monkeypatch.setattr("dscale.core.capture_buckets", lambda *a, **k: None)
    monkeypatch.setattr(Results, "milliseconds", property(lambda results: 1.03))
    engine = engine_of(Trace(*draw(SETTINGS["paper"], 64, 5), CPU))
    try:
        engine.use(case, ROOM)
        engine.core._costs[Chooser()].table.update(dict.fromkeys(buckets, Cost(1.0)))
        before = {(row["lanes"], row["rows"]): row for row in step_rows(engine, case)}
        closed_loop(engine.submit, requests(), WORKERS)
        after = {(row["lanes"], row["rows"]): row for row in step_rows(engine, case)}
        widths = [Case("dflash", width) for width in (None, 4)]
        tables = []
        for width in widths:
            engine.core.use(width, engine.settings)
            tables.append(engine.core._costs)
    finally:
        engine.close()
    assert before.keys() == after.keys() == buckets
    assert {(row["base_ms"], row["observed"]) for row in before.values()} == {(1.0, 0)}
    used = {key: row for key, row in after.items() if row["observed"]}
    assert all(1 < row["base_ms"] <= 1.03 for row in used.values())
    assert {row["base_ms"] for key, row in after.items() if key not in used} <= {1.0}
    assert 3 in {lanes for lanes, _ in used}
    assert tables[0] is not tables[1], "steps of other widths take other times"


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
        # Handed out once the next step has been started.
        assert request.first_token_at == pytest.approx(1e-3 * max(3, 2 + launch))
    with pytest.raises(ValueError, match="steps: expected a time of 2 lanes"):
        times.of_step(2, None)


def test_a_replay_does_not_wait_for_a_chunk_that_ends_no_prompt() -> None:
    """Nothing of it is read: the host launches it behind the other request's step and goes on."""
    draws = draw(SETTINGS["paper"], 16, 3)
    table: dict[tuple[int, int | None], Cost] = {(n, None): Cost(2.0) for n in (1, 2)}
    prefill, alone = [(1, 3.0), (512, 3.0)], [(1, 2.0), (512, 2.0)]
    times = Times(MeasuredCosts(table), prefill, alone, 0.5, 0.1)
    loop = Replay(CASES["ar"], times, *draws, padded=False)
    loop._submit([Request(prompt=[0] * 4, max_new_tokens=200)])
    for _ in range(4):
        loop._round()
    loop._submit([Request(prompt=[0] * 2048, max_new_tokens=5)])
    before, busy = loop.stats.prefill_seconds, loop.gpu
    loop._round()
    assert 1e3 * (loop.stats.prefill_seconds - before) == pytest.approx(1.0)
    assert loop.host <= busy + times.finish


def test_a_larger_bucket_stands_in() -> None:
    table = {(2, 4): Cost(1.0), (2, 8): Cost(2.0), (2, 0): Cost(0.5), (4, 12): Cost(9.0)}
    times = flat_times({**table})
    assert [times.of_step(2, rows).base for rows in (3, 4, 5, 0)] == [1.0, 1.0, 2.0, 0.5]
    assert times.of_prefill(4096) == (1.0, 0.5)

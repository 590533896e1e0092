"""What a replay of closed loops needs to know of an engine: times of its steps and prefills,
measured, kept as rows and read back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.aggregate import Row, read_rows
from bench.replay_times import Times
from bench.result_files import ResultFile
from bench.step_cases import Case
from bench.switched import SwitchedEngine
from dscale.batcher import Batcher
from dscale.choosers import chooser_of
from dscale.config import EngineConfig
from dscale.policy import Cost
from dscale.prefill import TILES, tiles_of
from dscale.request import Request
from dscale.timing import NEAR_CONTEXT, MeasuredCosts, Runner, bucket_kinds

STEP_KEYS = ("model", "mode", "tile", "sampled", "lanes", "rows")
STEP_FIELDS = (*STEP_KEYS, "base_ms", "per_token_ms", "launch_ms")
PREFILL_KEYS = ("model", "sampled", "requests", "length", "context")
PREFILL_FIELDS = (*PREFILL_KEYS, "prefill_ms", "gpu_ms")

REPEATS = 5
SLEEP = 100_000_000
"""Clock ticks that keep a GPU busy, 50 ms or so, while the host gets ahead of it."""


def step_rows(engine: SwitchedEngine, case: Case, temperature: float = 0.0) -> list[Row]:
    """The captured buckets of the mode in use for requests of this temperature, corrected by as
    many served steps as `observed` says, and how long the host takes to start each."""
    rows: list[Row] = []
    chooser = chooser_of([Request(prompt=[0], max_new_tokens=1, temperature=temperature)])

    def run(batcher: Batcher) -> None:
        core = engine.core
        assert core.workspace is not None
        runner = Runner(core.workspace, core.stages(chooser), alone=True)
        times = core.times(chooser)
        table = times.table if core.captured else _eager(runner, core.config)
        table = table | _riding(runner, times)
        for (lanes, packed), cost in table.items():
            rows.append(
                {
                    "mode": case.mode,
                    "tile": case.fields["tile"],
                    "sampled": chooser.sample,
                    "lanes": lanes,
                    "rows": packed,
                    "base_ms": round(cost.base, 5),
                    "per_token_ms": cost.per_token,
                    "observed": times.observed[lanes, packed],
                    "launch_ms": round(_launch(runner, lanes, packed), 4),
                }
            )

    engine.ask(run)
    return rows


def _eager(runner: Runner, config: EngineConfig) -> dict[tuple[int, int | None], Cost]:
    """Times of uncaptured steps, which have as many lanes as requests."""
    return {
        (lanes, rows): Cost(runner.milliseconds(lanes, rows))
        for lanes in range(1, (config.max_concurrency or 1) + 1)
        for kind in bucket_kinds(config)
        for rows in [None if kind is None else kind * lanes]
    }


def _riding(runner: Runner, times: MeasuredCosts) -> dict[tuple[int, int | None], Cost]:
    """Times of buckets that only steps with prompts have, behind little context; those of more
    lanes than slots of equal lanes, which a GPU is somewhat faster at."""
    found = {}
    for lanes, rows in sorted(times.captured - times.table.keys(), key=str):
        runner.at_context(lanes, NEAR_CONTEXT)
        found[lanes, rows] = Cost(runner.milliseconds(lanes, rows))
        runner.rest(lanes)
    return found


def _launch(runner: Runner, lanes: int, rows: int | None) -> float:
    found = []
    for _ in range(REPEATS):
        _wait()
        began = time.perf_counter()
        runner.step(lanes, rows)
        found.append(1e3 * (time.perf_counter() - began))
    _wait()
    return median(found)


def prefill_rows(
    engine: SwitchedEngine, counts: Iterable[int], length: int, temperature: float = 0.0
) -> list[Row]:
    """Prefills of so many prompts at once with nothing else running: the whole round (or several,
    where one pass does not take them all), and on a GPU its share behind other work (elsewhere the
    same). First tokens are chosen at `temperature`."""
    rows: list[Row] = []

    def run(batcher: Batcher) -> None:
        for count in counts:
            prompts = (count, length, temperature)
            _round(batcher, *prompts)  # what is compiled at first
            whole = median(_round(batcher, *prompts) for _ in range(REPEATS))
            alone = whole
            if torch.cuda.is_available():
                alone = median(_behind(batcher, *prompts) for _ in range(REPEATS))
            rows.append(
                {
                    "sampled": temperature > 0,
                    "requests": count,
                    "length": length,
                    "context": 0,
                    "prefill_ms": round(whole, 4),
                    "gpu_ms": round(alone, 4),
                    "tokens_per_s": round(1e3 * count * length / whole, 1),
                }
            )

    engine.ask(run)
    return rows


def _add(batcher: Batcher, count: int, length: int, temperature: float) -> None:
    """Queue requests which end with their first token, and wait for the device."""
    vocab = batcher.core.target.config.vocab_size
    prompts = torch.randint(vocab, (count, length)).tolist()
    batcher.add(
        [Request(prompt=ids, max_new_tokens=1, temperature=temperature) for ids in prompts]
    )
    _wait()


def _round(batcher: Batcher, count: int, length: int, temperature: float) -> float:
    """Milliseconds of a round that prefills such requests."""
    _add(batcher, count, length, temperature)
    began = time.perf_counter()
    while batcher.busy:
        batcher.round()
    _wait()
    return 1e3 * (time.perf_counter() - began)


def _behind(batcher: Batcher, count: int, length: int, temperature: float) -> float:
    """Milliseconds of GPU time of such a round, submitted while the GPU was busy."""
    event: Any = torch.cuda.Event
    sleep: Any = torch.cuda._sleep
    first, last = event(enable_timing=True), event(enable_timing=True)
    _add(batcher, count, length, temperature)
    sleep(SLEEP)
    first.record()
    while batcher.busy:
        batcher.round()
    last.record()
    _wait()
    return float(first.elapsed_time(last))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_steps(
    engine: SwitchedEngine, case: Case, file: ResultFile, temperature: float = 0.0
) -> None:
    """Keep the times of the steps of the mode in use as they are by now. Those of requests that
    sample, at whatever temperature, are rows of their own."""
    for row in step_rows(engine, case, temperature):
        file.put(row)


def write_prefills(
    engine: SwitchedEngine, file: ResultFile, length: int, temperature: float = 0.0
) -> None:
    """Measure and keep prefills, in the mode in use: those of others are alike."""
    together = TILES[-1] // tiles_of(length)  # in one pass
    most = min(engine.settings.max_concurrency or together, together)
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= most]
    for row in prefill_rows(engine, counts, length, temperature):
        file.put(row)


def read_times(folder: Path, model: str, case: Case, sampled: bool = False) -> tuple[Times, Row]:
    """Times of one mode from bucket_times.json and prefill.json, of greedy or of sampled requests,
    and the environment they were measured in. Raises ValueError where there are none, or for a
    file of another schema."""
    steps = read_rows(folder / "bucket_times.json", STEP_FIELDS)
    prefills = read_rows(folder / "prefill.json", PREFILL_FIELDS)
    wanted = {"model": model, "sampled": sampled}
    here = {"mode": case.mode, "tile": case.fields["tile"]} | wanted
    steps = [row for row in steps if here.items() <= row.items()]
    prefills = [row for row in prefills if wanted.items() <= row.items()]
    for name, rows in (("bucket_times.json", steps), ("prefill.json", prefills)):
        if not rows:
            raise ValueError(f"{folder / name}: expected rows of {here}, got none")
    return times_of(steps, prefills), steps[0]


def times_of(steps: Sequence[Row], prefills: Sequence[Row]) -> Times:
    """Times of the rows of one mode and of the model's prefills."""
    table: dict[tuple[int, int | None], Cost] = {
        (row["lanes"], row["rows"]): Cost(row["base_ms"], row["per_token_ms"]) for row in steps
    }
    by_tokens = sorted(prefills, key=lambda row: row["requests"] * row["length"])
    tokens = [row["requests"] * row["length"] for row in by_tokens]
    return Times(
        MeasuredCosts(table),
        list(zip(tokens, (row["prefill_ms"] for row in by_tokens), strict=True)),
        list(zip(tokens, (row["gpu_ms"] for row in by_tokens), strict=True)),
        launch=median(row["launch_ms"] for row in steps),
    )

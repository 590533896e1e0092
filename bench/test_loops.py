"""Benchmarks of the prefill and of closed loops, over one engine that is switched from mode to
mode."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.aggregate import LOOP_KEYS
from bench.closed_loop_simulated import measure
from bench.loop_cells import Cell
from bench.result_files import ResultFile
from bench.serving_times import PREFILL_KEYS, prefill_rows
from bench.shapes import Models
from bench.simulated import SETTINGS, Trace, draw
from bench.simulated_cells import lengths
from bench.sizes import CUDA, REQUESTS, SHAPE
from bench.step_cases import CASES
from bench.switched import SwitchedEngine
from dscale.batcher import Batcher
from dscale.config import EngineConfig
from dscale.request import Request

SET = "prompt128-new256" if CUDA else "prompt32-new48"
MODES = ("ar", "dflash", "+tiles", "+budget", "dscale-half", "dscale-auto")
PROMPT, NEW = lengths(SET, 1)[0]
MOST = max(REQUESTS)
ROOM = [Request(prompt=[0] * PROMPT, max_new_tokens=NEW)] * MOST


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[SwitchedEngine]:
    trace = Trace(*draw(SETTINGS["paper"], 1024, MOST + 1), models.target.norm.device)
    settings = EngineConfig(max_concurrency=MOST, prefix_cache=False)
    made = SwitchedEngine(models.target, models.drafter, models.predictor, settings, trace)
    yield made
    made.close()


@pytest.mark.parametrize("prompts", [1, MOST])
def test_prefill(
    timed: Callable[..., None],
    engine: SwitchedEngine,
    base: dict[str, Any],
    pytestconfig: pytest.Config,
    prompts: int,
) -> None:
    """Prefill of prompts that end with their first token."""
    engine.use(CASES["dflash"], ROOM)
    ids = torch.randint(SHAPE.vocab, (prompts, PROMPT)).tolist()
    sent: list[Request] = []

    def run(batcher: Batcher) -> None:
        sent[:] = [Request(prompt=p, max_new_tokens=1) for p in ids]
        batcher.add(sent)
        while batcher.busy:
            batcher.round()

    timed(lambda: engine.ask(run), prompts=prompts, tokens=prompts * PROMPT)
    assert [len(r.tokens) for r in sent] == [1] * prompts
    out = pytestconfig.getoption("--bench-out")
    for row in prefill_rows(engine, [prompts], PROMPT) if isinstance(out, Path) else ():
        ResultFile(out / "prefill.json", PREFILL_KEYS, base).put(row)


@pytest.mark.parametrize("concurrency", REQUESTS)
@pytest.mark.parametrize("name", MODES)
def test_closed_loop(
    timed: Callable[..., None],
    engine: SwitchedEngine,
    base: dict[str, Any],
    pytestconfig: pytest.Config,
    name: str,
    concurrency: int,
) -> None:
    """Two requests of each worker, simulated acceptance."""
    engine.use(CASES[name], ROOM)
    cell = Cell(SET, concurrency, 0.0, name, 0, 2 * concurrency, concurrency, NEW)
    drawn = draw(SETTINGS["paper"], 1024, MOST + 1)
    rows: list[dict[str, Any]] = []
    timed(lambda: rows.append(measure(engine, cell, drawn, SHAPE.vocab)), 1)
    row = rows[-1]
    assert row["output_tokens"] == 2 * concurrency * NEW
    assert row["tokens_per_s"] > 0
    assert (row["tokens_per_step"] == 1) == (name == "ar")
    out = pytestconfig.getoption("--bench-out")
    if isinstance(out, Path):
        about = {"acceptance": "simulated", "source": "measured", "trace": "paper"}
        ResultFile(out / "closed_loop.json", LOOP_KEYS, base | about).put(row)

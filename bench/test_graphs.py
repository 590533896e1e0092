"""Benchmarks of the decide graph, the verify graph and whole steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.graphs import DECIDE_KEYS, VERIFY_KEYS, measured
from bench.result_files import ResultFile
from bench.shapes import Models
from bench.sizes import CONTEXT, CUDA, REQUESTS, needs_gpu
from bench.step_cases import CASES, Rig
from bench.step_parts import Stepper
from dscale.compiled.capture import begin_step

STEPS = [name for name in CASES if CUDA or name != "+tiles-per-head"]


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("name", ["dflash", "dscale-half"])
@pytest.mark.parametrize("graph", ["decide", "verify"])
def test_graph(timed: Callable[..., None], rig: Rig, graph: str, name: str, requests: int) -> None:
    """One of the two alone, over the same buffers again and again."""
    case, lanes = CASES[name], rig.lanes_of(requests)
    stepper = Stepper(rig, case, requests, CONTEXT)
    stepper.warm_up()
    workspace, stages = rig.workspace, rig.stages(case)
    rows, state, step = case.rows(lanes), workspace.requests, workspace.step(lanes)
    assert rows is not None
    packed = [workspace.packed(lanes, n) for n in ((16 * lanes, rows) if case.budget else ())]

    def decide() -> None:
        begin_step()
        assert stages.decide is not None
        stages.decide(state, step, *packed[:1])

    def verify() -> None:
        begin_step()
        stages.verify(state, step, *packed[1:])
        state.context_S.copy_(stepper.context_S)

    timed(decide if graph == "decide" else verify, requests=requests, rows=rows)
    assert int(state.context_S[:requests].min()) == CONTEXT


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("name", STEPS)
def test_step(timed: Callable[..., None], rig: Rig, name: str, requests: int) -> None:
    """A whole step as the engine launches it, in every mode."""
    stepper = Stepper(rig, CASES[name], requests, CONTEXT)
    stepper.warm_up()
    before = rig.trace.at_S[0].item()
    timed(stepper, requests=requests, rows=CASES[name].rows(rig.lanes_of(requests)))
    assert rig.trace.at_S[0].item() > before


@needs_gpu
def test_graphs_over_their_floors(
    models: Models, base: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    """Captured graphs, on the GPU's own clock."""
    out = pytestconfig.getoption("--bench-out")
    keys = {"verify": VERIFY_KEYS, "decide": DECIDE_KEYS}
    for graph, row in measured(models, REQUESTS, [CONTEXT], 20):
        print(graph, row)
        assert row["over_floor"] > 1
        if isinstance(out, Path):
            ResultFile(out / f"{graph}_graph.json", keys[graph], base).put(row)

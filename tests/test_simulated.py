"""Simulated acceptance: the trace has the paper's statistics, and the stages that act by it still
compute everything."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import predictor_report as reporting
import predictor_retention as retaining

import dscale.stages
from bench.shapes import SHAPES, build
from bench.simulated import SETTINGS, SimulatedVerify, Trace, draw, simulate
from bench.step_cases import CASES, SAMPLING, Case, Rig
from dscale.compiled.capture import own_forward
from dscale.compiled.flow import COUNT, LENGTH, TOKENS
from dscale.kernels import ops
from dscale.stats import Stats

CPU = torch.device("cpu")
STEPS, SLOTS = 1024, 32


@pytest.fixture(scope="module")
def paper() -> tuple[Tensor, Tensor]:
    return draw(SETTINGS["paper"], STEPS, SLOTS)


@pytest.mark.parametrize(("name", "mean"), [("paper", 6.09), ("six", 6.0)])
def test_progress_and_prediction_are_the_paper_s(name: str, mean: float) -> None:
    score_TSC, accepted_TS = draw(SETTINGS[name], STEPS, SLOTS)
    predicted, accepted = score_TSC.sum(2).flatten(), accepted_TS.flatten()
    assert float(accepted.double().mean()) + 1 == pytest.approx(mean, abs=0.02)
    assert int(accepted.max()) == 15
    assert int(accepted.min()) == 0
    assert reporting.r_squared(predicted, accepted) == pytest.approx(0.70, abs=0.02)
    assert reporting.spearman(predicted, accepted) == pytest.approx(0.74, abs=0.02)


@pytest.mark.parametrize("cohort", [8, 16, 32])
def test_retention_is_the_paper_s(cohort: int, paper: tuple[Tensor, Tensor]) -> None:
    score, accepted = paper[0].reshape(-1, cohort, 15), paper[1].reshape(-1, cohort)
    raw = retaining.seed_lengths(score, "paper")
    assert float(raw.double().mean()) == pytest.approx(5.11, abs=0.05)
    assert retaining.retention(accepted, raw) == pytest.approx(0.71, abs=0.02)
    adjusted = retaining.allocate(score, 8, "paper")
    assert float(adjusted.double().mean()) == 8
    assert retaining.retention(accepted, adjusted) == pytest.approx(0.91, abs=0.02)


def test_scores_fall_and_come_true(paper: tuple[Tensor, Tensor]) -> None:
    score_TSC, accepted_TS = paper
    assert bool((score_TSC.diff(dim=2) <= 0).all())
    assert float(score_TSC.min()) >= 0
    assert float(score_TSC.max()) <= 1
    position_C = torch.arange(1, 16)
    came_true = (accepted_TS[..., None] >= position_C).double().mean((0, 1))
    assert torch.allclose(score_TSC.double().mean((0, 1)), came_true, atol=0.01)


def test_every_slot_progresses_alike_over_a_window(paper: tuple[Tensor, Tensor]) -> None:
    windows = paper[1].double().view(-1, 16, SLOTS).mean(1)
    assert float(windows.std()) < 0.2
    # The draws of one step are as different as ever.
    assert float(paper[1].double().std(1).mean()) > 4


def test_a_seed_names_a_trace() -> None:
    first, again, other = (draw(SETTINGS["paper"], 32, 4, seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(ValueError, match="steps: expected a multiple of 16, got 40"):
        draw(SETTINGS["paper"], 40, 4)


def tiny_rig(lanes: int, **changes: Any) -> Rig:
    models = build(SHAPES["tiny"], CPU, torch.float32)
    trace = Trace(*draw(SETTINGS["paper"], 64, lanes + 1), CPU)
    settings: dict[str, Any] = {"tokens": 600, "wrap": None, "flex": False}
    return Rig(models, trace, lanes, **(settings | changes))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sampling", ["greedy", "temperature 1"])
def test_steps_commit_what_the_trace_accepts(name: str, sampling: str) -> None:
    lanes, case = 5, CASES[name]
    case = Case(case.mode, case.budget, case.per_head, sampling)
    rig = tiny_rig(lanes)
    policy = rig.policy(case, [lanes])
    rig.trace.rewind()
    requests = rig.place([3, 9, 1, 130, 40], [400] * lanes, SAMPLING[sampling])
    stats = Stats()
    decoding = rig.decoding(case, policy, stats)
    step = rig.workspace.step(lanes)
    for at in range(12):
        launched = decoding.launch(requests)
        candidate_NC = step.candidate_NC.clone()
        result = launched.results.host_NX.clone()
        assert decoding.finish(launched) == []
        accepted_N = rig.trace.accepted_TS[at, :lanes]
        adaptive = case.config.adaptive
        length_N = result[:, LENGTH] if adaptive else torch.tensor([decoding.rows] * lanes)
        want_N = torch.minimum(accepted_N, length_N - 1)
        assert torch.equal(result[:, COUNT], want_N.int() + 1)
        for lane, kept in enumerate(want_N.tolist()):
            tokens = result[lane, TOKENS][: kept + 1].long()
            assert torch.equal(tokens[:kept], candidate_NC[lane, :kept])
            assert bool(((tokens >= 0) & (tokens < 200)).all())
        if adaptive and policy is not None and launched.choice is not None:
            room = torch.tensor([launched.choice.rows, launched.choice.average])
            want = ops.allocate_budget(
                rig.trace.score_TSC[at, :lanes].contiguous(),
                torch.ones(lanes, dtype=torch.bool),
                torch.full((lanes,), 100, dtype=torch.int32),
                room.int(),
            )
            assert not launched.choice.draft or torch.equal(length_N, want)
    assert rig.trace.at_S.tolist() == [12] * lanes + [0]


def test_a_trace_can_be_replaced() -> None:
    rig = tiny_rig(3)
    address = rig.trace.score_TSC.data_ptr()
    rig.trace.advance(torch.tensor([0, 2, 3, 3]))
    assert rig.trace.at_S.tolist() == [1, 0, 1, 1]
    other = draw(SETTINGS["six"], 64, 4, seed=7)
    rig.trace.load(*other)
    assert rig.trace.at_S.tolist() == [0] * 4
    assert torch.equal(rig.trace.scores(torch.tensor([1])), other[0][:1, 1])
    assert rig.trace.score_TSC.data_ptr() == address
    with pytest.raises(ValueError, match="stage: expected Decide or Verify, got Linear"):
        simulate(torch.nn.Linear(1, 1), rig.trace)


def test_the_control_shares_no_stage_whose_keys_are_shared_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU sub-lanes are no part of it, whichever case comes first."""
    monkeypatch.setattr(dscale.stages, "gpu", lambda target: True)
    for names in (("dflash", "+tiles"), ("+tiles", "dflash")):
        rig = dataclasses.replace(tiny_rig(3), flex=True)
        for name in names:
            stages: Any = rig.stages(CASES[name])
            for stage in (stages.decide.stage, stages.verify.stage):
                assert (stage.tile.parts == 0) is (name == "dflash"), names


KINDS = ("mm", "dscale", "flex", "functionalized")  # the last: a layer, which writes to its pools


def operations_of(name: str, simulated: bool) -> list[Counter[str]]:
    """Products, attention and custom operations of every graph that a case compiles to, dead code
    gone; run at two numbers of lanes."""
    from torch._dynamo.backends.common import aot_autograd

    found: list[Counter[str]] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graph.graph.eliminate_dead_code()
        names = [str(node.target) for node in graph.graph.nodes if node.op != "placeholder"]
        found.append(Counter(n for n in names if any(kind in n for kind in KINDS)))
        return graph.forward

    def wrap(stage: Any) -> Any:
        backend = aot_autograd(fw_compiler=keep)
        return torch.compile(own_forward(stage), fullgraph=True, backend=backend)

    torch._dynamo.reset()
    rig = tiny_rig(8, tokens=100, wrap=wrap, flex=True)
    with pytest.MonkeyPatch.context() as patch:
        if not simulated:
            patch.setattr("bench.step_cases.simulate", lambda stage, trace: stage)
        for lanes in (8, 4):
            requests = rig.place([30] * lanes, [60] * lanes, {})
            decoding = rig.decoding(CASES[name], rig.policy(CASES[name], []), Stats())
            decoding.launch(requests)
    torch._dynamo.reset()
    return found


def test_the_compiled_stages_leave_nothing_out() -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    real, simulated = (operations_of("dscale-half", kind) for kind in (False, True))
    assert simulated == real
    decide, verify = simulated  # one compile each, for both numbers of lanes
    for name in ("row_statistics", "allocate_budget", "pack_rows"):
        assert decide[f"dscale.{name}.default"] == 1, decide
    assert verify["dscale.accept_prefix.default"] == 1, verify
    assert decide["auto_functionalized_v2"] == SHAPES["tiny"].draft_layers, decide
    assert verify["auto_functionalized_v2"] == SHAPES["tiny"].layers, verify
    assert sum(n for name, n in decide.items() if "mm" in name) >= 2, decide  # head, predictor
    assert not counters["graph_break"]


def test_the_last_row_never_counts_as_a_candidate() -> None:
    """Fifteen accepted candidates and a successor: progress 16."""
    rig = tiny_rig(2)
    rig.trace.accepted_TS.fill_(15)
    case = CASES["+tiles"]
    requests = rig.place([4, 7], [64, 64], {})
    decoding = rig.decoding(case, None, Stats())
    result = decoding.launch(requests).results.host_NX
    assert isinstance(decoding.stages.verify.stage, SimulatedVerify)  # type: ignore[attr-defined]
    assert result[:, COUNT].tolist() == [16, 16]

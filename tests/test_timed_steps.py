"""Which steps say how long they took, and to whom."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_drafter, tiny_model

sys.path.insert(0, str(Path(__file__).parents[1]))

import dscale
import dscale.decode
import dscale.results
from bench.shapes import SHAPES, build
from bench.simulated import SETTINGS, Trace, draw
from bench.step_cases import CASES, Case, Rig
from dscale.choosers import GREEDY
from dscale.compiled.flow import COUNT
from dscale.core import Core
from dscale.decode import Decoding
from dscale.policy import AutoBudget, Choice, Floats
from dscale.request import Request
from dscale.results import Results, mark
from dscale.stats import Stats
from dscale.timing import MeasuredCosts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Moment:
    """A GPU event that has passed."""

    def __init__(self, at: float, broken: bool = False) -> None:
        self.at, self.broken = at, broken

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")

    def elapsed_time(self, other: "Moment") -> float:
        return other.at - self.at


class Heard(list[tuple[Any, ...]]):
    """Who is told of the steps' times."""

    def observe(self, *step: Any) -> None:
        self.append(step)


class Scripted:
    """Choices one after the other."""

    def __init__(self, *choices: Choice) -> None:
        self.choices = iter(choices)

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        return next(self.choices)

    def observe(self, score_NC: Floats, length_N: Floats, accepted_N: Floats) -> None:
        pass


def decoding_of(case: Case, policy: Any, **changes: Any) -> tuple[Decoding, list[Request]]:
    """Steps of three requests in four lanes, read a step late."""
    models = build(SHAPES["tiny"], CPU, torch.float32)
    trace = Trace(*draw(SETTINGS["paper"], 64, 5), CPU)
    rig = Rig(models, trace, 4, 600, None, flex=False)
    requests = rig.place([3, 9, 130], [400] * 3, {})
    decoding = rig.decoding(case, policy, Stats())
    assert decoding.times is None
    return dataclasses.replace(decoding, **({"late": True, "padded": True} | changes)), requests


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[Moment]:
    """Events as a GPU's: the n-th step takes n ms. Returns those of arrivals."""
    whole, arrivals = Results.of, list[Moment]()

    def of(result_NX: Any, *, late: bool, began: Any = None) -> Results:
        results = whole(result_NX, late=late)
        arrivals.append(Moment(10.0 + len(arrivals) + 1))
        results.arrived, results.began = arrivals[-1], began
        return results

    monkeypatch.setattr(dscale.decode, "mark", lambda device: Moment(10.0))
    monkeypatch.setattr(Results, "of", of)
    return arrivals


def test_steps_say_how_long_they_took(gpu: list[Moment]) -> None:
    heard = Heard()
    choices = (Choice(16, 16), Choice(4, 1, draft=False), Choice(8, 16))
    decoding, requests = decoding_of(CASES["dscale-auto"], Scripted(*choices), times=heard)
    contexts, pending = [], []
    for _ in choices:
        contexts.append(sum(r.num_tokens for r in requests))
        pending.append(decoding.launch(requests))
        if len(pending) > 1:
            decoding.finish(pending.pop(0))
    decoding.finish(pending.pop())
    assert heard == list(zip([4] * 3, [16, 0, 8], contexts, [1.0, 2.0, 3.0], strict=True))
    assert contexts[0] == contexts[1] == 142  # as late as the results are
    assert contexts[2] > 142
    heard.clear()
    for case in ("dflash", "ar"):
        decoding, requests = decoding_of(CASES[case], None, times=heard)
        decoding.finish(decoding.launch(requests))
    assert heard == [(4, None, 142, 4.0), (4, None, 142, 5.0)]


def test_steps_that_say_nothing(gpu: list[Moment], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that failed, committed nothing, or are read at once."""
    heard = Heard()
    decoding, requests = decoding_of(CASES["dflash"], None, times=heard)
    launched = decoding.launch(requests)
    gpu[-1].broken = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        decoding.finish(launched)
    launched = decoding.launch(requests)
    launched.results.host_NX[:, COUNT] = 0
    decoding.finish(launched)
    assert heard == []
    decoding.finish(decoding.launch(requests))
    assert len(heard) == 1
    decoding, requests = decoding_of(CASES["dflash"], None, times=heard, late=False)
    decoding.finish(decoding.launch(requests))
    assert len(heard) == 1
    monkeypatch.setattr(dscale.decode, "mark", lambda device: pytest.fail("an event"))
    decoding, requests = decoding_of(CASES["dflash"], None, times=heard)
    decoding.finish(decoding.launch(requests, timed=False))
    assert len(heard) == 1
    decoding, requests = decoding_of(CASES["dflash"], None)
    decoding.finish(decoding.launch(requests))


def test_steps_behind_a_prompt_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the GPU may have waited for the host, which started the prompt's pass, too."""
    launch, steps = Decoding.launch, list[tuple[int, bool]]()

    def launched(self: Decoding, live: list[Request], *, timed: bool = True) -> Any:
        steps.append((len(live), timed))
        return launch(self, live, timed=timed)

    monkeypatch.setattr(Decoding, "launch", launched)
    model = tiny_model()
    with dscale.attach(model, mode="ar", prefill_chunk=64) as spec:
        prompts = [list(range(1, 9)), list(range(1, 101))]
        results = list(spec.engine.stream(prompts, max_new_tokens=12))
    assert [len(r.generated_tokens) for r in results] == [12, 12]
    second = steps.index((2, False))
    assert steps[0] == (1, False)
    assert steps[second - 1 : second + 2] == [(1, False), (2, False), (2, True)], "two chunks"


class OnGpu:
    """A tensor of a GPU, and the pinned one it is copied to."""

    device, shape = torch.device("cuda"), torch.Size([2, 3])

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def copy_(self, source: Any, non_blocking: bool) -> None:
        self.calls.append(("copy", non_blocking))


@pytest.mark.parametrize("timed", [False, True])
def test_events_are_timing_ones_where_times_are_asked_for(
    timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.timing = enable_timing

        def record(self) -> None:
            calls.append(("record", self.timing))

        def elapsed_time(self, other: "Event") -> float:
            assert self.timing
            assert other.timing
            return 3.5

    on_gpu: Any = OnGpu(calls)
    monkeypatch.setattr(dscale.results.torch.cuda, "Event", Event)
    monkeypatch.setattr(dscale.results.torch, "empty", lambda *a, **k: on_gpu)
    assert mark(CPU) is None
    began = mark(on_gpu.device) if timed else None
    results = Results.of(on_gpu, late=True, began=began)
    assert calls == [("record", True)] * timed + [("copy", True), ("record", timed)]
    assert results.milliseconds == (3.5 if timed else None)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("mode", "budget"), [("dscale", "auto"), ("dscale", 4), ("dflash", None)])
def test_a_core_s_steps_correct_the_times_its_policy_counts_with(
    mode: Any, budget: Any, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    greedy = Request(prompt=prompt(9), max_new_tokens=4)
    sampled = Request(prompt=prompt(9), max_new_tokens=4, temperature=1.0)
    with dscale.attach(model, tiny_drafter(tmp_path, model), mode=mode, budget=budget) as spec:
        core = spec.engine.batcher.core
        core.make_room([greedy])
        if captured:
            monkeypatch.setattr(Core, "captured", property(lambda self: True))
            monkeypatch.setattr("dscale.core.capture_buckets", lambda *a, **k: None)
            monkeypatch.setattr("dscale.stages.capture", lambda stage: stage)
        found = core.decoding([greedy])
        if not captured or budget != "auto":
            if captured:  # as a warm-up leaves them
                core._costs[GREEDY] = MeasuredCosts()
            assert core.decoding([greedy]).times is None
            return
        assert isinstance(found.times, MeasuredCosts)
        assert isinstance(found.policy, AutoBudget)
        assert found.policy.costs is found.times is core._costs[GREEDY]
        other = core.decoding([sampled])
        assert isinstance(other.times, MeasuredCosts)
        assert other.times is not found.times


def test_a_rig_s_steps_correct_the_times_of_auto_alone() -> None:
    models = build(SHAPES["tiny"], CPU, torch.float32)
    trace = Trace(*draw(SETTINGS["paper"], 64, 3), CPU)
    rig = Rig(models, trace, 2, 300, lambda stage: stage, flex=False)
    for name in ("dflash", "dscale-half", "dscale-auto"):
        policy = rig.policy(CASES[name], [2])
        times = rig.decoding(CASES[name], policy, Stats()).times
        assert (times is not None) == (name == "dscale-auto")
    assert isinstance(policy, AutoBudget)
    assert policy.costs is times

"""Compiled stages without a GPU: whole graphs, one compile for all batches, late results."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import SAMPLED, EveryBucket, Pair, like
from tiny import continuation, prompt
from torch import Tensor, nn

import dscale
import dscale.compiled.attention
import dscale.core
import dscale.stages
import dscale.timing
from dscale.compiled.capture import own_forward, own_trees
from dscale.compiled.prefill import PromptPass
from dscale.compiled.shares import PARTS
from dscale.core import Core
from dscale.timing import Runner
from dscale.worker import await_exit

NEW = 14
ADAPTIVE = ["Anchors", "Decide", "Verify"]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compile the stages without a GPU; lists the stage of every graph compiled."""
    torch._dynamo.reset()
    compiled: list[str] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def trace(stage: nn.Module) -> Callable[..., Any]:
        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(type(stage).__name__)
            return aot_eager(graph, inputs)

        forward = own_forward(stage)
        wrapped: Callable[..., Any] = torch.compile(forward, fullgraph=True, backend=backend)
        return wrapped

    def milliseconds(self: Runner, lanes: int, rows: int | None) -> float:
        return 1.0 + 0.01 * (rows or 0)

    def gathered(*arguments: Any) -> PromptPass:
        return PromptPass(*arguments[:-1], flex=False)  # eager FlexAttention takes seconds

    if not torch.cuda.is_available():
        # In a CUDA build of torch 2.11 this crashes on a thread of its own when there is no GPU.
        guard = "_ensureCUDADeviceGuardSet"
        monkeypatch.setattr(torch._C, guard, lambda: None, raising=False)
    monkeypatch.setattr(dscale.stages, "capture", trace)
    monkeypatch.setattr(dscale.stages, "PromptPass", gathered)
    monkeypatch.setattr(dscale.timing, "CAPTURE_RUNS", 1)
    monkeypatch.setattr(Runner, "milliseconds", milliseconds)
    monkeypatch.setattr(Core, "flex", property(lambda self: True))
    # The gathered route reads lengths on the host.
    monkeypatch.setattr(Core, "captures_prompts", False)
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield compiled
    assert not counters["graph_break"]
    torch._dynamo.reset()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.mark.parametrize(("settings", "predicted"), [({}, True), (SAMPLED, False)], ids=str)
def test_one_graph_of_each_stage_for_every_bucket(
    settings: dict[str, Any],
    predicted: bool,
    graphs: list[str],
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    settings = {**settings, "max_new_tokens": NEW}
    want = pair.want(5, **settings)
    pair.overrule(monkeypatch, want, real_scores=predicted)
    predictor = pair.predictor if predicted else None
    with pair.attach(mode="dscale", predictor=predictor) as spec:
        assert torch.equal(pair.got(5, **settings), want)
        assert sorted(graphs) == ADAPTIVE
        assert max(map(max, spec.stats.last_progress)) > 2
        for count in (1, 3, 2):
            got = pair.got(count, **settings)
            offset = want.shape[1] - got.shape[1]
            assert torch.equal(got, want[:count, offset:]), count
        assert sorted(graphs) == ADAPTIVE


@pytest.mark.parametrize(
    ("mode", "budget"), [("ar", None), ("dflash", 5), ("+budget", "auto"), ("dscale", 3)]
)
def test_warm_up_compiles_each_stage_once(
    mode: str, budget: Any, graphs: list[str], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    want = pair.want(3, max_new_tokens=NEW)
    if mode != "ar":
        pair.overrule(monkeypatch, want)
    stages = {"ar": ["Verify"], "+budget": ADAPTIVE}.get(mode, ["Decide", "Verify"])
    with pair.attach(mode=mode, budget=budget) as spec:
        spec.engine.warm_up(like(3))
        assert sorted(graphs) == stages
        for count in (3, 1):
            got = pair.got(count, max_new_tokens=NEW)
            assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :])
        assert sorted(graphs) == stages
        assert spec.stats.tokens_per_pass > 1 or budget is None


@pytest.mark.parametrize(
    ("mode", "budget", "parted"),
    [("dscale", 3, True), ("ar", None, True), ("dflash", 5, False)],
)
def test_one_graph_of_each_stage_for_few_lanes_and_many(
    mode: str,
    budget: Any,
    parted: bool,
    graphs: list[str],
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps have sub-lanes on a GPU; here, told to: 16, or as many as lanes."""
    monkeypatch.setattr(dscale.stages, "gpu", lambda target: True)
    shared: list[int] = []
    merge = dscale.compiled.attention.merge_shares

    def counted(*arguments: Any) -> Tensor:
        shared.append(arguments[0].shape[0])
        return merge(*arguments)

    monkeypatch.setattr(dscale.compiled.attention, "merge_shares", counted)
    new = 6
    want = pair.want(17, max_new_tokens=new)
    if mode != "ar":
        pair.overrule(monkeypatch, want)
    stages = ["Verify"] if mode == "ar" else ["Decide", "Verify"]
    with pair.attach(mode=mode, budget=budget, pool_tokens=40 * 128) as spec:
        spec.engine.warm_up(like(3, new=new))
        assert sorted(graphs) == stages
        for count, parts in ((9, PARTS), (17, 20), (1, PARTS)):
            shared.clear()
            got = pair.got(count, max_new_tokens=new)
            assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :]), count
            assert parted is (parts in shared), count
            assert parted is bool(shared), count
        assert sorted(graphs) == stages


@pytest.mark.parametrize(
    ("mode", "budget", "stages"),
    [("dscale", "auto", ADAPTIVE), ("dflash", None, ["Decide", "Verify"])],
)
def test_riding_prompts_need_no_graph_of_their_own(
    mode: str,
    budget: Any,
    stages: list[str],
    graphs: list[str],
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dscale.stages, "gpu", lambda target: mode == "dscale")  # for sub-lanes
    long, short = prompt(9), [prompt(n) for n in (20, 3)]
    want = [continuation(pair.reference, ids, 12)[len(ids) :] for ids in short]
    with pair.attach(mode=mode, budget=budget, max_concurrency=4) as spec:
        spec.engine.warm_up(like(3))
        before = sorted(graphs)
        assert set(before) <= set(stages)
        running = spec.engine.submit(long, max_new_tokens=300)
        next(iter(running))
        handles = [spec.engine.submit(ids, max_new_tokens=12) for ids in short]
        assert [h.result().generated_tokens for h in handles] == want
        running.cancel()
        assert spec.stats.ridden_tokens == 23
        assert sorted(graphs) == before == sorted(set(before))


def test_ways_of_choosing_tokens_do_not_share_a_compile_limit(
    graphs: list[str], pair: Pair
) -> None:
    ways: list[dict[str, Any]] = [{}, SAMPLED]
    with torch._dynamo.config.patch(recompile_limit=1), pair.attach(mode="ar"):
        for way in ways:
            settings = {**way, "max_new_tokens": 3}
            assert torch.equal(pair.got(2, **settings), pair.want(2, **settings)), way
    assert graphs == ["Verify"] * len(ways)


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        self.calls.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.calls.append([])


@pytest.mark.parametrize("mode", ["ar", "dflash", "+budget", "dscale"])
def test_late_results_change_nothing(
    mode: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, stats and streamer calls are the same when results are read a step later."""
    settings = {"max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    want = pair.want(5, **settings)
    settings["eos_token_id"] = [int(want[0, 130 + 21]), int(want[2, 130 + 9])]
    budget = {"ar": None, "dflash": 9}.get(mode, 5)
    seen: list[Any] = []
    make = dscale.core.Decoding
    for late in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(
                dscale.core,
                "Decoding",
                lambda *a, late=late, **k: make(*a, **{**k, "late": late}),
            )
            if mode != "ar":
                pair.overrule(patch, want)
            with pair.attach(mode=mode, budget=budget, pool_tokens=None) as spec:
                recorder = Recorder()
                outs = [pair.got(n, **settings) for n in (5, 3)]
                outs.append(pair.got(1, **settings, streamer=recorder))
                stats = spec.stats
                figures = [getattr(stats, n) for n in (
                    "calls", "requests", "steps", "passes", "tokens", "drafted", "accepted",
                    "prompt_tokens", "last_progress",
                )]  # fmt: skip
                seen.append((outs, recorder.calls, figures))
    for ours, theirs in zip(seen[0][0], seen[1][0], strict=True):
        assert torch.equal(ours, theirs)
    assert seen[0][1:] == seen[1][1:]
    assert len(seen[0][1]) > 5
    assert seen[0][2][3] > 5


def test_every_thread_has_cuda_graph_trees_of_its_own() -> None:
    from torch._inductor.cudagraph_trees import get_container, local

    found: list[Any] = []
    kept: list[Any] = []

    def run() -> None:
        with own_trees():
            found.append(get_container(0))
            assert get_container(0) is found[-1]
            kept.extend((local.tree_manager_containers, local.tree_manager_locks))

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        await_exit(thread)
    assert len(found) == 2
    assert found[0] is not found[1]
    # The thread has let go of what it had, and of no more: freed twice, it ends the process.
    fresh: list[Any] = [{}]
    assert [sys.getrefcount(kept[i]) for i in range(4)] == 4 * [sys.getrefcount(fresh[0])]


def test_the_callers_thread_keeps_cuda_graph_trees() -> None:
    """In a process of its own, because a module is loaded once."""
    code = """
import threading
from dscale.compiled.capture import load_trees, own_trees
from dscale.worker import await_exit
load_trees()
def run():
    with own_trees():
        pass
thread = threading.Thread(target=run)
thread.start()
thread.join()
await_exit(thread)
from torch._inductor.cudagraph_trees import get_container
get_container(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

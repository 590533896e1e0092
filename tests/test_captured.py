"""Captured runs on a GPU: the ids of the eager run and of plain decoding, recordings counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import SETTINGS, EveryBucket, Pair, like
from tiny import plain, prompt
from torch import nn

import dscale.compiled.capture
import dscale.compiled.layer
import dscale.core
from dscale.choosers import GREEDY
from dscale.compiled.capture import own_forward
from dscale.compiled.prefill import PromptPass
from dscale.policy import MULTIPLES
from dscale.prefill import TILES
from dscale.workspace import bucket_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [("ar", None), ("dflash", None), ("dflash", 5), ("+tiles", None), ("+budget", "half"),
         ("+budget", "auto"), ("dscale", 3), ("dscale", "half"), ("dscale", "auto")]  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("mode", "budget"), CASES)
def test_the_captured_run_equals_the_eager_one_and_plain_decoding(
    mode: str,
    budget: Any,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    pair = Pair(tmp_path, "cuda")
    settings = {**settings, "max_new_tokens": 30, "pad_token_id": 0}
    want = pair.want(5, **settings)
    if mode != "ar":
        pair.overrule(monkeypatch, want)
    forwards: list[tuple[str, Any]] = []

    def remembered(stage: nn.Module) -> Callable[..., Any]:
        forwards.append((type(stage).__name__, own_forward(stage)))
        return forwards[-1][1]

    monkeypatch.setattr(dscale.compiled.capture, "own_forward", remembered)
    layers: list[Any] = []

    def remember(code: nn.Module) -> Callable[..., Any]:
        layers.append(own_forward(code))
        return layers[-1]

    dscale.compiled.layer._compiled.cache_clear()
    monkeypatch.setattr(dscale.compiled.layer, "own_forward", remember)
    stops = [int(want[0, 130 + 11]), int(want[2, 130 + 5])]
    for captured in (False, True):
        with pair.attach(mode=mode, budget=budget, capture=captured) as spec:
            if captured:
                spec.engine.warm_up(like(5, **settings))
            for count in (5, 3, 4, 1, 2, 5, 1):
                got = pair.got(count, **settings)
                assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :]), count
            ended = pair.got(5, **settings, eos_token_id=stops)
            assert torch.equal(ended, pair.want(5, **settings, eos_token_id=stops))
            assert spec.stats.tokens_per_pass > 1 or mode == "ar"
        for stage, forward in forwards:
            entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(forward.__code__)
            # Only "auto" takes steps that draft nothing.
            assert len(entries) == (stage != "Anchors" or budget == "auto"), stage
    assert forwards
    for layer in layers:
        assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(layer.__code__)) == 1
    assert layers
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("mode", "budget", "most"),
    [("dscale", "auto", 5), ("dscale", 4, 5), ("dscale", 4, 17), ("+tiles", None, 5)],
)
def test_each_bucket_is_recorded_once(
    mode: str, budget: Any, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seventeen requests have a sub-lane each, fewer have more."""
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    recorded: list[int] = []
    record = cudagraph_trees.CUDAGraphTreeManager.record_function

    def counted(self: Any, *args: Any) -> Any:
        recorded.append(1)
        return record(self, *args)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphTreeManager, "record_function", counted)
    pair = Pair(tmp_path, "cuda")
    want = pair.want(most, max_new_tokens=30)
    pair.overrule(monkeypatch, want)
    with pair.attach(mode=mode, budget=budget, pool_tokens=40 * 128, ride_prompts=False) as spec:
        spec.engine.warm_up(like(most))
        buckets = len({bucket_of(n) for n in range(1, most + 1)})
        # Verify once per capacity; decide and anchors once per lane count; prompts once per size.
        per_lanes = {"auto": len(MULTIPLES) + 1 + 2, 4: 2, None: 2}[budget]
        everything = buckets * per_lanes + len(TILES)
        assert len(recorded) == everything
        for count in (most, 2, 4, 1, 3, most):
            got = pair.got(count, max_new_tokens=30)
            assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :])
        assert len(recorded) == everything
        times = spec.engine.batcher.core.corrected(GREEDY)
        assert (times is not None) == (budget == "auto")
        if times is not None:
            assert sum(times.observed.values()) > 20, "steps said how long they took"
            assert all(0 < cost.base < 1000 for cost in times.table.values())


@pytest.mark.gpu
@needs_gpu
def test_prompts_that_are_not_captured_give_the_same_tokens(tmp_path: Path) -> None:
    torch._dynamo.reset()
    pair = Pair(tmp_path, "cuda")
    want = pair.want(5, max_new_tokens=20)
    with pair.attach(mode="dscale", budget="half", compile_prefill=False) as spec:
        for count in (1, 5, 2):
            got = pair.got(count, max_new_tokens=20)
            assert torch.equal(got, want[:count, want.shape[1] - got.shape[1] :]), count
        assert isinstance(spec.engine.batcher.core.prompt, PromptPass)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("mode", "budget"), [("dflash", None), ("dscale", "half"), ("dscale", "auto")]
)
def test_riding_prompts_record_nothing_after_the_warm_up(
    mode: str, budget: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time and two at once, while another decodes; in steps of every capacity."""
    from torch._inductor import cudagraph_trees

    torch._dynamo.reset()
    monkeypatch.setattr(dscale.core, "AutoBudget", EveryBucket)
    recorded: list[int] = []
    record = cudagraph_trees.CUDAGraphTreeManager.record_function

    def counted(self: Any, *args: Any) -> Any:
        recorded.append(1)
        return record(self, *args)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphTreeManager, "record_function", counted)
    pair = Pair(tmp_path, "cuda")
    short = [prompt(n) for n in (20, 3, 100, 16)]
    want = [
        plain(pair.reference, torch.tensor([ids]).to("cuda"), max_new_tokens=12)[0, len(ids) :]
        for ids in short
    ]
    with pair.attach(mode=mode, budget=budget, max_concurrency=4, pool_tokens=40 * 128) as spec:
        spec.engine.warm_up(like(4))
        everything = len(recorded)
        assert everything
        running = spec.engine.submit(prompt(9), max_new_tokens=1500)
        next(iter(running))
        found = []
        for group in (short[:1], short[1:3], short[3:]):
            handles = [spec.engine.submit(ids, max_new_tokens=12) for ids in group]
            found += [handle.result().generated_tokens for handle in handles]
        running.cancel()
        assert found == [ids.tolist() for ids in want]
        assert spec.stats.ridden_tokens == sum(map(len, short))
        assert len(recorded) == everything

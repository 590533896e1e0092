"""Timing and packed buffers: what they leave alone; bad drafts that never give a token."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import overrule, random_predictor
from tiny import VOCAB, continuation, left_padded, plain, prompt, tiny_drafter, tiny_model
from torch import Tensor, nn

import dscale
import dscale.core
from dscale.choosers import chooser_of
from dscale.compiled.decide import Decide, pack
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import PAGE
from dscale.core import Core
from dscale.decode import Decoding
from dscale.host_pack import pack_on_host
from dscale.policy import AutoBudget, Choice
from dscale.request import Request
from dscale.timing import (
    CAPTURE_RUNS,
    LinearCosts,
    MeasuredCosts,
    Runner,
    bucket_kinds,
    capture_buckets,
)
from dscale.workspace import Workspace

LENGTHS, NEW = [5, 130, 17], 24


def inputs() -> dict[str, Tensor]:
    return left_padded([prompt(n) for n in LENGTHS], pad=VOCAB - 1)


class Pair:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_model()
        self.drafter: Drafter = tiny_drafter(folder / "drafter", self.model)
        self.predictor = random_predictor(self.drafter, folder / "predictor")
        self.want = plain(tiny_model(), **inputs(), max_new_tokens=NEW)
        self.texts = [continuation(tiny_model(), prompt(n), NEW) for n in LENGTHS]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def state(workspace: Workspace) -> list[Tensor]:
    """Live requests' state and all pages but scratch, copied."""
    idle = workspace.max_requests
    kept = [tensor[:idle].clone() for tensor in workspace.requests]
    for pool in (workspace.pool, workspace.draft_pool):
        assert pool is not None
        kept += [buffer[PAGE:].clone() for buffer in pool.buffers()]
    return kept


@pytest.mark.parametrize("mode", ["dflash", "+budget", "dscale"])
def test_timing_between_steps_changes_nothing(
    mode: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a request joins others and brings buckets that were never timed."""
    overrule(monkeypatch, pair.texts)
    launch, timed = Decoding.launch, []

    def interrupted(self: Decoding, live: list[Request], **settings: Any) -> Any:
        if len(timed) < 3:
            before = state(self.workspace)
            runner = Runner(self.workspace, self.stages, alone=False)
            for context in (0, 300):
                runner.at_context(3, context)
                for rows in (None,) if self.policy is None else (6, 48, 0):
                    assert runner.milliseconds(3, rows) > 0
            runner.at_context(3, 0)
            assert all(map(torch.equal, before, state(self.workspace)))
            fresh = self.workspace.host_requests(1)
            idle = self.workspace.max_requests
            for name in ("context_S", "live_S", "page_SL", "logical_SP"):
                ours = getattr(self.workspace.requests, name)[idle]
                assert torch.equal(ours, getattr(fresh, name)[0]), name
            timed.append(len(live))
        return launch(self, live, **settings)

    passes = []
    for launches in (launch, interrupted):
        monkeypatch.setattr(Decoding, "launch", launches)
        with dscale.attach(pair.model, pair.drafter, mode=mode, budget=6) as spec:
            assert torch.equal(spec.generate(**inputs(), max_new_tokens=NEW), pair.want)
            passes.append(spec.stats.last_progress)
    assert timed == [3, 3, 3]
    assert passes[0] == passes[1]
    assert max(map(max, passes[0])) > 2


@pytest.mark.parametrize("mode", ["dscale", "+budget"])
def test_buckets_timed_alone_leave_fresh_slots(mode: Any, pair: Pair) -> None:
    with dscale.attach(pair.model, pair.drafter, mode=mode, budget="auto") as spec:
        spec.generate(**inputs(), max_new_tokens=NEW)
        core = spec.engine.batcher.core
        workspace, costs = core.workspace, MeasuredCosts()
        assert workspace is not None
        (stages,) = core._stages.values()
        kinds = bucket_kinds(spec.engine.config)
        more = workspace.max_requests + 1
        capture_buckets(workspace, stages, [2, 4, more], kinds, costs, alone=True)
        assert len(costs.table) == 3 * len(kinds)
        assert min(cost.at(0) for cost in costs.table.values()) > 0
        for ours, fresh in zip(workspace.requests, workspace.host_requests(), strict=True):
            if ours is not workspace.requests.anchor_S:
                assert torch.equal(ours, fresh)
        runner = Runner(workspace, stages, alone=True)
        runner.at_context(2, 2 * PAGE)
        before = workspace.requests.context_S.clone()
        runner.step(2, 12)
        step, packed = workspace.step(2), workspace.packed(2, 12)
        assert step.length_N.sum() == 12, "its lanes are live"
        assert (workspace.requests.context_S > before).sum() == 2
        assert len(set(packed.token_M.tolist())) > 2
        runner.rest(2)
        for ours, fresh in zip(workspace.requests, workspace.host_requests(), strict=True):
            assert torch.equal(ours[:2], fresh[:2])
        table = dict(costs.table)
        capture_buckets(workspace, stages, [2, 4], kinds, costs, alone=True)
        assert costs.table == table, "nothing is timed twice"
        assert torch.equal(spec.generate(**inputs(), max_new_tokens=NEW), pair.want)


def test_capturing_many_sizes_is_nothing_to_warn_of(pair: Pair) -> None:
    """PyTorch warns from 9 sizes of a function on."""
    from torch._inductor.cudagraph_utils import maybe_warning_due_to_dynamic_shape as warn

    sizes: dict[Any, Any] = {(n,): len for n in range(9)}
    warned: list[bool] = []
    with dscale.attach(pair.model, pair.drafter, mode="dscale", budget=4) as spec:
        spec.generate(**inputs(), max_new_tokens=NEW)
        core = spec.engine.batcher.core
        (stages,) = core._stages.values()
        stages = dataclasses.replace(stages, verify=lambda *_: warned.append(warn(sizes, 9)))
        assert core.workspace is not None
        capture_buckets(core.workspace, stages, [2], (4,), MeasuredCosts(), alone=False)
    assert warned[:CAPTURE_RUNS] == [False] * CAPTURE_RUNS
    assert set(warned[CAPTURE_RUNS:]) == {True}, "it is timed then"


def test_lanes_are_timed_behind_noise_where_no_request_has_been(pair: Pair) -> None:
    with dscale.attach(pair.model, pair.drafter, mode="dscale", budget="auto") as spec:
        batcher = spec.engine.batcher
        core, count = batcher.core, 4
        requests = [Request(prompt=[1] * 140, max_new_tokens=NEW) for _ in range(count)]
        workspace = core.make_room(requests)
        stages = core.stages(chooser_of(requests))
        contexts = []

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            contexts.append(args[2].context_N.tolist())

        hook = core.target.register_forward_pre_hook(keep)
        capture_buckets(workspace, stages, [count], (6,), MeasuredCosts(), alone=False)
        assert not any(page.any() for page in pages_of(workspace)), "they may be others'"
        capture_buckets(workspace, stages, [count], (8,), MeasuredCosts(), alone=True)
        assert all(0.9 < page.std() < 1.1 for page in pages_of(workspace)[:count])
        assert min(contexts[-1]) >= PAGE
        hook.remove()
        batcher._reset()
        assert torch.equal(spec.generate(**inputs(), max_new_tokens=NEW), pair.want)
        assert workspace is core.workspace
        before = pages_of(workspace)
        capture_buckets(workspace, stages, [count], (12,), MeasuredCosts(), alone=True)
        for ours, theirs in zip(pages_of(workspace), before, strict=True):
            assert torch.equal(ours, theirs), "they may be kept for their prompts"


def pages_of(workspace: Workspace) -> list[Tensor]:
    """The pages of the first keys in both pools, without scratch, copied."""
    assert workspace.draft_pool is not None
    keys = (pool.layer(0)[0] for pool in (workspace.pool, workspace.draft_pool))
    return [page.clone() for key in keys for page in key.split(PAGE)[1:]]


def test_packed_rows_of_a_lane_count_share_memory(pair: Pair) -> None:
    with dscale.attach(pair.model, pair.drafter) as spec:
        spec.generate(**inputs(), max_new_tokens=4)
        workspace = spec.engine.batcher.core.workspace
        assert workspace is not None
        full, part = workspace.packed(4, 64), workspace.packed(4, 10)
        assert workspace.packed(4, 10) is part
        assert [len(column) for column in part[:-1]] == [10] * 5
        for ours, theirs in zip(part, full, strict=True):
            assert ours.data_ptr() == theirs.data_ptr()
        full.row_NT.fill_(40)
        rows = part.rows()
        assert int(rows.row_NT.max()) == 9
        assert int(part.row_NT.max()) == 40
        others = workspace.packed(3, 48)
        assert others.token_M.data_ptr() != full.token_M.data_ptr()


def test_packing_on_the_host_equals_the_device(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrule(monkeypatch, pair.texts)
    compared: list[list[int]] = []

    def both(requests: Any, step: Any, packed: Any) -> None:
        pack(requests, step, packed)
        device = [step.offset_N.clone(), *(column.clone() for column in packed)]
        for buffer in (step.offset_N, *packed):
            buffer.fill_(-7)
        pack_on_host(requests, step, packed)
        assert all(map(torch.equal, device, [step.offset_N, *packed]))
        compared.append(step.length_N.tolist())

    monkeypatch.setattr("dscale.decode.pack_on_host", both)
    with dscale.attach(pair.model, pair.drafter, mode="+budget", budget=4) as spec:
        assert torch.equal(spec.generate(**inputs(), max_new_tokens=NEW), pair.want)
    assert len(compared) > 2
    assert any(len(set(lengths)) > 1 for lengths in compared)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scored_by", ["predictor", "product"])
@pytest.mark.parametrize("mode", ["dscale", "+budget", "dflash"])
def test_drafts_that_are_not_numbers_give_no_wrong_token(
    mode: str, scored_by: str, poison: float, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisoned hidden states in some lanes of some steps: those drafts are lost, no more."""
    if mode == "dflash" and scored_by == "predictor":
        pytest.skip("uniform rows need no scores")
    draft, steps, scored = Decide.draft, [0], []

    def poisoned(self: Decide, requests: Any, step: Any) -> Tensor:
        hidden_NCD = draft(self, requests, step).clone()
        steps[0] += 1
        for lane in range(len(hidden_NCD)):
            if (steps[0] + lane) % 3:
                hidden_NCD[lane, 3:] = poison
        return hidden_NCD

    propose = Decide.propose

    def watched(self: Decide, requests: Any, step: Any) -> Tensor | None:
        score_NC = propose(self, requests, step)
        assert int(step.candidate_NC.min()) >= 0
        assert int(step.candidate_NC.max()) < VOCAB
        if score_NC is not None:
            scored.append(score_NC.clone())
        return score_NC

    monkeypatch.setattr(Decide, "draft", poisoned)
    monkeypatch.setattr(Decide, "propose", watched)
    for budget in (5, "auto") if mode != "dflash" else (5,):
        predictor = pair.predictor if scored_by == "predictor" else None
        settings = {"mode": mode, "budget": budget, "predictor": predictor}
        with dscale.attach(pair.model, pair.drafter, **settings) as spec:
            assert torch.equal(spec.generate(**inputs(), max_new_tokens=NEW), pair.want)
    assert steps[0] > 1
    assert mode == "dflash" or all(bool(scores.isfinite().all()) for scores in scored)


def test_linear_costs_order_steps_by_their_rows() -> None:
    costs = LinearCosts(0.5, 2.0, 0.25)
    assert costs.of(4, 0).at(10_000) == 3.0
    assert costs.of(4, 8).at(0) == 2.0 + 2.0 + 2.0
    assert costs.of(4, 64).base > costs.of(4, 8).base


def test_results_that_never_come_do_not_end_drafting(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured runs whose last step was a probe: the next call must look again."""
    dear = LinearCosts(5.0, 1.0, 0.2)
    monkeypatch.setattr(dscale.core, "linear_costs", lambda *arguments: dear)
    monkeypatch.setattr(Core, "captured", property(lambda self: True))
    monkeypatch.setattr(dscale.stages, "capture", lambda stage: stage)
    monkeypatch.setattr(dscale.core, "capture_buckets", lambda *a, **k: None)
    monkeypatch.setattr(dscale.core, "AutoBudget", lambda costs: AutoBudget(dear))
    choose: Callable[..., Choice] = AutoBudget.choose
    drafted: list[bool] = []

    def watched(self: AutoBudget, *arguments: Any) -> Choice:
        drafted.append(choose(self, *arguments).draft)
        return Choice(arguments[0], 1, draft=False) if not drafted[-1] else Choice(32, 16)

    monkeypatch.setattr(AutoBudget, "choose", watched)
    ids = torch.tensor([prompt(5)])
    with dscale.attach(pair.model, pair.drafter) as spec:
        for new in (18, 17, 18, 19, 18, 17):
            got = spec.generate(ids, max_new_tokens=new)
            assert got[0].tolist() == pair.texts[0][: 5 + new]
    half = drafted[len(drafted) // 2 :]
    assert 0 < sum(half) <= len(half) / 8

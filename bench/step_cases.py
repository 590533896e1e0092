"""The cases a decode step is measured in, and the rig that runs them: workspace, stages, decoding
loop and clock, as the engine has them, over simulated acceptance."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from bench.shapes import Models
from bench.simulated import Trace, simulate
from dscale.choosers import chooser_of
from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.capture import capture
from dscale.compiled.sampling import Chooser
from dscale.config import Budget, EngineConfig, Mode
from dscale.decode import Decoding
from dscale.pages import PageAllocator, pages_for
from dscale.policy import AutoBudget, FixedBudget, Policy
from dscale.request import Request
from dscale.results import mark
from dscale.stages import Stage, Stages, build_stages
from dscale.stats import Stats
from dscale.timing import MeasuredCosts, bucket_kinds, capture_buckets, linear_costs
from dscale.workspace import Workspace, bucket_of

Sampled = dict[str, Any]

SAMPLING: dict[str, Sampled] = {
    "greedy": {},
    "temperature 0.6, top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "temperature 1": {"temperature": 1.0},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A mode as it is measured. `per_head`: the 16-row tile for each query head in place of the
    one that all heads of a group share. `sampling`: a key of SAMPLING."""

    mode: Mode
    budget: Budget = None
    per_head: bool = False
    sampling: str = "greedy"

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(mode=self.mode, budget=self.budget)

    @property
    def fields(self) -> dict[str, Any]:
        """What tells its result rows apart."""
        tile = "per head, 16 rows" if self.per_head else "packed heads, 16 rows"
        if self.mode == "dflash":
            tile = "per head, 128 rows"
        return {
            "mode": self.mode,
            "budget": None if self.budget is None else str(self.budget),
            "tile": tile,
            "sampling": self.sampling,
        }

    def rows(self, lanes: int) -> int | None:
        """Rows of a step of so many lanes, None where each step chooses."""
        if self.config.adaptive:
            average = self.config.average
            return None if average is None else average * lanes
        return lanes * self.config.uniform_rows(VERIFY_TILE)


CASES = {
    "ar": Case("ar"),
    "dflash": Case("dflash"),
    "+tiles-per-head": Case("+tiles", per_head=True),
    "+tiles": Case("+tiles"),
    "+budget": Case("+budget", "half"),
    "dscale-half": Case("dscale", "half"),
    "dscale-auto": Case("dscale", "auto"),
}
"""By the names of the command line, each but the first adding a mechanism to the one before."""


def shared_stages(
    raw: Stages, chooser: Chooser, case: Case, make: Callable[[object, Any, bool], Stage]
) -> Stages:
    """The stages of a case as `make(key, stage, simulated)` has them: the same key for what cases
    have in common. `simulated`: whether simulated acceptance changes the stage."""
    verify, decide = cast(Any, raw.verify), cast(Any, raw.decide)
    if case.per_head:
        verify.tile = dataclasses.replace(verify.tile, per_head=True, block=VERIFY_TILE, parts=0)
    key = (verify.drafter is None, verify.rows, verify.tile, chooser, case.config.adaptive)
    return dataclasses.replace(
        raw,
        decide=decide and make(("decide", decide.rows, decide.seed, decide.tile), decide, True),
        anchors=raw.anchors and make("anchors", raw.anchors, False),
        verify=make(key, verify, True),
    )


class Clock:
    """Marks in time: on the GPU's own clock where there is one, else on the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        """This moment; on a GPU, when it gets here."""
        return mark(self.device) if self.cuda else time.perf_counter()

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds; only after `wait`."""
        return float(first.elapsed_time(last) if self.cuda else 1e3 * (last - first))

    def wait(self) -> None:
        """Until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize()


class Timed:
    """A stage whose calls are marked while `spans` is a list."""

    def __init__(self, stage: Stage, clock: Clock) -> None:
        self.stage, self.clock = stage, clock
        self.spans: list[tuple[Any, Any]] | None = None

    def __call__(self, *args: Any) -> None:
        if self.spans is None:
            self.stage(*args)
            return
        began = self.clock.mark()
        self.stage(*args)
        self.spans.append((began, self.clock.mark()))


@dataclass(slots=True)
class Rig:
    """One workspace and every stage built in it; cases share the stages they have in common.

    `lanes`: the most requests. `tokens`: the most each may have, prompt included. `wrap`: how a
    stage is compiled, None runs it as it is. `spare`: how many times larger than needed the pool
    is."""

    models: Models
    trace: Trace
    lanes: int
    tokens: int
    wrap: Callable[[nn.Module], Stage] | None
    flex: bool
    spare: int = 1
    clock: Clock = field(init=False)
    workspace: Workspace = field(init=False)
    _stages: dict[object, Timed] = field(default_factory=dict)
    _costs: dict[Case, MeasuredCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        target = self.models.target
        pages = pages_for(0, self.tokens)
        logical = 1 << (pages - 1).bit_length()
        self.workspace = Workspace(
            target,
            self.models.drafter,
            max_requests=self.lanes,
            num_pages=self.spare * max(-(-(1 + self.lanes * pages) // 16) * 16, logical),
            pages_per_request=logical,
        )
        self.clock = Clock(self.workspace.device)
        assert self.workspace.draft_pool is not None
        for pool in (self.workspace.pool, self.workspace.draft_pool):
            for buffer in pool.buffers():
                buffer.normal_()

    def stages(self, case: Case) -> Stages:
        """The stages of a case, compiled at their first call."""
        drafter = None if case.mode == "ar" else self.models.drafter
        chooser = chooser_of([Request(prompt=[0], max_new_tokens=1, **SAMPLING[case.sampling])])
        raw = build_stages(
            self.models.target, drafter, self.models.predictor, self.workspace, case.config,
            chooser, flex=self.flex, captured=False,
        )  # fmt: skip
        return shared_stages(raw, chooser, case, self._timed)

    def _timed(self, key: object, stage: Any, simulated: bool) -> Timed:
        if key not in self._stages:
            if simulated:
                stage = simulate(stage, self.trace)
            wrapped = stage if self.wrap is None else self.wrap(stage)
            self._stages[key] = Timed(wrapped, self.clock)
        return self._stages[key]

    def lanes_of(self, requests: int) -> int:
        """Lanes of a step of so many requests."""
        return bucket_of(requests) if self.flex else requests

    def policy(self, case: Case, lanes: Sequence[int]) -> Policy | None:
        """The budget policy; "auto" times steps of these numbers of requests first, and captures
        them where steps are captured."""
        config = case.config
        if not config.adaptive:
            return None
        if config.average is not None:
            return FixedBudget(config.average)
        if self.wrap is None:
            return AutoBudget(linear_costs(self.workspace, self.stages(case), min(lanes)))
        costs, buckets = (
            self._costs.setdefault(case, MeasuredCosts()),
            set(map(self.lanes_of, lanes)),
        )
        capture_buckets(
            self.workspace, self.stages(case), buckets, bucket_kinds(config), costs, alone=True
        )
        return AutoBudget(costs)

    def place(
        self, contexts: Sequence[int], new_tokens: Sequence[int], sampled: Sampled
    ) -> list[Request]:
        """Live requests in slots 0, 1, ... with so much context each, without a prefill: the pools
        hold random keys and values."""
        allocator, host = PageAllocator(self.workspace.num_pages), self.workspace.host_requests()
        requests = []
        for slot, (context, new) in enumerate(zip(contexts, new_tokens, strict=True)):
            request = Request(prompt=[0] * context, max_new_tokens=new, seed=slot, **sampled)
            pages = torch.tensor(allocator.take(request.num_pages))
            host.context_S[slot], host.remaining_S[slot] = context, new
            host.anchor_S[slot], host.live_S[slot], host.seed_S[slot] = slot, True, slot
            host.temperature_S[slot], host.top_k_S[slot] = request.temperature, request.top_k
            host.top_p_S[slot] = request.top_p
            host.page_SL[slot, : len(pages)] = pages.int()
            host.logical_SP[slot].fill_(-1)
            host.logical_SP[slot, pages] = torch.arange(len(pages), dtype=torch.int32)
            request.slot = slot
            requests.append(request)
        self.workspace.upload(list(range(self.workspace.max_requests + 1)))
        return requests

    def decoding(self, case: Case, policy: Policy | None, stats: Stats) -> Decoding:
        """The engine's decode steps for placed requests."""
        config = case.config
        return Decoding(
            self.workspace,
            self.stages(case),
            stats,
            rows=1 if case.mode == "ar" else config.uniform_rows(VERIFY_TILE),
            policy=policy,
            late=self.wrap is not None,
            padded=self.flex,
            times=self._costs.get(case),
        )


def make_rig(models: Models, trace: Trace, lanes: int, tokens: int, spare: int = 1) -> Rig:
    """A rig as the engine would run on the models' device: captured on a GPU, eager on a CPU."""
    cuda = models.target.norm.device.type == "cuda"
    return Rig(models, trace, lanes, tokens, capture if cuda else None, cuda, spare)

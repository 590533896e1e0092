"""The engine's batcher and thread, switched from mode to mode between measurements: all modes
share weights, caches and every stage they have in common, so each is compiled once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.client import Intervals
from bench.simulated import Trace, simulate
from bench.step_cases import Case, shared_stages
from dscale.batcher import Batcher
from dscale.compiled.capture import capture
from dscale.compiled.drafter import Drafter
from dscale.compiled.predictor import Predictor
from dscale.compiled.sampling import Chooser
from dscale.compiled.target import Target
from dscale.config import EngineConfig
from dscale.core import Core
from dscale.policy import Policy
from dscale.request import Request
from dscale.stages import Stage, Stages, build_stages, prompt_stage
from dscale.stats import Stats
from dscale.timing import MeasuredCosts
from dscale.worker import Command, Worker
from dscale.workspace import Workspace


@dataclass(slots=True)
class Kept:
    """What a core has made for one mode, by the way of choosing tokens: see Core's fields."""

    stages: dict[Chooser, Stages] = field(default_factory=dict)
    policies: dict[Chooser, Policy | None] = field(default_factory=dict)
    costs: dict[Chooser, MeasuredCosts] = field(default_factory=dict)
    ready: set[Chooser] = field(default_factory=set)
    warmed: set[Chooser] = field(default_factory=set)

    def clear(self) -> None:
        """Let all of it go."""
        for made in (self.stages, self.policies, self.costs, self.ready, self.warmed):
            made.clear()


@dataclass(slots=True)
class SharedCore(Core):
    """A core whose stages outlive its mode. `trace`: simulated acceptance, None for the real one.
    `all_modes`: the drafter of every mode but "ar"."""

    trace: Trace | None = None
    all_modes: Drafter | None = None
    case: Case = field(default_factory=lambda: Case("ar"))
    _shared: dict[object, Any] = field(default_factory=dict)
    _kept: dict[object, Kept] = field(default_factory=dict)

    def use(self, case: Case, settings: EngineConfig) -> None:
        """Turn to another mode; what was captured and measured for it before is there again.
        `settings`: all but mode and budget. Only while no request is placed."""
        config = dataclasses.replace(settings, mode=case.mode, budget=case.budget)
        self.config, self.case = config, case
        self.drafter = None if case.mode == "ar" else self.all_modes
        kept = self._kept.setdefault(case, Kept())
        self._stages, self._policies = kept.stages, kept.policies
        self._ready, self._warmed = kept.ready, kept.warmed
        # Times of buckets: those of one mode serve all its budgets, but widths of uniform rows.
        width = None if config.adaptive else case.budget
        self._costs = self._kept.setdefault((case.mode, case.per_head, width), Kept()).costs

    def stages(self, chooser: Chooser) -> Stages:
        """The stages of the mode for one way of choosing tokens, compiled where no mode has had
        them."""
        if chooser in self._stages:
            return self._stages[chooser]
        assert self.workspace is not None
        raw = build_stages(
            self.target, self.drafter, self.predictor, self.workspace, self.config, chooser,
            flex=self.flex, captured=False, prompt=self.prompt,
        )  # fmt: skip
        made = shared_stages(raw, chooser, self.case, self._made)
        self._stages[chooser] = made
        return made

    @property
    def warmed(self) -> bool:
        """Whether the mode has been compiled and nothing of it lost since."""
        return bool(self._warmed)

    @property
    def prompt(self) -> Stage:
        """The pass over prompts: one of the modes with a drafter, another without."""
        assert self.workspace is not None
        key = ("prompt", self.drafter is None)
        if key not in self._shared:
            self._shared[key] = prompt_stage(
                self.target, self.drafter, self.workspace,
                flex=self.flex, captured=self.captures_prompts,
            )  # fmt: skip
        made: Stage = self._shared[key]
        return made

    def times(self, chooser: Chooser) -> MeasuredCosts:
        """Times of the mode's buckets, as far as they have been captured."""
        return self._costs.get(chooser, MeasuredCosts())

    def corrected(self, chooser: Chooser) -> MeasuredCosts | None:
        """The times of the mode's buckets, whether its policy counts with them or not."""
        return self._costs.get(chooser)

    def make_room(self, requests: list[Request]) -> Workspace:
        """As ever, but with the draft cache that other modes need."""
        drafter, self.drafter = self.drafter, self.all_modes
        try:
            return Core.make_room(self, requests)
        finally:
            self.drafter = drafter

    def close(self) -> None:
        """Let the workspace and all stages go."""
        Core.close(self)
        self._shared.clear()
        for kept in self._kept.values():
            kept.clear()

    def _made(self, key: object, stage: Any, simulated: bool) -> Any:
        if key not in self._shared:
            if self.trace is not None and simulated:
                stage = simulate(stage, self.trace)
            self._shared[key] = capture(stage) if self.captured else stage
        return self._shared[key]


@dataclass(slots=True)
class TimedBatcher(Batcher):
    """A batcher that notes its step intervals."""

    intervals: Intervals = field(default_factory=Intervals)
    _ended: float | None = None

    def _fill(self) -> bool:
        filled = Batcher._fill(self)
        if filled:
            self._ended = None
        return filled

    def _decode(self, timed: bool) -> None:
        stats = self.core.stats
        steps, tokens = stats.steps, stats.tokens
        Batcher._decode(self, timed)
        ended, advanced = time.perf_counter(), stats.steps - steps
        if self._ended is not None and advanced:
            self.intervals.add(stats.tokens - tokens, ended - self._ended)
        self._ended = ended if advanced else None


class SwitchedEngine:
    """A batcher on its thread over a SharedCore. The first `use` makes room for its requests, and
    later ones must not need more: everything would be compiled anew."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        predictor: Predictor | None,
        settings: EngineConfig,
        trace: Trace | None = None,
    ) -> None:
        """`settings`: all but mode and budget."""
        self.stats, self.settings = Stats(), settings
        self.core = SharedCore(
            target, drafter, predictor, settings, self.stats, trace=trace, all_modes=drafter
        )
        self.batcher = TimedBatcher(self.core)
        self._worker = Worker(self.batcher)
        self._rooms: dict[Case, list[list[Request]]] = {}

    def use(self, case: Case, requests: Sequence[Request] = ()) -> float:
        """Turn to a mode; compile and capture what requests like these, all at once, may need and
        is missing (without any: what a failure has taken). Returns the seconds it took. Raises
        ValueError where they need a larger workspace than the first ones."""
        began, rooms = time.perf_counter(), self._rooms.setdefault(case, [])

        def run(batcher: Batcher) -> None:
            _drain(batcher)
            core = self.core
            core.use(case, self.settings)
            missing = [list(requests)] if requests else ([] if core.warmed else rooms)
            for wanted in missing:
                if core.workspace is not None and not core.workspace.fits(**core.sizes(wanted)):
                    raise ValueError("requests: expected no larger ones than at the first use")
                batcher.warm_up(wanted)

        self.ask(run)
        if requests:
            rooms.append(list(requests))
        return time.perf_counter() - began

    def submit(self, requests: list[Request]) -> None:
        """Queue requests; their sinks hear of the tokens, on the engine's thread."""
        for request in requests:
            request.queued_at = time.time()
        self._worker.tell(lambda batcher: batcher.add(requests))

    def ask(self, command: Command) -> None:
        """Run `command(batcher)` on the engine's thread and wait; raises what it raises."""
        self._worker.ask(command)

    def forget(self, rewind: bool = True) -> None:
        """Counters to zero and the trace to its start, when all requests are done."""

        def run(batcher: Batcher) -> None:
            _drain(batcher)
            self.stats.reset()
            self.batcher.intervals = Intervals()
            if rewind and self.core.trace is not None:
                self.core.trace.rewind()

        self.ask(run)

    def close(self) -> None:
        """End the thread and free the buffers."""
        self._worker.close()


def _drain(batcher: Batcher) -> None:
    """Make the last late step, of requests that have ended."""
    while batcher.busy:
        batcher.round()

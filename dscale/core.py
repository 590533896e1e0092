"""What runs on the device: the workspace, the stages for each way of choosing tokens, the prefill.

One thread uses it at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from dscale.choosers import chooser_of, narrowest
from dscale.compiled.capture import begin_step
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import PAGE
from dscale.compiled.predictor import Predictor
from dscale.compiled.sampling import Chooser
from dscale.compiled.target import Target
from dscale.config import EngineConfig
from dscale.decode import Decoding
from dscale.host import HostStages, host_stages
from dscale.placing import write_state
from dscale.policy import AutoBudget, FixedBudget, Policy
from dscale.prefill import packed_chunk
from dscale.request import Request
from dscale.results import FirstTokens, Results
from dscale.sizing import Sizes, allocate, check_memory, check_room, memory_of, needed, roomy
from dscale.stages import Stage, Stages, build_stages, prompt_stage
from dscale.stats import Stats
from dscale.timing import (
    MeasuredCosts,
    bucket_kinds,
    buckets_to,
    capture_buckets,
    capture_prompts,
    linear_costs,
)
from dscale.workspace import Workspace

TIMED_LANES = 8
"""Lanes of the eager passes that are timed for budget "auto" without captured graphs."""


@dataclass(slots=True)
class Core:
    """A target and, but for mode "ar", a drafter, with their buffers.

    Owns the workspace (paged caches, request state, step buffers) and makes a larger one when
    asked, unless `config.pool_tokens` fixes its size. `serving`: requests come one by one, so the
    pool is chosen from free memory; `capacity`: its pages, once chosen."""

    target: Target
    drafter: Drafter | None
    predictor: Predictor | None
    config: EngineConfig
    stats: Stats
    workspace: Workspace | None = None
    serving: bool = False
    capacity: int | None = None
    _stages: dict[Chooser, Stages] = field(default_factory=dict)
    _policies: dict[Chooser, Policy | None] = field(default_factory=dict)
    _costs: dict[Chooser, MeasuredCosts] = field(default_factory=dict)
    _ready: set[Chooser] = field(default_factory=set)  # those that captured steps have used
    _warmed: set[Chooser] = field(default_factory=set)  # those of `warm_up`
    _host: HostStages | None = None
    _prompt: Stage | None = None
    _warm_prompt: Stage | None = None  # the pass over prompts that `warm_up` has captured

    @property
    def rows(self) -> int:
        """Rows of a request's block that a pass may verify."""
        if self.drafter is None:
            return 1
        return self.config.uniform_rows(self.drafter.config.block_size)

    @property
    def flex(self) -> bool:
        """Whether attention goes through FlexAttention (GPU) or gathered pages and SDPA (CPU)."""
        return self.target.inv_freq.device.type != "cpu"

    @property
    def captured(self) -> bool:
        """Whether steps are compiled and captured in CUDA graphs."""
        return self.flex if self.config.capture is None else self.config.capture

    @property
    def captures_prompts(self) -> bool:
        """Whether the pass over prompts is captured as well."""
        return self.captured and self.config.compile_prefill is not False

    def decoding(self, requests: list[Request]) -> Decoding:
        """Decode steps that serve all these requests, and as many more as they are."""
        assert self.workspace is not None
        chooser = self._chooser(requests, self._ready)
        policy = self._policy(chooser, len(requests), alone=False)  # may capture and time
        return Decoding(
            self.workspace,
            self.stages(chooser),
            self.stats,
            rows=self.rows,
            policy=policy,
            late=self.captured,
            padded=self.flex,
            times=self.corrected(chooser),
        )

    def corrected(self, chooser: Chooser) -> MeasuredCosts | None:
        """Step times for decode steps to correct; None where no policy chooses by times."""
        return self._costs.get(chooser) if self.config.automatic else None

    def prefill(self, requests: list[Request], lengths: list[int]) -> FirstTokens | None:
        """Prefill the next `lengths` prompt tokens of placed requests, all above 0; returns what
        comes of those whose prompt ends, None where none does."""
        assert self.workspace is not None
        guided = any(r.guide is not None for r in requests)
        stages = self._host_stages(requests) if guided else self.stages(chooser_of(requests))
        w = self.workspace
        chunk = (
            w.chunk(requests, lengths) if self.flex else packed_chunk(requests, lengths, w.norm)
        )
        step = w.assign([r.slot for r in requests])
        begin_step()
        stages.prefill(w.requests, step, chunk)
        self.stats.prompt_tokens += sum(lengths)
        for request, length in zip(requests, lengths, strict=True):
            request.prefilled += length
        lanes = [i for i, r in enumerate(requests) if r.prefilled == len(r.prompt)]
        if not lanes:
            return None
        late = self.captured and not guided
        return FirstTokens(
            [requests[i] for i in lanes], lanes, Results.of(step.result_NX, late=late)
        )

    def guided_step(self, live: list[Request]) -> list[Request]:
        """One decode step of guided requests, on the host path; returns those that end."""
        assert self.workspace is not None
        decoding = Decoding(
            self.workspace,
            self._host_stages(live),
            self.stats,
            rows=self.rows,
            policy=None,
            late=False,
            padded=self.flex,
        )
        self.stats.uncaptured_steps += 1
        ended = decoding.finish(decoding.launch(live))
        return ended + [r for r in live if r.error is not None and r not in ended]

    def _host_stages(self, live: list[Request]) -> Stages:
        assert self.workspace is not None
        if self._host is None:
            self._host = host_stages(
                self.target, self.drafter, self.workspace, self.config, self.rows, self.flex,
                self.prompt,
            )  # fmt: skip
        self._host.lanes(live)
        return self._host

    def prepare(self, requests: list[Request]) -> None:
        """Time what the budget policy needs for so many requests; best while none is placed."""
        requests = [r for r in requests if r.guide is None]
        if requests:
            chooser = self._chooser(requests, self._warmed)
            self.stages(chooser)
            self._policy(chooser, len(requests), alone=True)

    def _chooser(self, requests: list[Request], among: set[Chooser]) -> Chooser:
        """How these requests' tokens are chosen in captured steps: by the narrowest way of `among`
        that serves them, so that nothing is compiled while others wait, else by their own."""
        chooser = chooser_of(requests)
        if self.captured:
            chooser = narrowest(chooser, among) or chooser
            self._ready.add(chooser)
        return chooser

    def warm_up(self, requests: list[Request]) -> None:
        """Make room for these requests, and compile and capture what they may need."""
        chooser = chooser_of(requests)
        self.make_room(requests).clear([])  # compiles the kernel
        self._warmed.add(chooser)
        self.prepare(requests)
        if self.captured:
            self._capture(chooser, len(requests), alone=True)
        if self.captures_prompts and self._warm_prompt is not self.prompt:
            capture_prompts(self.make_room(requests), self.prompt, self.config.prefill_chunk)
            self._warm_prompt = self.prompt

    def place(self, requests: list[Request]) -> None:
        """Write the state of requests, which have slots and pages, to the device."""
        assert self.workspace is not None
        host = self.workspace.host_requests(len(requests))
        for row, request in enumerate(requests):
            write_state(host, row, request)
        self.workspace.clear([page for r in requests for page in r.pages[r.prefilled // PAGE :]])
        self.workspace.upload([r.slot for r in requests])

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that does not fit by itself into a pool that is fixed, or
        that was chosen from a GPU's free memory, or into a CPU's memory."""
        capacity = self.config.pool_tokens
        if capacity is None and self.capacity is not None and self.flex:
            capacity = (self.capacity - 1) * PAGE
        check_room(request, capacity)
        if capacity is None and not self.flex and not self.holds(request):
            workspace = self.workspace  # would be let go first
            had = 0 if workspace is None else workspace.num_bytes
            check_memory(request, memory_of(self.target, self.drafter), had)

    def holds(self, request: Request) -> bool:
        """Whether the workspace could hold this request if it were alone there."""
        workspace = self.workspace
        if workspace is None:
            return False
        try:
            need = self.sizes([request])
        except ValueError:  # a fixed pool that is too small
            return False
        return workspace.fits(**{**need, "max_requests": 1, "num_pages": 1 + request.num_pages})

    def make_room(self, requests: list[Request]) -> Workspace:
        """The workspace, made larger where these requests together need more than it has, or where
        a serving engine chooses its pool.

        Only while no request is placed. Raises ValueError when a fixed pool is too small for them
        or memory does not suffice."""
        need = self.sizes(requests)
        if self.unchosen or self.workspace is None or not self.workspace.fits(**need):
            old = {} if self.workspace is None else {n: getattr(self.workspace, n) for n in need}
            self.close()
            memory, shape = memory_of(self.target, self.drafter), self.target.config
            if self.serving:
                need = needed(self.config, shape, requests, memory.serving_pages)
            wanted = roomy(need, old, self.config, shape, memory, self.serving)
            self.workspace = allocate(self.target, self.drafter, wanted, need, memory)
            if self.serving and self.config.pool_tokens is None:
                self.capacity = self.workspace.num_pages
        return self.workspace

    @property
    def unchosen(self) -> bool:
        """Whether a serving engine has yet to choose its pool."""
        return self.serving and self.capacity is None and self.config.pool_tokens is None

    def close(self) -> None:
        """Let the workspace go, and everything made for it."""
        self.workspace = self._host = self._prompt = self._warm_prompt = self.capacity = None
        for made in (self._stages, self._policies, self._costs, self._ready, self._warmed):
            made.clear()

    def sizes(self, requests: list[Request]) -> Sizes:
        """What these requests need of a workspace, together or, in a chosen pool, in turns."""
        return needed(self.config, self.target.config, requests, self.capacity)

    def stages(self, chooser: Chooser) -> Stages:
        """Build the stages for one way of choosing tokens, once."""
        if chooser not in self._stages:
            assert self.workspace is not None
            self._stages[chooser] = build_stages(
                self.target, self.drafter, self.predictor, self.workspace, self.config, chooser,
                flex=self.flex, captured=self.captured, prompt=self.prompt,
            )  # fmt: skip
        return self._stages[chooser]

    @property
    def prompt(self) -> Stage:
        """The pass over prompts, for every way of choosing tokens."""
        if self._prompt is None:
            assert self.workspace is not None
            self._prompt = prompt_stage(
                self.target, self.drafter, self.workspace,
                flex=self.flex, captured=self.captures_prompts,
            )  # fmt: skip
        return self._prompt

    def _policy(self, chooser: Chooser, requests: int, *, alone: bool) -> Policy | None:
        """The budget policy, with the times of every bucket that so many requests may pass."""
        if not self.config.adaptive or self.drafter is None:
            return None
        if self.config.average is not None:
            average = min(self.config.average, self.drafter.config.block_size)
            return self._policies.setdefault(chooser, FixedBudget(average))
        if self.captured:
            costs = self._capture(chooser, requests, alone=alone)
            return self._policies.setdefault(chooser, AutoBudget(costs))
        if chooser not in self._policies:
            assert self.workspace is not None
            lanes = min(requests, TIMED_LANES)
            measured = linear_costs(self.workspace, self.stages(chooser), lanes)
            self._policies[chooser] = AutoBudget(measured)
        return self._policies[chooser]

    def _capture(self, chooser: Chooser, requests: int, *, alone: bool) -> MeasuredCosts:
        """Capture and time what so many requests may pass and is missing; returns all times."""
        assert self.workspace is not None
        costs = self._costs.setdefault(chooser, MeasuredCosts())
        stages, lanes = self.stages(chooser), buckets_to(requests)
        kinds = bucket_kinds(self.config)
        capture_buckets(self.workspace, stages, lanes, kinds, costs, alone=alone)
        return costs

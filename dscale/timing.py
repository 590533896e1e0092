"""Step times, measured between requests and corrected while they are served: captured buckets on a
GPU, a line through a few eager passes on a CPU."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from dscale.compiled.attention import PREFILL_TILE, VERIFY_TILE
from dscale.compiled.capture import begin_step, many_sizes
from dscale.compiled.kv import PAGE
from dscale.config import EngineConfig
from dscale.decode import run_stages
from dscale.policy import MULTIPLES, Choice, Cost
from dscale.prefill import FILL_ROWS, bucket_of_tiles
from dscale.stages import Stage, Stages
from dscale.workspace import BUCKETS, Workspace, bucket_of

CAPTURE_RUNS = 3
"""Calls until a bucket replays: one runs, one records, one replays."""

HEATING_RUNS, TIMED_RUNS, EAGER_RUNS = 8, 5, 2
"""Calls before a timing that are not timed, calls that are on a GPU, and on a CPU."""

ENDLESS = 1 << 20
"""Tokens a lane may still emit."""

NEAR_CONTEXT, LONG_CONTEXT = PAGE, 1024
"""Tokens per lane of the two timings that a cost is made of. Rows that attend to nothing but one
another become alike (mean cosine 0.9, behind a page of noise 0.01: 12 random layers of width 512),
and on the same numbers a GPU computes faster."""

CORRECTION, LARGEST_ERROR = 0.1, 0.05
"""A served step moves its bucket's time by this share of the difference, of which at most so much
of the time counts. An error of 7 % is down to 1 % after some 20 steps, while a step that something
else held up moves its bucket by 0.5 % at most: one that seems slower than it is may never be tried
again."""

KNOWN_AFTER, OPTIMISM = 20, 0.04
"""Only buckets that are used are corrected; the others keep the errors of their timing. So a
drafted bucket counts as up to OPTIMISM cheaper than it seems until it has had so many steps of its
own: what may be as good is tried, and its time comes to be known. Timings and loops were seen to
differ by as much."""


def buckets_to(lanes: int) -> list[int]:
    """Every lane bucket that a call of `lanes` requests passes through as they finish."""
    top = bucket_of(lanes)
    return [b for b in BUCKETS if b <= top] + list(range(64, top + 1, 32))


@dataclass(slots=True)
class MeasuredCosts:
    """Times of captured buckets: (lanes, rows) to a cost; rows 0 is a plain step, None a uniform
    one. `observed`: how many served steps have corrected each."""

    table: dict[tuple[int, int | None], Cost] = field(default_factory=dict)
    observed: Counter[tuple[int, int | None]] = field(default_factory=Counter)

    def of(self, lanes: int, rows: int) -> Cost:
        """A bucket's cost as a choice should count it: a little known one's is lowered. Raises
        KeyError for one that was never measured."""
        cost = self.table[lanes, rows]
        unknown = max(0.0, 1 - self.observed[lanes, rows] / KNOWN_AFTER) if rows else 0.0
        factor = 1 - OPTIMISM * unknown
        return Cost(cost.base * factor, cost.per_token * factor)

    def observe(self, lanes: int, rows: int | None, context: int, milliseconds: float) -> None:
        """Correct a bucket by a served step of `context` committed tokens in all. Both terms of
        its cost change by one factor, so that they stay positive. A bucket that was never measured
        stays so; a time that is not a positive number is left out."""
        cost = self.table.get((lanes, rows))
        if cost is None or not 0 < milliseconds < math.inf:
            return
        off = milliseconds / cost.at(context) - 1
        factor = 1 + CORRECTION * min(max(off, -LARGEST_ERROR), LARGEST_ERROR)
        self.table[lanes, rows] = Cost(cost.base * factor, cost.per_token * factor)
        self.observed[lanes, rows] += 1


def cost_of(fast: float, slow: float, near: int, far: int) -> Cost:
    """The line through a step's times at two total contexts, which may be the same.

    At most half of the nearer time is due to its context: where something else made the other one
    long, no step may seem free without one."""
    per_token = max(0.0, slow - fast) / (far - near) if far > near else 0.0
    if per_token * near > fast / 2:
        per_token = fast / (2 * near)
    return Cost(fast - per_token * near, per_token)


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """A draft of `draft_lane` * lanes ms, a pass of `verify` + `verify_row` * rows ms."""

    draft_lane: float
    verify: float
    verify_row: float

    def of(self, lanes: int, rows: int) -> Cost:
        """Of any step."""
        if rows == 0:
            return Cost(self.verify + self.verify_row * lanes)
        drafted = self.draft_lane * lanes
        return Cost(drafted + self.verify + self.verify_row * rows)


class Runner:
    """Runs steps that no request takes part in.

    `alone`: no request is placed, so that every lane can be a live slot with pages of its own, in
    which there is noise unless requests were served before. Else all lanes are the idle slot: they
    compute as much and commit nothing, but their rows are all the same one, and a GPU is faster at
    that."""

    def __init__(self, workspace: Workspace, stages: Stages, alone: bool) -> None:
        self.workspace, self.stages, self.alone = workspace, stages, alone
        self._noisy = 1  # first page without noise yet; page 0 is scratch

    def slots(self, lanes: int) -> list[int]:
        """The slots of a step's lanes."""
        idle = self.workspace.max_requests
        return list(range(lanes)) if self.live(lanes) else [idle] * lanes

    def live(self, lanes: int) -> bool:
        """Whether a step has live slots."""
        return self.alone and lanes <= self.workspace.max_requests

    def step(self, lanes: int, rows: int | None) -> None:
        """A drafted step of `rows` packed rows, with 0 a plain one, with None a uniform one."""
        choice = None if rows is None else Choice(rows, -(-rows // lanes))
        if rows == 0:
            choice = Choice(lanes, 1, draft=False)
        step = self.workspace.assign(self.slots(lanes))
        run_stages(self.workspace, self.stages, step, lanes, choice)

    def at_context(self, lanes: int, context: int) -> int:
        """Let the lanes read whole pages, up to `context` tokens each; returns how many. Live ones
        begin at a token each.

        The pages may be anyone's; what is written goes to the scratch page, each lane's last."""
        w = self.workspace
        slots = sorted(set(self.slots(lanes)))
        pages = min(context // PAGE, w.pages_per_request - 1, (w.num_pages - 1) // len(slots))
        if self.live(lanes):
            self._fill(1 + pages * len(slots))
        host = w.host_requests(len(slots))
        host.context_S.fill_(pages * PAGE)
        host.logical_SP[:, 0] = pages
        for row in range(len(slots)):
            page = torch.arange(1 + row * pages, 1 + (row + 1) * pages)
            host.page_SL[row, :pages] = page.int()
            host.logical_SP[row, page] = torch.arange(pages, dtype=torch.int32)
        if self.live(lanes):
            tokens = torch.Generator().manual_seed(lanes)
            host.anchor_S.random_(w.vocab_size, generator=tokens)
            host.remaining_S.fill_(ENDLESS)
            host.live_S.fill_(True)
        w.upload(slots)
        return pages * PAGE

    def _fill(self, end: int) -> None:
        """Noise in the pages below `end`, unless some may be kept for their prompts: a request's
        are cleared when it is placed."""
        w = self.workspace
        if w.served or end <= self._noisy:
            return
        noise = torch.Generator(w.device).manual_seed(self._noisy)
        for pool in (w.pool, w.draft_pool):
            for buffer in () if pool is None else pool.buffers():
                pages = buffer.view(w.num_pages, -1)[self._noisy : end]
                pages.normal_(generator=noise)
        self._noisy = end

    def rest(self, lanes: int) -> None:
        """Leave the slots of so many lanes as they are before a request."""
        slots = sorted(set(self.slots(lanes)))
        self.workspace.host_requests(len(slots))
        self.workspace.upload(slots)

    def heat(self, lanes: int, rows: int | None) -> None:
        """Load an idle GPU with steps that are not timed: in those of much arithmetic its clock
        falls to what its power allows."""
        if self.alone and self.workspace.device.type == "cuda":
            for _ in range(HEATING_RUNS):
                self.step(lanes, rows)

    def milliseconds(self, lanes: int, rows: int | None) -> float:
        """Median time of a step, on the GPU's own clock where there is one."""
        self.step(lanes, rows)
        if self.workspace.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(EAGER_RUNS):
                self.step(lanes, rows)
                marks.append(time.perf_counter())
            # The best: a shared machine only ever adds time.
            return 1e3 * min(b - a for a, b in pairwise(marks))
        make: Any = torch.cuda.Event
        events = [make(enable_timing=True) for _ in range(TIMED_RUNS + 1)]
        events[0].record()
        for event in events[1:]:
            self.step(lanes, rows)
            event.record()
        events[-1].synchronize()
        return float(median(a.elapsed_time(b) for a, b in pairwise(events)))


def bucket_kinds(config: EngineConfig) -> tuple[int | None, ...]:
    """Rows per lane of the captured steps of a mode: 0 is a plain step, None a uniform one."""
    if config.automatic:
        return (*MULTIPLES, 0)
    if config.average is not None:
        return (config.average,)
    return (None,)


def capture_buckets(
    workspace: Workspace,
    stages: Stages,
    lanes: Iterable[int],
    kinds: tuple[int | None, ...],
    costs: MeasuredCosts,
    *,
    alone: bool,
) -> None:
    """Capture every bucket of these lane counts that `costs` does not have yet, then time them.

    `kinds`: see `bucket_kinds`. `alone`: see `Runner`."""
    wanted = [
        (count, None if kind is None else kind * count)
        for count in sorted(lanes, reverse=True)
        for kind in kinds
    ]
    wanted = [bucket for bucket in wanted if bucket not in costs.table]
    if not wanted:
        return  # as before nearly every step after a prompt: no progress bar is made for nothing
    runner = Runner(workspace, stages, alone)
    with many_sizes():
        for count, rows in tqdm(wanted, desc="dscale: capture", unit="bucket"):
            runner.at_context(count, 0)  # Earlier requests' pages may be others' by now.
            for _ in range(CAPTURE_RUNS):
                runner.step(count, rows)
    for count, rows in wanted:
        far = runner.at_context(count, LONG_CONTEXT)
        runner.heat(count, rows)
        slow = runner.milliseconds(count, rows)
        near = runner.at_context(count, NEAR_CONTEXT)
        fast = runner.milliseconds(count, rows)
        costs.table[count, rows] = cost_of(fast, slow, count * near, count * far)
    for count in {count for count, _ in wanted}:  # of more lanes than slots: the idle one
        runner.rest(count)


def capture_prompts(workspace: Workspace, prompt: Stage, prefill_chunk: int) -> None:
    """Capture the pass over prompts for every number of tiles that a chunk may have."""
    most = bucket_of_tiles(max(FILL_ROWS, prefill_chunk) // PREFILL_TILE)
    sizes = sorted({bucket_of_tiles(tiles) for tiles in range(1, most + 1)}, reverse=True)
    with many_sizes():
        for tiles in tqdm(sizes, desc="dscale: capture prompts", unit="bucket"):
            for _ in range(CAPTURE_RUNS):
                begin_step()
                prompt(workspace.requests, workspace.chunk([], [], tiles))


def linear_costs(workspace: Workspace, stages: Stages, lanes: int) -> LinearCosts:
    """Fit a line to eager steps of `lanes` lanes: a plain one and two drafted ones."""
    runner, most = Runner(workspace, stages, alone=False), VERIFY_TILE * lanes
    plain = runner.milliseconds(lanes, 0)
    half, full = (runner.milliseconds(lanes, rows) for rows in (most // 2, most))
    row = max((full - half) / (most - most // 2), 1e-4)
    verify = max(plain - row * lanes, 1e-3)
    draft = max(half - verify - row * (most // 2), 1e-3)
    return LinearCosts(draft / lanes, verify, row)

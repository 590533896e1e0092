"""The measurements of a decode step: its stages' times, decoding at a fixed number of requests, a
ragged trace, the growth of kernels with the pool."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.profile_step import StepProfile, counts, graph_pool_mib, growth, record, step_profile
from bench.step_cases import SAMPLING, Case, Rig
from dscale.decode import Decoding, Launch
from dscale.policy import Policy
from dscale.request import Request
from dscale.stats import Stats
from dscale.timing import ENDLESS, buckets_to
from dscale.workspace import bucket_of

WARM_UP = 4
"""Steps before a measurement: a bucket runs, records, then replays."""

PROFILED, SKIPPED = 8, 3
"""Steps under the profiler, and those at its start that do not count."""

POOL_FACTOR = 4

GREW_US, GREW = 5.0, 0.2
"""A kernel has grown when a step of it takes so many microseconds more, and this share more."""


def room_for(new_tokens: int) -> int:
    """Tokens a request may emit when the mean of all emits `new_tokens`: they progress unequally,
    and none should end."""
    return 2 * new_tokens + 64


class Stepper:
    """Runs one step over and over at the same context: every request is live, and put back to
    where it was after each step. No result is read."""

    def __init__(self, rig: Rig, case: Case, lanes: int, context: int) -> None:
        self.rig, self.case, self.lanes = rig, case, lanes
        policy = rig.policy(case, [lanes])
        sampled = SAMPLING[case.sampling]
        requests = rig.place([context] * lanes, [room_for(0)] * lanes, sampled)
        self.state = rig.workspace.requests
        self.state.remaining_S.fill_(ENDLESS)
        self.context_S = self.state.context_S.clone()
        self.requests = requests
        self.decoding = rig.decoding(case, policy, Stats())

    def __call__(self) -> None:
        self.decoding.launch(self.requests)
        self.state.context_S.copy_(self.context_S)

    def warm_up(self) -> float:
        """Compile and capture what is missing; seconds it took."""
        began = time.perf_counter()
        for _ in range(WARM_UP):
            self()
        self.rig.clock.wait()
        return time.perf_counter() - began

    def times(self, repeats: int) -> dict[str, float]:
        """Medians of back-to-back steps, ms: decide, verify, the step from the start of one to
        the end of the other, and the host's own time for launching it."""
        clock, stages = self.rig.clock, self.decoding.stages
        timed: list[Any] = [s for s in (stages.decide, stages.verify) if s is not None]
        for stage in timed:
            stage.spans = []
        host = []
        for _ in range(repeats):
            began = time.perf_counter()
            self()
            host.append(1e3 * (time.perf_counter() - began))
        clock.wait()
        spans = [stage.spans for stage in timed]
        for stage in timed:
            stage.spans = None
        each = [median(clock.between(*pair) for pair in found) for found in spans]
        whole = [clock.between(a[0], b[1]) for a, b in zip(spans[0], spans[-1], strict=True)]
        return {
            "decide_ms": round(each[0], 4) if len(each) == 2 else 0.0,
            "verify_ms": round(each[-1], 4),
            "step_ms": round(median(whole), 4),
            "host_ms": round(median(host), 4),
        }

    def profile(self, unread: Path) -> StepProfile:
        """What the GPU does in these steps; they must be captured. A trace that does not hold them
        goes to the file `unread`."""
        per_step = 1 if self.decoding.stages.decide is None else 2
        kernels = record(self, PROFILED)
        try:
            return step_profile(kernels, per_step, SKIPPED)
        except ValueError:
            unread.write_text(json.dumps(kernels))
            raise


def decode_rate(
    rig: Rig, case: Case, lanes: int, prompt: int, new_tokens: int, rounds: int
) -> dict[str, Any]:
    """Decode `lanes` requests that never end from `prompt` tokens of context on, until they have
    `new_tokens` more on average; the engine's own loop, all of whose host work counts.

    `rounds` times; the trace starts at its beginning, the same for every case."""
    policy = rig.policy(case, [lanes])
    _run(*_placed(rig, case, lanes, prompt, new_tokens, policy, Stats()), 1)
    rig.trace.rewind()
    stats, rates, seconds = Stats(), [], 0.0
    for _ in range(rounds):
        decoding, requests = _placed(rig, case, lanes, prompt, new_tokens, policy, stats)
        before = stats.tokens
        rig.clock.wait()
        began = time.perf_counter()
        _run(decoding, requests, new_tokens * lanes)
        rig.clock.wait()
        took = time.perf_counter() - began
        seconds += took
        rates.append((stats.tokens - before) / took)
    return {
        "decode_tokens_per_s": round(stats.tokens / seconds, 1),
        "decode_tokens_per_s_min": round(min(rates), 1),
        "decode_tokens_per_s_max": round(max(rates), 1),
        "tokens_per_step": round(stats.tokens_per_pass, 4),
        "step_ms": round(1e3 * seconds / stats.steps, 4),
        "rows_per_step": round((stats.drafted + stats.passes) / stats.steps, 2),
        "steps": stats.steps,
        "rounds": rounds,
    }


def _placed(
    rig: Rig,
    case: Case,
    lanes: int,
    prompt: int,
    new_tokens: int,
    policy: Policy | None,
    stats: Stats,
) -> tuple[Decoding, list[Request]]:
    room = room_for(new_tokens)
    requests = rig.place([prompt] * lanes, [room] * lanes, SAMPLING[case.sampling])
    return rig.decoding(case, policy, stats), requests


def _run(decoding: Decoding, requests: list[Request], tokens: int) -> None:
    """The engine's loop, until `tokens` more are committed; at least WARM_UP steps."""
    launches = 0
    launched: Launch | None
    pending: Launch | None = None
    wanted = decoding.stats.tokens + tokens
    while launches < WARM_UP or decoding.stats.tokens < wanted:
        launched = decoding.launch(requests)
        launches += 1
        if decoding.late:
            launched, pending = pending, launched
        if launched is not None and decoding.finish(launched):
            raise RuntimeError("a request ended before its round did: give it more room")
    if pending is not None:
        decoding.finish(pending)


def ragged(rig: Rig, case: Case, total: int, context: int, new_tokens: int) -> dict[str, Any]:
    """Decode `total` requests of random context (1 to `context`) and length (8 to `new_tokens`) in
    waves of random size to their ends, every bucket captured before: what was compiled, recorded
    or skipped while they ran."""
    draws = random.Random(0)
    began = time.perf_counter()
    buckets = buckets_to(rig.lanes) if rig.flex else [rig.lanes]
    policy = rig.policy(case, buckets)
    if case.config.average is not None:
        for lanes in buckets:
            Stepper(rig, case, min(lanes, rig.lanes), 1).warm_up()
    warm_up = time.perf_counter() - began
    before, stats, left, waves = counts(), Stats(), total, 0
    began = time.perf_counter()
    while left:
        size = min(left, draws.randint(1, rig.lanes))
        requests = rig.place(
            [draws.randint(1, context) for _ in range(size)],
            [draws.randint(min(8, new_tokens), new_tokens) for _ in range(size)],
            SAMPLING[case.sampling],
        )
        rig.decoding(case, policy, stats).run(requests)
        short = [r for r in requests if len(r.tokens) != r.max_new_tokens]
        if short:
            raise RuntimeError(f"{len(short)} requests of a wave did not get all their tokens")
        left, waves = left - size, waves + 1
    rig.clock.wait()
    return {
        "requests": total,
        "waves": waves,
        "buckets": sorted({bucket_of(n) for n in buckets}),
        "warm_up_s": round(warm_up, 1),
        "seconds": round(time.perf_counter() - began, 2),
        "steps": stats.steps,
        "tokens": stats.tokens,
        "recordings_before": before.recordings,
        **counts().since(before),
        "cudagraph_skips_in_all": counts().skips,
        "graph_breaks_in_all": counts().breaks,
        "graph_pool_mib": graph_pool_mib(),
    }


def pool_growth(small: StepProfile, large: StepProfile) -> dict[str, Any]:
    """A step with a pool and with one POOL_FACTOR times as large: which kernels take longer."""
    rows = growth(small.kernels, large.kernels)
    grown = [
        row
        for row in rows
        if row["us_large"] - row["us_small"] > max(GREW_US, GREW * row["us_small"])
    ]
    return {
        "busy_us_small": round(small.busy, 1),
        "busy_us_large": round(large.busy, 1),
        "grown": grown,
        "most_growth": rows[:3],
    }


def device_memory() -> dict[str, float]:
    """GiB in use on the GPU, torch's and all."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 2),
        "in_use_gib": round((total - free) / 2**30, 2),
    }

"""A closed-loop client: so many workers, each sending its next request when its last is done; and
what the requests say about throughput and latency."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any

import numpy as np

from dscale.request import Request
from dscale.stats import Stats

PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}


@dataclass(frozen=True, slots=True)
class Served:
    """Requests after their ends, in the order they were sent, and the seconds from the first
    submission to the last end."""

    requests: Sequence[Request]
    seconds: float


@dataclass(slots=True)
class Intervals:
    """Decode steps from one's end to the next one's end, host time included, where no prefill and
    no idling came between: the paper's step intervals (IV-D)."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count one more."""
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds


def closed_loop(
    submit: Callable[[list[Request]], None], requests: Sequence[Request], workers: int
) -> Served:
    """Send requests as `workers` closed-loop workers do and wait for all: the paper's client.

    `submit` queues requests and returns at once. A worker's next request is sent from the sink of
    its last one, on the engine's thread: workers on threads of their own would take the
    interpreter from the engine, and send a step late. Raises the error of a request that
    failed."""
    left, done = iter(requests), SimpleQueue[Request]()

    def sink(request: Request, tokens: list[int]) -> None:
        if not request.finished:
            return
        following = next(left, None)
        if following is not None:
            submit([following])
        done.put(request)

    for request in requests:
        request.sink = sink
    began = time.perf_counter()
    submit(list(islice(left, workers)))
    for _ in requests:
        ended = done.get()
        if ended.error is not None or ended.finish_reason == "cancelled":
            raise ended.error or RuntimeError("engine: closed while requests were running")
    return Served(requests, time.perf_counter() - began)


def figures(served: Served, stats: Stats, intervals: Intervals, output_cap: int) -> dict[str, Any]:
    """A result row's figures. `stats`, `intervals`: of these requests alone."""
    requests = served.requests
    tokens = sum(len(r.tokens) for r in requests)
    capped = [len(r.tokens) >= output_cap for r in requests]
    free = [r for r, at_cap in zip(requests, capped, strict=True) if not at_cap]
    progress = np.concatenate([np.array(r.progress, dtype=np.int64) for r in requests])
    return {
        "tokens_per_s": round(tokens / served.seconds, 1),
        "output_tokens": tokens,
        "window_s": round(served.seconds, 4),
        "decode_tokens_per_s": round(ratio(intervals.tokens, intervals.seconds), 1),
        "step_ms": round(1e3 * ratio(intervals.seconds, intervals.steps), 4),
        "tokens_per_step": round(stats.tokens_per_pass, 4),
        "tokens_per_step_uncapped": _mean_progress(free),
        "live_per_step": round(ratio(stats.passes, stats.steps), 3),
        "rows_per_step": round(ratio(stats.drafted + stats.passes, stats.steps), 3),
        "steps": stats.steps,
        "prefill_share": round(stats.prefill_seconds / served.seconds, 4),
        "latency_ms": spread([_seconds(r, r.finished_at) for r in requests]),
        "ttft_ms": spread([_seconds(r, r.first_token_at) for r in requests]),
        "capped": sum(capped),
        "progress_counts": np.bincount(progress, minlength=17).tolist(),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, milliseconds."""
    found = {"mean": float(np.mean(seconds))}
    found |= {name: float(np.percentile(seconds, at)) for name, at in PERCENTILES.items()}
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def ratio(over: float, under: float) -> float:
    """A quotient, 0 where there is nothing to divide by."""
    return over / under if under else 0.0


def _seconds(request: Request, moment: float | None) -> float:
    assert request.queued_at is not None
    assert moment is not None
    return moment - request.queued_at


def _mean_progress(requests: Sequence[Request]) -> float | None:
    passes = sum(len(r.progress) for r in requests)
    return round(sum(sum(r.progress) for r in requests) / passes, 4) if passes else None

"""The random load of a soak: requests of every kind, cancellations and malformed ones from one
caller, and what must be true of every result. `tests/soak.py` and `bench/soak_captured.py` run it.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dscale.engine import Engine
from dscale.handle import Handle, Result

CANCELLED, MALFORMED = 0.10, 0.02
WAIT = 120.0
"""Seconds after which a result that has not come counts as lost."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A request to make. `want`: whatever the check of its result needs."""

    prompt: list[int]
    settings: dict[str, Any]
    want: Any = None


@dataclass(slots=True)
class Case:
    """One request under way. `doomed`: it is cancelled at some moment, or too late."""

    handle: Handle
    plan: Plan
    doomed: bool


Draw = Callable[[random.Random], Plan]
Check = Callable[[Case, Result], None]
Bad = tuple[str, Callable[[], object]]
"""What a refusal must match, and the call that is refused."""


def malformed(engine: Engine, vocab: int, too_long: int | None) -> list[Bad]:
    """Every kind of malformed request. `too_long`: new tokens that the pool has no room for, None
    where it grows."""

    def twice() -> None:
        name = engine.add_request([1, 2, 3], "twice", max_new_tokens=2)
        try:
            engine.submit([1, 2, 3, 4], request_id=name, max_new_tokens=2)
        finally:
            assert sum(map(len, engine.request_id_iter(name))) in (1, 2)

    nan = {"do_sample": True, "temperature": float("nan")}
    kinds: list[Bad] = [
        ("input_ids: .*empty", lambda: engine.submit([], max_new_tokens=4)),
        (f"input_ids: .*0..{vocab - 1}", lambda: engine.submit([1, vocab], max_new_tokens=4)),
        ("temperature", lambda: engine.submit([5], max_new_tokens=4, **nan)),
        ("max_new_tokens", lambda: engine.submit([5], max_new_tokens=0)),
        ("request_id", twice),
    ]
    if too_long is not None:
        kinds.append(("pool_tokens", lambda: engine.submit([1], max_new_tokens=too_long)))
    return kinds


def refused(bad: Bad) -> str:
    """Make a malformed request and see that it is refused for its own reason; returns the name of
    the argument at fault."""
    match, submit = bad
    try:
        submit()
    except ValueError as error:
        if re.search(match, str(error)):
            return match.split(":")[0]
        raise AssertionError(f"{match}: expected in the refusal, got {error}") from error
    raise AssertionError(f"{match}: expected a refusal, none came")


def check_times(result: Result) -> None:
    """Assert what is true of every request that was queued."""
    got = result.generated_tokens
    assert sum(result.progress) == max(0, len(got) - 1), result
    times = [result.queued_at, result.first_token_at, result.finished_at]
    present = [t for t in times if t is not None]
    assert present == sorted(present), result
    assert len(present) == 2 + bool(got), result


def drive(
    engine: Engine,
    count: int,
    rng: random.Random,
    draw: Draw,
    check: Check,
    bad: list[Bad],
    *,
    outstanding: int = 24,
    watch: Callable[[], object] = lambda: None,
) -> Counter[str]:
    """Make `count` random requests, at most `outstanding` at once, check each result, and count
    how they ended: a finish reason, or the argument a malformed one was refused for.

    `watch` is called at every request."""
    ends, running = Counter[str](), deque[Case]()

    def settle(case: Case) -> None:
        result = case.handle.result(WAIT)
        assert result.finish_reason != "cancelled" or case.doomed, result
        check_times(result)
        check(case, result)
        ends[result.finish_reason] += 1
        # Each token once, and none lost on the way.
        assert list(chain(*case.handle)) == result.generated_tokens, result

    for _ in range(count):
        watch()
        if rng.random() < MALFORMED:
            ends[refused(rng.choice(bad))] += 1
            continue
        plan = draw(rng)
        handle = engine.submit(plan.prompt, **plan.settings)
        case = Case(handle, plan, rng.random() < CANCELLED)
        running.append(case)
        if case.doomed and rng.random() < 0.5:
            handle.cancel()  # as early as can be: on a slow machine the others may all be too late
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.02)
        for other in [c for c in running if c.doomed and rng.random() < 0.1]:
            other.handle.cancel()
        while len(running) >= outstanding:
            settle(running.popleft())
    for case in running:
        if case.doomed:
            case.handle.cancel()
        settle(case)
    return ends


def all_back(engine: Engine) -> None:
    """Assert that nothing runs and every slot and page is free."""
    batcher, workspace = engine.batcher, engine.batcher.core.workspace
    deadline = time.perf_counter() + 10
    while batcher.busy and time.perf_counter() < deadline:  # the late step of the last requests
        time.sleep(0.01)
    assert not batcher.busy
    assert workspace is not None
    assert batcher.num_free_pages == workspace.num_pages - 1
    assert batcher.num_free_slots == min(workspace.max_requests, engine.config.concurrency)
    assert not engine.num_open

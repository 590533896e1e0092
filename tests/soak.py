"""A soak of the continuous batcher: random requests, cancellations and malformed ones through one
small engine, each compared with its single run. `make soak` runs it at length."""

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tiny import VOCAB, continuation, plain, prompt, tiny_drafter, tiny_model

import dscale
from dscale.engine import Engine
from dscale.handle import Handle, Result

LENGTHS = (1, 3, 9, 17, 40, 127, 128, 129, 260)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 1},
    {"max_new_tokens": 12},
    {"max_new_tokens": 40},
    {"max_new_tokens": 60, "eos_token_id": list(range(0, VOCAB, 25)), "pad_token_id": 0},
    {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "seed": 3},
    {"max_new_tokens": 30, "do_sample": True, "top_k": 9, "top_p": 0.9, "seed": 11},
    {"max_new_tokens": 16, "repetition_penalty": 1.3},
)
CANCELLED, MALFORMED = 0.10, 0.02
LONGEST = 200
WAIT = 120.0
"""Seconds after which a result that has not come counts as lost."""


@dataclass
class References:
    """What each prompt gives with each setting, alone: greedy by transformers, sampled by plain
    decoding of one request, each computed once."""

    model: Any = field(default_factory=tiny_model)
    known: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __call__(self, length: int, setting: int) -> list[int]:
        """The new tokens."""
        if (length, setting) not in self.known:
            ids, kwargs = torch.tensor([prompt(length)]), SETTINGS[setting]
            if "seed" in kwargs:
                with dscale.attach(self.model, mode="ar"):
                    out = self.model.generate(ids, **kwargs)
            else:
                out = plain(self.model, ids, **kwargs)
            self.known[length, setting] = out[0, length:].tolist()
        return self.known[length, setting]

    def text(self, length: int) -> list[int]:
        """The longest greedy continuation of a prompt, of LONGEST tokens."""
        if (length, -1) not in self.known:
            tokens = continuation(self.model, prompt(length), LONGEST)
            self.known[length, -1] = tokens[length:]
        return self.known[length, -1]


@dataclass
class Case:
    """One request under way."""

    handle: Handle
    want: list[int]
    doomed: bool


def check(case: Case, result: Result) -> str:
    """Compare one result with its single run; returns its finish reason."""
    got, want = result.generated_tokens, case.want
    if result.finish_reason == "cancelled":
        assert case.doomed
        assert got == want[: len(got)]
    else:
        assert got == want, (result, want)
        assert result.finish_reason in ("eos", "length")
    assert sum(result.progress) == max(0, len(got) - 1)
    assert result.error is None
    times = [result.queued_at, result.first_token_at, result.finished_at]
    present = [t for t in times if t is not None]
    assert present == sorted(present)
    assert len(present) == 2 + bool(got)
    return result.finish_reason


def twice(engine: Engine) -> None:
    """Submit an id again that is in use."""
    name = engine.add_request(prompt(3), "twice", max_new_tokens=2)
    try:
        engine.submit(prompt(9), request_id=name, max_new_tokens=2)
    finally:
        assert sum(map(len, engine.request_id_iter(name))) == 2


def malformed(engine: Engine, rng: random.Random) -> str:
    """Submit one malformed request; returns the name that its refusal gives."""
    kinds: list[tuple[str, Callable[[], object]]] = [
        ("input_ids: .*empty", lambda: engine.submit([], max_new_tokens=4)),
        (f"input_ids: .*0..{VOCAB - 1}", lambda: engine.submit([1, VOCAB], max_new_tokens=4)),
        ("pool_tokens", lambda: engine.submit(prompt(9), max_new_tokens=100_000)),
        (
            "temperature",
            lambda: engine.submit([5], max_new_tokens=4, do_sample=True, temperature=float("nan")),
        ),
        ("max_new_tokens", lambda: engine.submit([5], max_new_tokens=0)),
        ("request_id", lambda: twice(engine)),
    ]
    name, submit = rng.choice(kinds)
    with pytest.raises(ValueError, match=name):
        submit()
    return name.split(":")[0]


def soak(
    engine: Engine, references: References, count: int, seed: int, outstanding: int = 24
) -> Counter[str]:
    """Run `count` random requests, at most `outstanding` at once, and count how they ended."""
    rng, ends = random.Random(seed), Counter[str]()
    running: deque[Case] = deque()

    def settle(case: Case) -> None:
        ends[check(case, case.handle.result(WAIT))] += 1
        assert list(chain(*case.handle)) == case.handle.result().generated_tokens

    for _ in range(count):
        if rng.random() < MALFORMED:
            ends[malformed(engine, rng)] += 1
            continue
        length, setting = rng.choice(LENGTHS), rng.randrange(len(SETTINGS))
        handle = engine.submit(prompt(length), **SETTINGS[setting])
        case = Case(handle, references(length, setting), rng.random() < CANCELLED)
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
    assert not batcher.busy
    assert workspace is not None
    assert batcher.num_free_pages == workspace.num_pages - 1
    assert batcher.num_free_slots == min(
        workspace.max_requests, engine.config.max_concurrency or 256
    )
    assert not engine.num_open


def main() -> None:
    """Soak at the length asked for, in every mode."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    references = References()
    model = tiny_model()
    with TemporaryDirectory() as folder:
        drafter = tiny_drafter(Path(folder), model)
    modes: tuple[Any, ...] = ("dscale", "ar", "dflash", "+tiles", "+budget")
    for number, mode in enumerate(modes):
        settings = {"pool_tokens": 24 * 128, "max_concurrency": 8, "prefill_chunk": 128}
        spec = dscale.attach(model, None if mode == "ar" else drafter, mode=mode, **settings)
        with spec:
            began = time.perf_counter()
            each = options.requests // len(modes)
            ends = soak(spec.engine, references, each, options.seed + number)
            all_back(spec.engine)
            print(f"{mode}: {time.perf_counter() - began:.1f} s, {dict(ends)}", flush=True)


if __name__ == "__main__":
    main()

"""What callers hold of requests: refusals, ids, handles, streams."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from soak import References
from tiny import prompt

from bench.soak_load import WAIT, all_back
from dscale import Attachment
from dscale.errors import ClosedError

Attach = Callable[..., Attachment]


BAD: list[tuple[str, Any, dict[str, Any]]] = [
    ("input_ids: expected at least one", [], {}),
    ("input_ids: expected a list of token ids", "words", {}),
    ("input_ids: expected a list of token ids", [[1, 2]], {}),
    ("input_ids: expected a list of token ids", None, {}),
    ("input_ids: expected token ids in 0..499, got -1", [5, -1], {}),
    ("input_ids: expected token ids in 0..499, got 500", [500], {}),
    ("pool_tokens: expected at least 1664", prompt(1600), {}),
    ("temperature.*nan", [5], {"do_sample": True, "temperature": float("nan")}),
    ("max_new_tokens", [5], {"max_new_tokens": 0}),
    ("seed: has no effect", [5], {"seed": 3}),
    ("num_beams", [5], {"num_beams": 3}),
    ("num_return_sequences", [5], {"num_return_sequences": 2, "do_sample": True}),
]


@pytest.mark.parametrize(("match", "ids", "settings"), BAD)
def test_a_bad_request_is_refused_alone(
    match: str, ids: Any, settings: dict[str, Any], attach: Attach, references: References
) -> None:
    engine = attach().engine
    running = engine.submit(prompt(3), max_new_tokens=30)
    with pytest.raises(ValueError, match=match):
        engine.submit(ids, **{"max_new_tokens": 4} | settings)
    if not settings:
        found = engine.generate_batch([prompt(3), ids, prompt(9)], max_new_tokens=12)
        assert [r.finish_reason for r in found.values()] == ["length", "error", "length"]
        assert found["req_1"].error is not None
        assert match.split(":")[0] in found["req_1"].error
        assert found["req_2"].generated_tokens == references.text(9)[:12]
    assert running.result(WAIT).generated_tokens == references.text(3)[:30]
    assert engine.num_open == 0


def test_ids_are_taken_until_their_request_ends(attach: Attach) -> None:
    engine = attach().engine
    first = engine.submit(prompt(3), request_id="one", max_new_tokens=200)
    with pytest.raises(ValueError, match="request_id: expected a new one, got 'one'"):
        engine.submit(prompt(3), request_id="one", max_new_tokens=4)
    engine.cancel_request("one")
    engine.cancel_request("nobody")
    assert first.result(0).finish_reason == "cancelled"
    for _ in range(30):  # Free the moment the result is there.
        engine.submit(prompt(3), request_id="one", max_new_tokens=1).result(WAIT)


def test_a_handle_gives_each_token_once(attach: Attach, references: References) -> None:
    engine = attach().engine
    handle = engine.submit(torch.tensor(prompt(9)), max_new_tokens=20)
    with pytest.raises(TimeoutError, match="not finished"):
        handle.result(0)
    got = next(iter(handle))
    got += [t for delta in handle for t in delta]
    assert got == references.text(9)[:20]
    assert list(handle) == list(handle) == []
    result = handle.result()
    assert result.progress
    assert result.tokens_per_pass == 19 / len(result.progress)
    assert result.queued_at <= result.first_token_at <= result.finished_at  # type: ignore[operator]


def test_leaving_a_stream_cancels_the_rest(attach: Attach) -> None:
    engine = attach().engine
    for result in engine.stream([prompt(3)] * 20, max_new_tokens=30):
        assert result.finish_reason == "length"
        break
    del result
    gc.collect()
    all_back(engine)
    with pytest.raises(ValueError, match="seeds: expected 2"):
        engine.stream([[1], [2]], seeds=[3])


ARGUMENTS: list[tuple[str, Any, dict[str, Any]]] = [
    ("inputs", None, {}), ("inputs", iter([[1]]), {}), ("seeds", [[1]], {"seeds": 3}),
    ("seed", [[1]], {"seed": 3}), ("request_id", [[1]], {"request_id": "one"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompts", "kwargs"), ARGUMENTS)
def test_arguments_of_many_prompts(
    name: str, prompts: Any, kwargs: dict[str, Any], attach: Attach
) -> None:
    engine = attach().engine
    for call in (engine.stream, engine.generate_batch):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            call(prompts, max_new_tokens=2, do_sample=True, **kwargs)
    assert engine.stats.requests == 0


def test_arguments_of_one_prompt(attach: Attach) -> None:
    engine: Any = attach().engine
    with pytest.raises(ValueError, match=r"^request_id: expected a string, got \[3\]"):
        engine.submit([1], request_id=[3], max_new_tokens=2)
    with pytest.raises(ValueError, match=r"^input_ids: expected token ids of 64 bits"):
        engine.submit([1, 1 << 70], max_new_tokens=2)
    assert engine.num_open == engine.stats.requests == 0


def test_a_detached_engine_raises_as_a_closed_one(attach: Attach) -> None:
    spec = attach()
    engine = spec.engine
    spec.detach()
    for call in (engine.submit, lambda ids, **kwargs: engine.generate_batch([ids], **kwargs)):
        with pytest.raises(ClosedError, match="model: detached"):
            call([1, 2], max_new_tokens=2)


def resident() -> int:
    """Bytes of memory this process holds, 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return (
        int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
    )


def test_memory_stays_flat(attach: Attach) -> None:
    spec = attach(mode="dscale", budget="half")
    engine = spec.engine
    counts = []
    calls = 1000 if os.environ.get("DSCALE_SOAK") else 160
    for _ in range(4):
        for call in range(calls // 4):
            length = (3, 9, 129)[call % 3]
            if call % 4 == 0:
                spec.model.generate(torch.tensor([prompt(length)]), max_new_tokens=3)
                continue
            handle = engine.submit(prompt(length), max_new_tokens=3, repetition_penalty=1.2)
            if call % 5 == 0:
                handle.cancel()
            handle.result(WAIT)
        gc.collect()
        core = engine.batcher.core
        assert core.workspace is not None
        counts.append(
            (core.workspace.num_bytes, len(core._stages), len(core.workspace._packed),
             len(core.workspace._sent), engine.num_open, resident(), len(gc.get_objects()))
        )  # fmt: skip
        del handle, core
    assert counts[1][:-2] == counts[2][:-2] == counts[3][:-2]
    assert counts[3][-2] - counts[1][-2] < 8 << 20, counts
    assert abs(counts[3][-1] - counts[1][-1]) < 100, counts
    all_back(engine)

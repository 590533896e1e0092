"""One engine, many threads: calls at once, cancelling, closing, errors, what stays behind."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from soak import SETTINGS, References
from tiny import VOCAB, left_padded, prompt, tiny_model
from transformers import TextIteratorStreamer

import dscale
from bench.soak_load import WAIT, all_back
from dscale import Attachment
from dscale.compiled.drafter import Drafter
from dscale.core import Core

Attach = Callable[..., Attachment]


@pytest.fixture(autouse=True)
def no_other_threads() -> None:
    """An engine that a test before let go ends when the collector finds it."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "dscale":
            thread.join(1)
    assert engine_threads() == 0


def together(works: list[Callable[[], object]]) -> None:
    """Run each in a thread of its own; none may raise or hang."""
    errors: list[BaseException] = []

    def safely(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=safely, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def engine_threads() -> int:
    return sum(t.name == "dscale" for t in threading.enumerate())


def test_every_way_in_at_once(attach: Attach, references: References) -> None:
    spec = attach()
    engine, lengths = spec.engine, (3, 9, 129, 40)

    def by_generate() -> None:
        for setting in range(len(SETTINGS)):
            ids = torch.tensor([prompt(9)])
            out = spec.model.generate(ids, **SETTINGS[setting])
            assert out[0, 9:].tolist() == references(9, setting)

    def by_batch() -> None:
        inputs = left_padded([prompt(n) for n in lengths])
        for new in (5, 30):
            out = spec.model.generate(**inputs, max_new_tokens=new)
            for row, length in zip(out, lengths, strict=True):
                assert row[129:].tolist() == references.text(length)[:new]

    def by_submit() -> None:
        for setting in (2, 5, 3, 4):
            handles = [engine.submit(prompt(n), **SETTINGS[setting]) for n in lengths]
            for length, handle in zip(lengths, handles, strict=True):
                got = [token for delta in handle for token in delta]
                assert got == references(length, setting)

    def by_stream() -> None:
        prompts = [prompt(n) for n in lengths * 3]
        found = {r.request_id: r for r in engine.stream(prompts, max_new_tokens=20)}
        assert len(found) == 12
        for index, length in enumerate(lengths * 3):
            assert found[f"req_{index}"].generated_tokens == references.text(length)[:20]

    def by_generate_batch() -> None:
        settings = {name: value for name, value in SETTINGS[4].items() if name != "seed"}
        found = engine.generate_batch([prompt(n) for n in lengths], seeds=[3] * 4, **settings)
        assert list(found) == [f"req_{index}" for index in range(4)]
        for result, length in zip(found.values(), lengths, strict=True):
            assert result.generated_tokens == references(length, 4)

    def by_id() -> None:
        for length in lengths:
            name = engine.add_request(prompt(length), f"mine {length}", max_new_tokens=9)
            got = [t for delta in engine.request_id_iter(name) for t in delta]
            assert got == references.text(length)[:9]
            with pytest.raises(ValueError, match="request_id: expected one that is running"):
                engine.request_id_iter(name)

    for length in lengths:
        references.text(length)
        for setting in range(len(SETTINGS)):
            references(length, setting)
    works = [by_generate, by_batch, by_submit, by_stream, by_generate_batch, by_id]
    together([*works, by_submit, by_generate])
    all_back(engine)
    assert engine_threads() == 1


def test_closing_ends_what_runs(attach: Attach, references: References) -> None:
    spec = attach()
    engine = spec.engine
    raised: list[BaseException] = []

    def call() -> None:
        with pytest.raises(RuntimeError, match="engine: closed while this call was running"):
            spec.model.generate(torch.tensor([prompt(9)]), max_new_tokens=1000)
        raised.append(RuntimeError())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    handles = [engine.submit(prompt(n), max_new_tokens=200) for n in (3, 9, 40, 3, 9)]
    assert next(iter(handles[0]))
    stream = engine.stream([[VOCAB], *[prompt(3)] * 3], max_new_tokens=200)
    assert next(stream).finish_reason == "error"  # refused; the others are queued
    together([engine.close, engine.close])
    assert [r.finish_reason for r in stream] == ["cancelled"] * 3
    thread.join(WAIT)
    assert len(raised) == 1
    engine.close()
    for handle, length in zip(handles, (3, 9, 40, 3, 9), strict=True):
        result = handle.result(WAIT)
        assert result.finish_reason == "cancelled"
        got = result.generated_tokens
        assert got == references.text(length)[: len(got)]
        handle.cancel()
    assert engine.batcher.core.workspace is None
    assert engine.num_open == engine_threads() == 0
    for late in (
        lambda: engine.submit([1], max_new_tokens=2),
        lambda: engine.generate_batch([[1], [2]], max_new_tokens=2),
        lambda: engine.warm_up([]),
        lambda: spec.model.generate(torch.tensor([[1]]), max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match="engine: expected an open one"):
            late()


class Bang(Exception):
    """What tests throw."""


class Streamer:
    """Raises at its third token."""

    def __init__(self) -> None:
        self.puts = self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 3:
            raise Bang

    def end(self) -> None:
        self.ends += 1


def test_an_error_of_a_caller_is_its_own(attach: Attach, references: References) -> None:
    spec = attach()
    other = spec.engine.submit(prompt(40), max_new_tokens=100)
    streamer = Streamer()
    with pytest.raises(Bang):
        spec.model.generate(torch.tensor([prompt(9)]), max_new_tokens=100, streamer=streamer)
    assert (streamer.puts, streamer.ends) == (3, 1)
    assert other.result(WAIT).generated_tokens == references.text(40)[:100]
    all_back(spec.engine)


@pytest.mark.parametrize("stage", ["place", "prefill", "decoding", "make_room"])
def test_an_error_of_a_stage_reaches_every_caller(
    stage: str, attach: Attach, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = attach()
    ids = torch.tensor([prompt(9)])
    working, broken = getattr(Core, stage), threading.Event()

    def maybe(*arguments: Any) -> Any:
        if not broken.is_set():
            raise Bang(stage)
        return working(*arguments)

    monkeypatch.setattr(Core, stage, maybe)

    class Tokenizer:
        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return " ".join(map(str, ids))

    streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True, timeout=WAIT)
    text: list[str] = []

    def call() -> None:
        with pytest.raises(Bang):
            spec.model.generate(ids, max_new_tokens=20, streamer=streamer)

    handles = [spec.engine.submit(prompt(n), max_new_tokens=20) for n in (3, 9)]
    together([call, lambda: text.extend(streamer)])
    assert "".join(text).split() == list(map(str, references.text(9)[: stage == "decoding"]))
    for handle in handles:
        result = handle.result(WAIT)
        assert (result.finish_reason, result.error) == ("error", stage)
    broken.set()
    assert spec.model.generate(ids, max_new_tokens=20)[0, 9:].tolist() == (references.text(9)[:20])
    all_back(spec.engine)


def test_an_engine_nobody_holds_ends(pair: tuple[Any, Drafter]) -> None:
    before = engine_threads()
    model = tiny_model()
    spec = dscale.attach(model, pair[1])
    spec.engine.generate_batch([prompt(3), prompt(9)], max_new_tokens=4)
    handle = spec.engine.submit(prompt(3), max_new_tokens=4)
    handle.result(WAIT)
    assert engine_threads() == before + 1
    engine, core = weakref.ref(spec.engine), weakref.ref(spec.engine.target)
    del spec, model, handle
    gc.collect()
    deadline = time.monotonic() + WAIT
    while engine_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # The thread may still have been at the end of its round.
        gc.collect()
    assert engine() is core() is None
    assert engine_threads() == before


EXIT = """
import sys, threading
sys.path.insert(0, {tests!r})
import torch, dscale
from tiny import tiny_model, prompt
spec = dscale.attach(tiny_model(), mode="ar")
handles = [spec.engine.submit(prompt(9), max_new_tokens=1500) for _ in range(3)]
next(iter(handles[0]))
{end}
print("last line")
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "spec.engine.close()"])
def test_the_interpreter_exits_while_an_engine_runs(end: str) -> None:
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(tests=str(tests), end=end)],
        capture_output=True,
        text=True,
        timeout=WAIT,
        cwd=tests.parent,
    )
    assert done.returncode == (3 if "Exit" in end else 0), done.stderr
    assert ("last line" in done.stdout) is ("Exit" not in end)
    assert "Traceback" not in done.stderr


FORK = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch, dscale
from tiny import tiny_model
torch.set_num_threads(1)
model, ids = tiny_model(), torch.tensor([[3, 1, 2]])
spec = dscale.attach(model, mode="ar")
want = model.generate(ids, max_new_tokens=3)
child = os.fork()
if child == 0:
    signal.alarm(30)
    try:
        sys.exit(model.generate(ids, max_new_tokens=3))
    except ValueError as error:
        assert str(error).startswith("engine: expected the process"), error
    spec.detach()
    with dscale.attach(model, mode="ar"):
        assert torch.equal(model.generate(ids, max_new_tokens=3), want)
else:
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(model.generate(ids, max_new_tokens=3), want)
"""


def test_a_fork_of_the_process_is_refused_not_waited_for() -> None:
    tests = Path(__file__).parent
    command = [sys.executable, "-c", FORK.format(tests=str(tests))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, cwd=tests.parent)
    assert done.returncode == 0, done.stderr

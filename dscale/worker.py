"""The thread that owns an engine's compiled calls, and what others ask of it.

CUDA graphs belong to the thread that recorded them, so one thread makes all steps; `generate` and
`submit` of any thread hand their requests over and wait for tokens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from dscale.batcher import Batcher
from dscale.compiled.capture import load_trees, own_trees
from dscale.cpu_threads import release_threads
from dscale.errors import ClosedError
from dscale.waits import PATIENCE, waiting

Command = Callable[[Batcher], None]
"""What the engine's thread does between two rounds, or a round itself."""


class Worker:
    """A thread that runs a batcher while there is work, started by the first command."""

    def __init__(self, batcher: Batcher) -> None:
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        # Re-entrant: the garbage collector may close an engine on any thread at any time.
        self._lock = threading.RLock()
        self._closed = False
        self._batcher = batcher
        self._on_cpu = batcher.core.target.norm.device.type == "cpu"
        if batcher.core.target.norm.device.type == "cuda":
            load_trees()
        self._thread: threading.Thread | None = None
        self._process = 0

    def tell(self, command: Command) -> None:
        """Run `command(batcher)` on the thread, between rounds. Raises ValueError when closed, and
        in a fork of the process, which has no such thread."""
        with self._lock:
            if self._closed:
                raise ClosedError("engine: expected an open one, got one that was closed")
            if self._thread is None:
                arguments = (self._batcher, self._inbox)
                self._thread = threading.Thread(
                    target=_work, args=arguments, name="dscale", daemon=True
                )
                self._thread.start()
                self._process = os.getpid()
            if self._process != os.getpid():
                raise ClosedError(
                    "engine: expected the process that its thread runs in, got a fork of it; "
                    "detach and attach again there"
                )
            self._inbox.put(command)
        if self._on_cpu and self._thread is not threading.current_thread():
            release_threads()

    def ask(self, command: Command) -> None:
        """`tell`, then wait until it has run; raises what it raises. On the thread itself, as when
        the garbage collector ends a generator there, and where that thread waits for the calling
        one, it does not wait."""
        with waiting(self) as ends:
            if ends:
                self._wait_for(command)
            else:
                self.tell(command)

    def _wait_for(self, command: Command) -> None:
        answer: SimpleQueue[BaseException | None] = SimpleQueue()

        def run(batcher: Batcher) -> None:
            try:
                command(batcher)
            except BaseException as error:  # the asker's to handle
                answer.put(error)
            else:
                answer.put(None)

        self.tell(run)
        error = answer.get()
        if error is not None:
            raise error

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, once it is started."""
        return self._thread

    @contextmanager
    def waits(self, call: str) -> Iterator[None]:
        """A call that waits for the thread does so inside. Raises RuntimeError on the thread
        itself, and on one that the thread waits for."""
        if self._thread is threading.current_thread():
            raise RuntimeError(
                f"{call}: expected another thread than the engine's own, got a call of a stopping "
                "criterion, logits processor or sink there, which would wait for itself"
            )
        until = time.monotonic() + PATIENCE
        while True:
            with waiting(self) as ends:
                if ends:
                    yield
                    return
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{call}: expected an engine whose thread does not wait for the calling one, "
                    "got one with a criterion, processor or sink that does; neither would end"
                )
            time.sleep(0.01)

    def close(self) -> None:
        """Cancel what runs, let the buffers go and end the thread, which is waited for unless it
        is this one or waits for it. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._thread is None:
                return
            self._inbox.put(_cancel_all)
            self._inbox.put(None)
        with waiting(self) as ends:
            if ends:
                self._thread.join()
                await_exit(self._thread)


def await_exit(thread: threading.Thread) -> None:
    """Wait until a joined thread is gone from the system.

    PyTorch's thread-local Python objects are released after Python's `join` returns; where the
    interpreter ends in that moment, the process aborts."""
    task = Path(f"/proc/self/task/{thread.native_id}")
    for _ in range(5000):
        if not task.exists():
            return
        time.sleep(0.001)


def _cancel_all(batcher: Batcher) -> None:
    for request in [*batcher.waiting, *batcher.filling, *batcher.live]:
        batcher.cancel(request)
    while batcher.busy:  # a step under way
        _safely(batcher, Batcher.round)
    batcher.core.close()


def _work(batcher: Batcher, inbox: SimpleQueue[Command | None]) -> None:
    device = batcher.core.target.norm.device
    trees: AbstractContextManager[None] = nullcontext()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        trees = own_trees()
    with trees, torch.no_grad():
        while True:
            if device.type == "cpu" and not batcher.busy:
                release_threads()
            try:
                command = inbox.get(block=not batcher.busy)
            except Empty:
                command = Batcher.round
            if command is None:
                return
            _safely(batcher, command)
            del command


def _safely(batcher: Batcher, command: Command) -> None:
    try:
        command(batcher)
    except BaseException as error:  # who it concerns hears of it, the thread goes on
        batcher.fail(error)

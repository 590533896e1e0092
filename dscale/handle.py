"""What a caller holds of a request: its tokens as they come, and its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from dscale.request import FinishReason, Request

Waits = Callable[[str], AbstractContextManager[None]]
"""`Worker.waits`: a call, by its name, waits for the engine's thread inside."""

Item = TypeVar("Item")


def next_of(queue: SimpleQueue[Item], waits: Waits, call: str) -> Item:
    """What comes next in a queue, which is waited for only if it is not there."""
    try:
        return queue.get_nowait()
    except Empty:
        with waits(call):
            return queue.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished request.

    `prompt_ids`, `generated_tokens`: token ids, the stop id included. `finish_reason`: "eos",
    "length", "stop" (a stop string or another stopping criterion), "cancelled" or "error" (then
    `error` says why; what was generated before stays). `progress`: tokens committed by each decode
    pass; the first token comes from the prefill. `queued_at`, `first_token_at`, `finished_at`:
    seconds since the epoch, None for what never happened."""

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]
    finish_reason: FinishReason
    error: str | None = None
    progress: list[int]
    queued_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def tokens_per_pass(self) -> float:
        """Mean progress, 0.0 without a decode pass."""
        return sum(self.progress) / len(self.progress) if self.progress else 0.0

    def is_finished(self) -> bool:
        """Always: results are of finished requests (transformers asks its outputs this)."""
        return True


def result_of(request_id: str, request: Request) -> Result:
    """The result of a finished request."""
    assert request.finish_reason is not None
    return Result(
        request_id=request_id,
        prompt_ids=request.prompt,
        generated_tokens=request.tokens,
        finish_reason=request.finish_reason,
        error=None if request.error is None else str(request.error),
        progress=request.progress,
        queued_at=request.queued_at,
        first_token_at=request.first_token_at,
        finished_at=request.finished_at,
    )


def refused(request_id: str, input_ids: list[int], error: ValueError) -> Result:
    """The result of a request that was never queued."""
    return Result(
        request_id=request_id,
        prompt_ids=input_ids,
        generated_tokens=[],
        finish_reason="error",
        error=str(error),
        progress=[],
    )


class Handle:
    """A submitted request. Iterating gives newly committed tokens (lists of ids) as they come and
    ends with the request, whatever its end is; each is given once."""

    def __init__(
        self,
        request_id: str,
        request: Request,
        cancel: Callable[[list[Request]], None],
        waits: Waits,
    ) -> None:
        """`cancel` ends requests; in `waits` a call waits, which raises on a thread
        that must not."""
        self.request_id = request_id
        self._request, self._cancel, self._waits = request, cancel, waits
        self._news: SimpleQueue[list[int]] = SimpleQueue()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], object]] | None = []

    def __repr__(self) -> str:
        return f"<Handle {self.request_id!r} on {self._request!r}>"

    def sink(self, request: Request, tokens: list[int]) -> None:
        """Called by the engine's thread."""
        if not request.finished:
            self._news.put(tokens)
            return
        with self._lock:
            hooks, self._hooks = self._hooks, None
        # First, so that whoever has waited for the end finds everything in its final state.
        for hook in hooks or ():
            hook()
        self._ended.set()
        self._news.put([])

    def on_end(self, hook: Callable[[], object]) -> None:
        """Call `hook` when the request ends, on the engine's thread and before `finished` turns
        true, or now if it has ended. For the engine: it must not raise."""
        with self._lock:
            if self._hooks is not None:
                self._hooks.append(hook)
                return
        hook()

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            tokens = next_of(self._news, self._waits, "iterating a handle")
            if not tokens:
                break
            yield tokens
        self._news.put([])  # for whoever iterates again

    @property
    def finished(self) -> bool:
        """Whether the result is there."""
        return self._ended.is_set()

    @property
    def request(self) -> Request:
        """What the engine works on."""
        return self._request

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return it. Raises TimeoutError after `timeout` seconds, and
        RuntimeError, unless it is there, on the engine's own thread and on one that this waits
        for."""
        if not self.finished and timeout != 0:
            with self._waits("result"):
                self._ended.wait(timeout)
        if not self.finished:
            raise TimeoutError(f"{self.request_id}: not finished after {timeout} s")
        return result_of(self.request_id, self._request)

    def cancel(self) -> None:
        """End the request now; its slot and pages are free when this returns, or on the engine's
        own thread soon after. A finished request stays as it is."""
        if not self.finished:
            self._cancel([self._request])

"""The continuous batcher: admission, prefill in chunks between decode steps, and every request's
end. One thread owns it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from weakref import ref

import torch

from dscale.choosers import chooser_of
from dscale.compiled.sampling import Chooser
from dscale.core import Core
from dscale.decode import Decoding, Launch
from dscale.prefill import next_lengths
from dscale.prefix import PagePool
from dscale.request import FinishReason, Request, finish_reason
from dscale.results import FirstTokens
from dscale.sizing import explained
from dscale.weights import WeightWatch
from dscale.workspace import bucket_of


@dataclass(slots=True)
class Batcher:
    """Runs any number of requests through one core: `waiting`, then placed, with a slot and pages:
    `filling` while the prompt is prefilled, `live` while it decodes.

    Admission is first in, first out: a request enters when there is a slot and pages for its worst
    case, so it never has to leave again and nothing can lock up. A workspace without a fixed pool
    grows to what waits when nothing is placed; where twice its size would be put to use, nothing
    is admitted until then. Prompts are prefilled a chunk at a time between decode steps."""

    core: Core
    waiting: deque[Request] = field(default_factory=deque)
    filling: list[Request] = field(default_factory=list)
    live: list[Request] = field(default_factory=list)
    pages: PagePool = field(init=False)
    _slots: list[int] = field(default_factory=list)  # free ones, a heap
    _draining: bool = False  # nothing is admitted: the workspace grows once all have ended
    _at_limit: bool = False  # it could not grow to what waited: nobody drains for that again
    _decoding: Decoding | None = None  # for the live requests, None when those have changed
    _pending: tuple[Decoding, Launch] | None = None  # a step whose results are yet to be read
    _first: list[FirstTokens] = field(default_factory=list)  # prefills of which the same is true
    _handing: float = 0.0  # seconds of this round that went into first tokens
    _started: set[tuple[Chooser, int]] = field(default_factory=set)  # steps that have run before

    def __post_init__(self) -> None:
        core = self.core
        weights = WeightWatch(core.target, core.drafter)
        self.pages = PagePool(core.config.prefix_cache, weights, core.stats)

    @property
    def busy(self) -> bool:
        """Whether a round would do something."""
        return bool(self.waiting or self.filling or self.live or self._pending)

    @property
    def _placed(self) -> bool:
        return bool(self.filling or self.live or self._pending)

    @property
    def num_free_pages(self) -> int:
        """Pages that no placed request holds."""
        return self.pages.allocator.num_free

    @property
    def num_free_slots(self) -> int:
        """Requests that could be placed besides those that are."""
        return len(self._slots)

    def add(self, requests: list[Request], *, serving: bool = False) -> None:
        """Queue requests, in order. `serving`: others will come one by one, of any length."""
        self.core.serving = self.core.serving or serving
        self.waiting.extend(requests)
        self.core.stats.requests += len(requests)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request now, wherever it is; a step under way goes on without it."""
        if request.finished:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        self._end(request, reason)
        for group in (self.filling, self.live):
            if request in group:
                group.remove(request)

    def stop(self, request: Request, length: int) -> None:
        """End a request as stopped after its first `length` tokens; others were in vain."""
        self.core.stats.take_back(*request.cut(length))
        self.cancel(request, "stop")

    def fail(self, error: BaseException) -> None:
        """End every placed request with `error`, after a step broke: nothing on the device is
        trusted. Those that wait go on, but where none was placed the first of them is to blame."""
        workspace = self.core.workspace
        error = explained(error, 0 if workspace is None else workspace.num_pages)
        failed = [*self.live, *self.filling]
        if not failed and self._pending is None and self.waiting:
            failed.append(self.waiting.popleft())
        self._pending, self._first = None, []
        self.live, self.filling = [], []
        self.core.close()
        self._reset()
        for request in failed:
            request.slot, request.pages = -1, []
            request.finish("error", error)

    def round(self) -> None:
        """Admit what fits, prefill one chunk, start one decode step and read one."""
        self._admit()
        began = time.perf_counter()
        timed = not self._fill()  # a step behind a prompt may wait for the host
        filled, self._handing = time.perf_counter(), 0.0
        self._decode(timed)
        decoded = time.perf_counter()
        # The counters are not read: whoever waited for a request may be setting them to zero.
        self.core.stats.prefill_seconds += filled - began + self._handing
        self.core.stats.decode_seconds += decoded - filled - self._handing

    def warm_up(self, requests: list[Request]) -> None:
        """See `Engine.warm_up`."""
        while self._pending and not (self.waiting or self.filling or self.live):
            self.round()  # the late step of requests that have ended
        if self.busy:
            raise ValueError("warm_up: expected no request to be running")
        self.core.serving, self._decoding = True, None
        with self._resetting():
            try:
                self.core.warm_up(requests)
            except torch.OutOfMemoryError as error:
                workspace = self.core.workspace
                self.core.close()
                raise explained(error, 0 if workspace is None else workspace.num_pages) from error

    @contextmanager
    def _resetting(self) -> Iterator[None]:
        """Begin anew where the workspace becomes another one. Nothing here keeps the old one, so
        that its memory is free for it."""
        before = None if self.core.workspace is None else ref(self.core.workspace)
        try:
            yield
        finally:
            if before is None or before() is None or before() is not self.core.workspace:
                self._reset()

    def _admit(self) -> None:
        if not self._placed:
            self._draining, self._decoding = False, None  # which would keep an old workspace
            self.pages.idle()
            self._grow()
        else:
            self._draining = self._draining or self._outgrown()
        if self._draining:
            return
        new: list[Request] = []
        while self.waiting and self._slots:
            request = self.waiting[0]
            filling = [*self.filling, *new]
            if not self.core.holds(request) or not self.pages.reserve(request, filling):
                break
            self.waiting.popleft()
            request.slot = heappop(self._slots)
            new.append(request)
        if new:
            self.filling += new
            self.core.place(new)
            self._decoding = None

    def _outgrown(self) -> bool:
        """Whether what waits could use twice the workspace, and there may be one."""
        workspace, fixed = self.core.workspace, self.core.config.pool_tokens is not None
        if not self.waiting or fixed or self._at_limit or workspace is None:
            return False
        if self.core.unchosen:
            return True
        running = [*self.live, *self.filling]
        waiting = islice(self.waiting, max(0, self.core.config.concurrency - len(running)))
        need = self.core.sizes([*running, *waiting])
        return (
            need["max_requests"] >= 2 * workspace.max_requests
            or need["num_pages"] >= 2 * workspace.num_pages
        )

    def _grow(self) -> None:
        """Make room for as many waiting requests as may run together; refuse the first alone when
        it cannot run at all."""
        count = min(len(self.waiting), self.core.config.concurrency)
        with self._resetting():
            while self.waiting and count:
                try:
                    first = [self.waiting[i] for i in range(count)]
                    self.core.make_room(first)
                    self.core.prepare(first)
                    break
                except ValueError as error:
                    if count == 1:
                        self.waiting.popleft().finish("error", error)
                        count = min(len(self.waiting), 1)
                    else:
                        count, self._at_limit = (count + 1) // 2, True

    def _reset(self) -> None:
        workspace = self.core.workspace
        self._decoding, self._started = None, set()
        self.pages.reset(workspace.num_pages if workspace is not None else 1)
        most = 0 if workspace is None else workspace.max_requests
        self._slots = list(range(min(most, self.core.config.concurrency)))

    def _fill(self) -> bool:
        """Prefill the next chunk: of every request there is, as far as FILL_ROWS go, or while
        others decode, one chunk's tokens in all. Returns whether there was one."""
        if found := self.pages.follow(self.filling):
            self.core.place(found)
        size = self.core.config.prefill_chunk
        group = [r for r in self.filling if r.leader is None]
        rests = (len(r.prompt) - r.prefilled for r in group)
        left = size if self.live else size * len(group)
        lengths = next_lengths(rests, size, left, padded=not self.core.flex)
        if not lengths:
            return False
        group = group[: len(lengths)]
        for guided in (False, True):
            part = [i for i, r in enumerate(group) if (r.guide is not None) == guided]
            if part:
                parts = [group[i] for i in part], [lengths[i] for i in part]
                first = self.core.prefill(*parts)
                self._first += [] if first is None else [first]
        done = [r for r in group if r.prefilled == len(r.prompt)]
        self.filling = [r for r in self.filling if r not in done]
        self.live = sorted([*self.live, *done], key=lambda r: r.slot)
        self._decoding = None if done else self._decoding
        if not self.core.captured:
            self._give_first()
        return True

    def _give_first(self) -> None:
        """Hand out first tokens. On a GPU after the next step has been started, so that it does
        not run out of work; a request that its first token ends is a dead lane there."""
        began = time.perf_counter()
        while self._first:
            first = self._first.pop()
            ended = first.finish()
            for request in first.requests:
                if request.error is None and not request.finished:
                    self.pages.share(request, request.prompt)
            for request in ended:
                self._end(request, finish_reason(request))
                self.live.remove(request)
        self._handing += time.perf_counter() - began

    def _decode(self, timed: bool) -> None:
        if self._first:
            step = chooser_of(self.live), bucket_of(len(self.live))
            if step not in self._started:
                self._started.add(step)
                self._give_first()  # now: the step may be compiled first, for long
        launched: tuple[Decoding, Launch] | None = None
        # A request for one token has it from its prefill.
        live = [r for r in self.live if r.guide is None and r.max_new_tokens > 1]
        if live:
            if self._decoding is None:
                self._decoding = self.core.decoding(live)
            launched = (self._decoding, self._decoding.launch(live, timed=timed))
            if self._decoding.late:
                launched, self._pending = self._pending, launched
        else:
            launched, self._pending = self._pending, None
        ended = []
        if launched is not None:
            decoding, launch = launched
            ended += decoding.finish(launch)
        self._give_first()
        guided = [r for r in self.live if r.guide is not None]
        if guided:
            ended += self.core.guided_step(guided)
        for request in ended:
            self._end(request, finish_reason(request))
            self.live.remove(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Give slot and pages back. A step under way may still write there; what is placed next
        comes after it on the device."""
        if request.slot >= 0:
            if reason not in ("error", "cancelled"):
                # The last token is in no cache yet.
                self.pages.share(request, request.prompt + request.tokens[:-1])
            heappush(self._slots, request.slot)
            self.pages.allocator.give_back(request.pages)
            request.slot, request.pages = -1, []
        request.finish(reason)

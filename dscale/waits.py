"""Who waits for which engine's thread, so that no ring of threads waits for itself.

An engine's thread calls stopping criteria, logits processors and sinks, and these may call other
engines. No lock: the garbage collector may close an engine on any thread at any time. So a thread
enters itself before it looks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

PATIENCE = 0.2
"""Seconds after which a ring is taken for one that lasts: a thread that need not wait any longer
may not have run yet."""


class Awaited(Protocol):
    """What has a thread, once it is started."""

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that is waited for."""


_awaited: list[tuple[threading.Thread, Awaited]] = []


@contextmanager
def waiting(whom: Awaited) -> Iterator[bool]:
    """The calling thread waits inside. Gives whether that may end: not where the other thread is
    this one or waits for it, itself or through others."""
    me = threading.current_thread()
    entry = (me, whom)
    _awaited.append(entry)
    try:
        yield not _waits_for(whom, me)
    finally:
        _awaited.remove(entry)


def _waits_for(whom: Awaited, thread: threading.Thread) -> bool:
    seen: list[Awaited] = []
    left = [whom]
    while left:
        other = left.pop()
        if other.thread is thread:
            return True
        if other not in seen:
            seen.append(other)
            left += [awaited for waiter, awaited in list(_awaited) if waiter is other.thread]
    return False

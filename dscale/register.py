"""The handles of an engine's submitted requests, by their ids."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from dscale.handle import Handle


class Register:
    """Handles of requests that run or wait, and *kept* ones, which stay past the request's end
    until somebody takes them. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[str, Handle] = {}
        self._kept: dict[str, Handle] = {}

    def __len__(self) -> int:
        return len(self._open | self._kept)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open or request_id in self._kept

    def free_id(self) -> str:
        """An id that nobody has, and that was not given before."""
        names = (f"req_{number}" for number in self._numbers)
        return next(name for name in names if name not in self)

    def enter(self, request_id: str | None, make: Callable[[str], Handle]) -> Handle:
        """Make a handle of an id, None being a free one; it is open until its request's end.
        Raises ValueError for an id that is taken or no string."""
        with self._lock:
            request_id = self.free_id() if request_id is None else request_id
            if not isinstance(request_id, str):
                raise ValueError(f"request_id: expected a string, got {request_id!r}")
            if request_id in self:
                raise ValueError(f"request_id: expected a new one, got {request_id!r} again")
            handle = self._open[request_id] = make(request_id)
        handle.on_end(lambda: self.leave(handle))
        return handle

    def leave(self, handle: Handle) -> None:
        """A request has ended or was never queued: its id is free again, unless it is kept."""
        self._open.pop(handle.request_id, None)

    def keep(self, handle: Handle) -> None:
        """Hold a handle until it is taken."""
        self._kept[handle.request_id] = handle

    def find(self, request_id: str) -> Handle | None:
        """The handle of a request that has not ended."""
        return self._open.get(request_id)

    def take(self, request_id: str) -> Handle | None:
        """A handle that is kept, which it is no longer, or open."""
        return self._kept.pop(request_id, None) or self.find(request_id)

"""When a workspace becomes a larger one, and how large."""

from __future__ import annotations

from collections import deque
from itertools import islice

from dscale.core import Core
from dscale.request import Request


def outgrown(core: Core, waiting: deque[Request], running: list[Request]) -> bool:
    """Whether what waits could use twice the workspace, and there may be one."""
    workspace, fixed = core.workspace, core.config.pool_tokens is not None
    if not waiting or fixed or workspace is None:
        return False
    if core.unchosen:
        return True
    more = islice(waiting, max(0, core.config.concurrency - len(running)))
    need = core.sizes([*running, *more])
    return (
        need["max_requests"] >= 2 * workspace.max_requests
        or need["num_pages"] >= 2 * workspace.num_pages
    )


def grow(core: Core, waiting: deque[Request]) -> bool:
    """Make room for as many waiting requests as may run together; refuse the first alone when it
    cannot run at all. Only while none is placed. Returns whether there was no room for all."""
    count, is_limited = min(len(waiting), core.config.concurrency), False
    while waiting and count:
        try:
            first = [waiting[i] for i in range(count)]
            core.make_room(first)
            core.prepare(first)
            break
        except ValueError as error:
            if count == 1:
                waiting.popleft().finish("error", error)
                count = min(len(waiting), 1)
            else:
                count, is_limited = (count + 1) // 2, True
    return is_limited

"""Several prompts at once: their results as they finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

from dscale.errors import ClosedError
from dscale.handle import Handle, Result, Waits, next_of, refused, result_of
from dscale.request import Request


def stream(
    submit: Callable[..., Handle],
    cancel: Callable[[list[Request]], None],
    waits: Waits,
    inputs: list[list[int]],
    seeds: Sequence[int | None],
    prefix: str,
) -> Iterator[Result]:
    """Queue prompts with their seeds and give their results as they finish, named
    "req_<place in inputs>"; what the engine knows them by begins with `prefix`.

    `submit(ids, request_id=, seed=)`, `cancel` and `waits` are an engine's. A prompt that it
    refuses gives a result with its error; whoever leaves early cancels the rest."""
    with waits("stream"):  # raises before anything is queued
        pass
    done: SimpleQueue[Result] = SimpleQueue()
    requests: list[Request] = []
    try:
        for index, (ids, seed) in enumerate(zip(inputs, seeds, strict=True)):
            name = f"req_{index}"
            try:
                handle = submit(ids, request_id=f"{prefix}/{name}", seed=seed)
            except ClosedError:
                raise
            except ValueError as error:
                done.put(refused(name, ids, error))
                continue
            requests.append(handle.request)
            handle.on_end(partial(_deliver, done, handle.request, name))
        for _ in inputs:
            yield next_of(done, waits, "stream")
    finally:
        if not all(request.finished for request in requests):
            cancel(requests)


def _deliver(done: SimpleQueue[Result], request: Request, request_id: str) -> None:
    done.put(result_of(request_id, request))

"""The engine: takes requests from any thread and hands out their tokens."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from dscale.batcher import Batcher
from dscale.compiled.drafter import Drafter
from dscale.compiled.predictor import Predictor
from dscale.compiled.target import Target
from dscale.config import EngineConfig
from dscale.core import Core
from dscale.errors import ClosedError
from dscale.handle import Handle, Result
from dscale.register import Register
from dscale.request import Request, seeds_of, token_ids
from dscale.stages import check_weights
from dscale.stats import Stats
from dscale.streams import stream
from dscale.worker import Worker

OnTokens = Callable[[int, list[int]], None]  # a request's index, and its new tokens
# A request from a prompt, its config, its seed and what overrides the config.
Prepare = Callable[[list[int], GenerationConfig | None, int | None, dict[str, Any]], Request]


def _without_model(*arguments: object) -> Request:
    raise ValueError("engine: expected one made by attach or from_pretrained, to know defaults")


class Engine:
    """Decodes requests with a target and, but for mode "ar", a drafter, many at a time.

    `predictor` scores drafts in the adaptive modes; without one the running product of the
    drafter's top-1 probabilities does. Any thread may call; one thread of the engine's own makes
    all passes, outside inference mode and autocast, in the model's dtype. It also calls the
    logits processors, and of submitted prompts the stopping criteria: these may submit, cancel
    and close, which then does not wait, but what would wait for tokens raises RuntimeError. Other
    engines they may call as anybody may, unless those wait for this one's thread in turn."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        predictor: Predictor | None = None,
        prepare: Prepare = _without_model,
    ) -> None:
        """`prepare`: makes a request of a prompt and generation settings; `attach` gives it."""
        check_weights(target, drafter, config.weights)
        self.target, self.drafter, self.predictor = target, drafter, predictor
        self.config, self.stats = config, Stats()
        self._prepare = prepare
        self._lock = threading.Lock()
        self._register = Register()
        self.batcher = Batcher(Core(target, drafter, predictor, config, self.stats))
        self._worker = Worker(self.batcher)
        # The thread knows nothing of the engine, so that an engine nobody holds is closed.
        self._finalizer = weakref.finalize(self, Worker.close, self._worker)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        drafter: str | Path | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a model (see `dscale.load.load_model`) and attach to it; `settings` are `attach`'s.
        Raises what both raise."""
        from dscale.attach import attach
        from dscale.load import load_model

        spec = attach(load_model(name_or_path, dtype=dtype, device=device), drafter, **settings)
        return spec.engine

    def generate(self, requests: list[Request], on_tokens: OnTokens | None = None) -> None:
        """Decode requests to their ends; `request.tokens` and `request.progress` hold the result.

        `on_tokens(index, tokens)` sees each request's newly committed tokens once, in order, on
        the calling thread; what it raises cancels the requests. Raises ValueError before any
        compute for a request that cannot run, naming its field, and afterwards the error of the
        first one that failed."""
        with self._worker.waits("generate"):
            self._generate(requests, on_tokens)

    def _generate(self, requests: list[Request], on_tokens: OnTokens | None) -> None:
        for request in requests:
            self.check(request)
        news: SimpleQueue[tuple[int, list[int]]] = SimpleQueue()
        for index, request in enumerate(requests):
            if request.queued_at is not None:
                raise ValueError(f"requests: expected new ones, number {index} has run before")
            request.queued_at = time.time()
            request.sink = lambda _, tokens, index=index: news.put((index, tokens))
        self._worker.tell(lambda batcher: batcher.add(requests))
        left = len(requests)
        try:
            while left:
                index, tokens = news.get()
                if not tokens:
                    left -= 1
                elif on_tokens is not None:
                    on_tokens(index, tokens)
        except BaseException:
            self.cancel(requests)
            raise
        finally:
            with self._lock:
                self.stats.calls += any(r.prefilled for r in requests)
                self.stats.last_progress = [r.progress for r in requests]
        failed = next((r for r in requests if r.error is not None), None)
        if failed is not None and failed.error is not None:
            raise failed.error
        if any(r.finish_reason == "cancelled" for r in requests):
            raise RuntimeError("engine: closed while this call was running")

    def submit(
        self,
        input_ids: list[int],
        generation_config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Handle:
        """Queue one prompt with its own settings and return a handle on it.

        `generation_config` is completed by the model's own and overridden by `kwargs`, as in
        `generate`. `seed` keys its sampling noise; without one it is drawn from torch's global
        generator. Raises ValueError for a request that cannot run, naming the argument: nothing is
        queued then, and others go on."""
        request = self._prepare(token_ids(input_ids), generation_config, seed, kwargs)
        self.check(request)
        waits = self._worker.waits
        handle = self._register.enter(
            request_id, lambda name: Handle(name, request, self.cancel, waits)
        )
        request.sink, request.queued_at = handle.sink, time.time()
        try:
            self._worker.tell(lambda batcher: batcher.add([request], serving=True))
        except ClosedError:
            self._register.leave(handle)
            raise
        return handle

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, **kwargs: Any
    ) -> str:
        """`submit` by its name in transformers' continuous batching; returns the id, as there.
        What comes out waits for `request_id_iter`, even past the request's end."""
        handle = self.submit(input_ids, request_id=request_id, **kwargs)
        self._register.keep(handle)
        return handle.request_id

    def request_id_iter(self, request_id: str) -> Iterator[list[int]]:
        """Newly committed tokens of a request by its id: one that is running, or one of
        `add_request` that nobody has iterated yet. Raises ValueError for any other id."""
        handle = self._register.take(request_id)
        if handle is None:
            raise ValueError(f"request_id: expected one that is running, got {request_id!r}")
        return iter(handle)

    def stream(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        *,
        seeds: list[int] | None = None,
        **kwargs: Any,
    ) -> Iterator[Result]:
        """Queue prompts and give their results as they finish, with ids "req_<place in inputs>"
        that are their own. A prompt that cannot run gives a result with its error; leaving the
        loop early cancels the rest. `seeds`: one per prompt."""
        for name in {"seed", "request_id"} & kwargs.keys():
            raise ValueError(f"{name}: expected none for several prompts, got {kwargs[name]!r}")
        each = seeds_of(inputs, seeds)
        submit = partial(self.submit, generation_config=generation_config, **kwargs)
        prefix, waits = self._register.free_id(), self._worker.waits
        return stream(submit, self.cancel, waits, inputs, each, prefix)

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        *,
        progress_bar: bool = False,
        **kwargs: Any,
    ) -> dict[str, Result]:
        """Run prompts to their ends and return their results by id, in the order of `inputs`, as
        transformers' `generate_batch`. Arguments as in `stream`."""
        results: Any = self.stream(inputs, generation_config, **kwargs)
        with closing(results):
            bar = tqdm(results, total=len(inputs), unit="request", disable=not progress_bar)
            found = {result.request_id: result for result in bar}
        return {f"req_{index}": found[f"req_{index}"] for index in range(len(inputs))}

    @property
    def num_open(self) -> int:
        """Requests that run or wait, or whose tokens `request_id_iter` has yet to give."""
        return len(self._register)

    def cancel_request(self, request_id: str) -> None:
        """Cancel by id; an id that is not running is no error (it may just have finished)."""
        handle = self._register.take(request_id)
        if handle is not None:
            handle.cancel()

    def cancel(self, requests: list[Request]) -> None:
        """End requests; their slots and pages are free when this returns. Finished ones stay as
        they are, and those of a closed engine have ended."""

        def end(batcher: Batcher) -> None:
            for request in requests:
                batcher.cancel(request)

        with suppress(ClosedError):
            self._worker.ask(end)

    def stop(self, request: Request, length: int) -> None:
        """End a request after its first `length` tokens; later ones, which it may have by now,
        are dropped. Its slot and pages are free when this returns."""

        def end(batcher: Batcher) -> None:
            batcher.stop(request, length)

        self._worker.ask(end)

    def check(self, request: Request) -> None:
        """Raise ValueError naming the field for which a request can never run here."""
        request.check(self.target.config.vocab_size)
        self.batcher.core.check(request)

    def warm_up(self, requests: list[Request]) -> None:
        """Make room for requests like these, all at once, and on a GPU compile and capture every
        step they may need, with a progress bar. A call does by itself what it finds missing; this
        does it ahead. Raises ValueError while requests are running."""

        def run(batcher: Batcher) -> None:
            batcher.warm_up(requests)

        with self._worker.waits("warm_up"):
            for request in requests:
                self.check(request)
            self._worker.ask(run)

    def close(self) -> None:
        """Cancel what runs and free the buffers. Calls afterwards raise ValueError."""
        self._finalizer()

"""One request: its prompt, its settings, and what has come out so far."""

from __future__ import annotations

import operator
import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dscale.guide import Guide
from dscale.pages import pages_for
from dscale.stopping import Judge

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]

Sink = Callable[["Request", list[int]], None]
"""Sees a request's newly committed tokens once, in order, and at its end an empty list."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt and how to continue it. Equal to itself alone: two of one prompt are two requests.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off.
    The penalty counts the prompt and the request's own tokens as seen, and `also_seen`: ids that
    are in no context, as transformers' padding. `seed` keys the sampling noise together with the
    absolute position. `guide`: chooses its tokens on the host, and the fields of sampling are off.
    `judge`: says after each token whether it was the last; then `stopped` is set.

    What comes out: `tokens` grows by each step's progress; `progress` has one entry per decode
    pass. `finish_reason` is set at the end, with `error` where it is "error". `queued_at`,
    `first_token_at`, `finished_at`: seconds since the epoch. `prefilled`: prompt tokens in the
    caches; `scores`: the latest of its drafts. `keys`: its prompt's page keys, once needed.
    `leader`: a request that prefills a beginning both have, which this one waits for. `sink`: who
    is told."""

    prompt: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    also_seen: list[int] = field(default_factory=list)
    seed: int = 0
    guide: Guide | None = None
    judge: Judge | None = None
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    keys: list[bytes] | None = None
    leader: Request | None = None
    prefilled: int = 0
    scores: Any = None
    sink: Sink | None = None
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    queued_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_pages(self) -> int:
        """Pages its worst case needs."""
        return pages_for(len(self.prompt), self.max_new_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the prompt's and its own; as it decodes, its context and the anchor."""
        return len(self.prompt) + len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def give(self, tokens: list[int]) -> tuple[int, int]:
        """Add newly committed tokens, up to where the judge stops them, and tell the sink. Returns
        what `cut` says was dropped."""
        if self.first_token_at is None:
            self.first_token_at = time.time()
        self.tokens += tokens
        dropped = self._judged(tokens)
        if self.sink is not None:
            self.sink(self, tokens[: len(tokens) - dropped[0]])
        return dropped

    def _judged(self, tokens: list[int]) -> tuple[int, int]:
        if self.judge is None:
            return 0, 0
        try:
            self.judge.take(0, tokens)
            while self.judge.ready():
                self.judge.judge(None)
        except Exception as error:  # a criterion's; it ends this request alone
            self.error = error
            self.stopped = True
            return self.cut(self.judge.steps)
        self.stopped = self.judge.done
        return self.cut(self.judge.steps)

    def cut(self, length: int) -> tuple[int, int]:
        """Drop the tokens after the first `length`, which stopped there, and their progress.
        Returns how many tokens, and how many passes that brought only such, went."""
        dropped = max(0, len(self.tokens) - length)
        del self.tokens[length:]
        left, passes = dropped, 0
        while left:
            last = self.progress.pop()
            if last > left:
                self.progress.append(last - left)
            passes += last <= left
            left -= min(last, left)
        if dropped and self.finished:
            self.finish_reason = "stop"
        return dropped, passes

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the request and tell the sink, once."""
        if self.finished:
            return
        self.finished_at = time.time()
        self.finish_reason, self.error = reason, error or self.error
        if self.sink is not None:
            self.sink(self, [])

    def check(self, vocab_size: int) -> None:
        """Raise ValueError naming the first field with a value that no request can have."""
        if not self.prompt:
            raise ValueError(
                "input_ids: expected at least one prompt token per row, got an empty prompt"
            )
        for name, ids in (("input_ids", self.prompt), ("also_seen", self.also_seen)):
            worst = next((t for t in ids if not 0 <= t < vocab_size), None)
            if worst is not None:
                raise ValueError(f"{name}: expected token ids in 0..{vocab_size - 1}, got {worst}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        check_penalty(self.repetition_penalty)


def token_ids(given: Any) -> list[int]:
    """A prompt as a list of ints, from anything like one: a list, a tuple, a tensor or an array of
    one dimension. Raises ValueError for anything else and for an empty one."""
    plain = given.tolist() if hasattr(given, "tolist") else given
    try:
        ids = [operator.index(token) for token in plain]
    except TypeError:
        raise ValueError(
            f"input_ids: expected a list of token ids, got {reprlib.repr(given)}"
        ) from None
    if not ids:
        raise ValueError("input_ids: expected at least one prompt token, got an empty prompt")
    worst = next((token for token in ids if not -(2**63) <= token < 2**63), None)
    if worst is not None:
        raise ValueError(f"input_ids: expected token ids of 64 bits, got {worst}")
    return ids


def seeds_of(prompts: Any, seeds: Any) -> list[Any]:
    """A seed for each of some prompts, or None. Raises ValueError for prompts that are not in a
    list or the like, and for seeds that are not one per prompt."""
    for name, given in (("inputs", prompts), ("seeds", [] if seeds is None else seeds)):
        if not hasattr(given, "__len__"):
            raise ValueError(f"{name}: expected a list, one per prompt, got {given!r}")
    if seeds is None:
        return [None] * len(prompts)
    if len(seeds) != len(prompts):
        raise ValueError(f"seeds: expected {len(prompts)}, one per prompt, got {len(seeds)}")
    return list(seeds)


def finish_reason(request: Request) -> FinishReason:
    """Why a request that ran to its end ended."""
    if request.error is not None:
        return "error"
    if request.tokens and request.tokens[-1] in request.stop_ids:
        return "eos"
    return "length" if len(request.tokens) == request.max_new_tokens else "stop"


def check_penalty(penalty: object) -> None:
    """Raise ValueError for a repetition penalty that transformers refuses: it takes a strictly
    positive float, or any 1."""
    if not (penalty == 1 or (isinstance(penalty, float) and penalty > 0)):
        raise ValueError(
            f"repetition_penalty: expected a strictly positive float, got {penalty!r}"
        )

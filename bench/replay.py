"""A discrete-event replay of closed loops: measured times of steps and prefills, simulated
acceptance, and the batcher's own rules; no model runs.

Two clocks advance: the host's, and the moment until which the GPU has work. Milliseconds."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from bench.client import Intervals, Served
from bench.step_cases import Case
from dscale.compiled.attention import VERIFY_TILE
from dscale.kernels import ops
from dscale.policy import AutoBudget, Choice, Cost, Costs, FixedBudget, Policy
from dscale.prefill import next_lengths
from dscale.request import Request
from dscale.stats import Stats
from dscale.timing import MeasuredCosts
from dscale.workspace import bucket_of

CANDIDATES = VERIFY_TILE - 1


@dataclass(frozen=True, slots=True)
class Times:
    """Measured milliseconds. `steps`: captured buckets, rows None for a uniform step. `launch`:
    the host's time to start a step; `finish`: to hand out its results. Prefills by their tokens
    together: `prefill` for the whole round when nothing else runs, `prefill_gpu` of the GPU
    alone."""

    steps: MeasuredCosts
    prefill: Sequence[tuple[int, float]]
    prefill_gpu: Sequence[tuple[int, float]]
    launch: float = 0.3
    finish: float = 0.1

    def of_step(self, lanes: int, rows: int | None) -> Cost:
        """The measured bucket, or the next larger one of as many lanes. Raises ValueError where
        there is none."""
        table = self.steps.table
        if rows:
            larger = [n for count, n in table if count == lanes and n is not None and n >= rows]
            rows = min(larger, default=rows)
        if (lanes, rows) not in table:
            raise ValueError(f"steps: expected a time of {lanes} lanes, {rows} rows, got none")
        return table[lanes, rows]

    def of_prefill(self, tokens: int) -> tuple[float, float]:
        """(round, GPU) time of a prefill of so many tokens."""
        return _interpolated(tokens, self.prefill), _interpolated(tokens, self.prefill_gpu)


@dataclass(slots=True)
class Under:
    """A step under way: who takes part and what it will commit, and when it ends. `took`: what
    the engine's clock would say of it (lanes, rows, context, milliseconds), None where it says
    nothing."""

    live: list[Request]
    count_N: list[int]
    length_N: list[int]
    choice: Choice | None
    score_NC: Tensor
    end: float
    took: tuple[int, int | None, int, float] | None


@dataclass(slots=True)
class Replay:
    """One closed loop. `late`, `padded`: as in `dscale.decode.Decoding`, which this mirrors
    together with `dscale.batcher.Batcher`. Every replay is a new engine's: its policy comes to
    know the buckets by its own steps."""

    case: Case
    times: Times
    score_TSC: Tensor
    accepted_TS: Tensor
    chunk: int = 512
    late: bool = True
    padded: bool = True
    policy: Policy | None = None
    stats: Stats = field(default_factory=Stats)
    intervals: Intervals = field(default_factory=Intervals)
    host: float = 0.0
    gpu: float = 0.0
    _at_S: list[int] = field(default_factory=list)
    _left: dict[Request, int] = field(default_factory=dict)
    _waiting: deque[Request] = field(default_factory=deque)
    _slots: list[int] = field(default_factory=list)
    _filling: list[Request] = field(default_factory=list)
    _live: list[Request] = field(default_factory=list)
    _known: MeasuredCosts = field(init=False)
    _pending: Under | None = None
    _first: tuple[Sequence[Request], Sequence[Request], float] = ((), (), 0.0)
    _ended: float | None = None

    def __post_init__(self) -> None:
        slots = self.accepted_TS.shape[1] - 1
        self._at_S, self._slots = [0] * (slots + 1), list(range(slots))
        self._known = MeasuredCosts(dict(self.times.steps.table))
        if self.policy is None and self.case.config.adaptive:
            self.policy = policy_of(self.case, self._known)

    def run(self, requests: Sequence[Request], workers: int) -> Served:
        """Serve requests to `workers` workers; times are seconds of the replay."""
        left, ends = iter(requests), 0
        self._submit(list(islice(left, workers)))
        began = self.host
        while ends < len(requests):
            ended = self._round()
            ends += len(ended)
            self._submit(list(islice(left, len(ended))))
        return Served(requests, (self.host - began) / 1e3)

    def _submit(self, requests: list[Request]) -> None:
        for request in requests:
            request.queued_at = self.host / 1e3
            self._left[request] = request.max_new_tokens
        self._waiting.extend(requests)

    def _round(self) -> list[Request]:
        while self._waiting and self._slots:
            request = self._waiting.popleft()
            request.slot = heapq.heappop(self._slots)
            self._filling.append(request)
        began, filling = self.host, self._filling  # _fill makes another list
        before = [r.prefilled for r in filling]
        ended = self._fill()
        timed = self.late and [r.prefilled for r in filling] == before
        self.stats.prefill_seconds += (self.host - began) / 1e3
        steps, tokens = self.stats.steps, self.stats.tokens
        ended += self._decode(timed)
        advanced = self.stats.steps - steps
        if self._ended is not None and advanced:
            self.intervals.add(self.stats.tokens - tokens, (self.host - self._ended) / 1e3)
        self._ended = self.host if advanced else None
        return ended

    def _fill(self) -> list[Request]:
        left = self.chunk if self._live else self.chunk * len(self._filling)
        rests = (len(r.prompt) - r.prefilled for r in self._filling)
        found = next_lengths(rests, self.chunk, left, padded=not self.padded)
        if not found:
            return []
        lengths = dict(zip(self._filling, found, strict=False))
        whole, alone = self.times.of_prefill(sum(lengths.values()))
        for request, length in lengths.items():
            request.prefilled += length
        done = [r for r in lengths if r.prefilled == len(r.prompt)]
        end = max(self.host + whole, self.gpu + alone)
        # Behind other work the host is free again once it has launched the pass.
        self.gpu, self.host = end, self.host + (max(0.0, whole - alone) if self.late else whole)
        self._ended = None
        self._filling = [r for r in self._filling if r not in done]
        for request in done:
            self._left[request] -= 1
        self._live = sorted([*self._live, *done], key=_slot)
        self._first = (done, [r for r in done if self._left[r] == 0], end)
        return [] if self.late else self._give_first()

    def _give_first(self) -> list[Request]:
        """First tokens of the prompts that ended in this round; returns requests that end so."""
        (done, ended, end), self._first = self._first, ((), (), 0.0)
        self.host = max(self.host, end) if done else self.host
        for request in done:
            self._give(request, 1)
        for request in ended:
            self._live.remove(request)
            self._end(request)
        return ended

    def _decode(self, timed: bool) -> list[Request]:
        live = [r for r in self._live if r.max_new_tokens > 1]
        under = self._launch(live, timed) if live else None
        if self.late:
            under, self._pending = self._pending, under
        ended = self._finish(under) if under is not None else []
        waited = self.host
        ended += self._give_first()
        self.stats.prefill_seconds += (self.host - waited) / 1e3
        return ended

    def _launch(self, live: list[Request], timed: bool) -> Under:
        count, context = len(live), sum(r.num_tokens for r in live)
        lanes = bucket_of(count) if self.padded else count
        choice = self._choose(lanes, live)
        slots = [r.slot for r in live]
        at = [self._at_S[slot] % self.accepted_TS.shape[0] for slot in slots]
        score_NC = self.score_TSC[at, slots]
        left = [self._left[r] for r in live]
        length_N = self._lengths(choice, score_NC, left)
        accepted_N = self.accepted_TS[at, slots].tolist()
        rows = list(zip(accepted_N, length_N, left, strict=True))
        count_N = [min(a, k - 1, n - 1) + 1 if n else 0 for a, k, n in rows]
        for request, committed in zip(live, count_N, strict=True):
            self._left[request] -= committed
            # A draftless step advances the trace, too: its verify does.
            self._at_S[request.slot] += 1
        rows_in_all = None if choice is None else (choice.rows if choice.draft else 0)
        cost = self.times.of_step(lanes, rows_in_all)
        self.host += self.times.launch
        milliseconds = cost.at(context)
        end = self.gpu = max(self.gpu, self.host) + milliseconds
        took = (lanes, rows_in_all, context, milliseconds) if timed else None
        return Under(live, count_N, length_N, choice, score_NC, end, took)

    def _choose(self, lanes: int, live: list[Request]) -> Choice | None:
        if self.policy is None:
            return None
        unknown = np.full(CANDIDATES, np.nan, np.float32)
        known = [unknown if r.scores is None else r.scores for r in live]
        choice = self.policy.choose(lanes, np.stack(known), sum(r.num_tokens for r in live))
        if self.padded or not choice.draft:
            return choice
        most = sum(min(VERIFY_TILE, r.max_new_tokens - len(r.tokens)) for r in live)
        rows = min(choice.rows, choice.average * len(live), most)
        return Choice(rows, choice.average)

    def _lengths(self, choice: Choice | None, score_NC: Tensor, left: list[int]) -> list[int]:
        if choice is None:
            return [self.case.config.uniform_rows(VERIFY_TILE)] * len(left)
        if not choice.draft:
            return [1 if n else 0 for n in left]
        lengths: list[int] = ops.allocate_budget(
            score_NC.contiguous(),
            torch.tensor([n > 0 for n in left]),
            torch.tensor(left, dtype=torch.int32),
            torch.tensor([choice.rows, choice.average], dtype=torch.int32),
            self.case.config.budget_seed,
        ).tolist()
        return lengths

    def _finish(self, under: Under) -> list[Request]:
        self.host = max(self.host, under.end) + self.times.finish
        self.stats.steps += any(under.count_N)
        part = [i for i, count in enumerate(under.count_N) if count]
        if part and under.took is not None:
            self._known.observe(*under.took)
        if under.choice is not None and under.choice.draft and part and self.policy is not None:
            for at in part:
                under.live[at].scores = under.score_NC[at].numpy()
            length_N, count_N = (np.array(n, np.float32) for n in (under.length_N, under.count_N))
            self.policy.observe(under.score_NC[part].numpy(), length_N[part], count_N[part] - 1)
        ended = []
        for at in part:
            request, count = under.live[at], under.count_N[at]
            self.stats.add_pass(count, under.length_N[at])
            request.progress.append(count)
            self._give(request, count)
            if len(request.tokens) == request.max_new_tokens:
                ended.append(request)
        for request in ended:
            self._live.remove(request)
            self._end(request)
        return ended

    def _give(self, request: Request, count: int) -> None:
        request.first_token_at = request.first_token_at or self.host / 1e3
        request.tokens += [0] * count

    def _end(self, request: Request) -> None:
        heapq.heappush(self._slots, request.slot)
        request.finish_reason, request.finished_at = "length", self.host / 1e3


def policy_of(case: Case, costs: Costs) -> Policy:
    """The budget policy of an adaptive case."""
    average = case.config.average
    return AutoBudget(costs) if average is None else FixedBudget(average)


def _slot(request: Request) -> int:
    return request.slot


def _interpolated(at: int, table: Sequence[tuple[int, float]]) -> float:
    x, y = ([pair[i] for pair in table] for i in (0, 1))
    return float(np.interp(at, x, y))

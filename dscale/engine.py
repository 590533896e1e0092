"""The engine: place requests, prefill, then decide and verify until every request is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dscale.choosers import GREEDY, chooser_of
from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import COUNT, LIVE, TOKENS
from dscale.compiled.kv import PAGE
from dscale.compiled.predictor import Predictor
from dscale.compiled.sampling import Chooser
from dscale.compiled.target import Target
from dscale.config import EngineConfig
from dscale.decode import Decoding, OnTokens
from dscale.pages import PageAllocator
from dscale.policy import AutoBudget, FixedBudget, Policy
from dscale.prefill import chunks
from dscale.request import Request
from dscale.stages import Stages, build_stages
from dscale.stats import Stats
from dscale.timing import (
    MeasuredCosts,
    bucket_kinds,
    buckets_to,
    capture_buckets,
    linear_costs,
)
from dscale.workspace import STOP_IDS, Workspace, bucket_of

TIMED_LANES = 8
"""Lanes of the eager passes that are timed for budget "auto" without captured graphs."""


@dataclass(slots=True)
class Engine:
    """Decodes batches of requests with a target and, but for mode "ar", a drafter.

    Owns the workspace (paged caches, request state, step buffers) and grows it when a call needs
    more, unless `config.pool_tokens` fixes its size. `predictor` scores drafts in the adaptive
    modes; without one the running product of the drafter's top-1 probabilities does."""

    target: Target
    drafter: Drafter | None
    config: EngineConfig
    predictor: Predictor | None = None
    stats: Stats = field(default_factory=Stats)
    _workspace: Workspace | None = None
    _stages: dict[Chooser, Stages] = field(default_factory=dict)
    _policies: dict[Chooser, Policy | None] = field(default_factory=dict)
    _costs: dict[Chooser, MeasuredCosts] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _owner: int | None = None

    @property
    def rows(self) -> int:
        """Rows of a request's block that a pass may verify."""
        if self.drafter is None:
            return 1
        return self.config.uniform_rows(self.drafter.config.block_size)

    @property
    def captured(self) -> bool:
        """Whether steps are compiled and captured in CUDA graphs."""
        return self.flex if self.config.capture is None else self.config.capture

    @property
    def flex(self) -> bool:
        """Whether attention goes through FlexAttention (GPU) or gathered pages and SDPA (CPU)."""
        return self.target.inv_freq.device.type != "cpu"

    def generate(self, requests: list[Request], on_tokens: OnTokens | None = None) -> None:
        """Decode requests to their end; `request.tokens` and `request.progress` hold the result.

        `on_tokens(index, tokens)` sees each request's newly committed tokens once, in order; what
        it raises ends the call and leaves the engine ready for the next one. Calls of several
        threads take turns. Computes in the model's dtype, also under autocast. Raises ValueError
        before any compute for a request that cannot run, naming its field."""
        for request in requests:
            request.check(self.target.config.vocab_size)
        with self._computing():
            self._generate(requests, on_tokens or (lambda index, tokens: None))

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """One thread at a time, outside inference mode (whose buffers could not be written to
        later) and autocast. Raises ValueError when this thread is at it already."""
        if self._owner == threading.get_ident():
            raise ValueError("streamer: expected no call of generate from within its put()")
        device = self.target.inv_freq.device.type
        with (
            self._lock,
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def warm_up(self, requests: int, tokens: int, chooser: Chooser = GREEDY) -> None:
        """Make room for `requests` requests of `tokens` tokens each, prompt included, and on a GPU
        compile and capture every step they may need, with a progress bar.

        A call does by itself what it finds missing; this does it ahead. `chooser`: how those
        requests will choose tokens, `chooser_of` tells. Raises ValueError below 1 request or 2
        tokens."""
        for name, value, least in (("requests", requests, 1), ("tokens", tokens, 2)):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value!r}")
        placeholder = Request(prompt=[0], max_new_tokens=tokens - 1)
        with self._computing():
            workspace = self._room_for([placeholder] * requests, chooser)
            stages = self._stages_for(chooser)
            self._policy_for(chooser, requests)
            if self.captured:
                costs = self._costs.setdefault(chooser, MeasuredCosts())
                kinds = bucket_kinds(self.config)
                capture_buckets(workspace, stages, buckets_to(requests), kinds, costs)

    def _generate(self, requests: list[Request], emit: OnTokens) -> None:
        chooser = chooser_of(requests)
        workspace = self._room_for(requests, chooser)
        stages, policy = self._stages_for(chooser), self._policy_for(chooser, len(requests))
        self._place(requests, workspace)
        self.stats.calls += 1
        self.stats.requests += len(requests)
        self.stats.last_progress = [r.progress for r in requests]
        began = time.perf_counter()
        live = self._prefill(requests, workspace, stages, emit)
        self.stats.prefill_seconds += time.perf_counter() - began
        began = time.perf_counter()
        decoding = Decoding(
            workspace,
            stages,
            requests,
            emit,
            self.stats,
            rows=self.rows,
            policy=policy,
            late=self.captured,
            padded=self.flex,
            host_lengths=self.config.mode == "+budget",
        )
        decoding.run(live)
        self.stats.decode_seconds += time.perf_counter() - began

    def _prefill(
        self, requests: list[Request], workspace: Workspace, stages: Stages, emit: OnTokens
    ) -> list[int]:
        """Prefill every prompt in chunks and commit first tokens; returns the requests that go
        on."""
        live = []
        for chosen, chunk in chunks(
            requests, self.config.prefill_chunk, workspace.device, self.flex
        ):
            step = workspace.step(len(chosen))
            step.slot_N.copy_(torch.tensor(chosen))
            stages.prefill(workspace.requests, step, chunk)
            self.stats.prompt_tokens += chunk.token_R.shape[0]
            for index, row, ends in zip(
                chosen, step.result_NX.tolist(), chunk.ends_N.tolist(), strict=True
            ):
                if not ends:
                    continue
                tokens = row[TOKENS][: row[COUNT]]
                requests[index].tokens += tokens
                emit(index, tokens)
                if row[LIVE]:
                    live.append(index)
        return sorted(live)

    def _place(self, requests: list[Request], workspace: Workspace) -> None:
        """Hand out pages and write the requests' state to the device."""
        allocator = PageAllocator(workspace.num_pages)
        host = workspace.host_requests()
        for slot, request in enumerate(requests):
            request.pages = allocator.take(request.num_pages)
            host.remaining_S[slot] = request.max_new_tokens
            host.seed_S[slot] = request.seed
            host.temperature_S[slot] = request.temperature
            host.top_k_S[slot] = request.top_k
            host.top_p_S[slot] = request.top_p
            host.min_p_S[slot] = request.min_p
            host.penalty_S[slot] = request.repetition_penalty
            if request.repetition_penalty != 1:
                host.seen_SV[slot, request.prompt + request.also_seen] = True
            host.stop_SZ[slot, : len(request.stop_ids)] = torch.tensor(
                request.stop_ids, dtype=torch.int64
            )
            pages = torch.tensor(request.pages)
            host.page_SL[slot, : len(pages)] = pages.int()
            host.logical_SP[slot].fill_(-1)
            host.logical_SP[slot, pages] = torch.arange(len(pages), dtype=torch.int32)
        workspace.clear([page for request in requests for page in request.pages])
        workspace.upload(host)

    def _room_for(self, requests: list[Request], chooser: Chooser) -> Workspace:
        """The workspace, made larger when this call needs it; a fixed pool that is too small is an
        error."""
        need = self._sizes(requests, chooser)
        if self._workspace is None or not self._workspace.fits(**need):
            old = self._workspace
            if old is not None:
                need = {name: max(value, getattr(old, name)) for name, value in need.items()}
            self._workspace = None
            for made in (self._stages, self._policies, self._costs):
                made.clear()
            try:
                self._workspace = Workspace(self.target, self.drafter, **need)
            except RuntimeError as error:  # torch's out of memory, on any device
                raise ValueError(
                    f"max_new_tokens: expected a call whose cache can be allocated, got one of "
                    f"{need['num_pages'] * PAGE} tokens for {len(requests)} requests ({error})"
                ) from error
        return self._workspace

    def _sizes(self, requests: list[Request], chooser: Chooser) -> dict[str, int]:
        """Sizes this call needs, rounded up so that the next one rarely needs more."""
        num_pages = 1 + sum(r.num_pages for r in requests)
        per_request = 1 << (max(r.num_pages for r in requests) - 1).bit_length()
        capacity = self.config.pool_tokens
        if capacity is None:
            num_pages = max(-(-num_pages // 16) * 16, per_request)
        else:
            limit = 1 + -(-capacity // PAGE)
            if num_pages > limit:
                raise ValueError(
                    f"pool_tokens: expected at least {(num_pages - 1) * PAGE} (prompt + "
                    f"max_new_tokens + {2 * VERIFY_TILE} of each of {len(requests)} requests, in "
                    f"pages of {PAGE}), got {capacity}"
                )
            num_pages, per_request = limit, min(per_request, limit)
        stop_ids = max(len(r.stop_ids) for r in requests)
        return {
            "max_requests": bucket_of(len(requests)),
            "num_pages": num_pages,
            "pages_per_request": per_request,
            "stop_ids": max(STOP_IDS, 1 << (stop_ids - 1).bit_length() if stop_ids else 0),
            "seen": self.target.config.vocab_size if chooser.penalty else 1,
        }

    def _stages_for(self, chooser: Chooser) -> Stages:
        """Build the stages for one way of choosing tokens, once."""
        if chooser not in self._stages:
            assert self._workspace is not None
            self._stages[chooser] = build_stages(
                self.target,
                self.drafter,
                self.predictor,
                self._workspace,
                self.config,
                chooser,
                flex=self.flex,
                captured=self.captured,
            )
        return self._stages[chooser]

    def _policy_for(self, chooser: Chooser, requests: int) -> Policy | None:
        """The budget policy, with the times of every bucket that so many requests may pass."""
        if not self.config.adaptive or self.drafter is None:
            return None
        assert self._workspace is not None
        stages = self._stages[chooser]
        if self.config.average is not None:
            average = min(self.config.average, self.drafter.config.block_size)
            return self._policies.setdefault(chooser, FixedBudget(average))
        if self.captured:
            costs = self._costs.setdefault(chooser, MeasuredCosts())
            capture_buckets(
                self._workspace, stages, buckets_to(requests), bucket_kinds(self.config), costs
            )
            return self._policies.setdefault(chooser, AutoBudget(costs))
        if chooser not in self._policies:
            measured = linear_costs(self._workspace, stages, min(requests, TIMED_LANES))
            self._policies[chooser] = AutoBudget(measured)
        return self._policies[chooser]

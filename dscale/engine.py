"""The engine: prefill, then decide and verify until every request is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.capture import begin_step, capture
from dscale.compiled.decide import Decide
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import PAGE
from dscale.compiled.prefill import Prefill
from dscale.compiled.sampling import Chooser
from dscale.compiled.target import Target
from dscale.compiled.verify import Verify
from dscale.config import EngineConfig
from dscale.pages import PageAllocator
from dscale.prefill import chunks
from dscale.request import Request
from dscale.stats import Stats
from dscale.workspace import STOP_IDS, Workspace, bucket_of

OnTokens = Callable[[int, list[int]], None]


@dataclass(slots=True)
class Stages:
    """The stages of one step for one way of choosing tokens."""

    prefill: Callable[..., Any]
    decide: Callable[..., Any] | None
    verify: Callable[..., Any]


@dataclass(slots=True)
class Engine:
    """Decodes batches of requests with a target and, in mode "dflash", a drafter.

    Owns the workspace (paged caches, request state, step buffers) and grows it when a call needs
    more, unless `config.pool_tokens` fixes its size."""

    target: Target
    drafter: Drafter | None
    config: EngineConfig
    stats: Stats = field(default_factory=Stats)
    _workspace: Workspace | None = None
    _stages: dict[Chooser, Stages] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _owner: int | None = None

    @property
    def rows(self) -> int:
        """Rows each request verifies per pass."""
        if self.config.mode == "ar" or self.drafter is None:
            return 1
        return min(self.config.budget or VERIFY_TILE, self.drafter.config.block_size)

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
        if self._owner == threading.get_ident():
            raise ValueError("streamer: expected no call of generate from within its put()")
        device = self.target.inv_freq.device.type
        # Buffers made in inference mode could not be written to outside it.
        with (
            self._lock,
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            self._owner = threading.get_ident()
            try:
                self._generate(requests, on_tokens or (lambda index, tokens: None))
            finally:
                self._owner = None

    def _generate(self, requests: list[Request], emit: OnTokens) -> None:
        workspace = self._room_for(requests)
        stages = self._stages_for(chooser_of(requests))
        self._place(requests, workspace)
        self.stats.calls += 1
        self.stats.requests += len(requests)
        self.stats.last_progress = [r.progress for r in requests]
        began = time.perf_counter()
        live = self._prefill(requests, workspace, stages, emit)
        self.stats.prefill_seconds += time.perf_counter() - began
        began = time.perf_counter()
        while live:
            live = self._step(requests, live, workspace, stages, emit)
        self.stats.decode_seconds += time.perf_counter() - began

    def _step(
        self,
        requests: list[Request],
        live: list[int],
        workspace: Workspace,
        stages: Stages,
        emit: OnTokens,
    ) -> list[int]:
        """One decode step of the live requests; returns those that go on."""
        step = workspace.step(bucket_of(len(live)) if self.flex else len(live))
        lanes = live + [workspace.max_requests] * (step.slot_N.shape[0] - len(live))
        step.slot_N.copy_(torch.tensor(lanes))
        begin_step()
        if stages.decide is not None:
            stages.decide(workspace.requests, step)
        stages.verify(workspace.requests, step)
        self.stats.steps += 1
        token_NW, count_N, live_N = (
            t.tolist() for t in (step.token_NW, step.count_N, step.live_N)
        )
        for index, tokens, count in zip(live, token_NW, count_N, strict=False):
            requests[index].tokens += tokens[:count]
            requests[index].progress.append(count)
            self.stats.add_pass(count, self.rows)
            emit(index, tokens[:count])
        return [index for index, alive in zip(live, live_N, strict=False) if alive]

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
            ends_N, token_NW, live_N = (
                t.tolist() for t in (chunk.ends_N, step.token_NW, step.live_N)
            )
            for index, ends, tokens, alive in zip(chosen, ends_N, token_NW, live_N, strict=True):
                if not ends:
                    continue
                requests[index].tokens.append(tokens[0])
                emit(index, tokens[:1])
                if alive:
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
            host.stop_SZ[slot, : len(request.stop_ids)] = torch.tensor(
                request.stop_ids, dtype=torch.int64
            )
            pages = torch.tensor(request.pages)
            host.page_SL[slot, : len(pages)] = pages.int()
            host.logical_SP[slot].fill_(-1)
            host.logical_SP[slot, pages] = torch.arange(len(pages), dtype=torch.int32)
        workspace.clear([page for request in requests for page in request.pages])
        workspace.upload(host)

    def _room_for(self, requests: list[Request]) -> Workspace:
        """The workspace, made larger when this call needs it; a fixed pool that is too small is an
        error."""
        need = self._sizes(requests)
        if self._workspace is None or not self._workspace.fits(**need):
            old = self._workspace
            if old is not None:
                need = {name: max(value, getattr(old, name)) for name, value in need.items()}
            self._workspace = None
            self._stages.clear()
            try:
                self._workspace = Workspace(self.target, self.drafter, **need)
            except RuntimeError as error:  # torch's out of memory, on any device
                raise ValueError(
                    f"max_new_tokens: expected a call whose cache can be allocated, got one of "
                    f"{need['num_pages'] * PAGE} tokens for {len(requests)} requests ({error})"
                ) from error
        return self._workspace

    def _sizes(self, requests: list[Request]) -> dict[str, int]:
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
        }

    def _stages_for(self, chooser: Chooser) -> Stages:
        """Build (and on a GPU compile) the stages for one way of choosing tokens, once."""
        if chooser not in self._stages:
            assert self._workspace is not None
            pool, draft_pool = self._workspace.pool, self._workspace.draft_pool
            shared = (self.target, pool, self.drafter, draft_pool)
            verify = Verify(*shared, self.rows, chooser, self.flex)
            decide = None
            if self.drafter is not None and draft_pool is not None and self.rows > 1:
                decide = Decide(self.target, self.drafter, draft_pool, self.rows, self.flex)
            wrap = (
                capture
                if (self.flex if self.config.capture is None else self.config.capture)
                else _as_is
            )
            self._stages[chooser] = Stages(
                prefill=Prefill(*shared, chooser, self.flex),
                decide=wrap(decide) if decide is not None else None,
                verify=wrap(verify),
            )
        return self._stages[chooser]


def _as_is(stage: Callable[..., Any]) -> Callable[..., Any]:
    return stage


def chooser_of(requests: list[Request]) -> Chooser:
    """The narrowest way of choosing tokens that serves all the requests."""
    sampled = [r for r in requests if r.temperature > 0]
    if not sampled:
        return Chooser()
    if all(r.top_k == 0 and r.top_p >= 1 and r.min_p <= 0 for r in sampled):
        return Chooser(sample=True)
    if all(r.top_k > 0 for r in sampled):
        # Powers of two, so that similar settings share a compiled stage.
        largest = max(r.top_k for r in sampled)
        return Chooser(sample=True, max_candidates=max(64, 1 << (largest - 1).bit_length()))
    return Chooser(sample=True, max_candidates=1 << 62)

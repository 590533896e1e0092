"""The host path: stages whose guided lanes choose their tokens on the host, uncaptured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dscale.choosers import GREEDY
from dscale.compiled.attention import Rows
from dscale.compiled.decide import Decide
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import Requests, Step
from dscale.compiled.kv import Paging
from dscale.compiled.prefill import Prefill
from dscale.compiled.target import Target
from dscale.compiled.verify import Verify
from dscale.config import EngineConfig
from dscale.request import Request
from dscale.stages import Stage, Stages, verify_tile
from dscale.workspace import Workspace


class HostVerify(Verify):
    """Verify uniform rows of guided requests: each guide walks down its lane's rows as long as it
    chooses what was drafted."""

    live: list[Request] = []  # noqa: RUF012 - replaced at every step

    def choose(
        self, requests: Requests, step: Step, token_M: Tensor, rows: Rows, paging: Paging
    ) -> Tensor:
        """The guides' tokens, int64 `[M]`, 0 behind the first that was not drafted."""
        logit_MV = self.target.logits(self.run(token_M, rows, paging))
        choice_NT = torch.zeros(step.slot_N.shape[0], self.rows, dtype=torch.int64)
        candidate_NC = step.candidate_NC[:, : self.rows - 1].tolist()
        live, self.live = self.live, []
        for lane, request in enumerate(live):
            first = lane * self.rows
            logit_TV = logit_MV[first : first + self.rows]
            chosen = walk(request, logit_TV, candidate_NC[lane])
            choice_NT[lane, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
            if request.error is not None:
                cut(requests, request, len(chosen))
        return choice_NT.to(logit_MV.device).view(-1)


class HostPrefill(Prefill):
    """Prefill of guided requests: those whose prompts end in the chunk choose their first
    token."""

    live: list[Request] = []  # noqa: RUF012 - replaced at every chunk

    def choose(self, requests: Requests, step: Step, logits: Tensor, end_N: Tensor) -> Tensor:
        """The guides' tokens, int64 `[N]`, 0 where the prompt goes on."""
        choice_N = torch.zeros(step.slot_N.shape[0], dtype=torch.int64)
        live, self.live = self.live, []
        for lane, (request, end) in enumerate(zip(live, end_N[: len(live)].tolist(), strict=True)):
            if end < len(request.prompt):
                continue
            chosen = walk(request, logits[lane : lane + 1], [])
            if request.error is not None:
                cut(requests, request, 0)
            else:
                choice_N[lane] = chosen[0]
        return choice_N.to(logits.device)


@dataclass(frozen=True, slots=True)
class HostStages(Stages):
    """Stages of guided requests."""

    prefill: HostPrefill
    verify: HostVerify

    def lanes(self, live: list[Request]) -> None:
        """Say which request each lane of the next step or chunk is."""
        self.prefill.live = self.verify.live = live


def walk(request: Request, logit_TV: Tensor, candidates: list[int]) -> list[int]:
    """Let a request's guide choose at row 0, 1, ..., as long as its last choice was drafted and
    does not end the request. What a processor raises is left in `request.error`, behind the tokens
    that were chosen before."""
    guide: Any = request.guide
    chosen: list[int] = []
    room = request.max_new_tokens - len(request.tokens)
    for row in range(min(logit_TV.shape[0], room)):
        try:
            token = guide.choose(logit_TV[row : row + 1], request.num_tokens + row)
        except Exception as error:
            request.error = error
            break
        chosen.append(token)
        if token in request.stop_ids or candidates[row : row + 1] != [token]:
            break
    return chosen


def cut(requests: Requests, request: Request, count: int) -> None:
    """Let a failed request's lane commit no more than `count` tokens."""
    slot = torch.tensor([request.slot], device=requests.remaining_S.device)
    requests.remaining_S.index_fill_(0, slot, count)


def host_stages(
    target: Target,
    drafter: Drafter | None,
    workspace: Workspace,
    config: EngineConfig,
    rows: int,
    flex: bool,
    prompt: Stage,
) -> HostStages:
    """The stages of guided requests: `rows` rows for each, in every mode. `prompt`: the pass over
    prompts."""
    shared = (target, workspace.pool, drafter, workspace.draft_pool)
    decide = None
    if drafter is not None and workspace.draft_pool is not None and rows > 1:
        decide = Decide(target, drafter, workspace.draft_pool, rows=rows, flex=flex)
    return HostStages(
        prefill=HostPrefill(prompt, target, GREEDY),
        decide=decide,
        anchors=None,
        verify=HostVerify(*shared, rows, GREEDY, verify_tile(config, rows, flex)),
        host_lengths=False,
    )

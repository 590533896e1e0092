"""The verification stage: one target pass over the chosen rows, acceptance, the draft cache, the
commit."""

from __future__ import annotations

import torch
from torch import nn

from dscale.compiled.attention import VERIFY_TILE, Tile
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import Requests, Step, commit, uniform_rows
from dscale.compiled.kv import KVPool
from dscale.compiled.sampling import Chooser, choose
from dscale.compiled.target import Target
from dscale.kernels.reference import accept_prefix


class Verify(nn.Module):
    """Verify `rows` rows of every lane: the anchor and the first rows - 1 candidates (rows 1:
    plain decoding)."""

    def __init__(
        self,
        target: Target,
        pool: KVPool,
        drafter: Drafter | None,
        draft_pool: KVPool | None,
        rows: int,
        chooser: Chooser,
        flex: bool,
    ) -> None:
        super().__init__()
        self.target, self.pool = target, pool
        self.drafter, self.draft_pool = drafter, draft_pool
        self.rows, self.chooser = rows, chooser
        # FlexAttention wants a full 16-row tile; the gathered route computes just the rows there
        # are.
        self.tile = Tile(height=VERIFY_TILE if flex else rows, flex=flex)

    def forward(self, requests: Requests, step: Step) -> None:
        paging = requests.paging(step.slot_N)
        rows = uniform_rows(paging, self.rows, self.tile.height)
        anchor_N = requests.anchor_S[step.slot_N]
        candidate_NC = step.candidate_NC[:, : self.rows - 1]
        token_NT = torch.cat((anchor_N[:, None], candidate_NC), 1)
        hidden, taps = self.target(token_NT.reshape(-1), rows, paging, self.pool, self.tile)
        sampling = requests.sampling(step.slot_N[rows.lane_R])
        choice_R = choose(self.target.logits(hidden), rows.position_R + 1, sampling, self.chooser)
        choice_NT = choice_R.view(-1, self.rows)
        length_N = torch.full_like(anchor_N, self.rows)
        accepted_N, _ = accept_prefix(candidate_NC, length_N, choice_NT)
        if self.drafter is not None and self.draft_pool is not None and taps is not None:
            # Rejected rows enter the draft cache too: the next block overwrites their slots before
            # they are read.
            self.drafter.write_context(taps, rows.position_R, rows.slot_R, self.draft_pool)
        commit(requests, step, choice_NT, accepted_N, advance=True)

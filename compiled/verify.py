"""The verification stage: one target pass over the chosen rows, acceptance, the draft cache, the
commit.

Shapes: N lanes, W = 16 block, C = W - 1 candidates, M packed rows, T rows per lane."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dscale.compiled.attention import VERIFY_TILE, Rows, Tile
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import Packed, Requests, Step, commit, remember, uniform_rows
from dscale.compiled.kv import KVPool, Paging
from dscale.compiled.penalty import block_before, penalise
from dscale.compiled.sampling import Chooser, choose
from dscale.compiled.target import Target
from dscale.kernels import ops
from dscale.kernels.reference import accept_prefix


class Verify(nn.Module):
    """Verify packed rows, or without `packed` `rows` rows of every lane: the anchor and the first
    rows - 1 candidates (rows 1: plain decoding)."""

    def __init__(
        self,
        target: Target,
        pool: KVPool,
        drafter: Drafter | None,
        draft_pool: KVPool | None,
        rows: int,
        chooser: Chooser,
        tile: Tile,
    ) -> None:
        """`rows` at most `tile.height`; packed rows need a tile of 16."""
        super().__init__()
        self.target, self.pool = target, pool
        self.drafter, self.draft_pool = drafter, draft_pool
        self.rows, self.chooser, self.tile = rows, chooser, tile

    def forward(self, requests: Requests, step: Step, packed: Packed | None = None) -> None:
        """Verify, accept and commit: changes both caches and `requests`, fills `step.result_NX`.
        With `packed`, the lanes' rows are those of `step.length_N` and `step.offset_N`."""
        paging = requests.paging(step.slot_N)
        if packed is None:
            rows = uniform_rows(paging, self.rows, self.tile.height)
            anchor_N = requests.anchor_S[step.slot_N]
            candidate_NC = step.candidate_NC[:, : self.rows - 1]
            token_M = torch.cat((anchor_N[:, None], candidate_NC), 1).reshape(-1)
            choice_NT = self.choose(requests, step, token_M, rows, paging).view(-1, self.rows)
            length_N = torch.full_like(anchor_N, self.rows)
            accepted_N, _ = accept_prefix(candidate_NC, length_N, choice_NT)
        else:
            choice_M = self.choose(requests, step, packed.token_M, packed.rows(), paging)
            length_N = step.length_N
            accepted_N, _ = ops.accept_prefix(step.candidate_NC, length_N, step.offset_N, choice_M)
            column_T = torch.arange(VERIFY_TILE, device=choice_M.device)
            row_NT = torch.clamp(step.offset_N[:, None] + column_T, max=choice_M.shape[0] - 1)
            choice_NT = choice_M[row_NT]
        if self.drafter is not None:
            remember(requests, step.slot_N, accepted_N, length_N)
        commit(requests, step, choice_NT, accepted_N, advance=True, mark=self.chooser.penalty)

    def choose(
        self, requests: Requests, step: Step, token_M: Tensor, rows: Rows, paging: Paging
    ) -> Tensor:
        """The target's token after each row, int64 `[M]`; both caches get the rows."""
        hidden = self.run(token_M, rows, paging)
        request_M, logits = step.slot_N[rows.lane_R], self.target.logits(hidden)
        if self.chooser.penalty:
            block_MC = block_before(token_M, rows.tile_row_R, self.rows - 1)
            penalty_M = requests.penalty_S[request_M]
            logits = penalise(logits, requests.seen_SV, request_M, penalty_M, block_MC)
        return choose(logits, rows.position_R + 1, requests.sampling(request_M), self.chooser)

    def run(self, token_M: Tensor, rows: Rows, paging: Paging) -> Tensor:
        """The target's hidden states `[M, D]`; both caches get the rows."""
        hidden: Tensor
        hidden, taps = self.target(token_M, rows, paging, self.pool, self.tile)
        if self.drafter is not None and self.draft_pool is not None and taps is not None:
            # Rejected rows enter the draft cache too: the next block overwrites their slots before
            # they are read.
            self.drafter.write_context(taps, rows.position_R, rows.slot_R, self.draft_pool)
        return hidden

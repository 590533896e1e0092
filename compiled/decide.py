"""The decision stage: one drafter pass over `[anchor, MASK x 15]` of every lane, and its
candidates."""

from __future__ import annotations

from torch import nn

from dscale.compiled.attention import Tile
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import Requests, Step, uniform_rows
from dscale.compiled.kv import KVPool
from dscale.compiled.target import Target


class Decide(nn.Module):
    """Draft the lanes' next tokens into `step.candidate_NC`.

    `rows`: rows per request that verify will read, so that only rows - 1 draft positions meet the
    LM head. The block itself is always drafted at full width, because the number of masks changes
    every position's logits."""

    def __init__(
        self, target: Target, drafter: Drafter, draft_pool: KVPool, rows: int, flex: bool
    ) -> None:
        super().__init__()
        self.target, self.drafter, self.draft_pool = target, drafter, draft_pool
        self.rows = rows
        self.tile = Tile(height=drafter.config.block_size, causal=False, flex=flex)

    def forward(self, requests: Requests, step: Step) -> None:
        paging = requests.paging(step.slot_N)
        lanes, block = step.slot_N.shape[0], self.drafter.config.block_size
        rows = uniform_rows(paging, block, block)
        embedded = self.drafter.embed_block(requests.anchor_S[step.slot_N], self.target)
        hidden = self.drafter.draft(
            embedded.flatten(0, 1), rows, paging, self.draft_pool, self.tile
        )
        proposed = hidden.view(lanes, block, -1)[:, 1 : self.rows]
        step.candidate_NC[:, : self.rows - 1].copy_(self.target.logits(proposed).argmax(-1))

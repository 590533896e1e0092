"""The prefill stage: the target over a chunk of every prompt with the wide tile, taps into the
draft cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from dscale.compiled.attention import Rows, Tile
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import Requests, Step, commit
from dscale.compiled.kv import KVPool
from dscale.compiled.penalty import penalise
from dscale.compiled.sampling import Chooser, choose
from dscale.compiled.target import Target


class Chunk(NamedTuple):
    """A chunk of prompt rows of N lanes, cut into X tiles, int64.

    `token_R`; `rows`, whose lanes are the tiles; `slot_X`: each tile's request slot; `start_X`:
    positions before its first row; `last_N`: each lane's last row; `ends_N`: whether the lane's
    prompt ends in this chunk. Out: `hidden_ND`, the final-normed hidden states of the last rows.
    Lanes behind the requests', in a captured chunk, are read by nobody."""

    token_R: Tensor
    rows: Rows
    slot_X: Tensor
    start_X: Tensor
    last_N: Tensor
    ends_N: Tensor
    hidden_ND: Tensor


class PromptPass(nn.Module):
    """The target over a chunk; both caches get its rows."""

    def __init__(
        self,
        target: Target,
        pool: KVPool,
        drafter: Drafter | None,
        draft_pool: KVPool | None,
        flex: bool,
    ) -> None:
        super().__init__()
        self.target, self.pool = target, pool
        self.drafter, self.draft_pool = drafter, draft_pool
        self.flex = flex

    def forward(self, requests: Requests, chunk: Chunk) -> None:
        """Fill `chunk.hidden_ND`."""
        # A tile sees what is before it, and so the chunk's earlier tiles: keys are written first.
        paging = requests.paging(chunk.slot_X)._replace(context_N=chunk.start_X.int())
        tile = Tile(height=chunk.rows.row_NT.shape[1], flex=self.flex)
        hidden, taps = self.target(chunk.token_R, chunk.rows, paging, self.pool, tile)
        if self.drafter is not None and self.draft_pool is not None and taps is not None:
            self.drafter.write_context(
                taps, chunk.rows.position_R, chunk.rows.slot_R, self.draft_pool
            )
        chunk.hidden_ND.copy_(hidden[chunk.last_N])


class Prefill:
    """Run a chunk; lanes whose prompt ends in it commit their first token, the first anchor."""

    def __init__(self, prompt: Callable[..., None], target: Target, chooser: Chooser) -> None:
        """`prompt`: a PromptPass, maybe captured; it is the same for every way of choosing."""
        self.prompt, self.target, self.chooser = prompt, target, chooser

    def __call__(self, requests: Requests, step: Step, chunk: Chunk) -> None:
        """`step`: the N lanes; `chunk`: their rows."""
        self.prompt(requests, chunk)
        lanes = len(step.slot_N)
        logits = self.target.logits(chunk.hidden_ND[:lanes])
        last_N = chunk.last_N[:lanes]
        end_N = chunk.rows.position_R[last_N] + 1
        requests.context_S.index_put_((step.slot_N,), end_N.int())
        requests.live_S.index_put_((step.slot_N,), chunk.ends_N[:lanes].bool())
        choice_N = self.choose(requests, step, logits, end_N)
        mark = self.chooser.penalty
        commit(requests, step, choice_N[:, None], last_N * 0, advance=False, mark=mark)

    def choose(self, requests: Requests, step: Step, logits: Tensor, end_N: Tensor) -> Tensor:
        """The token after each lane's chunk, int64 `[N]`, from its logits `[N, V]`."""
        slot_N = step.slot_N
        if self.chooser.penalty:
            # Behind a prompt there is no block yet.
            block_NC = slot_N[:, None][:, :0]
            penalty_N = requests.penalty_S[slot_N]
            logits = penalise(logits, requests.seen_SV, slot_N, penalty_N, block_NC)
        return choose(logits, end_N, requests.sampling(slot_N), self.chooser)

"""The decision stage: draft every lane's next tokens, score them, share the rows, pack them.

Shapes: N lanes, W block size, C = W - 1 candidates, D hidden, V vocabulary, M packed rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dscale.compiled.attention import Tile
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import LENGTH, SCORES, Packed, Requests, Step, uniform_rows
from dscale.compiled.kv import PAGE, KVPool
from dscale.compiled.predictor import Predictor, batch_context, running_product
from dscale.compiled.sampling import best_tokens
from dscale.compiled.target import Target
from dscale.kernels import ops
from dscale.kernels.reference_statistics import features_from_statistics


class Decide(nn.Module):
    """Draft the lanes' next tokens into `step.candidate_NC`.

    `rows`: rows per request that verify will read, so that only rows - 1 draft positions meet the
    LM head; the same for every request, who are not scored. None: scores for all C candidates,
    from the predictor or else the running product of the drafter's top-1 probabilities. The block
    itself is always drafted at full width, because the number of masks changes every position's
    logits. `seed`: where the budget starts, see `kernels.reference_rows.SEEDS`. `parts`: sub-lanes
    that share the lanes' keys, see `Tile`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        draft_pool: KVPool,
        *,
        rows: int | None = None,
        predictor: Predictor | None = None,
        seed: str = "none",
        flex: bool,
        parts: int = 0,
    ) -> None:
        super().__init__()
        self.target, self.drafter, self.draft_pool = target, drafter, draft_pool
        self.rows, self.predictor, self.seed = rows, predictor, seed
        block = drafter.config.block_size
        self.tile = Tile(height=block, causal=False, flex=flex, parts=parts)

    def forward(self, requests: Requests, step: Step, packed: Packed | None = None) -> None:
        """Candidates; with scores also `step.length_N`; and with `packed`, at least W * N rows,
        the rows to verify."""
        score_NC = self.propose(requests, step)
        if score_NC is None:
            return
        step.result_NX[:, SCORES][:, : score_NC.shape[1]].copy_(score_NC.view(torch.int32))
        length_N = ops.allocate_budget(
            score_NC,
            requests.live_S[step.slot_N],
            requests.remaining_S[step.slot_N],
            step.room,
            self.seed,
        )
        step.length_N.copy_(length_N)
        step.result_NX[:, LENGTH].copy_(length_N)
        if packed is not None:
            pack(requests, step, packed)

    def propose(self, requests: Requests, step: Step) -> Tensor | None:
        """Draft; write the candidates, return their scores `[N, C]` float32, None without
        scoring."""
        hidden_NCD = self.draft(requests, step)[:, 1 : self.rows]
        # Flat: a product over [N, C, D] of a slice is one product a lane, each reading the whole
        # head (9.2 instead of 0.75 ms at 32 lanes of Qwen3-8B on an H200).
        logits_RV = self.drafter.logits(hidden_NCD.flatten(0, 1), self.target)
        if self.rows is not None:
            choice_NC = best_tokens(logits_RV).view(-1, self.rows - 1)
            step.candidate_NC[:, : self.rows - 1].copy_(choice_NC)
            return None
        statistics = ops.row_statistics(logits_RV)
        lanes, candidates = step.candidate_NC.shape
        step.candidate_NC.copy_(statistics.index_R.view(lanes, candidates))
        if self.predictor is None:
            return running_product(statistics, lanes)
        context_NX = batch_context(
            requests.live_S[step.slot_N],
            step.room[1],
            requests.recent_SK[step.slot_N],
            requests.context_S[step.slot_N],
        )
        feature_NCF = features_from_statistics(statistics, candidates)
        score_NC: Tensor = self.predictor(feature_NCF, hidden_NCD, context_NX)
        return score_NC

    def draft(self, requests: Requests, step: Step) -> Tensor:
        """Final-normed hidden states `[N, W, D]` of the lanes' blocks `[anchor, MASK, ...]`; row j
        predicts the token at its own position, row 0 is unused."""
        paging = requests.paging(step.slot_N)
        lanes, block = step.slot_N.shape[0], self.drafter.config.block_size
        rows = uniform_rows(paging, block, block)
        embedded = self.drafter.embed_block(requests.anchor_S[step.slot_N], self.target)
        hidden = self.drafter.draft(
            embedded.flatten(0, 1), rows, paging, self.draft_pool, self.tile
        )
        return hidden.view(lanes, block, -1)


class Anchors(nn.Module):
    """In place of Decide for a step that drafts nothing: one row for every live lane."""

    def forward(self, requests: Requests, step: Step, packed: Packed) -> None:
        """Set `step.length_N` and the packed rows, of which verify reads the first N."""
        length_N = requests.live_S[step.slot_N].int()
        step.length_N.copy_(length_N)
        step.result_NX[:, LENGTH].copy_(length_N)
        pack(requests, step, packed)


def pack(requests: Requests, step: Step, packed: Packed) -> None:
    """Lay the anchors and the chosen candidates out in `packed`, one request after the other."""
    offset_N, *columns = ops.pack_rows(
        step.length_N,
        step.candidate_NC,
        requests.anchor_S[step.slot_N],
        requests.context_S[step.slot_N],
        requests.page_SL[step.slot_N],
        packed.token_M.shape[0],
        PAGE,
    )
    step.offset_N.copy_(offset_N)
    for buffer, column in zip(packed, columns, strict=True):
        buffer.copy_(column)

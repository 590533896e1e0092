"""The records that flow between the stages of a step, the rows they verify, and the commit.

Shapes: S request slots (the last one is the idle slot, never live), N lanes of this step, W = 16
block and tile rows, C = W - 1 candidates, M packed rows, L logical pages, P physical pages, Z stop
ids, K recent passes, T rows per lane of a uniform step, R = N * T, V vocabulary.

Two things are called a slot: a request's place in `Requests` (`slot_N`), and a token's place in
the pools (kv.py; the `slot_R` and `slot_M` of rows)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dscale.compiled.attention import VERIFY_TILE, Rows
from dscale.compiled.kv import Paging, slots_of
from dscale.compiled.penalty import see
from dscale.compiled.predictor import RECENT
from dscale.compiled.sampling import NO_TOKEN, Sampling

# Columns of `Step.result_NX`, all int32: one copy to the host carries them.
TOKENS = slice(0, VERIFY_TILE)
COUNT, LIVE, LENGTH = VERIFY_TILE, VERIFY_TILE + 1, VERIFY_TILE + 2
SCORES = slice(VERIFY_TILE + 3, 2 * VERIFY_TILE + 2)
FAILED = 2 * VERIFY_TILE + 2
RESULT_COLUMNS = 2 * VERIFY_TILE + 3


class Requests(NamedTuple):
    """Device state of every request, indexed by slot; stages change it in place.

        committed tokens      anchor       draft block
        [0 ... context - 1]  [context]   [context + 1 ... context + W - 1]
          in both caches      known, in no cache

    `context_S`, `remaining_S` int32; `anchor_S`, `seed_S`, `top_k_S` int64; `live_S` bool;
    `temperature_S`, `top_p_S`, `min_p_S`, `penalty_S` (1 is off) float32; `page_SL`, `logical_SP`
    int32 (see Paging); `stop_SZ` int64, padded with -1. `recent_SK` int32: drafted tokens accepted
    in the last passes, newest first, -1 where there was none yet. `seen_SV` bool: tokens of the
    prompt and the committed ones, for the penalty; [S, 1] in a workspace made without one."""

    context_S: Tensor
    remaining_S: Tensor
    anchor_S: Tensor
    live_S: Tensor
    seed_S: Tensor
    temperature_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    page_SL: Tensor
    logical_SP: Tensor
    stop_SZ: Tensor
    recent_SK: Tensor
    penalty_S: Tensor
    seen_SV: Tensor

    def paging(self, slot_N: Tensor) -> Paging:
        """Page tables and context lengths of the lanes."""
        return Paging(self.page_SL[slot_N], self.logical_SP[slot_N], self.context_S[slot_N])

    def sampling(self, slot_R: Tensor) -> Sampling:
        """Sampling settings of rows, by their request's slot."""
        return Sampling(
            self.temperature_S[slot_R],
            self.top_k_S[slot_R],
            self.top_p_S[slot_R],
            self.min_p_S[slot_R],
            self.seed_S[slot_R],
        )


class Step(NamedTuple):
    """Fixed-address buffers of one step of N lanes: what the stages hand to each other and to the
    host.

    In: `slot_N` int64, each lane's request slot; `room` int32 [2], rows there is room for and rows
    per live request. Decide to verify: `candidate_NC` int64, `length_N` int32 (rows of each lane,
    k_i), `offset_N` int64 (its first row). Out: `result_NX` int32, the columns TOKENS, COUNT (how
    many of TOKENS are committed), LIVE (whether the request goes on), LENGTH (k_i), SCORES (the
    bits of float32 scores) and FAILED (whether the request met logits that are not finite)."""

    slot_N: Tensor
    room: Tensor
    candidate_NC: Tensor
    length_N: Tensor
    offset_N: Tensor
    result_NX: Tensor


class Packed(NamedTuple):
    """Fixed-address buffers of M packed rows, as `pack_rows` lays them out, int64."""

    token_M: Tensor
    position_M: Tensor
    slot_M: Tensor
    lane_M: Tensor
    tile_row_M: Tensor
    row_NT: Tensor

    def rows(self) -> Rows:
        """The rows for attention. A lane without rows points past the last one: cut here."""
        row_NT = torch.clamp(self.row_NT, max=self.token_M.shape[0] - 1)
        return Rows(self.position_M, self.slot_M, self.lane_M, self.tile_row_M, row_NT)


def uniform_rows(paging: Paging, width: int, height: int) -> Rows:
    """Rows of `width` positions from each lane's context on, in tiles of `height` >= width
    rows."""
    context_N = paging.context_N.long()
    lanes, device = context_N.shape[0], context_N.device
    column = torch.arange(width, device=device)
    position_NT = context_N[:, None] + column
    first_N = torch.arange(lanes, device=device) * width
    return Rows(
        position_R=position_NT.reshape(-1),
        slot_R=slots_of(position_NT, paging.page_NL).reshape(-1),
        lane_R=torch.arange(lanes, device=device)[:, None].expand(-1, width).reshape(-1),
        tile_row_R=column.expand(lanes, -1).reshape(-1),
        row_NT=first_N[:, None] + torch.clamp(torch.arange(height, device=device), max=width - 1),
    )


def commit(
    requests: Requests,
    step: Step,
    choice_NT: Tensor,
    accepted_N: Tensor,
    advance: bool,
    mark: bool = False,
) -> None:
    """Commit the accepted prefix and its successor: cut at the first stop id and at the token
    limit.

    `choice_NT` [N, T] int64: the target's tokens; the first accepted + 1 are the progress. A
    NO_TOKEN among them ends its request as failed, the tokens before it committed.
    `advance`: the rows in front of the tokens are in the caches now, so the context grows by the
    progress (decode); a prefill's first token only becomes the anchor. `mark`: remember the tokens
    as seen, for the penalty. Idle lanes commit nothing."""
    slot_N = step.slot_N
    remaining_N = requests.remaining_S[slot_N]
    live_N = requests.live_S[slot_N]
    index_T = torch.arange(choice_NT.shape[1], device=choice_NT.device)
    count_N = torch.minimum(accepted_N.int() + 1, remaining_N)
    is_stop_NT = (choice_NT[..., None] == requests.stop_SZ[slot_N][:, None]).any(-1) & (
        index_T < count_N[:, None]
    )
    stopped_N = is_stop_NT.any(1)
    count_N = torch.where(stopped_N, is_stop_NT.int().argmax(1).int() + 1, count_N)
    count_N = torch.where(live_N, count_N, 0).int()
    last_N = torch.gather(choice_NT, 1, torch.clamp(count_N - 1, min=0).long()[:, None])[:, 0]
    failed_N = live_N & (last_N == NO_TOKEN)
    count_N = count_N - failed_N.int()
    # Dead lanes run on for a step: their anchor must be a token.
    last_N = torch.clamp(last_N, min=0)
    live_N = live_N & ~stopped_N & ~failed_N & (count_N < remaining_N)
    if advance:
        requests.context_S.index_put_((slot_N,), requests.context_S[slot_N] + count_N)
    requests.anchor_S.index_put_((slot_N,), last_N)
    requests.remaining_S.index_put_((slot_N,), remaining_N - count_N)
    requests.live_S.index_put_((slot_N,), live_N)
    if mark:
        see(requests.seen_SV, slot_N, torch.clamp(choice_NT, min=0), count_N)
    step.result_NX[:, : choice_NT.shape[1]].copy_(choice_NT)
    step.result_NX[:, COUNT].copy_(count_N)
    step.result_NX[:, LIVE].copy_(live_N)
    step.result_NX[:, FAILED].copy_(failed_N)


def remember(requests: Requests, slot_N: Tensor, accepted_N: Tensor, length_N: Tensor) -> None:
    """Put accepted counts in front of the recent ones of lanes that verified a candidate."""
    recent_NK = requests.recent_SK[slot_N]
    newer_NK = torch.cat((accepted_N.int()[:, None], recent_NK[:, : RECENT - 1]), 1)
    recent_NK = torch.where(length_N[:, None] > 1, newer_NK, recent_NK)
    requests.recent_SK.index_put_((slot_N,), recent_NK)

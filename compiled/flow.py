"""The records that flow between the stages of a step, and the rows a uniform step verifies.

Shapes: S request slots (the last one is the idle slot, never live), N lanes of this step, W block
size, L logical pages, P physical pages, Z stop ids, T rows per lane, R = N * T rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dscale.compiled.attention import Rows
from dscale.compiled.kv import Paging, slots_of
from dscale.compiled.sampling import Sampling


class Requests(NamedTuple):
    """Device state of every request, indexed by slot; stages change it in place.

        committed tokens      anchor       draft block
        [0 ... context - 1]  [context]   [context + 1 ... context + W - 1]
          in both caches      known, in no cache

    `context_S`, `remaining_S` int32; `anchor_S`, `seed_S`, `top_k_S` int64; `live_S` bool;
    `temperature_S`, `top_p_S`, `min_p_S` float32; `page_SL`, `logical_SP` int32 (see Paging);
    `stop_SZ` int64, padded with -1."""

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

    `slot_N` int64 in: each lane's request slot. `candidate_NC` int64 [N, W - 1]: decide to verify.
    `token_NW` int64, `count_N` int32, `live_N` bool out: tokens committed in this step (the first
    `count_N` of each row) and whether the request goes on."""

    slot_N: Tensor
    candidate_NC: Tensor
    token_NW: Tensor
    count_N: Tensor
    live_N: Tensor


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
    requests: Requests, step: Step, choice_NT: Tensor, accepted_N: Tensor, advance: bool
) -> None:
    """Commit the accepted prefix and its successor: cut at the first stop id and at the token
    limit.

    `choice_NT` [N, T] int64: the target's tokens; the first accepted + 1 are the progress.
    `advance`: the rows in front of the tokens are in the caches now, so the context grows by the
    progress (decode); a prefill's first token only becomes the anchor. Idle lanes commit nothing.
    """
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
    live_N = live_N & ~stopped_N & (count_N < remaining_N)
    if advance:
        requests.context_S.index_put_((slot_N,), requests.context_S[slot_N] + count_N)
    requests.anchor_S.index_put_((slot_N,), last_N)
    requests.remaining_S.index_put_((slot_N,), remaining_N - count_N)
    requests.live_S.index_put_((slot_N,), live_N)
    step.token_NW[:, : choice_NT.shape[1]].copy_(choice_NT)
    step.count_N.copy_(count_N)
    step.live_N.copy_(live_N)

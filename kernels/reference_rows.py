"""Eager references of the budget, the packing and the acceptance of ragged rows: the
specification, and the implementation on the CPU.

Shapes: N lanes, C = W - 1 candidates per lane, M packed rows, T tile rows, L logical pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dscale.kernels.reference import accept_prefix

TILE = 16
"""Tile rows per lane, the most rows a request may verify in a pass."""

SEEDS = ("paper", "plus_anchor", "none")
"""Where the budget starts: round(sum of scores) (halves go up), one more than that, or 1 row."""

# Sums of scores are rounded in fixed point, so that every order of summation gives the same seed.
_FIXED_BITS = 24


def allocate_budget(
    score_NC: Tensor, live_N: Tensor, limit_N: Tensor, room: Tensor, seed: str
) -> Tensor:
    """Rows each request verifies, k [N] int32: Algorithm 1 (paper, section III-C).

    `score_NC` float32: chance in 0..1 that at least j drafted tokens are kept; NaN counts as 0,
    values outside are clamped, and the cumulative minimum is taken here. `live_N` bool. `limit_N`
    int32: tokens a request may still emit. `room` int32 [2]: capacity M in rows, at least N, and
    rows per live request on average, 1..W. `seed`: one of SEEDS.

    Live requests share min(M, average * live, sum of limits) rows, all of them used: 1 <= k_i <=
    min(W, limit_i), where a limit below 1 counts as 1. Others get 0. From the seed, rows are given
    to the highest next score or taken from the lowest tail, in one total order: score descending,
    request ascending, position ascending."""
    width = score_NC.shape[1] + 1
    score_NC = torch.where(score_NC > 0, score_NC, 0.0).clamp(max=1.0).cummin(1).values
    limit_N = torch.where(live_N, limit_N.clamp(1, width), 0).long()
    start_N = _seed_lengths(score_NC, limit_N, seed)
    total = (live_N.sum() * room[1]).minimum(room[0]).minimum(limit_N.sum())
    gap = total - start_N.sum()

    slot_C = torch.arange(1, width, device=score_NC.device)
    inside_NC = slot_C < start_N[:, None]
    outside_NC = ~inside_NC & (slot_C < limit_N[:, None])
    # Growing takes the head of the order outside the seed; shrinking keeps the head inside it.
    grow = gap > 0
    take = torch.where(grow, gap, inside_NC.sum() + gap)
    base_N = torch.where(grow, start_N, limit_N.clamp(max=1))
    eligible_NC = torch.where(grow, outside_NC, inside_NC)
    order = (
        torch.where(eligible_NC, score_NC, -1.0).flatten().argsort(descending=True, stable=True)
    )
    rank = torch.arange(order.shape[0], device=order.device)
    taken = torch.zeros_like(order).scatter_(0, order, (rank < take).long())
    return (base_N + taken.view_as(score_NC).sum(1)).int()


def _seed_lengths(score_NC: Tensor, limit_N: Tensor, seed: str) -> Tensor:
    """Rows before the budget is met, int64, in 1..limit for a live request (limit 0: 0)."""
    if seed == "none":
        return limit_N.clamp(max=1)
    fixed_NC = (score_NC * 2.0**_FIXED_BITS).long()
    rounded_N = (fixed_NC.sum(1) + (1 << (_FIXED_BITS - 1))) >> _FIXED_BITS
    return torch.minimum((rounded_N + (seed == "plus_anchor")).clamp(min=1), limit_N)


class PackedRows(NamedTuple):
    """Ragged rows of one verification pass, all int64.

    `offset_N`: first row of a lane, or the number of used rows where the lane has none (this can
    be M). `token_M`, `position_M`: what the row embeds and where. `slot_M`: pool slot of its key
    and value. `lane_M`, `tile_row_M`: the tile cell that holds the row. `row_NT` [N, 16]: the row
    in each tile cell, any valid row where the cell is empty.

    Rows past the used ones are placeholders: token 0 at position 0, in slot 0 of the scratch page,
    cell (0, 0); no cell of `row_NT` with tile row < k_i names one."""

    offset_N: Tensor
    token_M: Tensor
    position_M: Tensor
    slot_M: Tensor
    lane_M: Tensor
    tile_row_M: Tensor
    row_NT: Tensor


def pack_rows(
    length_N: Tensor,
    candidate_NC: Tensor,
    anchor_N: Tensor,
    context_N: Tensor,
    page_NL: Tensor,
    rows: int,
    page: int,
) -> PackedRows:
    """Lay the anchor and the first k_i - 1 candidates of every lane one after the other.

    `length_N` int32: k_i in 0..W, their sum at most `rows` = M. `candidate_NC` int64, `anchor_N`
    int64, `context_N` int32: committed tokens before the anchor. `page_NL` int32: physical page of
    every logical page, `page` tokens each; positions past the table are clamped to its last page.
    """
    length_N, context_N = length_N.long(), context_N.long()
    end_N = length_N.cumsum(0)
    used = length_N.sum()
    row_M = torch.arange(rows, device=length_N.device)
    is_used_M = row_M < used
    lane_M = torch.where(is_used_M, torch.searchsorted(end_N, row_M, right=True), 0)
    tile_row_M = torch.where(is_used_M, row_M - (end_N - length_N)[lane_M], 0)
    position_M = torch.where(is_used_M, context_N[lane_M] + tile_row_M, 0)
    logical_M = torch.clamp(position_M // page, max=page_NL.shape[1] - 1)
    slot_M = page_NL.long()[lane_M, logical_M] * page + position_M % page
    token_NW = torch.cat((anchor_N[:, None], candidate_NC), 1)

    offset_N = torch.where(length_N > 0, end_N - length_N, used)
    cell_T = torch.arange(TILE, device=length_N.device)
    row_NT = offset_N[:, None] + torch.minimum(cell_T, torch.clamp(length_N[:, None] - 1, min=0))
    return PackedRows(
        offset_N,
        torch.where(is_used_M, token_NW[lane_M, tile_row_M], 0),
        position_M,
        torch.where(is_used_M, slot_M, 0),
        lane_M,
        tile_row_M,
        torch.clamp(row_NT, max=rows - 1),
    )


def accept_rows(
    candidate_NC: Tensor, length_N: Tensor, offset_N: Tensor, choice_M: Tensor
) -> tuple[Tensor, Tensor]:
    """accept_prefix over packed rows: row offset_i + j holds the target's choice after candidate
    j, for j < k_i.

    `candidate_NC` int64, `length_N` int32 in 0..W, `offset_N` int64, `choice_M` int64: argmax when
    greedy, the Gumbel-max draw when sampling. Returns (accepted [N], successor [N]), int64; both
    are 0 where k_i = 0. Rows of no lane are not read."""
    column_W = torch.arange(candidate_NC.shape[1] + 1, device=candidate_NC.device)
    row_NW = torch.clamp(offset_N[:, None] + column_W, max=choice_M.shape[0] - 1)
    choice_NW = torch.where(column_W < length_N[:, None], choice_M[row_NW], -1)
    accepted_N, successor_N = accept_prefix(candidate_NC, length_N.long(), choice_NW)
    return accepted_N, torch.where(length_N > 0, successor_N, 0)

"""Cutting prompts into chunks of packed rows for the prefill stage."""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.compiled.attention import PREFILL_TILE, Rows
from dscale.compiled.kv import PAGE
from dscale.compiled.prefill import Chunk
from dscale.request import Request


def make_chunk(
    requests: list[Request],
    lengths: list[int],
    device: torch.device,
    *,
    wide: bool,
    idle_slot: int | None = None,
) -> Chunk:
    """The next `lengths` prompt tokens of every request, from where its prefill stands.

    `wide`: cut into tiles of the wide tile's height (FlexAttention); the gathered route takes one
    tile per request. `idle_slot`: the slot of a lane that is added to a single request, because a
    compiled stage takes a size of 1 for a constant."""
    starts, slots = [r.prefilled for r in requests], [r.slot for r in requests]
    stops = [start + length for start, length in zip(starts, lengths, strict=True)]
    prompts = [r.prompt[r.prefilled : stop] for r, stop in zip(requests, stops, strict=True)]
    ends = [len(r.prompt) == stop for r, stop in zip(requests, stops, strict=True)]
    pages = [r.pages for r in requests]
    if idle_slot is not None and len(requests) == 1:
        # Its row lies before the beginning, so that the idle slot's context stays 0.
        prompts, starts, slots = [*prompts, [0]], [*starts, -1], [*slots, idle_slot]
        pages, ends = [*pages, [0]], [*ends, False]
    length_N = torch.tensor([len(p) for p in prompts])
    height = PREFILL_TILE if wide else int(length_N.max())
    return _to(_cut(prompts, length_N, starts, slots, pages, ends, height), device)


def _cut(
    prompts: list[list[int]],
    length_N: Tensor,
    starts: list[int],
    slots: list[int],
    pages: list[list[int]],
    ends: list[bool],
    height: int,
) -> Chunk:
    lanes, lane_N = len(prompts), torch.arange(len(prompts))
    tiles_N = (length_N + height - 1) // height
    end_N, first_N = length_N.cumsum(0), length_N.cumsum(0) - length_N
    tile_N = tiles_N.cumsum(0) - tiles_N  # each lane's first
    lane_X, lane_R = lane_N.repeat_interleave(tiles_N), lane_N.repeat_interleave(length_N)
    offset_R = torch.arange(len(lane_R)) - first_N[lane_R]
    before_X = (torch.arange(len(lane_X)) - tile_N[lane_X]) * height
    start_N, slot_N = torch.tensor(starts), torch.tensor(slots)
    position_R = start_N[lane_R] + offset_R
    page_NL = torch.zeros(lanes, max(map(len, pages)), dtype=torch.int64)
    for row, own in zip(page_NL, pages, strict=True):
        row[: len(own)] = torch.tensor(own)
    row_NT = (first_N[lane_X] + before_X)[:, None] + torch.arange(height)
    rows = Rows(
        position_R=position_R,
        slot_R=page_NL[lane_R, position_R // PAGE] * PAGE + position_R % PAGE,
        lane_R=tile_N[lane_R] + offset_R // height,
        tile_row_R=offset_R % height,
        row_NT=torch.minimum(row_NT, end_N[lane_X, None] - 1),
    )
    return Chunk(
        token_R=torch.tensor([t for p in prompts for t in p]),
        rows=rows,
        slot_X=slot_N[lane_X],
        start_X=(start_N[lane_X] + before_X).clamp(min=0),
        last_N=end_N - 1,
        ends_N=torch.tensor(ends),
    )


def idle_chunk(idle_slot: int, device: torch.device) -> Chunk:
    """A chunk of two idle lanes, to compile a stage with."""
    two = [[0], [0]]
    chunk = _cut(
        two, torch.ones(2).long(), [-1] * 2, [idle_slot] * 2, two, [False] * 2, PREFILL_TILE
    )
    return _to(chunk, device)


def _to(chunk: Chunk, device: torch.device) -> Chunk:
    def move(tensor: Tensor) -> Tensor:
        moved = tensor.to(device, non_blocking=True)
        torch._dynamo.maybe_mark_dynamic(moved, 0)
        return moved

    token_R, rows, *others = chunk
    return Chunk(move(token_R), Rows(*map(move, rows)), *map(move, others))

"""Cutting prompts into chunks of packed rows for the prefill stage."""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.compiled.attention import PREFILL_TILE, Rows
from dscale.compiled.kv import PAGE
from dscale.compiled.prefill import Chunk
from dscale.request import Request


def make_chunk(
    requests: list[Request], lengths: list[int], device: torch.device, pad_tile: bool
) -> Chunk:
    """The next `lengths` prompt tokens of every request, from where its prefill stands.

    `pad_tile`: round the tile up to the wide tile (FlexAttention); the gathered route takes exact
    tiles."""
    pieces = [
        r.prompt[r.prefilled : r.prefilled + n] for r, n in zip(requests, lengths, strict=True)
    ]
    start_N = torch.tensor([r.prefilled for r in requests])
    length_N = torch.tensor(lengths)
    height = max(lengths)
    if pad_tile:
        height = -(-height // PREFILL_TILE) * PREFILL_TILE
    end_N = length_N.cumsum(0)
    lane_R = torch.repeat_interleave(torch.arange(len(pieces)), length_N)
    tile_row_R = torch.arange(int(end_N[-1])) - (end_N - length_N)[lane_R]
    position_R = start_N[lane_R] + tile_row_R
    page_NL = torch.zeros(len(pieces), max(len(r.pages) for r in requests), dtype=torch.int64)
    for row, request in zip(page_NL, requests, strict=True):
        row[: len(request.pages)] = torch.tensor(request.pages)
    row_NT = (end_N - length_N)[:, None] + torch.minimum(
        torch.arange(height), length_N[:, None] - 1
    )
    rows = Rows(
        position_R=position_R,
        slot_R=page_NL[lane_R, position_R // PAGE] * PAGE + position_R % PAGE,
        lane_R=lane_R,
        tile_row_R=tile_row_R,
        row_NT=row_NT,
    )
    ends_N = torch.tensor(
        [len(r.prompt) == r.prefilled + n for r, n in zip(requests, lengths, strict=True)]
    )
    chunk = Chunk(
        token_R=torch.tensor([t for p in pieces for t in p]),
        rows=rows,
        last_N=end_N - 1,
        start_N=start_N,
        ends_N=ends_N,
    )
    return _to(chunk, device)


def _to(chunk: Chunk, device: torch.device) -> Chunk:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Chunk(
        move(chunk.token_R),
        Rows(*map(move, chunk.rows)),
        move(chunk.last_N),
        move(chunk.start_N),
        move(chunk.ends_N),
    )

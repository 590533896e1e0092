"""Cutting prompts into chunks of packed rows for the prefill stage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dscale.compiled.attention import PREFILL_TILE, Rows
from dscale.compiled.kv import PAGE
from dscale.compiled.prefill import Chunk
from dscale.request import Request


def chunks(
    requests: list[Request], size: int, device: torch.device, pad_tile: bool
) -> Iterator[tuple[list[int], Chunk]]:
    """Yield (indices of the requests in it, chunk) until every prompt is done, `size` tokens of
    each at a time.

    `pad_tile`: round the tile up to the wide tile (FlexAttention); the gathered route takes exact
    tiles."""
    longest = max(len(r.prompt) for r in requests)
    for start in range(0, longest, size):
        chosen = [i for i, r in enumerate(requests) if len(r.prompt) > start]
        yield chosen, _chunk([requests[i] for i in chosen], start, size, device, pad_tile)


def _chunk(
    requests: list[Request], start: int, size: int, device: torch.device, pad_tile: bool
) -> Chunk:
    pieces = [r.prompt[start : start + size] for r in requests]
    length_N = torch.tensor([len(p) for p in pieces])
    height = int(length_N.max())
    if pad_tile:
        height = -(-height // PREFILL_TILE) * PREFILL_TILE
    end_N = length_N.cumsum(0)
    lane_R = torch.repeat_interleave(torch.arange(len(pieces)), length_N)
    tile_row_R = torch.arange(int(end_N[-1])) - (end_N - length_N)[lane_R]
    position_R = start + tile_row_R
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
    ends_N = torch.tensor([len(r.prompt) <= start + size for r in requests])
    chunk = Chunk(
        token_R=torch.tensor([t for p in pieces for t in p]),
        rows=rows,
        last_N=end_N - 1,
        start_N=torch.full_like(end_N, start),
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

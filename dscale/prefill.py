"""Cutting prompts into chunks of rows for the prefill stage: packed flat, or in fixed-address
buffers of whole tiles."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dscale.compiled.attention import PREFILL_TILE, Rows
from dscale.compiled.capture import fixed, send
from dscale.compiled.kv import PAGE
from dscale.compiled.prefill import Chunk
from dscale.request import Request

TILES = (2, 4, 6, 8, 12, 16, 24, 32)
"""Tiles of a captured chunk, powers of two beyond. From 2, as lanes: see `workspace.BUCKETS`."""

FILL_ROWS = TILES[-1] * PREFILL_TILE
"""Rows of one prefill pass, unless `prefill_chunk` alone is more. Enough for a large GPU: at 8B
shapes they are 33 TFLOP, some 40 ms of an H200."""


def tiles_of(rows: int) -> int:
    """Tiles that so many rows of one prompt take."""
    return -(-rows // PREFILL_TILE)


def next_length(rest: int, most: int) -> int:
    """Tokens of a prompt's next chunk, of `rest` that are left and at most `most`.

    Whole tiles but for its last chunk: then no tile reaches past the request's pages, where it
    would read the scratch page and what others leave there, NaN maybe."""
    return rest if rest <= most else most - most % PREFILL_TILE


def next_lengths(rests: Iterable[int], most: int, left: int, *, padded: bool) -> list[int]:
    """Tokens of the next chunks of one pass: of the first prompts, as many as FILL_ROWS hold.

    `rests`: tokens each prompt has left. `most`: tokens of a chunk; `left`: of all together.
    `padded`: all chunks take as many rows as the longest (the gathered route pads them so)."""
    lengths: list[int] = []
    rows = height = 0
    for rest in rests:
        length = next_length(rest, min(most, left))
        own = tiles_of(length) * PREFILL_TILE
        rows, height = rows + own, max(height, own)
        taken = height * (1 + len(lengths)) if padded else rows
        if length < 1 or (lengths and taken > FILL_ROWS):
            break
        lengths.append(length)
        left -= length
    return lengths


def bucket_of_tiles(tiles: int) -> int:
    """Smallest bucket that holds `tiles`."""
    return next((b for b in TILES if b >= tiles), 1 << (tiles - 1).bit_length())


def packed_chunk(requests: list[Request], lengths: list[int], target_row: Tensor) -> Chunk:
    """The next `lengths` prompt tokens of every request, from where its prefill stands, row after
    row: one tile per request, for the gathered route. `target_row` `[D]`: as hidden states are."""
    device, lanes = target_row.device, len(requests)
    lane_R = torch.arange(lanes).repeat_interleave(torch.tensor(lengths))
    end_N = torch.tensor(lengths).cumsum(0)
    first_N = end_N - torch.tensor(lengths)
    start_N = torch.tensor([r.prefilled for r in requests])
    tile_row_R = torch.arange(len(lane_R)) - first_N[lane_R]
    position_R = start_N[lane_R] + tile_row_R
    row_NT = first_N[:, None] + torch.arange(max(lengths))
    taken = list(zip(requests, lengths, strict=True))
    rows = Rows(
        position_R=position_R,
        slot_R=torch.from_numpy(
            np.concatenate([_slots(r, np.arange(r.prefilled, r.prefilled + n)) for r, n in taken])
        ),
        lane_R=lane_R,
        tile_row_R=tile_row_R,
        row_NT=torch.minimum(row_NT, end_N[:, None] - 1),
    )
    return Chunk(
        token_R=torch.cat([torch.tensor(r.prompt[r.prefilled :][:n]) for r, n in taken]).to(
            device
        ),
        rows=Rows(*(x.to(device) for x in rows)),
        slot_X=torch.tensor([r.slot for r in requests], device=device),
        start_X=start_N.to(device),
        last_N=(end_N - 1).to(device),
        ends_N=torch.tensor([int(r.prefilled + n == len(r.prompt)) for r, n in taken]).to(device),
        hidden_ND=target_row.new_empty(lanes, target_row.shape[0]),
    )


def _slots(request: Request, position: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pool slots of a request's positions."""
    return np.array(request.pages)[position // PAGE] * PAGE + position % PAGE


class ChunkBuffers:
    """A chunk of X tiles at fixed addresses; what no prompt fills runs in the idle slot."""

    def __init__(self, tiles: int, idle_slot: int, target_row: Tensor) -> None:
        """`target_row` `[D]`: as hidden states are."""
        device, rows = target_row.device, tiles * PREFILL_TILE
        self.tiles, self.idle_slot = tiles, idle_slot
        # Token, position and slot of each row; slot and start of each tile; each lane's last row
        # and whether its prompt ends.
        self._sizes = [rows] * 3 + [tiles] * 4
        self.flat = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        row = torch.arange(rows, device=device)
        parts = torch.split(self.flat, self._sizes)
        token, position, slot, slot_X, start_X, last_N, ends_N = parts
        self.chunk = Chunk(
            token_R=token,
            rows=Rows(
                position, slot, row // PREFILL_TILE, row % PREFILL_TILE, row.view(tiles, -1)
            ),
            slot_X=slot_X,
            start_X=start_X,
            last_N=last_N,
            ends_N=ends_N,
            hidden_ND=target_row.new_empty(tiles, target_row.shape[0]),
        )
        for tensor in (*self.chunk.rows, *(x for x in self.chunk if isinstance(x, Tensor))):
            torch._dynamo.mark_dynamic(fixed(tensor), 0)

    def fill(self, requests: list[Request], lengths: list[int]) -> Chunk:
        """The next `lengths` prompt tokens of every request, from where its prefill stands, each
        from a tile's first row on."""
        # By NumPy: as many tensor operations took the host 0.2 ms.
        host = np.zeros(len(self.flat), np.int64)
        token, position, slot, slot_X, start_X, last_N, ends_N = np.split(
            host, np.cumsum(self._sizes)[:-1]
        )
        slot[:] = np.arange(len(slot)) % PAGE
        slot_X[:] = self.idle_slot
        first = 0
        for lane, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            start, row, tiles = request.prefilled, first * PREFILL_TILE, tiles_of(length)
            at = np.arange(start, start + tiles * PREFILL_TILE)
            position[row : row + len(at)] = at
            token[row : row + length] = request.prompt[start : start + length]
            slot[row : row + length] = _slots(request, at[:length])
            slot_X[first : first + tiles] = request.slot
            start_X[first : first + tiles] = at[::PREFILL_TILE]
            last_N[lane] = row + length - 1
            ends_N[lane] = start + length == len(request.prompt)
            first += tiles
        send(torch.from_numpy(host), self.flat)
        return self.chunk

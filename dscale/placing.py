"""A request's state as the stages read it: written row by row, and sent to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.compiled.capture import send
from dscale.compiled.flow import Requests
from dscale.request import Request

ALIGNMENT = 16
"""Bytes at which the fields of a row begin."""


class Staging:
    """State of up to `size` slots on the host, a row of bytes each, and its way to the device in
    one copy.

    Neither side is allocated or cut up for every request anew: that took the host longer than a
    step takes a small model."""

    def __init__(self, idle: Requests, size: int, device: torch.device) -> None:
        """`idle`: the state of one idle slot, `[1, ...]` each."""
        self._fields = [torch.zeros(1, dtype=torch.int64), *idle]
        self._widths = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in self._fields]
        self._idle = torch.zeros(1, sum(self._widths), dtype=torch.uint8)
        for ours, theirs in zip(self._cut(self._idle), self._fields, strict=True):
            ours.copy_(theirs)
        self._host = self._idle.repeat(size, 1)
        self._device = self._host.to(device, copy=True)
        self._views: dict[int, tuple[Tensor, Requests, Tensor, Requests]] = {}

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """The fields of rows of bytes."""
        return [
            part[:, : x.nbytes].view(x.dtype).view(len(rows), *x.shape[1:])
            for part, x in zip(torch.split(rows, self._widths, 1), self._fields, strict=True)
        ]

    def _of(self, count: int) -> tuple[Tensor, Requests, Tensor, Requests]:
        """Slots and state of the first `count` rows, on the host and on the device."""
        if count not in self._views:
            slot_N, *host = self._cut(self._host[:count])
            index_N, *moved = self._cut(self._device[:count])
            self._views[count] = slot_N, Requests(*host), index_N, Requests(*moved)
        return self._views[count]

    def reset(self, count: int) -> Requests:
        """The first `count` rows, idle again; to be written to."""
        self._host[:count].copy_(self._idle)
        return self._of(count)[1]

    def send(self, slots: list[int]) -> tuple[Tensor, Requests]:
        """As many rows on the device, for which the host does not wait, and their slots;
        overwritten when the next are sent."""
        slot_N, _, index_N, moved = self._of(len(slots))
        slot_N.copy_(torch.tensor(slots))
        send(self._host[: len(slots)], self._device[: len(slots)])
        return index_N, moved


def write_state(host: Requests, row: int, request: Request) -> None:
    """Write the state of a request, which has pages, into a row of host buffers."""
    host.remaining_S[row] = request.max_new_tokens
    host.seed_S[row] = request.seed
    host.temperature_S[row] = request.temperature
    host.top_k_S[row] = request.top_k
    host.top_p_S[row] = request.top_p
    host.min_p_S[row] = request.min_p
    host.penalty_S[row] = request.repetition_penalty
    if request.repetition_penalty != 1:
        host.seen_SV[row, request.prompt + request.also_seen] = True
    stop_ids = torch.tensor(request.stop_ids, dtype=torch.int64)
    host.stop_SZ[row, : len(stop_ids)] = stop_ids
    pages = torch.tensor(request.pages)
    host.page_SL[row, : len(pages)] = pages.int()
    host.logical_SP[row].fill_(-1)
    host.logical_SP[row, pages] = torch.arange(len(pages), dtype=torch.int32)

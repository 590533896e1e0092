"""A request's state as the stages read it, row by row."""

from __future__ import annotations

import torch

from dscale.compiled.flow import Requests
from dscale.request import Request


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

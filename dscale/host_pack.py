"""Packing on the host for mode "+budget": what mode "dscale" does on the device."""

from __future__ import annotations

import torch

from dscale.compiled.flow import Packed, Requests, Step, lane_paging, lane_tokens
from dscale.compiled.kv import PAGE
from dscale.kernels.reference_rows import pack_rows


def pack_on_host(requests: Requests, step: Step, packed: Packed) -> None:
    """Read the lengths back, build the rows and send them, with one copy down and one up."""
    paging = lane_paging(requests, step)
    anchor_N, candidate_NC = lane_tokens(requests, step)
    down = (
        step.length_N[:, None],
        anchor_N[:, None],
        candidate_NC,
        paging.context_N[:, None],
        paging.page_NL,
    )
    host_NX = torch.cat([x.long() for x in down], 1).cpu()
    length_N1, anchor_N1, candidate_NC, context_N1, page_NL = torch.split(
        host_NX, [x.shape[1] for x in down], 1
    )
    rows = packed.token_M.shape[0]
    found = pack_rows(
        length_N1[:, 0], candidate_NC, anchor_N1[:, 0], context_N1[:, 0], page_NL, rows, PAGE
    )
    buffers = (step.offset_N, *packed)
    host = torch.cat([x.flatten() for x in found])
    if step.slot_N.device.type == "cuda":
        host = host.pin_memory()
    up = host.to(step.slot_N.device, non_blocking=True)
    parts = torch.split(up, [b.numel() for b in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))

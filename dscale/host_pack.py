"""Packing on the host for mode "+budget": what mode "dscale" does on the device."""

from __future__ import annotations

import torch

from dscale.compiled.flow import Packed, Requests, Step
from dscale.compiled.kv import PAGE
from dscale.kernels.reference_rows import pack_rows


def pack_on_host(requests: Requests, step: Step, packed: Packed) -> None:
    """Read the lengths back, build the rows and send them, with one copy down and one up."""
    slot_N = step.slot_N
    down = (
        step.length_N[:, None],
        requests.anchor_S[slot_N][:, None],
        step.candidate_NC,
        requests.context_S[slot_N][:, None],
        requests.page_SL[slot_N],
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
    if slot_N.device.type == "cuda":
        host = host.pin_memory()
    up = host.to(slot_N.device, non_blocking=True)
    parts = torch.split(up, [b.numel() for b in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))

"""Packing on the host for mode "+budget": what mode "dscale" does on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.flow import Packed, Requests, Step
from dscale.compiled.kv import PAGE


def pack_on_host(requests: Requests, step: Step, packed: Packed) -> None:
    """Read the lengths back, build the rows and send them: `kernels.reference_rows.pack_rows`, in
    numpy, with one copy down and one up."""
    slot_N = step.slot_N
    down = (
        step.length_N[:, None],
        requests.anchor_S[slot_N][:, None],
        step.candidate_NC,
        requests.context_S[slot_N][:, None],
        requests.page_SL[slot_N],
    )
    host_NX = torch.cat([x.long() for x in down], 1).cpu().numpy()
    widths = np.cumsum([x.shape[1] for x in down])[:-1]
    length_N1, anchor_N1, candidate_NC, context_N1, page_NL = np.split(host_NX, widths, 1)
    length_N, context_N = length_N1[:, 0], context_N1[:, 0]
    rows, end_N = packed.token_M.shape[0], np.cumsum(length_N)
    used = int(end_N[-1])

    columns = np.zeros((5, rows), np.int64)
    token_M, position_M, slot_M, lane_M, tile_row_M = columns[:, :used]
    lane_M[:] = np.repeat(np.arange(len(length_N)), length_N)
    tile_row_M[:] = np.arange(used) - (end_N - length_N)[lane_M]
    token_M[:] = np.concatenate((anchor_N1, candidate_NC), 1)[lane_M, tile_row_M]
    position_M[:] = context_N[lane_M] + tile_row_M
    logical_M = np.minimum(position_M // PAGE, page_NL.shape[1] - 1)
    slot_M[:] = page_NL[lane_M, logical_M] * PAGE + position_M % PAGE

    offset_N = np.where(length_N > 0, end_N - length_N, used)
    filled_NT = np.minimum(np.arange(VERIFY_TILE), np.maximum(length_N1 - 1, 0))
    row_NT = np.minimum(offset_N[:, None] + filled_NT, rows - 1)
    _send(
        [*columns, row_NT.ravel(), offset_N], [*packed[:5], packed.row_NT.view(-1), step.offset_N]
    )


def _send(values: list[np.ndarray], buffers: list[Tensor]) -> None:
    host = torch.from_numpy(np.concatenate(values))
    if buffers[0].device.type == "cuda":
        host = host.pin_memory()
    device = host.to(buffers[0].device, non_blocking=True)
    for buffer, part in zip(
        buffers, torch.split(device, [b.numel() for b in buffers]), strict=True
    ):
        buffer.copy_(part)

"""Tokens per pass of a drafter over known greedy responses, without decoding anything."""

from collections.abc import Callable, Iterator
from typing import Any

import drafter_batches as batches
import numpy as np
import torch
from drafter_batches import Batch
from drafter_features import FeatureCache, Ints
from torch import Tensor


def pieces(cache: FeatureCache, anchors: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Every (sequence, `anchors` consecutive offsets) of a cache, -1 past the last anchor."""
    for index in np.argsort(cache.length, kind="stable"):
        last = int(cache.response_length[index]) - 1
        for start in range(0, last, anchors):
            offset = np.arange(start, start + anchors)
            yield int(index), np.where(offset < last, offset, -1)


@torch.no_grad()
def replay(
    hidden_of: Callable[[Batch], Tensor],
    head_VD: Tensor,
    cache: FeatureCache,
    *,
    groups: list[str] | None,
    sequences: int,
    anchors: int,
    pad_length: int,
    pad_rows: int,
) -> dict[str, Any]:
    """Replay greedy decoding over the responses of a cache: what the runtime would accept.

    Drafts at every anchor, then walks each response from its first token: a pass accepts the
    leading drafts equal to the response and commits one token more. Returns, for "all" and each of
    `groups` (one name a sequence), tokens per pass and slot-1 accuracy over all anchors.
    """
    lead = np.zeros(len(cache.token_T), np.int64)
    reach_T = batches.reach(cache, greedy=False)
    todo = list(pieces(cache, anchors))
    for start in range(0, len(todo), sequences):
        some = todo[start : start + sequences]
        some = some + [(some[0][0], np.full(anchors, -1))] * (sequences - len(some))
        part = np.asarray([index for index, _ in some])
        offset = np.stack([offsets for _, offsets in some])
        batch = batches.plan(
            cache,
            part,
            offset,
            reach_T,
            gamma=1.0,
            kl=0.0,
            greedy=False,
            pad_length=pad_length,
            pad_rows=pad_rows,
        )
        hidden = hidden_of(batch).to(head_VD.dtype)
        own = batch.mass_RK.argmax(-1, keepdim=True)
        label_R = batch.token_RK.gather(1, own)[:, 0]
        hit = torch.zeros(
            offset.size * cache.shape.block_size, dtype=torch.bool, device=hidden.device
        )
        for row in range(0, len(hidden), pad_rows):
            rows = slice(row, row + pad_rows)
            guess = (hidden[rows] @ head_VD.T).argmax(-1)
            real = batch.weight_R[rows] > 0
            hit[batch.row_R[rows][real]] = (guess == label_R[rows])[real]
        run = hit.view(-1, cache.shape.block_size)[:, 1:].long().cumprod(-1).sum(-1).cpu().numpy()
        valid = offset >= 0
        token = (cache.label_start[part][:, None] + offset)[valid]
        lead[token] = run.reshape(offset.shape)[valid]
    return walk(cache, lead, groups)


def walk(cache: FeatureCache, lead_T: Ints, groups: list[str] | None = None) -> dict[str, Any]:
    """Count decode passes and committed tokens from the accepted drafts at each anchor."""
    counts: dict[str, np.ndarray[Any, Any]] = {}
    for index in range(cache.num_sequences):
        start, size = int(cache.label_start[index]), int(cache.response_length[index])
        here, passes = 0, 0
        while here < size - 1:
            here, passes = here + int(lead_T[start + here]) + 1, passes + 1
        first = int((lead_T[start : start + size - 1] > 0).sum())
        row = np.asarray([size - 1, passes, first, size - 1])
        for name in ["all", *([groups[index]] if groups else [])]:
            counts[name] = counts.get(name, 0) + row
    return {
        name: {
            "tokens_per_pass": round(float(tokens / max(1, passes)), 4),
            "slot_1_accuracy": round(float(first / max(1, anchors)), 4),
            "tokens": int(tokens),
        }
        for name, (tokens, passes, first, anchors) in counts.items()
    }

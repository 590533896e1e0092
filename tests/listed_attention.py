"""FlexAttention's kernel, emulated on a CPU: it reads the pages of the block tables alone."""

from typing import Any

import torch
from torch import Tensor

from dscale.compiled.kv import PAGE


def listed_attention(
    q_NHQE: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **options: Any
) -> Tensor:
    """FlexAttention as its kernel does it: every query block over its listed pages, the mask on
    those that are not full. What is masked still meets the weights: 0 x NaN is NaN."""
    (_, heads, rows, head_dim), height = q_NHQE.shape, block_mask.BLOCK_SIZE[0]
    out = torch.empty_like(q_NHQE)
    tables = (
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        (block_mask.kv_num_blocks, block_mask.kv_indices),
    )
    for lane in range(len(q_NHQE)):
        for block, query in enumerate(torch.arange(rows).split(height)):
            full, tail = (at[lane, 0, block, : count[lane, 0, block]] for count, at in tables)
            at = (torch.cat((full, tail))[:, None] * PAGE + torch.arange(PAGE)).flatten()
            keys, values = (
                x[0, :, at].repeat_interleave(heads // x.shape[1], 0) for x in (key, value)
            )
            score = q_NHQE[lane, :, query] @ keys.mT * head_dim**-0.5
            seen = block_mask.mask_mod(torch.tensor(lane), torch.tensor(0), query[:, None], at)
            seen = seen | (torch.arange(len(at)) < len(full) * PAGE)
            weight = torch.softmax(score.masked_fill(~seen, -torch.inf), -1)
            out[lane, :, query] = weight @ values
    return out

"""Attention of a lane whose pages are shared out among sub-lanes: the shares, and the merge of
what each sub-lane found.

Shapes: N lanes, S sub-lanes of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf

import torch
from torch import Tensor


def shares(used_N: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """First and end of the logical pages of each sub-lane, `[N, S]`: of the lane's `used_N` pages
    (integers), each belongs to one sub-lane, and shares differ by one page at most."""
    bound = used_N[:, None] * torch.arange(split + 1, device=used_N.device) // split
    return bound[:, :-1], bound[:, 1:]


def merge(out: Sequence[Tensor], lse: Sequence[Tensor]) -> Tensor:
    """Attention over all keys from attention over each share of them.

    `out[s]` `[..., E]`, the share's own result; `lse[s]` `[..., 1]` float32, the log-sum-exp of
    its scores, -inf where it saw no key: such a share counts nothing, and where no share saw any,
    the result is 0. Computed in float32, returned in the dtype of `out`.

    Weights are written at full width: Inductor keeps what several terms share, and what has
    another shape than they, in a kernel and a buffer of its own."""
    wide = [own.expand_as(part) for own, part in zip(lse, out, strict=True)]
    top = reduce(torch.maximum, wide)
    top = torch.where(top == -inf, 0.0, top)
    weight = [torch.exp(own - top) for own in wide]
    total = reduce(torch.add, weight)
    terms = [
        torch.where(own == -inf, 0.0, w * part.float())
        for own, w, part in zip(wide, weight, out, strict=True)
    ]
    return (reduce(torch.add, terms) / torch.where(total == 0, 1.0, total)).to(out[0].dtype)

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

    A weight is written as 1 / sum_j exp(lse_j - lse_s): Inductor would store a maximum or a sum
    that several weights share, in a kernel of its own."""

    def term(s: int) -> Tensor:
        others = (torch.exp(lse[j] - lse[s]) for j in range(len(lse)) if j != s)
        return torch.where(lse[s] == -inf, 0.0, out[s].float() / sum(others, 1.0))

    return reduce(torch.add, map(term, range(len(out)))).to(out[0].dtype)

"""Torch code that stages run without a kernel of ours: the noise of sampling, acceptance of
uniform rows, and on a CPU the gate. References of the operations are in the files `reference_*`.

Shapes: N lanes, W rows per lane."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the splitmix64 increment
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def mix64(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 bit patterns (a bijection; arithmetic wraps)."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def position_gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, that depends on (request seed, absolute position, token id)
    and nothing else.

    Three int64 tensors that broadcast together. Counter-based, so drafter, mode, budget and batch
    mates cannot change what a request samples (docs/design.md, "Accept")."""
    key = mix64(mix64(seed + _GOLDEN) + position * _GOLDEN)
    bits = mix64((key + token) * _GOLDEN)
    # 53 bits keep the upper tail exact where it matters: the noise is -log(E) of a small
    # exponential E.
    uniform = ((bits >> 11) & ((1 << 53) - 1)).to(torch.float32) * 2.0**-53 + 2.0**-55
    return -torch.log(-torch.log1p(-torch.clamp(uniform, max=1.0 - 2.0**-24)))


def accept_prefix(candidate: Tensor, length: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest candidate prefix that the target chose too.

    `candidate` [N, W - 1] int64: drafted tokens. `length` [N] int64: rows verified, k_i in 0..W
    (the anchor row and k_i - 1 candidates). `choice` [N, W] int64: the token the target chose
    after the anchor and after each candidate; argmax when greedy, the Gumbel-max draw when
    sampling, which keeps candidate x with probability P(x) and else draws from P without x (paper,
    section III-D).

    Returns (accepted [N], successor [N]), int64: accepted candidates a_i in 0..k_i - 1 and the
    token after them. Lanes with length 0 get 0 and their first choice; callers ignore them."""
    width = choice.shape[1]
    index = torch.arange(width - 1, device=choice.device)
    match = (candidate == choice[:, :-1]) & (index < length[:, None] - 1)
    accepted = match.long().cumprod(1).sum(1)
    return accepted, torch.gather(choice, 1, accepted[:, None])[:, 0]


def gated(x: Tensor) -> Tensor:
    """silu(gate) * up, x `[M, 2 * K]` being gate and up side by side."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up

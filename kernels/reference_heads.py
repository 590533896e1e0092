"""Head norm, rotary embedding and attention tiles in eager code: the specification of
`tile_heads`, and its implementation on the CPU.

Shapes: R rows, H query heads, K KV heads, E head_dim, N lanes, T tile rows, G query heads that
share a tile, S pool slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, rounded as transformers rounds it.

    The scale is computed in float32, the result rounded to `x.dtype`, then multiplied by `weight`.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotate(x_RHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the half-split rotary embedding (dimension i pairs with i + head_dim / 2).

    `cos`, `sin` `[R, 1, E / 2]`."""
    a, b = x_RHE.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def tiles_of(q_RHE: Tensor, row_NT: Tensor, shared: int) -> Tensor:
    """Gather rows into tiles `[N, H / G, G * T, E]`, head major: tile row q = g * T + t."""
    lanes, height = row_NT.shape
    heads, head_dim = q_RHE.shape[1:]
    split = (lanes, height, heads // shared, shared, head_dim)
    tiles = q_RHE[row_NT].view(split).permute(0, 2, 3, 1, 4)
    return tiles.reshape(lanes, heads // shared, shared * height, head_dim)


def tile_heads(
    qkv_RXE: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    row_NT: Tensor,
    slot_R: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    shared: int,
    eps: float,
) -> Tensor:
    """Query tiles `[N, H / G, G * T, E]`; keys and values go to the pools `[S, K, E]` in place.
    Queries and keys are normed (unless the norms are None) and rotated, values stay as they are.

    `qkv_RXE` `[R, H + 2 K, E]`, the fused projection. `q_norm`, `k_norm` `[E]`. `cos`, `sin`
    `[R, 1, E / 2]`. `row_NT` int64: the row of each tile cell. `slot_R` int64: each row's place
    in the pools. `shared`: G."""
    kv_heads = key_pool.shape[1]
    q, k, v = torch.split(qkv_RXE, [qkv_RXE.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    key_pool.index_put_((slot_R,), rotate(k, cos, sin))
    value_pool.index_put_((slot_R,), v)
    return tiles_of(rotate(q, cos, sin), row_NT, shared)

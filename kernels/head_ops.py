"""The custom operation between a layer's fused projection and its attention.

Shapes: R rows, H query heads, K KV heads, E head_dim, N lanes, T tile rows, G query heads that
share a tile, S pool slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscale.kernels import reference_heads
from dscale.kernels.registry import expect, expect_tensor, implement

torch.library.define(
    "dscale::tile_heads",
    "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, Tensor row, Tensor slot,"
    " Tensor(a!) key_pool, Tensor(b!) value_pool, int shared, float eps) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_tile_heads: Any = torch.ops.dscale.tile_heads.default


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
    """Query tiles `[N, H / G, G * T, E]`; keys and values go to the pools `[S, K, E]`, each row's
    to its slot. reference_heads says how. On a GPU a result is rounded once, on the CPU after each
    of four steps, as transformers does. Of rows that share a slot any may stay.

    Raises ValueError for other shapes or dtypes, one norm without the other, an odd E, pools that
    are not contiguous, or heads that do not divide by `shared`. A slot behind the pool is not
    looked for on a GPU."""
    tile: Tensor = _tile_heads(
        qkv_RXE, q_norm, k_norm, cos, sin, row_NT, slot_R, key_pool, value_pool, shared, eps
    )
    return tile


def _check(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    row: Tensor,
    slot: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    shared: int,
    eps: float,
) -> None:
    floats = (torch.bfloat16, torch.float16, torch.float32)
    ok = qkv.ndim == 3 and qkv.shape[2] % 2 == 0 and qkv.dtype in floats
    expected = "bfloat16, float16 or float32 [R, H + 2 K, E] with an even E"
    expect(ok, "qkv", expected, f"{qkv.dtype} {list(qkv.shape)}")
    ok = key_pool.ndim == 3 and 1 <= key_pool.shape[1] < qkv.shape[1] / 2
    expect(ok, "key_pool", "[S, K, E], K beside queries", list(key_pool.shape))
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        expect_tensor(name, pool, qkv.dtype, (*key_pool.shape[:2], qkv.shape[2]))
        expect(pool.is_contiguous(), name, "a contiguous tensor", f"strides {pool.stride()}")
    expect_tensor("slot", slot, torch.int64, qkv.shape[:1])
    heads = qkv.shape[1] - 2 * key_pool.shape[1]
    expect(shared >= 1 and heads % shared == 0, "shared", f"a divisor of {heads}", shared)
    expect((q_norm is None) == (k_norm is None), "k_norm", "both norms or none", "one of them")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            expect_tensor(name, norm, qkv.dtype, (qkv.shape[2],))
    for name, table in (("cos", cos), ("sin", sin)):
        expect_tensor(name, table, qkv.dtype, (qkv.shape[0], 1, qkv.shape[2] // 2))
    ok = row.ndim == 2 and row.dtype == torch.int64
    expect(ok, "row", "torch.int64 [N, T]", f"{row.dtype} {list(row.shape)}")
    expect(eps >= 0, "eps", "0 or more", eps)


def _fake(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    row: Tensor,
    slot: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    shared: int,
    eps: float,
) -> Tensor:
    lanes, height = row.shape
    heads, head_dim = qkv.shape[1] - 2 * key_pool.shape[1], qkv.shape[2]
    return qkv.new_empty((lanes, heads // shared, shared * height, head_dim))


implement("tile_heads", _check, reference_heads.tile_heads, _fake)

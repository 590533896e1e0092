"""The custom operation between a layer's fused projection and its attention.

Shapes: R rows, H query heads, K KV heads, E head_dim, N lanes, T tile rows, G query heads that
share a tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscale.kernels import reference_heads
from dscale.kernels.registry import expect, expect_tensor, implement

torch.library.define(
    "dscale::tile_heads",
    "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, Tensor row,"
    " int kv_heads, int shared, float eps) -> (Tensor, Tensor)",
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
    kv_heads: int,
    shared: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Query tiles `[N, H / G, G * T, E]` and keys `[R, K, E]`; reference_heads says how. On a GPU
    the result is rounded once, on the CPU after each of four steps, as transformers does.

    Raises ValueError for other shapes or dtypes, one norm without the other, an odd E, or heads
    that do not divide by `shared`."""
    tile, key = _tile_heads(qkv_RXE, q_norm, k_norm, cos, sin, row_NT, kv_heads, shared, eps)
    return tile, key


def _check(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    row: Tensor,
    kv_heads: int,
    shared: int,
    eps: float,
) -> None:
    floats = (torch.bfloat16, torch.float16, torch.float32)
    ok = qkv.ndim == 3 and qkv.shape[2] % 2 == 0 and qkv.dtype in floats
    expected = "bfloat16, float16 or float32 [R, H + 2 K, E] with an even E"
    expect(ok, "qkv", expected, f"{qkv.dtype} {list(qkv.shape)}")
    heads = qkv.shape[1] - 2 * kv_heads
    expect(kv_heads >= 1 and heads >= 1, "kv_heads", "1 or more beside queries", kv_heads)
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
    kv_heads: int,
    shared: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    lanes, height = row.shape
    rows, width, head_dim = qkv.shape
    tiles = (lanes, (width - 2 * kv_heads) // shared, shared * height, head_dim)
    return qkv.new_empty(tiles), qkv.new_empty((rows, kv_heads, head_dim))


implement("tile_heads", _check, reference_heads.tile_heads, _fake)

"""Triton launcher of tile_heads: one program per tile cell for the queries, one per row for its
key and value.

Seven Inductor kernels did the same (query and key norm, rotary embedding, tile gather, the write
to the pools)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.dependent import launch_options, starts_early


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
    """The reference's contract, on a GPU or under Triton's interpreter. One launch."""
    rows, width, head_dim = qkv_RXE.shape
    kv_heads, (lanes, height) = key_pool.shape[1], row_NT.shape
    heads = width - 2 * kv_heads
    tile = qkv_RXE.new_empty((lanes, heads // shared, shared * height, head_dim))
    qkv_RXE = qkv_RXE.contiguous()
    normed, early = q_norm is not None, starts_early(qkv_RXE.device)
    _tile_heads[(lanes * height + rows,)](
        qkv_RXE,
        qkv_RXE if q_norm is None else q_norm,
        qkv_RXE if k_norm is None else k_norm,
        cos.contiguous(),
        sin.contiguous(),
        row_NT.contiguous(),
        slot_R.contiguous(),
        tile,
        key_pool,
        value_pool,
        lanes * height,
        height,
        eps,
        heads,
        kv_heads,
        shared,
        head_dim,
        triton.next_power_of_2(heads),
        triton.next_power_of_2(kv_heads),
        triton.next_power_of_2(head_dim // 2),
        normed,
        early,
        num_warps=4,
        **launch_options(early),
    )
    return tile


@triton.jit(do_not_specialize=["cells", "height"])  # type: ignore[untyped-decorator]
def _tile_heads(
    qkv: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    row_of: tl.tensor,
    slot_of: tl.tensor,
    tile_out: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    cells: tl.tensor,
    height: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    E: tl.constexpr,
    H_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """The queries of a tile cell, or behind the `cells`, key and value of a row."""
    program = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if program < cells:
        q_row = tl.load(row_of + program)
        q_head = tl.arange(0, H_BLOCK)
        lane, cell = program // height, program % height
        line = (lane * (H // SHARED) + q_head // SHARED).to(tl.int64) * SHARED + q_head % SHARED
        q_to = tile_out + (line * height + cell) * E
        q_from = qkv + q_row * ((H + 2 * K) * E) + q_head * E
        _head(q_from, q_to, q_norm, cos, sin, q_row, q_head < H, eps, E, HALF_BLOCK, NORMED)
    else:
        k_row = (program - cells).to(tl.int64)
        k_head = tl.arange(0, K_BLOCK)
        place = (tl.load(slot_of + k_row) * K + k_head) * E
        k_from = qkv + k_row * ((H + 2 * K) * E) + (H + k_head) * E
        at = tl.arange(0, 2 * HALF_BLOCK)
        is_value = (k_head < K)[:, None] & (at < E)[None, :]
        value = tl.load((k_from + K * E)[:, None] + at[None, :], mask=is_value)
        tl.store((value_pool + place)[:, None] + at[None, :], value, mask=is_value)
        k_to = key_pool + place
        _head(k_from, k_to, k_norm, cos, sin, k_row, k_head < K, eps, E, HALF_BLOCK, NORMED)


@triton.jit  # type: ignore[untyped-decorator]
def _head(
    start: tl.tensor,
    to: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    row: tl.tensor,
    is_head: tl.tensor,
    eps: tl.tensor,
    E: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
) -> None:
    """Norm and rotate a row's heads in float32, rounded once."""
    HALF: tl.constexpr = E // 2
    dtype = to.dtype.element_ty
    at = tl.arange(0, HALF_BLOCK)
    is_at = at < HALF
    mask = is_head[:, None] & is_at[None, :]
    low = tl.load(start[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(start[:, None] + (HALF + at)[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(square / E + eps)[:, None]
        low_weight = tl.load(norm + at, mask=is_at, other=0.0).to(tl.float32)[None, :]
        high_weight = tl.load(norm + HALF + at, mask=is_at, other=0.0).to(tl.float32)[None, :]
        low = low * scale * low_weight
        high = high * scale * high_weight
    c = tl.load(cos + row * HALF + at, mask=is_at, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * HALF + at, mask=is_at, other=0.0).to(tl.float32)[None, :]
    first, second = low * c - high * s, high * c + low * s
    tl.store(to[:, None] + at[None, :], first.to(dtype), mask=mask)
    tl.store(to[:, None] + (HALF + at)[None, :], second.to(dtype), mask=mask)

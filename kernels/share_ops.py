"""The custom operations behind attention whose keys are shared out among sub-lanes.

Shapes: N lanes, X sub-lanes, R rows, T tile rows, K tiles of heads, G heads of a tile, E
head_dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dscale.kernels import reference_shares
from dscale.kernels.reference_shares import Shares
from dscale.kernels.registry import expect, expect_tensor, implement

torch.library.define(
    "dscale::share_pages",
    "(Tensor used, Tensor lane, int parts, int most) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_share_pages: Any = torch.ops.dscale.share_pages.default


def share_pages(used_N: Tensor, lane_R: Tensor, parts: int, most: int) -> Shares:
    """Pages of lanes shared out among sub-lanes; reference_shares says how.

    In a graph that is being traced their number is an expression of the number of lanes. Raises
    ValueError for other shapes or dtypes; pages and lanes that are not there are not looked for on
    a GPU."""
    return Shares(*_share_pages(used_N, lane_R, parts, most))


def _check_pages(used: Tensor, lane: Tensor, parts: int, most: int) -> None:
    for name, x, dtype in (("used", used, torch.int32), ("lane", lane, torch.int64)):
        expect_tensor(name, x, dtype, (x.numel(),))
    expect(used.numel() >= 1, "used", "at least 1 lane", "none")
    for name, number in (("parts", parts), ("most", most)):
        expect(number >= 1, name, "at least 1", number)


def _fake_pages(used: Tensor, lane: Tensor, parts: int, most: int) -> tuple[Tensor, ...]:
    sub_lanes = torch.sym_max(used.shape[0], parts)  # type: ignore[no-untyped-call]
    sizes = (*3 * (sub_lanes,), *2 * (lane.shape[0],))
    return tuple(lane.new_empty((size,)) for size in sizes)


implement("share_pages", _check_pages, reference_shares.share_pages, _fake_pages)

torch.library.define(
    "dscale::merge_shares",
    "(Tensor out, Tensor lse, Tensor first, Tensor count, Tensor tile_row, int height) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_merge_shares: Any = torch.ops.dscale.merge_shares.default


def merge_shares(
    out_XKQE: Tensor,
    lse_XKQ: Tensor,
    first_R: Tensor,
    count_R: Tensor,
    tile_row_R: Tensor,
    height: int,
) -> Tensor:
    """Packed rows `[R, K * G * E]` of attention over all keys; reference_shares says how.

    Raises ValueError for other shapes or dtypes. Sub-lanes and tile rows that are not there are
    not looked for on a GPU."""
    rows: Tensor = _merge_shares(out_XKQE, lse_XKQ, first_R, count_R, tile_row_R, height)
    return rows


def _check(
    out: Tensor, lse: Tensor, first: Tensor, count: Tensor, tile_row: Tensor, height: int
) -> None:
    floats = (torch.bfloat16, torch.float16, torch.float32)
    ok = out.ndim == 4 and out.dtype in floats
    expected = "bfloat16, float16 or float32 [X, K, G * T, E]"
    expect(ok, "out", expected, f"{out.dtype} {list(out.shape)}")
    expect_tensor("lse", lse, torch.float32, tuple(out.shape[:3]))
    for name, index in (("first", first), ("count", count), ("tile_row", tile_row)):
        expect_tensor(name, index, torch.int64, (first.numel(),))
    ok = height >= 1 and out.shape[2] % height == 0
    expect(ok, "height", f"a divisor of {out.shape[2]}", height)


def _fake(
    out: Tensor, lse: Tensor, first: Tensor, count: Tensor, tile_row: Tensor, height: int
) -> Tensor:
    heads = out.shape[1] * (out.shape[2] // height)
    return out.new_empty((first.shape[0], heads * out.shape[3]))


implement("merge_shares", _check, reference_shares.merge_shares, _fake)

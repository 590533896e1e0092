"""Paged attention over packed rows: tile routes, the mask factories, and the one FlexAttention
call.

Rows of all requests are packed flat, `[R, ...]`. For attention they are gathered into tiles, one
per lane, of T rows; under grouped-query attention the G query heads that share a KV head become
one tile of G * T rows, head major (tile row q = g * T + t), so that keys and values are read once
(docs/design.md, "Tiles"). A per-head tile, for comparison, keeps the heads apart.

Shapes: N lanes, T tile height, R rows, H query heads, K KV heads, G = H / K, E head_dim, P pages,
S keys, X sub-lanes (the lanes of a tile that is not split)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)

from dscale.compiled.kv import PAGE, Paging
from dscale.compiled.split import merge, shares

VERIFY_TILE = 16
"""Rows a request may verify in one pass: one anchor and 15 candidates (paper, section II)."""

SPLIT = 1
"""Sub-lanes of a decode tile on a GPU: eight lanes of eight KV heads leave half of it idle."""

PREFILL_TILE = 64
"""Rows of a prefill tile on a GPU: with four query heads a KV head, two query blocks of 128."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# For the eager prefill on a GPU: eager FlexAttention would materialise every score. Inlined when a
# stage is compiled.
compiled_flex = torch.compile(flex_attention, dynamic=True)


class Rows(NamedTuple):
    """The packed rows of one forward, all int64.

    `position_R`: absolute position. `slot_R`: pool slot the row's key and value go to (scratch for
    padding). `lane_R`, `tile_row_R`: the tile cell that holds the row. `row_NT`: the row in each
    tile cell (any valid row where the cell is empty; its output is read by nobody), `[X, T]` once
    `sub_lanes` has copied the tiles."""

    position_R: Tensor
    slot_R: Tensor
    lane_R: Tensor
    tile_row_R: Tensor
    row_NT: Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile route, fixed at trace time.

    `height` T rows per lane. `causal`: row t sees positions <= context + t; otherwise every row
    sees positions < context + T (the draft block, which is bidirectional). `flex`: FlexAttention,
    else gathered pages and SDPA. `per_head`: a tile for each query head instead of one for each
    group. `block`: rows of a query block, None for what the tile needs (both matter to
    FlexAttention only). `split`: sub-lanes that share a lane's pages, each with a copy of the
    query tile (FlexAttention only)."""

    height: int
    causal: bool = True
    flex: bool = True
    per_head: bool = False
    block: int | None = None
    split: int = 1

    def __post_init__(self) -> None:
        if self.split < 1 or (self.split > 1 and not self.flex):
            expected = "1 or more" if self.flex else "1 on the gathered route"
            raise ValueError(f"split: expected {expected}, got {self.split}")

    def heads(self, group: int) -> int:
        """Query heads that share a tile."""
        return 1 if self.per_head and self.flex else group

    def q_block(self, group: int) -> int:
        """Rows of one query block: the packed tile, padded to a power of two, at most 128."""
        return self.block or min(128, 1 << (self.height * self.heads(group) - 1).bit_length())


def sub_lanes(rows: Rows, tile: Tile) -> Rows:
    """The rows with a copy of each lane's tile for each of its sub-lanes, `row_NT` `[X, T]`;
    sub-lane s of lane n is x = n * split + s. Once per forward, for `tile_heads` and `attend`."""
    if tile.split == 1:
        return rows
    return rows._replace(row_NT=rows.row_NT[:, None].expand(-1, tile.split, -1).flatten(0, 1))


def paged_mask(logical_NP: Tensor, context_N: Tensor, tile: Tile, tables: BlockTables) -> MaskMod:
    """Mask of physical keys: visible iff the page is the sub-lane's and the position within
    limits."""
    height, causal, split = tile.height, tile.causal, tile.split
    first_X, end_X = tables.first_X, tables.end_X

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        lane = b // split if split > 1 else b
        logical = logical_NP[lane, kv // PAGE]
        position = logical * PAGE + kv % PAGE
        limit = context_N[lane] + (q % height if causal else height - 1)
        if first_X is None or end_X is None:
            return (logical >= 0) & (position <= limit)
        return (logical >= first_X[b]) & (logical < end_X[b]) & (position <= limit)

    return visible


class BlockTables(NamedTuple):
    """Which pages each query block reads, in FlexAttention's form; all layers share it.

    `tail_count`, `full_count` int32 `[X, 1, B]`; `tail_index`, `full_index` int32 `[X, 1, B, P]`.
    Full pages lie before the context's last one and skip the mask function, the tail runs it.
    `first_X`, `end_X` int32: the logical pages of each sub-lane, None without a split."""

    tail_count: Tensor
    tail_index: Tensor
    full_count: Tensor
    full_index: Tensor
    first_X: Tensor | None = None
    end_X: Tensor | None = None


def block_tables(paging: Paging, tile: Tile, group: int) -> BlockTables:
    """Read the tables off the page table, without a mask evaluation and without a host read.

    The index tables span all physical pages because FlexAttention's CPU lowering demands it.
    """
    logical_pages, num_pages = paging.page_NL.shape[1], paging.logical_NP.shape[1]
    num_blocks = -(-tile.height * tile.heads(group) // tile.q_block(group))
    used_N = torch.clamp((paging.context_N + tile.height + PAGE - 1) // PAGE, max=logical_pages)
    full_N1 = (paging.context_N // PAGE)[:, None]
    first_NS, end_NS = shares(used_N, tile.split)
    tail_NS = torch.maximum(first_NS, full_N1)
    page_NSL = paging.page_NL[:, None].expand(-1, tile.split, -1)

    def index(start_NS: Tensor) -> Tensor:
        index_NSL = start_NS[..., None] + torch.arange(logical_pages, device=start_NS.device)
        index_NSL = torch.clamp(index_NSL, max=logical_pages - 1).long()
        index_XL = torch.gather(page_NSL, 2, index_NSL).flatten(0, 1)
        index_XP = F.pad(index_XL, (0, num_pages - logical_pages)).repeat(1, num_blocks)
        return as_blocks(index_XP, (1, num_blocks, num_pages))

    def count(count_NS: Tensor) -> Tensor:
        count_X1 = torch.clamp(count_NS, min=0).int().flatten()[:, None]
        return as_blocks(count_X1.repeat(1, num_blocks), (1, num_blocks))

    return BlockTables(
        count(end_NS - tail_NS),
        index(tail_NS),
        count(torch.minimum(end_NS, full_N1) - first_NS),
        index(first_NS),
        *((x_NS.flatten().int() for x_NS in (first_NS, end_NS)) if tile.split > 1 else ()),
    )


def as_blocks(table_NX: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View a contiguous `[N, X]` table as `[N, *shape]` with the strides of that shape, exactly.

    FlexAttention's kernel finds a lane's table by the stride of the head dimension, whose size is
    1. Inductor gives such a dimension stride 0 in an ordinary view, and then every lane reads the
    first lane's table.
    """
    strides = [table_NX.shape[1]]
    for size in shape[:-1]:
        strides.append(strides[-1] // size)
    return table_NX.contiguous().as_strided((table_NX.shape[0], *shape), (*strides, 1))


def block_mask(tables: BlockTables, paging: Paging, tile: Tile, group: int) -> BlockMask:
    """The block mask of one forward from its tables and the page table."""
    return BlockMask.from_kv_blocks(
        *tables[:4],
        BLOCK_SIZE=(tile.q_block(group), PAGE),
        mask_mod=paged_mask(paging.logical_NP, paging.context_N, tile, tables),
        seq_lengths=(tile.height * tile.heads(group), paging.logical_NP.shape[1] * PAGE),
        compute_q_blocks=False,
    )


Visibility = BlockTables | Tensor
"""What all layers of one forward share: block tables, or the gathered route's dense mask."""


def visibility(paging: Paging, tile: Tile, group: int) -> Visibility:
    """Work out once per forward which keys its rows see, in the form the tile's route needs."""
    return block_tables(paging, tile, group) if tile.flex else gathered_mask(paging, tile, group)


def attend(
    q_NXQE: Tensor,
    pool: tuple[Tensor, Tensor],
    rows: Rows,
    paging: Paging,
    tile: Tile,
    seen: Visibility,
) -> Tensor:
    """Attend query tiles `[X, H / G, G * T, E]` (see `tile_heads`) to their requests' pages; the
    result goes back to packed rows, `[R, H * E]`. `rows` as `sub_lanes` gives them."""
    (num_rows,), height = rows.lane_R.shape, rows.row_NT.shape[1]
    head_dim, shared = q_NXQE.shape[3], q_NXQE.shape[2] // height
    num_heads = q_NXQE.shape[1] * shared
    group = num_heads // pool[0].shape[1]

    def packed(tiles: Tensor, lane_R: Tensor) -> Tensor:
        cells = tiles.view(tiles.shape[0], -1, shared, height, tiles.shape[3])
        return cells.permute(0, 3, 1, 2, 4)[lane_R, rows.tile_row_R]

    if isinstance(seen, Tensor):
        out = packed(gathered_attention(q_NXQE, pool, paging, seen), rows.lane_R)
    else:
        flex: Callable[..., Any] = flex_attention
        if q_NXQE.device.type != "cpu":
            flex = compiled_flex
        key, value = (x.transpose(0, 1)[None] for x in pool)
        settings: dict[str, Any] = {
            "block_mask": block_mask(seen, paging, tile, group),
            "enable_gqa": shared != group,
            "kernel_options": kernel_options(tile, group, q_NXQE),
        }
        if tile.split == 1:
            out = packed(flex(q_NXQE, key, value, **settings), rows.lane_R)
        else:
            tiles, aux = flex(q_NXQE, key, value, return_aux=AuxRequest(lse=True), **settings)
            parts = [rows.lane_R * tile.split + s for s in range(tile.split)]
            lse = aux.lse[..., None]
            out = merge([packed(tiles, x) for x in parts], [packed(lse, x) for x in parts])
    return out.reshape(num_rows, num_heads * head_dim)


def kernel_options(tile: Tile, group: int, query: Tensor) -> FlexKernelOptions:
    """Options of FlexAttention's main kernel for queries `[..., E]`.

    Its decoding kernel, which AUTO would pick for short queries, took 3.8 ms where this one took
    0.83 ms (4 layers of 8B shape, 8 requests, H200); 4 warps, 3 stages and 64 keys a step were the
    best of those tried for a verify tile. 128 rows of 128 sums are too many for the registers of 4
    warps; PyTorch takes 8 there, too. Three stages of wide float32 heads would not fit into a
    Hopper GPU's 227 KiB of shared memory."""
    height, keys, head_dim = max(16, tile.q_block(group)), 64, query.shape[-1]
    staged = query.element_size() * head_dim * (height + 3 * 2 * keys)
    return {
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": height,
        "BLOCK_N": keys,
        "num_warps": 8 if height * head_dim >= 128 * 128 else 4,
        "num_stages": 3 if staged <= 220 * 1024 else 1,
    }


def gathered_mask(paging: Paging, tile: Tile, group: int) -> Tensor:
    """Dense visibility `[N, 1, G * T, S]` over the pages in use, for the gathered route."""
    used = int((paging.context_N.max() + tile.height + PAGE - 1) // PAGE)
    used = min(used, paging.page_NL.shape[1])
    device = paging.context_N.device
    rows_T = (
        torch.arange(tile.height, device=device)
        if tile.causal
        else torch.full((tile.height,), tile.height - 1)
    )
    limit_NT = paging.context_N[:, None] + rows_T.to(device)
    key_S = torch.arange(used * PAGE, device=device)
    return (key_S <= limit_NT[..., None]).repeat(1, group, 1)[:, None]


def gathered_attention(
    q_NKQE: Tensor, pool: tuple[Tensor, Tensor], paging: Paging, mask: Tensor
) -> Tensor:
    """Copy each lane's pages together and call SDPA: the CPU route, and the reference of the
    FlexAttention one.

    Eager FlexAttention would score the whole pool for every lane.
    """
    used = mask.shape[-1] // PAGE
    page_X = paging.page_NL[:, :used].reshape(-1)
    lanes = q_NKQE.shape[0]

    def gather(pool_SKE: Tensor) -> Tensor:
        pages = pool_SKE.view(-1, PAGE, *pool_SKE.shape[1:]).index_select(0, page_X)
        return pages.view(lanes, used * PAGE, *pool_SKE.shape[1:]).transpose(1, 2)

    return F.scaled_dot_product_attention(q_NKQE, gather(pool[0]), gather(pool[1]), attn_mask=mask)

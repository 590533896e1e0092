"""Paged attention over packed rows: tile routes, the mask factories, and the one FlexAttention
call.

Rows of all requests are packed flat, `[R, ...]`. For attention they are gathered into tiles, one
per lane, of T rows; under grouped-query attention the G query heads that share a KV head become
one tile of G * T rows, head major (tile row q = g * T + t), so that keys and values are read once
(docs/design.md, "Tiles"). A per-head tile, for comparison, keeps the heads apart.

Shapes: N lanes, T tile height, R rows, H query heads, K KV heads, G = H / K, E head_dim, P pages,
L pages of a lane, S keys, X sub-lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from dscale.compiled.kv import PAGE, Paging
from dscale.compiled.shares import attend_shares, sub_paging
from dscale.kernels.ops import merge_shares, share_pages

VERIFY_TILE = 16
"""Rows a request may verify in one pass: one anchor and 15 candidates (paper, section II)."""

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
    tile cell (any valid row where the cell is empty; its output is read by nobody).

    With sub-lanes (`attention_inputs`) every sub-lane has a tile, a copy of its lane's, and
    `lane_R` is the first sub-lane of the row's lane."""

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
    FlexAttention only). `parts`: sub-lanes that share the keys of all lanes, or as many as lanes
    where those are more (FlexAttention only); 0: none, rows are gathered without a merge."""

    height: int
    causal: bool = True
    flex: bool = True
    per_head: bool = False
    block: int | None = None
    parts: int = 0

    def __post_init__(self) -> None:
        if self.parts < 0 or (self.parts and not self.flex):
            expected = "0 or more" if self.flex else "0 on the gathered route"
            raise ValueError(f"parts: expected {expected}, got {self.parts}")

    def heads(self, group: int) -> int:
        """Query heads that share a tile."""
        return 1 if self.per_head and self.flex else group

    def q_block(self, group: int) -> int:
        """Rows of one query block: the packed tile, padded to a power of two, 16 to 128."""
        rows = 1 << (self.height * self.heads(group) - 1).bit_length()
        return self.block or min(128, max(16, rows))


def paged_mask(logical_NP: Tensor, context_N: Tensor, tile: Tile) -> MaskMod:
    """Mask of physical keys: visible iff the page is the lane's and the position within limits."""
    height, causal = tile.height, tile.causal

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        logical = logical_NP[b, kv // PAGE]
        position = logical * PAGE + kv % PAGE
        limit = context_N[b] + (q % height if causal else height - 1)
        return (logical >= 0) & (position <= limit)

    return visible


class BlockTables(NamedTuple):
    """Which pages each query block reads, in FlexAttention's form; all layers share it.

    `tail_count`, `full_count` int32 `[N, 1, B]`; `tail_index`, `full_index` int32 `[N, 1, B, P]`.
    Full pages lie before the context's last one and skip the mask function, the tail runs it.
    """

    tail_count: Tensor
    tail_index: Tensor
    full_count: Tensor
    full_index: Tensor


def used_pages(paging: Paging, tile: Tile) -> Tensor:
    """Pages of each lane that its tile's rows reach, `[N]`."""
    used_N = (paging.context_N + tile.height + PAGE - 1) // PAGE
    return torch.clamp(used_N, max=paging.page_NL.shape[1])


def block_tables(
    paging: Paging, tile: Tile, group: int, held_N: Tensor | None = None
) -> BlockTables:
    """Read the tables off the page table, without a mask evaluation and without a host read.
    `held_N`: pages of each sub-lane, None for lanes, which have what their rows reach.

    The index tables span all physical pages because FlexAttention's CPU lowering demands it.
    """
    logical_pages, num_pages = paging.page_NL.shape[1], paging.logical_NP.shape[1]
    num_blocks = -(-tile.height * tile.heads(group) // tile.q_block(group))
    full_N = paging.context_N // PAGE
    used_N = used_pages(paging, tile)
    if held_N is not None:
        full_N = torch.minimum(torch.clamp(full_N, min=0), held_N)
        used_N = torch.minimum(torch.clamp(used_N, min=0), held_N)
    tail_NL = full_N[:, None] + torch.arange(logical_pages, device=full_N.device)
    tail_NL = torch.gather(paging.page_NL, 1, torch.clamp(tail_NL, max=logical_pages - 1).long())

    def spread(index_NL: Tensor) -> Tensor:
        index_NX = F.pad(index_NL, (0, num_pages - logical_pages)).repeat(1, num_blocks)
        return as_blocks(index_NX, (1, num_blocks, num_pages))

    def count(count_N: Tensor) -> Tensor:
        return as_blocks(count_N.int()[:, None].repeat(1, num_blocks), (1, num_blocks))

    return BlockTables(
        count(used_N - full_N), spread(tail_NL), count(full_N), spread(paging.page_NL)
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
        *tables,
        BLOCK_SIZE=(tile.q_block(group), PAGE),
        mask_mod=paged_mask(paging.logical_NP, paging.context_N, tile),
        seq_lengths=(tile.height * tile.heads(group), paging.logical_NP.shape[1] * PAGE),
        compute_q_blocks=False,
    )


class SharedTables(NamedTuple):
    """Block tables of sub-lanes, and of how many each row's lane has, int64 `[R]`."""

    tables: BlockTables
    count_R: Tensor


Visibility = BlockTables | SharedTables | Tensor
"""What all layers of one forward share: block tables, or the gathered route's dense mask."""


def visibility(paging: Paging, tile: Tile, group: int) -> Visibility:
    """Work out once per forward which keys its rows see, in the form the tile's route needs."""
    return block_tables(paging, tile, group) if tile.flex else gathered_mask(paging, tile, group)


def attention_inputs(
    rows: Rows, paging: Paging, tile: Tile, group: int
) -> tuple[Rows, Paging, Visibility]:
    """What `tile_heads` and `attend` read, once for all layers of a forward: the given rows and
    pages with what they see, or where the tile has sub-lanes, the same with those as lanes."""
    if not tile.parts:
        return rows, paging, visibility(paging, tile, group)
    used_N = used_pages(paging, tile)
    part = share_pages(used_N, rows.lane_R, tile.parts, paging.page_NL.shape[1])
    rows = rows._replace(row_NT=rows.row_NT[part.lane_X], lane_R=part.start_R)
    paging = sub_paging(paging, part.lane_X, part.first_X, part.held_X)
    tables = block_tables(paging, tile, group, part.held_X)
    return rows, paging, SharedTables(tables, part.count_R)


def attend(
    q_NXQE: Tensor,
    pool: tuple[Tensor, Tensor],
    rows: Rows,
    paging: Paging,
    tile: Tile,
    seen: Visibility,
) -> Tensor:
    """Attend query tiles `[N, H / G, G * T, E]` (see `tile_heads`) to their requests' pages; the
    result is packed rows, `[R, H * E]`. `rows`, `paging`, `seen`: from `attention_inputs`."""
    (num_rows,), (lanes, height) = rows.lane_R.shape, rows.row_NT.shape
    head_dim, shared = q_NXQE.shape[3], q_NXQE.shape[2] // height
    num_heads = q_NXQE.shape[1] * shared
    group = num_heads // pool[0].shape[1]
    if isinstance(seen, SharedTables):
        mask = block_mask(seen.tables, paging, tile, group)
        options = kernel_options(tile, group, q_NXQE)
        parts = attend_shares(q_NXQE, pool, mask, options)
        return merge_shares(*parts, rows.lane_R, seen.count_R, rows.tile_row_R, height)
    if isinstance(seen, Tensor):
        out = gathered_attention(q_NXQE, pool, paging, seen)
    else:
        mask = block_mask(seen, paging, tile, group)
        key, value = (x.transpose(0, 1)[None] for x in pool)
        flex = flex_attention if q_NXQE.device.type == "cpu" else compiled_flex
        out = flex(
            q_NXQE,
            key,
            value,
            block_mask=mask,
            enable_gqa=shared != group,
            kernel_options=kernel_options(tile, group, q_NXQE),
        )
    out = out.view(lanes, num_heads // shared, shared, height, head_dim).permute(0, 3, 1, 2, 4)
    return out[rows.lane_R, rows.tile_row_R].reshape(num_rows, num_heads * head_dim)


def kernel_options(tile: Tile, group: int, query: Tensor) -> FlexKernelOptions:
    """Options of FlexAttention's main kernel for queries `[..., E]`.

    Its decoding kernel, which AUTO would pick for short queries, took 3.8 ms where this one took
    0.83 ms (4 layers of 8B shape, 8 requests, H200); 4 warps, 3 stages and 64 keys a step were the
    best of those tried for a verify tile. 128 rows of 128 sums are too many for the registers of 4
    warps; PyTorch takes 8 there, too. Three stages of wide float32 heads would not fit into a
    Hopper GPU's 227 KiB of shared memory, nor would one of 64 keys of 256; heads are padded to
    powers of two there."""
    height, keys, head_dim = tile.q_block(group), 64, 1 << (query.shape[-1] - 1).bit_length()

    def fits(stages: int) -> bool:
        staged = query.element_size() * head_dim * (height + stages * 2 * keys)
        return staged <= 220 * 1024

    stages = 3 if fits(3) else 1
    return {
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": height,
        "BLOCK_N": keys if fits(stages) else keys // 2,
        "num_warps": 8 if height * head_dim >= 128 * 128 else 4,
        "num_stages": stages,
    }


def gathered_mask(paging: Paging, tile: Tile, group: int) -> Tensor:
    """Dense visibility `[N, 1, G * T, S]` over the pages in use, for the gathered route."""
    used = int((paging.context_N.max() + tile.height + PAGE - 1) // PAGE)
    used = min(used, paging.page_NL.shape[1])
    device = paging.context_N.device
    row_T = torch.arange(tile.height, device=device)
    row_T = row_T if tile.causal else torch.full_like(row_T, tile.height - 1)
    limit_NT = paging.context_N[:, None] + row_T
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

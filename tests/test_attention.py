"""Paged attention, both routes, against each request's own dense attention; the block tables."""

from itertools import product

import pytest
import torch
from paged import shuffled_paging, slots
from torch import Tensor

from dscale.compiled.attention import (
    Rows,
    Tile,
    attend,
    block_mask,
    block_tables,
    kernel_options,
    visibility,
)
from dscale.compiled.kv import KVPool, Paging, slots_of, write
from dscale.kernels.reference_heads import tiles_of

CONTEXT = [0, 5, 127, 128, 200]
PAGES, NUM_PAGES = 3, 17
KV_HEADS, HEAD_DIM = 2, 16

TILES = pytest.mark.parametrize(
    "tile",
    [Tile(height=h, causal=c) for h, c in product((16, 32), (True, False))],
    ids=lambda tile: f"{tile.height}-{'causal' if tile.causal else 'block'}",
)
GROUPS = pytest.mark.parametrize("group", [1, 3, 4, 7])


def sees(context: int, row: int, position: int, tile: Tile) -> bool:
    """A verified row sees the context and the rows up to itself; a draft row its whole block."""
    if position < context:
        return True
    other = position - context
    return other <= row if tile.causal else other < tile.height


def ragged_rows(paging: Paging, widths: list[int], height: int) -> Rows:
    """Rows of lanes with different widths, packed without holes, and a padding row at the end."""
    position, slot, lane_R, tile_row = [], [], [], []
    row_NT = torch.zeros(len(widths), height, dtype=torch.int64)
    for lane, width in enumerate(widths):
        start = int(paging.context_N[lane])
        row_NT[lane, :width] = torch.arange(len(position), len(position) + width)
        position += range(start, start + width)
        slot += slots(paging, lane, start, start + width).tolist()
        lane_R += [lane] * width
        tile_row += range(width)
    columns = ([*position, 0], [*slot, 0], [*lane_R, 0], [*tile_row, 0])
    return Rows(*(torch.tensor(column) for column in columns), row_NT)


def filled_pool(num_slots: int) -> tuple[Tensor, Tensor]:
    """A pool that earlier requests have used: nothing in it is zero."""
    shape = (num_slots, KV_HEADS, HEAD_DIM)
    return 3 * torch.randn(shape), 3 * torch.randn(shape)


def dense(
    q_RHE: Tensor, pool: tuple[Tensor, Tensor], rows: Rows, paging: Paging, tile: Tile
) -> Tensor:
    """Attention written row by row from the definition; keys in the order of their positions."""
    out = []
    for row in range(q_RHE.shape[0]):
        lane, tile_row = int(rows.lane_R[row]), int(rows.tile_row_R[row])
        context = int(paging.context_N[lane])
        seen = [p for p in range(context + tile.height) if sees(context, tile_row, p, tile)]
        at = slots(paging, lane, 0, len(seen))
        group = q_RHE.shape[1] // KV_HEADS
        key, value = (x[at].repeat_interleave(group, 1) for x in pool)
        weight = torch.softmax(torch.einsum("he,she->hs", q_RHE[row], key) / HEAD_DIM**0.5, -1)
        out.append(torch.einsum("hs,she->he", weight, value).flatten())
    return torch.stack(out)


@GROUPS
@TILES
def test_both_routes_equal_dense_attention(group: int, tile: Tile) -> None:
    torch.manual_seed(group)
    paging = shuffled_paging(CONTEXT, PAGES, NUM_PAGES)
    full = tile.height
    widths = [full, 1, 3, full - 1, 7] if tile.causal else [full] * 5
    rows = ragged_rows(paging, widths, full)
    pool = filled_pool(NUM_PAGES * 128)
    num_rows = len(rows.position_R)
    write(pool, rows.slot_R, *torch.randn(2, num_rows, KV_HEADS, HEAD_DIM))
    q_RHE = torch.randn(num_rows, KV_HEADS * group, HEAD_DIM)
    expected = dense(q_RHE, pool, rows, paging, tile)
    for flex in (False, True):
        route = Tile(height=full, causal=tile.causal, flex=flex)
        mask = visibility(paging, route, group)
        assert isinstance(mask, Tensor) is not flex
        tiles = tiles_of(q_RHE, rows.row_NT, group)
        out = attend(tiles, pool, rows, paging, route, mask)
        assert out.sub(expected)[:-1].abs().max() < 1e-5, f"{flex=}"


@GROUPS
@TILES
def test_block_tables_list_whole_context_pages_as_full_and_the_tail_as_partial(
    group: int, tile: Tile
) -> None:
    paging = shuffled_paging(CONTEXT, PAGES, NUM_PAGES)
    mask = block_mask(block_tables(paging, tile, group), paging, tile, group)
    num_blocks = mask.kv_num_blocks.shape[-1]
    assert num_blocks * mask.BLOCK_SIZE[0] >= tile.height * group
    for lane, context in enumerate(CONTEXT):
        touched, whole = set(), set()
        for page, physical in enumerate(paging.page_NL[lane].tolist()):
            first, last = page * 128, page * 128 + 127
            if sees(context, tile.height - 1, first, tile):
                touched.add(physical)
            if last < context:
                whole.add(physical)
        for block in range(num_blocks):
            full = mask.full_kv_indices[lane, 0, block, : mask.full_kv_num_blocks[lane, 0, block]]
            part = mask.kv_indices[lane, 0, block, : mask.kv_num_blocks[lane, 0, block]]
            listed = full.tolist() + part.tolist()
            assert len(set(listed)) == len(listed)
            assert set(full.tolist()) == whole
            assert set(listed) == touched


@GROUPS
@TILES
def test_mask_function_equals_its_dense_twin(group: int, tile: Tile) -> None:
    paging = shuffled_paging(CONTEXT, PAGES, NUM_PAGES)
    mask_mod = block_mask(block_tables(paging, tile, group), paging, tile, group).mask_mod
    q, kv = torch.arange(tile.height * group)[:, None], torch.arange(NUM_PAGES * 128)
    for lane, context in enumerate(CONTEXT):
        twin = torch.zeros(tile.height, NUM_PAGES * 128, dtype=torch.bool)
        at = slots(paging, lane, 0, PAGES * 128)
        for row in range(tile.height):
            twin[row, at] = torch.tensor(
                [sees(context, row, position, tile) for position in range(PAGES * 128)]
            )
        out = mask_mod(torch.tensor(lane), torch.tensor(0), q, kv)
        assert torch.equal(out.expand(len(q), -1), twin.repeat(group, 1))


def test_slots_follow_the_page_table() -> None:
    paging = shuffled_paging(CONTEXT, PAGES, NUM_PAGES)
    position_NT = torch.tensor([[0, 127, 128, 383]]).expand(5, -1)
    expected = torch.stack([slots(paging, lane, 0, 384)[[0, 127, 128, 383]] for lane in range(5)])
    assert torch.equal(slots_of(position_NT, paging.page_NL), expected)
    past_the_table = slots_of(torch.full((5, 1), 385), paging.page_NL)
    assert torch.equal(past_the_table[:, 0], paging.page_NL[:, 2] * 128 + 1)


@pytest.mark.parametrize("flex", [False, True])
def test_an_idle_lane_on_the_scratch_page_stays_finite(flex: bool) -> None:
    tile = Tile(height=16, flex=flex)
    logical_NP = torch.full((1, NUM_PAGES), -1, dtype=torch.int32)
    logical_NP[:, 0] = 0
    paging = Paging(torch.zeros(1, PAGES, dtype=torch.int32), logical_NP, torch.zeros(1).int())
    index = torch.arange(16)
    rows = Rows(index, index, torch.zeros(16, dtype=torch.int64), index, index[None])
    pool = filled_pool(NUM_PAGES * 128)
    out = attend(
        tiles_of(torch.randn(16, 6, HEAD_DIM), rows.row_NT, 3),
        pool,
        rows,
        paging,
        tile,
        visibility(paging, tile, 3),
    )
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "height", "warps", "stages"),
    [
        (torch.bfloat16, 128, 16, 4, 3),
        (torch.bfloat16, 128, 64, 8, 3),
        (torch.bfloat16, 64, 64, 4, 3),
        (torch.float32, 64, 64, 4, 3),
        (torch.float32, 128, 16, 4, 1),
        (torch.float32, 128, 64, 8, 1),
        (torch.float32, 80, 64, 8, 1),
        (torch.float16, 96, 64, 8, 3),
        (torch.float32, 256, 64, 8, 1),
        (torch.bfloat16, 256, 16, 8, 1),
    ],
)
def test_options_fit_the_tile(
    dtype: torch.dtype, head_dim: int, height: int, warps: int, stages: int
) -> None:
    got = kernel_options(Tile(height=height), 4, torch.empty(1, 1, 1, head_dim, dtype=dtype))
    assert (got["num_warps"], got["num_stages"]) == (warps, stages)
    rows, keys = got["BLOCK_M"], got["BLOCK_N"]
    assert rows == min(4 * height, 128)
    padded = 1 << (head_dim - 1).bit_length()
    assert dtype.itemsize * padded * (rows + 2 * keys * stages) <= 227 * 1024


@pytest.mark.parametrize("group", range(1, 9))
def test_query_blocks_are_whole_blocks_of_the_kernel(group: int) -> None:
    """Else Inductor refuses them; the kernel's products have at least 16 rows."""
    for height in range(2, 17):
        tile = Tile(height=height, causal=False)
        rows = kernel_options(tile, group, torch.empty(1, 1, 1, 64))["BLOCK_M"]
        assert rows >= 16
        assert tile.q_block(group) % rows == 0, height


def test_every_pool_has_a_storage_of_its_own() -> None:
    """Compiled layers write them in place for that reason only."""
    made = KVPool(3, 2, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    buffers = list(made.buffers())
    assert len({x.untyped_storage().data_ptr() for x in buffers}) == len(buffers) == 6
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in buffers)

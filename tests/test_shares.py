"""Keys of lanes shared out among sub-lanes: the tables, attention, the layer."""

from itertools import chain, product
from typing import Any

import pytest
import test_target
import torch
from paged import shuffled_paging
from test_attention import HEAD_DIM, KV_HEADS, dense, filled_pool, ragged_rows
from test_target import check_all, with_heads
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dscale.compiled.attention import (
    BlockTables,
    Rows,
    SharedTables,
    Tile,
    attend,
    attention_inputs,
    block_mask,
    block_tables,
)
from dscale.compiled.flow import uniform_rows
from dscale.compiled.kv import PAGE, Paging, write
from dscale.compiled.shares import PARTS
from dscale.kernels.reference_heads import tiles_of

PAGES, HEIGHT = 8, 16
BORDERS = [0, 1, 111, 112, 113, 127, 128, 129, 240, 255, 256, 384, 511, 895, 896, 1000, 1007]

CAUSAL = pytest.mark.parametrize("causal", [True, False])
GROUPS = pytest.mark.parametrize("group", [3, 4])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def paging_of(context: list[int], device: str = "cpu") -> Paging:
    paging = shuffled_paging(context, PAGES, PAGES * len(context) + 1, seed=len(context))
    return Paging(*(table.to(device) for table in paging))


def test_parts_are_for_flex_attention_alone() -> None:
    with pytest.raises(ValueError, match="parts: expected 0 on the gathered route, got 2"):
        Tile(height=HEIGHT, flex=False, parts=2)
    with pytest.raises(ValueError, match="parts: expected 0 or more, got -1"):
        Tile(height=HEIGHT, parts=-1)


def listed(count: Tensor, index: Tensor, lane: int) -> list[int]:
    pages: list[int] = index[lane, 0, 0, : count[lane, 0, 0]].tolist()
    return pages


@CAUSAL
def test_each_page_is_in_the_tables_of_one_sub_lane_and_its_mask_keeps_to_them(
    causal: bool,
) -> None:
    for context in (BORDERS[:8], BORDERS[8:16], [1007], [0, 1000], BORDERS):
        parts = max(PARTS, len(context))
        paging = paging_of(context)
        whole, tile = (Tile(height=HEIGHT, causal=causal, parts=p) for p in (0, PARTS))
        tables = block_tables(paging, whole, 4)
        mask = block_mask(tables, paging, whole, 4)
        rows, apart, seen = attention_inputs(uniform_rows(paging, HEIGHT, HEIGHT), paging, tile, 4)
        assert isinstance(seen, SharedTables)
        masks = block_mask(seen.tables, apart, tile, 4)
        assert len(rows.row_NT) == len(seen.tables.full_count) == parts
        for lane in range(len(context)):
            start, count = (int(x[lane * HEIGHT]) for x in (rows.lane_R, seen.count_R))
            mine = range(start, start + count)
            assert torch.equal(rows.row_NT[start], torch.arange(HEIGHT) + lane * HEIGHT)
            for at in (0, 2):
                want = listed(*tables[at : at + 2], lane)
                assert list(chain(*(listed(*seen.tables[at : at + 2], x) for x in mine))) == want
            sees = [keys(masks, x, paging) for x in mine]
            assert torch.equal(torch.stack(sees).sum(0), keys(mask, lane, paging).long())
            for x, visible in zip(mine, sees, strict=True):
                pages = set((visible.any(0).nonzero()[:, 0] // PAGE).tolist())
                tail, full = (listed(*seen.tables[at : at + 2], x) for at in (0, 2))
                assert set(full) <= pages <= {*tail, *full}
        unused = [x for x in range(parts) if x >= start + count]
        assert not any(listed(*seen.tables[at : at + 2], x) for at in (0, 2) for x in unused)
        assert not any(keys(masks, x, paging).any() for x in unused)


def keys(mask: BlockMask, lane: int, paging: Paging) -> Tensor:
    """Which keys of the pool the rows of a lane's tile see."""
    q, kv = torch.arange(HEIGHT * 4)[:, None], torch.arange(paging.logical_NP.shape[1] * PAGE)
    return mask.mask_mod(torch.tensor(lane), torch.tensor(0), q, kv).expand(len(q), -1)


@GROUPS
@CAUSAL
def test_attention_of_shares_equals_dense_attention(causal: bool, group: int) -> None:
    torch.manual_seed(group)
    tile = Tile(height=HEIGHT, causal=causal, parts=PARTS)
    some = ([1007], [0], [1, 1000], [112], [128, 240, 1007])
    for context in (BORDERS, BORDERS[:9], BORDERS[:8], BORDERS[8:16], *some):
        paging = paging_of(context)
        widths = (3 * [HEIGHT, 1, 3, HEIGHT - 1, 7, 2, 16, 5])[: len(context)]
        rows = ragged_rows(paging, widths if causal else [HEIGHT] * len(context), HEIGHT)
        pool = filled_pool(paging.logical_NP.shape[1] * PAGE)
        num_rows = len(rows.position_R)
        write(pool, rows.slot_R, *torch.randn(2, num_rows, KV_HEADS, HEAD_DIM))
        q_RHE = torch.randn(num_rows, KV_HEADS * group, HEAD_DIM)
        want = dense(q_RHE, pool, rows, paging, tile)
        apart, shared, seen = attention_inputs(rows, paging, tile, group)
        got = attend(tiles_of(q_RHE, apart.row_NT, group), pool, apart, shared, tile, seen)
        assert got.shape == want.shape
        assert got.sub(want)[:-1].abs().max() < 2e-5, context


def test_a_lane_whose_pages_are_all_hidden_gives_zero() -> None:
    paging = paging_of([300, 300])
    paging.logical_NP[0] = -1  # as if no page were the first lane's
    got = attended(paging, Tile(height=HEIGHT, parts=PARTS))
    assert torch.equal(got[:HEIGHT], torch.zeros_like(got[:HEIGHT]))
    assert got[HEIGHT:].isfinite().all()
    assert (got[HEIGHT:] != 0).all()


def attended(paging: Paging, tile: Tile, dtype: torch.dtype = torch.float32) -> Tensor:
    """Attention of whole tiles over a pool without a zero."""
    device, generator = paging.page_NL.device, torch.Generator().manual_seed(7)
    size = (2, paging.logical_NP.shape[1] * PAGE, KV_HEADS, HEAD_DIM)
    key, value = (x.to(device, dtype) for x in 3 * torch.randn(size, generator=generator))
    rows = uniform_rows(paging, HEIGHT, HEIGHT)
    shape = (len(rows.lane_R), KV_HEADS * 3, HEAD_DIM)
    q_RHE = torch.randn(shape, generator=generator).to(device, dtype)
    rows, paging, seen = attention_inputs(rows, paging, tile, 3)
    tiles = tiles_of(q_RHE, rows.row_NT, 3)
    return attend(tiles, (key, value), rows, paging, tile, seen)


def with_parts(height: int, flex: bool) -> Tile:
    return Tile(height=height, flex=flex, parts=PARTS if height == HEIGHT else 0)


@pytest.mark.parametrize(("family", "heads", "kv_heads"), [("llama", 9, 3), ("qwen3", 32, 8)])
@torch.no_grad()
def test_a_target_with_shared_keys_equals_transformers(
    family: str, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_target, "Tile", with_parts)
    check_all(with_heads(family, heads, kv_heads), flex=True, size=300)


def test_compiled_tables_are_the_eager_ones_and_one_compile_serves_all_lanes() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []
    inductor = torch._dynamo.lookup_backend("inductor")

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return inductor(graph, inputs)

    tile, pages = Tile(height=HEIGHT, parts=PARTS), paging_of(2 * BORDERS)

    def tables(lane_N: Tensor, lane_R: Tensor, tile_row_R: Tensor) -> list[Tensor]:
        paging = Paging(*(table[lane_N] for table in pages))
        row_NT = lane_N[:, None] + torch.arange(HEIGHT)
        rows = Rows(lane_R, lane_R, lane_R, tile_row_R, row_NT)
        rows, paging, seen = attention_inputs(rows, paging, tile, 4)
        assert isinstance(seen, SharedTables)
        return [rows.row_NT, rows.lane_R, *paging, *seen.tables, seen.count_R]

    compiled = torch.compile(tables, fullgraph=True, backend=backend)
    for lanes in (8, 17, 2, 32, 16, 3, 9):
        lane_N = torch.randperm(34)[:lanes]
        lane_R, tile_row_R = torch.arange(2 * lanes) // 2, torch.arange(2 * lanes) % 2
        for moving in (lane_N, lane_R, tile_row_R):
            torch._dynamo.mark_dynamic(moving, 0)
        got, want = (f(lane_N, lane_R, tile_row_R) for f in (compiled, tables))
        assert all(map(torch.equal, got, want)), lanes
        for table in BlockTables(*got[5:9]):
            assert table.stride() == torch.empty(table.shape).stride()
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.gpu
@needs_gpu
@CAUSAL
def test_attention_of_shares_equals_unshared_on_a_gpu(causal: bool) -> None:
    """Block tables count here, which eager FlexAttention does not read."""
    torch._dynamo.reset()
    contexts = [BORDERS[:8], BORDERS[8:16], [0, 0], [1000, 3], [1007, 0, 112, 128]]
    for context, dtype in product(contexts, (torch.float32, torch.bfloat16)):
        paging = paging_of(context, "cuda")
        tiles = [Tile(height=HEIGHT, causal=causal, parts=p) for p in (0, PARTS)]
        want, got = (attended(paging, tile, dtype).float() for tile in tiles)
        assert got.sub(want).abs().max() < (1e-4 if dtype == torch.float32 else 0.1), context

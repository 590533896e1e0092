"""The drafter over a paged cache against z-lab's own code (PyPI `dflash`), run per request."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import drafter_json, drafter_tensors, fitting_target, write_drafter
from paged import shuffled_paging, slots
from torch import Tensor

from dscale.compiled.attention import Tile
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import uniform_rows
from dscale.compiled.kv import KVPool, Paging
from dscale.compiled.target import Target
from dscale.drafter_files import load_drafter

PAGES, NUM_PAGES = 3, 12
CONTEXT = [5, 131, 250]
PROGRESS = [[1, 16, 7], [4, 1, 2], [8, 3, 8]]


def reference(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """z-lab's model with the same weights in float32."""
    module = pytest.importorskip("dflash.model", reason="needs PyPI dflash (z-lab's model class)")
    from transformers import Qwen3Config

    model = module.DFlashDraftModel(Qwen3Config(**raw)).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


class ReferenceRequest:
    """z-lab's loop for one request: its own cache, cropped to the context after each draft."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self.model, self.cache = model, DynamicCache(config=model.config)

    def draft(self, block_WD: Tensor, new_taps_XF: Tensor) -> Tensor:
        """One draft over the cached context, the new context rows and the block."""
        cached = self.cache.get_seq_length()
        total = cached + new_taps_XF.shape[0] + block_WD.shape[0]
        hidden = self.model(
            position_ids=torch.arange(cached, total)[None],
            noise_embedding=block_WD[None],
            target_hidden=new_taps_XF[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.crop(-block_WD.shape[0])
        return hidden[0]


def small(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Tensor], Drafter]:
    """A random drafter in float32: its config, stored tensors and loaded form."""
    raw = drafter_json(**changes)
    tensors = drafter_tensors(raw, dtype=torch.float32)
    write_drafter(folder, raw, tensors)
    target = fitting_target(raw)
    return raw, tensors, load_drafter(folder, target, dtype=torch.float32, device="cpu")


def pool_of(drafter: Drafter, num_pages: int = NUM_PAGES) -> KVPool:
    """An empty draft pool."""
    c = drafter.config
    return KVPool(
        c.num_layers, num_pages, c.num_kv_heads, c.head_dim, torch.float32, torch.device("cpu")
    )


def write_lanes(
    drafter: Drafter, paging: Paging, pool: KVPool, taps: list[Tensor], spans: list[range]
) -> None:
    """Write each lane's span of positions in one call, two padding rows to scratch among them."""
    rows = [taps[lane][span.start : span.stop] for lane, span in enumerate(spans)]
    slot = [slots(paging, lane, span.start, span.stop) for lane, span in enumerate(spans)]
    position = [torch.arange(span.start, span.stop) for span in spans]
    pad = torch.zeros(2, dtype=torch.int64)
    drafter.write_context(
        torch.cat([torch.full_like(taps[0][:2], 1e3), *rows]),
        torch.cat([pad, *position]),
        torch.cat([pad, *slot]),
        pool,
    )


def draft(
    drafter: Drafter, blocks_NWD: Tensor, paging: Paging, pool: KVPool, flex: bool = False
) -> Tensor:
    """One draft of every lane; `[N, B, D]` in, `[N, B, D]` out."""
    size = drafter.config.block_size
    rows = uniform_rows(paging, size, size)
    tile = Tile(height=size, causal=False, flex=flex)
    return drafter.draft(blocks_NWD.flatten(0, 1), rows, paging, pool, tile).view_as(blocks_NWD)


@pytest.mark.parametrize("block_size", [16, 8])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (32, 8)])
@torch.inference_mode()
def test_every_round_equals_z_labs_code(
    tmp_path: Path, heads: int, kv_heads: int, num_layers: int, block_size: int
) -> None:
    raw, tensors, drafter = small(
        tmp_path,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=num_layers,
        block_size=block_size,
    )
    model = reference(raw, tensors)
    requests = [ReferenceRequest(model) for _ in CONTEXT]
    generator = torch.Generator().manual_seed(1)
    features = len(drafter.config.taps) * drafter.config.hidden_size
    taps = [torch.randn(PAGES * 128, features, generator=generator) for _ in CONTEXT]
    pool = pool_of(drafter)
    done, context = [0] * len(CONTEXT), list(CONTEXT)
    for index, progress in enumerate([*PROGRESS, [0, 0, 0]]):
        paging = shuffled_paging(context, PAGES, NUM_PAGES)
        spans = [range(*span) for span in zip(done, context, strict=True)]
        write_lanes(drafter, paging, pool, taps, spans)
        blocks = torch.randn(len(context), block_size, 32, generator=generator)
        ours = draft(drafter, blocks, paging, pool)
        for lane, request in enumerate(requests):
            new = taps[lane][done[lane] : context[lane]]
            theirs = request.draft(blocks[lane], new)
            assert ours[lane].sub(theirs).abs().max() < 1e-5, (index, lane)
        done = context
        context = [a + min(b, block_size) for a, b in zip(context, progress, strict=True)]


@torch.inference_mode()
def test_rejected_rows_in_the_cache_change_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, _, drafter = small(tmp_path)
    taps = [torch.randn(PAGES * 128, 64) for _ in CONTEXT]
    blocks = torch.randn(3, 16, 32)
    paging = shuffled_paging(CONTEXT, PAGES, NUM_PAGES)
    exact, sloppy = pool_of(drafter), pool_of(drafter)
    write_lanes(drafter, paging, exact, taps, [range(n) for n in CONTEXT])
    write_lanes(drafter, paging, sloppy, taps, [range(n + 16) for n in CONTEXT])
    assert torch.equal(
        draft(drafter, blocks, paging, exact), draft(drafter, blocks, paging, sloppy)
    )


@torch.inference_mode()
def test_the_block_is_bidirectional_and_context_ends_before_the_anchor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, _, drafter = small(tmp_path)
    taps = [torch.randn(PAGES * 128, 64) for _ in CONTEXT]
    paging = shuffled_paging(CONTEXT, PAGES, NUM_PAGES)
    pool = pool_of(drafter)
    write_lanes(drafter, paging, pool, taps, [range(n) for n in CONTEXT])
    blocks = torch.randn(3, 16, 32)
    before = draft(drafter, blocks, paging, pool)
    last = blocks.clone()
    last[:, -1] += 1
    assert (draft(drafter, last, paging, pool) - before)[:, 0].abs().min() > 0
    taps[1] = taps[1].clone()
    taps[1][0] += 1
    write_lanes(drafter, paging, pool, taps, [range(n) for n in CONTEXT])
    changed = (draft(drafter, blocks, paging, pool) - before).abs().amax((1, 2))
    assert changed[1] > 1e-4
    assert changed[0] == changed[2] == 0


@torch.inference_mode()
def test_flex_route_equals_gathered_route(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, _, drafter = small(tmp_path, num_attention_heads=6)
    taps = [torch.randn(256, 64) for _ in range(2)]
    paging = shuffled_paging([3, 130], 2, 5)
    pool = pool_of(drafter, 5)
    write_lanes(drafter, paging, pool, taps, [range(3), range(130)])
    blocks = torch.randn(2, 16, 32)
    gathered = draft(drafter, blocks, paging, pool)
    flex = draft(drafter, blocks, paging, pool, flex=True)
    assert flex.sub(gathered).abs().max() < 1e-5


def test_embed_block(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, _, drafter = small(tmp_path)
    embedding = torch.randn(60, 32)
    target = Target(
        fitting_target(drafter_json()), embedding, [], torch.ones(32), embedding, torch.ones(4)
    )
    block = drafter.embed_block(torch.tensor([7, 11]), target)
    assert block.shape == (2, 16, 32)
    assert torch.equal(block[:, 0], embedding[[7, 11]])
    assert torch.equal(block[:, 1:], embedding[59].expand(2, 15, 32))
    drafter.mask_embedding = torch.arange(32.0)
    block = drafter.embed_block(torch.tensor([7, 11]), target)
    assert torch.equal(block[:, 0], embedding[[7, 11]])
    assert torch.equal(block[:, 1:], torch.arange(32.0).expand(2, 15, 32))


@torch.inference_mode()
def test_one_graph_without_breaks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, _, drafter = small(tmp_path)
    taps = [torch.randn(256, 64) for _ in range(2)]
    paging = shuffled_paging([3, 130], 2, 5)
    pool = pool_of(drafter, 5)

    def step(taps_RF: Tensor, position_R: Tensor, slot_R: Tensor, blocks_NWD: Tensor) -> Tensor:
        drafter.write_context(taps_RF, position_R, slot_R, pool)
        return draft(drafter, blocks_NWD, paging, pool, flex=True)

    position = torch.arange(3)
    inputs = taps[0][:3], position, slots(paging, 0, 0, 3), torch.randn(2, 16, 32)
    eager = step(*inputs)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(*inputs)
    assert compiled.sub(eager).abs().max() < 1e-5

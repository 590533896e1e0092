"""Pages: what the allocator hands out, the tables built from it, and that nobody reads others'."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, left_padded, plain, prompt, tiny_drafter, tiny_model

import dscale
from dscale.compiled.decide import Decide
from dscale.compiled.flow import Requests, Step
from dscale.compiled.kv import PAGE
from dscale.core import Core
from dscale.pages import PageAllocator, pages_for
from dscale.request import Request
from dscale.workspace import Workspace, bucket_of

INPUTS = left_padded([prompt(n) for n in (1, 127, 128, 129, 300)], pad=VOCAB - 1)


@pytest.mark.parametrize("seed", range(5))
def test_allocator_under_random_use(seed: int) -> None:
    rng, num_pages = random.Random(seed), 40
    allocator, held = PageAllocator(num_pages), dict[int, list[int]]()
    for turn in range(2000):
        free = num_pages - 1 - sum(map(len, held.values()))
        assert allocator.num_free == free
        if held and rng.random() < 0.5:
            allocator.give_back(held.pop(rng.choice(list(held))))
            continue
        count = rng.randint(1, 12)
        if count > free:
            with pytest.raises(ValueError, match=rf"pages: expected at most {free} .* {count}"):
                allocator.take(count)
            continue
        held[turn] = allocator.take(count)
        assert len(held[turn]) == count
        every = [page for pages in held.values() for page in pages]
        assert len(set(every)) == len(every)
        assert all(0 < page < num_pages for page in every)
    for pages in held.values():
        allocator.give_back(pages)
    assert sorted(allocator.take(num_pages - 1)) == list(range(1, num_pages))


def test_pages_given_back_twice_are_noticed() -> None:
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    allocator.give_back(pages)
    with pytest.raises(AssertionError):
        allocator.give_back(pages)


@pytest.mark.parametrize(
    ("length", "new", "pages"), [(1, 1, 1), (95, 1, 1), (96, 1, 2), (1, 224, 3), (128, 96, 2)]
)
def test_pages_of_a_request(length: int, new: int, pages: int) -> None:
    assert pages_for(length, new) == pages
    request = Request(prompt=[1] * length, max_new_tokens=new)
    assert request.num_pages == pages
    # The last block drafted starts at the last token but one and writes 16 slots.
    assert length + new - 2 + 16 < pages * PAGE


def test_buckets() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 9, 13, 29, 32, 33, 64, 65)] == [
        2, 2, 4, 12, 16, 32, 32, 64, 64, 96
    ]  # fmt: skip


def check_tables(host: Requests, rows: int) -> None:
    """Requests own disjoint pages, none of them scratch; both tables agree; the rest is idle."""
    owned: list[int] = []
    for slot in range(rows):
        mine = host.page_SL[slot][host.page_SL[slot] > 0].tolist()
        owned += mine
        logical = host.logical_SP[slot]
        assert [int(logical[page]) for page in mine] == list(range(len(mine)))
        assert int((logical >= 0).sum()) == len(mine)
        assert int(logical[0]) == -1
    assert len(set(owned)) == len(owned)
    for slot in range(rows, len(host.live_S)):
        assert not host.live_S[slot]
        assert not host.page_SL[slot].any()
        assert host.logical_SP[slot].tolist() == [0] + [-1] * (host.logical_SP.shape[1] - 1)


@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_garbage_in_every_page_changes_nothing(
    flex: bool, drafted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(num_hidden_layers=3)
    want = plain(model, **INPUTS, max_new_tokens=8)
    drafter = tiny_drafter(tmp_path, model) if drafted else None
    uploads: list[float] = []
    candidates: list[list[list[int]]] = []
    monkeypatch.setattr(Core, "flex", property(lambda self: flex))
    upload: Callable[[Workspace, list[int]], None] = Workspace.upload

    def soil(scale: float) -> None:
        """Fill the pools, pages in use too, just before a call uses them."""

        def patched(self: Workspace, slots: list[int]) -> None:
            upload(self, slots)
            placed = Requests(*(x[slots] for x in self.requests))
            check_tables(placed, len(INPUTS["input_ids"]))
            uploads.append(scale)
            for pool in (self.pool, self.draft_pool):
                for buffer in pool.buffers() if pool is not None else ():
                    buffer.copy_(scale * torch.randn(buffer.shape))

        monkeypatch.setattr(Workspace, "upload", patched)

    decide = Decide.forward

    def watched(self: Decide, requests: Requests, step: Step, *packed: Any) -> None:
        decide(self, requests, step, *packed)
        live = requests.live_S[step.slot_N]
        candidates[-1] += step.candidate_NC[live].tolist()

    monkeypatch.setattr(Decide, "forward", watched)
    torch.manual_seed(0)
    mode: Any = "dflash" if drafted else "ar"
    with dscale.attach(
        model, drafter, mode=mode, prefill_chunk=128, capture=False, prefix_cache=False
    ):
        for scale in (0.0, 1.0, 1e4):
            soil(scale)
            candidates.append([])
            assert torch.equal(model.generate(**INPUTS, max_new_tokens=8), want), scale
    assert uploads == [0.0, 1.0, 1e4]
    # Neither does the drafter see any of it.
    assert candidates[0] == candidates[1] == candidates[2]
    assert bool(candidates[0]) is drafted


def test_idle_lanes_of_a_bucket_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    rows = left_padded([prompt(n) for n in (3, 40, 17)], pad=VOCAB - 1)
    eos = int(plain(model, **rows, max_new_tokens=4)[1, 42])
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": eos, "pad_token_id": 1}
    want = plain(model, **rows, **settings)
    lanes = []
    monkeypatch.setattr(Core, "flex", property(lambda self: True))
    step = Workspace.step
    monkeypatch.setattr(Workspace, "step", lambda self, n: (lanes.append(n), step(self, n))[1])
    drafter = tiny_drafter(tmp_path, model)
    with dscale.attach(model, drafter, budget="half", capture=False):
        assert torch.equal(model.generate(**rows, **settings), want)
    # Three requests in a bucket of four, then fewer: the lanes shrink with them.
    assert lanes[:2] == [3, 4]
    assert lanes[-1] < 4


def test_the_workspace_grows_and_stays(tmp_path: Path) -> None:
    model = tiny_model()
    with dscale.attach(model, tiny_drafter(tmp_path, model)) as spec:
        sizes = []
        for count, length in ((1, 5), (4, 200), (2, 900), (9, 3), (1, 5), (4, 200)):
            ids = torch.tensor([prompt(length, row) for row in range(count)])
            out = model.generate(ids, max_new_tokens=6)
            assert torch.equal(out, plain(model, ids, max_new_tokens=6))
            workspace = spec.engine.batcher.core.workspace
            assert workspace is not None
            sizes.append((workspace.max_requests, workspace.num_pages, workspace.num_bytes))
        assert sizes == sorted(sizes)
        assert sizes[-1] == sizes[-2] == sizes[-3]


def test_a_call_that_went_wrong_leaves_nothing_behind(tmp_path: Path) -> None:
    """Zero times NaN is NaN, so a masked key or value of an earlier call could still be seen."""
    model = tiny_model()
    want = plain(model, **INPUTS, max_new_tokens=8)
    weight = model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with dscale.attach(model, tiny_drafter(tmp_path, model)), torch.no_grad():
        for value in (torch.nan, torch.inf):
            weight.fill_(value)
            with pytest.raises(ArithmeticError, match="model: expected finite logits"):
                model.generate(**INPUTS, max_new_tokens=40)
            weight.copy_(kept)
            short = {name: tensor[:1, -9:] for name, tensor in INPUTS.items()}
            assert torch.equal(
                model.generate(**short, max_new_tokens=8), plain(model, **short, max_new_tokens=8)
            )
            assert torch.equal(model.generate(**INPUTS, max_new_tokens=8), want)

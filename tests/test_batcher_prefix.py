"""The prefix cache: whole pages shared by prompts that begin alike, with the same tokens and the
same progress as without it."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import plain, prompt, tiny_drafter, tiny_model

import dscale
from dscale import Attachment
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import PAGE
from dscale.pages import PageAllocator, page_keys
from dscale.request import Request
from dscale.weights import WeightWatch

MODES = ["ar", "dflash", "+tiles", "+budget", "dscale"]
HEAD = prompt(1000)
Attach = Callable[..., Attachment]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_model())


@pytest.fixture
def attach(drafter: Drafter) -> Iterator[Attach]:
    """Attach a fresh tiny model; the test takes the batcher's rounds itself."""
    specs: list[Attachment] = []

    def make(mode: Any = "dscale", **settings: Any) -> Attachment:
        settings = {"pool_tokens": 40 * PAGE, "max_concurrency": 4} | settings
        budget = {"budget": 4} if mode in ("+budget", "dscale") else {}
        model = tiny_model()
        specs.append(
            dscale.attach(
                model, None if mode == "ar" else drafter, mode=mode, **budget, **settings
            )
        )
        return specs[-1]

    with torch.no_grad():
        yield make
    for spec in specs:
        spec.detach()


def run(spec: Attachment, requests: list[Request]) -> list[Request]:
    batcher = spec.engine.batcher
    batcher.add(requests)
    while batcher.busy:
        batcher.round()
    assert batcher.core.workspace is not None
    assert batcher.num_free_pages == batcher.core.workspace.num_pages - 1
    return requests


def request(ids: list[int], new: int = 12, **settings: Any) -> Request:
    return Request(prompt=ids, max_new_tokens=new, **settings)


@pytest.mark.parametrize("mode", MODES)
def test_a_shared_prompt(mode: Any, attach: Attach) -> None:
    tails = [prompt(n, 7) for n in (1, 30, 200, 1)]
    settings: dict[str, Any] = {"temperature": 0.7, "seed": 5}

    def one_by_one(spec: Attachment) -> list[Request]:
        made = [run(spec, [request(HEAD + tail)])[0] for tail in tails]
        made += [run(spec, [request(HEAD[:257], **settings)])[0]]
        return made + run(spec, [request(HEAD + tail, **settings) for tail in tails])

    cached, alone = attach(mode), attach(mode, prefix_cache=False)
    for ours, theirs in zip(one_by_one(cached), one_by_one(alone), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.progress == theirs.progress
    # Seven whole pages of the head each time but the first; the last prompts of 1,001 and 1,200
    # tokens are there whole, up to the last page; 256 of 257 tokens.
    hits = [7 * PAGE] * 3 + [2 * PAGE] + [7 * PAGE, 8 * PAGE, 9 * PAGE, 7 * PAGE]
    assert cached.stats.prefix_hits == sum(hits)
    assert alone.stats.prefix_hits == 0
    assert cached.stats.prompt_tokens + cached.stats.prefix_hits == alone.stats.prompt_tokens


@pytest.mark.parametrize(("length", "hit"), [(127, 0), (128, 0), (129, 1), (256, 1), (257, 2)])
def test_the_last_prompt_token_is_always_run(length: int, hit: int, attach: Attach) -> None:
    spec = attach()
    first, second = (run(spec, [request(HEAD[:length])])[0] for _ in range(2))
    assert first.tokens == second.tokens
    assert spec.stats.prefix_hits == hit * PAGE
    assert spec.stats.prompt_tokens == 2 * length - hit * PAGE


def test_an_answer_is_found_by_the_next_turn(attach: Attach) -> None:
    spec, model = attach(), tiny_model()
    first = run(spec, [request(HEAD[:100], 160)])[0]
    turn = first.prompt + first.tokens + prompt(9)
    second = run(spec, [request(turn, 8)])[0]
    assert spec.stats.prefix_hits == 2 * PAGE
    want = plain(model, torch.tensor([turn]), max_new_tokens=8)[0, len(turn) :]
    assert second.tokens == want.tolist()


def test_what_was_not_committed_is_not_shared(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = attach(prefill_chunk=128)
    batcher = spec.engine.batcher
    # Cancelled in the middle of its prompt.
    cut = request(HEAD[:600])
    batcher.add([cut])
    batcher.round()
    assert cut.prefilled == 128
    batcher.cancel(cut)
    # Failed: the poison is in its second page, and the first is as bad as the rest.
    weight = spec.model.get_input_embeddings().weight
    kept = weight[499].clone()
    weight[499] = torch.nan
    failed = run(spec, [request([*HEAD[:200], 499, *HEAD[:200]])])[0]
    assert failed.finish_reason == "error"
    # An answer of 28 tokens ends on the page's last position, where no row has been.
    run(spec, [request([t for t in HEAD[:140] if t != 499][:100], 28)])
    assert batcher.pages.allocator.num_shared == 0
    weight[499] = kept
    assert run(spec, [request(HEAD[:300])])[0].finish_reason == "length"
    assert spec.stats.prefix_hits == 0


@pytest.mark.parametrize("how", ["optimizer", "data"])
def test_written_weights_end_it(how: str, attach: Attach) -> None:
    spec = attach()
    run(spec, [request(HEAD)])
    run(spec, [request(HEAD)])
    assert spec.stats.prefix_hits == 7 * PAGE
    weight = spec.model.model.layers[0].self_attn.v_proj.weight
    (weight.data if how == "data" else weight).mul_(1.5)
    run(spec, [request(prompt(300, 3))])  # no hit, but new pages
    changed = run(spec, [request(HEAD)])[0]
    assert spec.stats.prefix_hits == 7 * PAGE
    want = plain(spec.model, torch.tensor([HEAD]), max_new_tokens=12)[0, 1000:]
    assert changed.tokens == want.tolist()


def test_a_weight_that_is_no_number_is_no_change() -> None:
    model = tiny_model()
    embedding = model.model.embed_tokens.weight
    embedding.data[0, 0] = torch.nan
    known = WeightWatch(model)
    assert [known.same() for _ in range(3)] == [False, True, True]
    embedding.data[0, 0] = 1.0
    assert [known.same() for _ in range(2)] == [False, True]
    with dscale.attach(model, mode="ar") as spec:
        embedding.data[0, 0] = torch.nan
        for _ in range(2):
            run(spec, [request([token or 1 for token in HEAD])])
        assert spec.stats.prefix_hits == 7 * PAGE


def test_pages_make_room_for_what_needs_them(attach: Attach) -> None:
    spec = attach("ar", pool_tokens=12 * PAGE)
    model = tiny_model()
    rng, want = random.Random(0), dict[tuple[int, int], list[int]]()
    for _ in range(40):
        key = (rng.choice([140, 300, 700]), rng.randrange(3))
        made = run(spec, [request(prompt(*key), 4)])[0]
        if key not in want:
            ids = torch.tensor([prompt(*key)])
            want[key] = plain(model, ids, max_new_tokens=4)[0, key[0] :].tolist()
        assert made.tokens == want[key]
    assert 0 < spec.stats.prefix_hits < 40 * 700


def test_requests_at_once_keep_what_they_share(attach: Attach) -> None:
    spec = attach(pool_tokens=24 * PAGE)
    run(spec, [request(HEAD[:300])])
    batcher = spec.engine.batcher
    first, second = request(HEAD[:290] + prompt(5), 60), request(HEAD[:270], 40)
    third = request(prompt(900, 5), 200)
    batcher.add([first, second])
    batcher.round()
    assert first.pages[:2] == second.pages[:2]
    assert set(first.pages[2:]).isdisjoint(second.pages)
    batcher.add([third])  # needs pages that nobody uses, not those of the first
    while batcher.busy:
        batcher.round()
    for item in (first, second, third):
        ids = torch.tensor([item.prompt])
        want = plain(tiny_model(), ids, max_new_tokens=item.max_new_tokens)
        assert item.tokens == want[0, len(item.prompt) :].tolist()
    assert batcher.num_free_pages == 24


def test_engines_share_nothing(attach: Attach) -> None:
    one, other = attach(), attach()
    run(one, [request(HEAD)])
    run(other, [request(HEAD)])
    assert one.stats.prefix_hits == other.stats.prefix_hits == 0
    with pytest.raises(ValueError, match="prefix_cache: expected True or False, got 1"):
        attach(prefix_cache=1)


@pytest.mark.parametrize("mode", ["ar", "dscale"])
def test_prompts_that_come_together_share_too(mode: Any, attach: Attach) -> None:
    def made() -> list[Request]:
        tails = [prompt(n, 7) for n in (40, 1, 200)]
        own = request(prompt(300, 9))
        return [
            request(HEAD + tails[0]),
            own,
            *(request(HEAD + t) for t in tails[1:]),
            request(HEAD),
        ]

    settings: dict[str, Any] = {"pool_tokens": 60 * PAGE, "max_concurrency": 8}
    cached, alone = attach(mode, **settings), attach(mode, prefix_cache=False, **settings)
    for ours, theirs in zip(run(cached, made()), run(alone, made()), strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.progress == theirs.progress
        assert ours.leader is None
    # The first of them runs the head, 7 whole pages; the others wait for it.
    assert cached.stats.prefix_hits == 3 * 7 * PAGE
    assert cached.stats.prompt_tokens + cached.stats.prefix_hits == alone.stats.prompt_tokens


def test_whom_a_request_waits_for(attach: Attach) -> None:
    spec = attach("ar", prefill_chunk=128, pool_tokens=60 * PAGE, max_concurrency=8)
    batcher = spec.engine.batcher
    first, second = request(HEAD[:700]), request(HEAD[:700] + prompt(9))
    short = request(HEAD[:300])  # most of what `first` still runs is none of its business
    other = request([1, *HEAD])
    batcher.add([first, second, short, other])
    batcher.round()
    assert [r.leader for r in (first, second, short, other)] == [None, first, None, None]
    assert [r.prefilled for r in (first, second, short, other)] == [128, 0, 128, 128]
    batcher.cancel(first)  # and with it what it has run
    batcher.round()
    assert second.leader is None
    assert second.prefilled == 128
    late = request(HEAD[:500])
    batcher.add([late])
    batcher.round()
    assert late.leader is second
    while batcher.busy:
        batcher.round()
    assert spec.stats.prefix_hits == 3 * PAGE
    for item in (second, short, other, late):
        ids = torch.tensor([item.prompt])
        want = plain(tiny_model(), ids, max_new_tokens=12)[0, len(item.prompt) :]
        assert item.tokens == want.tolist()
    assert batcher.num_free_pages == 60


@pytest.mark.parametrize("seed", range(5))
def test_allocator_of_shared_pages_under_random_use(seed: int) -> None:
    rng, num_pages = random.Random(seed), 30
    allocator = PageAllocator(num_pages)
    texts = [[rng.randrange(2) for _ in range(PAGE)] * rng.randint(1, 5) for _ in range(6)]
    held: list[tuple[list[int], list[bytes]]] = []
    content: dict[int, bytes] = {}
    for _ in range(1500):
        if held and rng.random() < 0.45:
            allocator.give_back(held.pop(rng.randrange(len(held)))[0])
            continue
        if rng.random() < 0.01:
            allocator.forget_all()
        keys = page_keys(rng.choice(texts))
        found = allocator.find(keys)
        assert [content[page] for page in found] == keys[: len(found)]
        need = len(keys) + 1 - len(found)
        if need > allocator.num_free:
            allocator.give_back(found)
            continue
        fresh = allocator.take(need)
        used = {page for pages, _ in held for page in pages} | set(found)
        assert used.isdisjoint(fresh)
        assert 0 not in fresh
        content.update(zip(fresh, [*keys[len(found) :], b"private"], strict=True))
        allocator.share(found + fresh, keys)
        held.append((found + fresh, keys))
        assert allocator.num_free == num_pages - 1 - len(used | set(fresh))
    for pages, _ in held:
        allocator.give_back(pages)
    assert allocator.num_free == num_pages - 1
    allocator.forget_all()
    assert sorted(allocator.take(num_pages - 1)) == list(range(1, num_pages))


def test_keys_tell_of_all_that_came_before() -> None:
    text = prompt(400)
    assert len(page_keys(text)) == 3
    other = [*text[:5], text[5] + 1, *text[6:]]
    assert not set(page_keys(other)) & set(page_keys(text))
    assert page_keys(text[:256] + text[:128])[:2] == page_keys(text)[:2]
    assert page_keys(text[:127]) == []

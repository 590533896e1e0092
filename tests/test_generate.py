"""Greedy ids equal transformers' generate for every drafter, batch, budget, prompt and length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    VOCAB,
    always_wrong,
    continuation,
    left_padded,
    oracle,
    plain,
    prompt,
    ragged,
    script,
    tiny_drafter,
    tiny_model,
)

import dscale
from dscale import Attachment
from dscale.compiled.drafter import Drafter

Scripted = Callable[..., Attachment]
LENGTHS = [1, 127, 128, 129, 300, 5, 16, 64]
SCRIPTS = {"oracle": oracle, "wrong": always_wrong, "ragged": ragged, "real": None}
SCRIPT = pytest.mark.parametrize("kind", SCRIPTS)


@pytest.fixture(scope="module")
def reference() -> Any:
    """A model that nobody attaches."""
    return tiny_model()


@pytest.fixture(scope="module")
def texts(reference: Any) -> list[list[int]]:
    """A prompt of each length and its greedy continuation, 64 tokens long."""
    return [continuation(reference, prompt(n), 64) for n in LENGTHS]


@pytest.fixture(scope="module")
def wandering(reference: Any) -> list[int]:
    """A prompt of 9 tokens and its continuation, whose first 18 tokens all differ."""
    rows = [continuation(reference, prompt(9, seed), 64) for seed in range(12)]
    row = max(rows, key=lambda row: first_repeat(row[9:]))
    assert first_repeat(row[9:]) >= 18
    return row


def first_repeat(tokens: list[int]) -> int:
    """Index of the first token that stands earlier too."""
    return next((i for i, t in enumerate(tokens) if t in tokens[:i]), len(tokens))


@pytest.fixture
def attach(
    pair: tuple[Any, Drafter], texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Attach the pair with a drafter of a kind, scripted from `texts`; detach at the end."""
    model, drafter = pair
    specs = []

    def go(kind: str, rows: list[list[int]] | None = None, **settings: Any) -> Attachment:
        right_for = SCRIPTS[kind]
        monkeypatch.undo()
        if right_for is not None:
            script(monkeypatch, texts if rows is None else rows, right_for)
        specs.append(dscale.attach(model, drafter, **settings))
        return specs[-1]

    yield go
    for spec in specs:
        spec.detach()
    assert "generate" not in vars(model)


def batch(rows: int) -> dict[str, torch.Tensor]:
    return left_padded([prompt(n) for n in LENGTHS[:rows]], pad=VOCAB - 1)


@pytest.mark.parametrize("rows", [1, 3, 8])
@SCRIPT
def test_ids_equal_at_every_budget(kind: str, rows: int, reference: Any, attach: Scripted) -> None:
    inputs = batch(rows)
    new = 20
    want = plain(reference, **inputs, max_new_tokens=new)
    for budget in range(1, 17) if rows == 3 else (2, 7, 16):
        spec = attach(kind, budget=budget)
        assert torch.equal(spec.model.generate(**inputs, max_new_tokens=new), want), budget
        spec.detach()


@SCRIPT
def test_ids_equal_for_every_length(kind: str, reference: Any, attach: Scripted) -> None:
    inputs = batch(2)
    want = plain(reference, **inputs, max_new_tokens=33)
    spec = attach(kind)
    for new in range(1, 34):
        assert torch.equal(
            spec.model.generate(**inputs, max_new_tokens=new), want[:, : 127 + new]
        ), new


@SCRIPT
def test_eos_at_every_offset_of_the_block(
    kind: str, reference: Any, attach: Scripted, wandering: list[int]
) -> None:
    spec = attach(kind, [wandering])
    ids = torch.tensor([wandering[:9]])
    for offset in range(18):
        settings = {"max_new_tokens": 24, "eos_token_id": wandering[9 + offset]}
        ours = spec.model.generate(ids, **settings, pad_token_id=3)
        assert ours[0].tolist() == wandering[: 9 + offset + 1]
        assert torch.equal(ours, plain(reference, ids, **settings, pad_token_id=3))


@SCRIPT
def test_several_eos_ids_and_pads_in_a_ragged_batch(
    kind: str, reference: Any, attach: Scripted, texts: list[list[int]]
) -> None:
    inputs = batch(5)
    stops = [texts[0][1 + 3], texts[2][128 + 20], texts[3][129]]
    spec = attach(kind)
    for eos in (stops, stops[:1], stops[1], stops[2]):
        for pad in (None, 7):
            settings = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": pad}
            ours = spec.model.generate(**inputs, **settings)
            assert torch.equal(ours, plain(reference, **inputs, **settings)), settings
            assert ours.shape[1] <= 300 + 30
    # Every row stops early: the result ends with the longest one.
    ours = spec.model.generate(**batch(1), max_new_tokens=30, eos_token_id=texts[0][6])
    assert ours.shape[1] < 31


@pytest.mark.parametrize("chunk", [128, 256])
def test_prompts_at_chunk_boundaries(chunk: int, reference: Any, attach: Scripted) -> None:
    spec = attach("real", prefill_chunk=chunk)
    for length in (1, chunk - 1, chunk, chunk + 1, 2 * chunk, 300):
        ids = torch.tensor([prompt(length)])
        ours = spec.model.generate(ids, max_new_tokens=17)
        assert torch.equal(ours, plain(reference, ids, max_new_tokens=17)), length


def test_pages_that_fill_up_exactly(reference: Any, attach: Scripted) -> None:
    # 128-token pages: prompt + new + 2 * 16 reserved slots end at, before and after a boundary.
    spec = attach("wrong", [continuation(reference, prompt(60), 64)])
    for new in (35, 36, 37, 52, 53):
        ids = torch.tensor([prompt(60)])
        ours = spec.model.generate(ids, max_new_tokens=new)
        assert torch.equal(ours, plain(reference, ids, max_new_tokens=new))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    model, theirs = tiny_model(family, tied=True), tiny_model(family, tied=True)
    inputs = batch(5)
    want = plain(theirs, **inputs, max_new_tokens=20)
    with dscale.attach(model, tiny_drafter(tmp_path, model)) as spec:
        assert torch.equal(model.generate(**inputs, max_new_tokens=20), want)
        assert spec.stats.passes >= spec.stats.steps > 0


def test_small_blocks(tmp_path: Path, reference: Any) -> None:
    model = tiny_model()
    inputs = batch(5)
    want = plain(reference, **inputs, max_new_tokens=20)
    for block in (2, 8):
        drafter = tiny_drafter(tmp_path / str(block), model, block_size=block)
        for budget in (None, 1, block, 16):
            for mode in ("dflash", "dscale"):
                with dscale.attach(model, drafter, mode=mode, budget=budget) as spec:
                    assert torch.equal(model.generate(**inputs, max_new_tokens=20), want)
                    rows = block if mode == "dscale" else min(block, budget or 16)
                    assert spec.engine.batcher.core.rows == rows


def test_plain_mode_and_one_call(tmp_path: Path, reference: Any) -> None:
    model = tiny_model()
    drafter = tiny_drafter(tmp_path, model)
    inputs = batch(5)
    want = plain(reference, **inputs, max_new_tokens=20)
    with dscale.attach(model, mode="ar") as spec:
        assert torch.equal(model.generate(**inputs, max_new_tokens=20), want)
        assert spec.stats.steps == 19
        assert spec.stats.tokens_per_pass == 1
    assert torch.equal(dscale.generate(model, **inputs, max_new_tokens=20), want)
    assert torch.equal(dscale.generate(model, **inputs, drafter=tmp_path, max_new_tokens=20), want)
    assert torch.equal(dscale.generate(model, **inputs, drafter=drafter, max_new_tokens=20), want)
    assert "generate" not in vars(model)


def test_batch_rows_do_not_touch_each_other(attach: Scripted) -> None:
    spec = attach("real")
    inputs = batch(8)
    together = spec.model.generate(**inputs, max_new_tokens=20)
    for row, length in enumerate(LENGTHS):
        alone = spec.model.generate(torch.tensor([prompt(length)]), max_new_tokens=20)
        assert torch.equal(together[row, -20 - length :], alone[0])
    swapped = left_padded([prompt(n, 3) for n in LENGTHS[:7]] + [prompt(64)], pad=VOCAB - 1)
    others = spec.model.generate(**swapped, max_new_tokens=20)
    assert torch.equal(others[7, -84:], together[7, -84:])


def test_stats_count_what_happened(attach: Scripted, texts: list[list[int]]) -> None:
    spec = attach("ragged", mode="+tiles", budget=9)
    new = 30
    spec.model.generate(**batch(3), max_new_tokens=new)
    progress = []
    for slot, length in enumerate(LENGTHS[:3]):
        context, left, passes = length, new - 1, []
        while left:
            passes.append(min(min(ragged(slot, context), 8) + 1, left))
            context, left = context + passes[-1], left - passes[-1]
        progress.append(passes)
    stats = spec.stats
    assert stats.last_progress == progress
    assert (stats.calls, stats.requests, stats.prompt_tokens) == (1, 3, 256)
    assert stats.steps == max(map(len, progress))
    assert stats.passes == sum(map(len, progress))
    assert stats.tokens == 3 * (new - 1)
    assert stats.tokens_per_pass == pytest.approx(stats.tokens / stats.passes)
    assert stats.drafted == 8 * stats.passes
    assert stats.accepted == stats.tokens - stats.passes
    stats.reset()
    assert (stats.tokens, stats.steps, stats.tokens_per_pass, stats.last_progress) == (0, 0, 0, [])


def test_stats_of_an_oracle_cut_by_eos(attach: Scripted, wandering: list[int]) -> None:
    new = wandering[9:]
    spec = attach("oracle", [wandering], mode="dflash")
    spec.model.generate(torch.tensor([wandering[:9]]), max_new_tokens=64, eos_token_id=new[17])
    # The prefill gives token 0, the first pass tokens 1 to 16, the second token 17.
    assert spec.stats.last_progress == [[16, 1]]
    assert spec.stats.tokens_per_pass == 8.5


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.3, "top_k": 0},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.1, "top_k": 0, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 600, "min_p": 0.1},
    {},
]


@pytest.mark.parametrize("settings", SAMPLING, ids=str)
def test_samples_are_the_same_in_every_mode_budget_and_batch(
    settings: dict[str, Any], pair: tuple[Any, Drafter], attach: Scripted
) -> None:
    model, _ = pair
    inputs, new = batch(5), 20
    settings = {**settings, "do_sample": True, "max_new_tokens": new, "seed": list(range(40, 45))}
    with dscale.attach(model, mode="ar"):
        want = model.generate(**inputs, **settings)
        assert not torch.equal(want, model.generate(**inputs, **settings | {"seed": 7}))
    rows = [want[i, 300 - n :].tolist() for i, n in enumerate(LENGTHS[:5])]
    for kind in SCRIPTS:
        for budget in (5, 16):
            spec = attach(kind, rows, budget=budget)
            assert torch.equal(model.generate(**inputs, **settings), want), (kind, budget)
            if kind == "oracle" and budget == 16:
                assert spec.stats.steps == 2
            spec.detach()
    attach("real")
    for row, length in enumerate(LENGTHS[:3]):
        alone = {**settings, "seed": 40 + row}
        out = model.generate(torch.tensor([prompt(length)]), **alone)
        assert out[0].tolist() == rows[row]


def test_numbers_beyond_float32_are_its_largest(attach: Scripted) -> None:
    spec = attach("real")
    for beyond in ({"temperature": 1e39}, {"repetition_penalty": 1e39}):
        name = next(iter(beyond))
        largest = {name: torch.finfo(torch.float32).max}
        outs = [
            spec.model.generate(**batch(2), do_sample=True, seed=3, max_new_tokens=8, **settings)
            for settings in (beyond, largest)
        ]
        assert torch.equal(*outs), name


def test_the_global_seed_makes_a_sample_reproducible(attach: Scripted) -> None:
    spec = attach("real")
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs += [spec.model.generate(**batch(3), do_sample=True, max_new_tokens=12) for _ in "ab"]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[4])
    state = torch.get_rng_state()
    spec.model.generate(**batch(3), max_new_tokens=12)
    assert torch.equal(torch.get_rng_state(), state)

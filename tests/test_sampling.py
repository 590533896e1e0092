"""Sampling: filters against transformers' warpers, the noise's law, the law of whole samples."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chisquare import p_value
from tiny import always_wrong, oracle, ragged, script, tiny_drafter, tiny_model
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import dscale
from dscale.compiled.sampling import Chooser, Sampling, choose, kept_candidates
from dscale.kernels.reference import mix64, position_gumbel


def warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """What transformers builds for these settings, in its order."""
    chosen: list[Any] = []
    if temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chosen.append(TopPLogitsWarper(top_p))
    if min_p:
        chosen.append(MinPLogitsWarper(min_p))
    return LogitsProcessorList(chosen)


def settings(rows: list[tuple[float, int, float, float]], seed: int = 0) -> Sampling:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Sampling(temperature, top_k, top_p, min_p, torch.arange(len(rows)) + seed)


def random_settings(count: int, vocab: int) -> list[tuple[float, int, float, float]]:
    generator = torch.Generator().manual_seed(vocab)
    u = torch.rand(count, 6, generator=generator).tolist()
    rows = []
    for a, b, c, d, off_p, off_m in u:
        top_p = 1.0 if off_p < 0.3 else c
        rows.append((0.1 + 2 * a, int(b * (vocab + 9)), top_p, 0.0 if off_m < 0.3 else d * d))
    edges = [(1.0, 1, 1.0, 0.0), (1.0, 0, 0.0, 0.0), (1.0, 0, 1.0, 1.0), (1.0, vocab, 1.0, 0.0)]
    return [*rows, *edges, (1.0, 0, 1.0, 0.0), (0.7, 5, 0.5, 0.5)]


@pytest.mark.parametrize("vocab", [2, 12, 101])
def test_filters_keep_what_transformers_keeps(vocab: int) -> None:
    rows = random_settings(500, vocab)
    torch.manual_seed(vocab)
    logits = 3 * torch.randn(len(rows), vocab)
    want = torch.cat(
        [warpers(*row)(None, x[None]) for row, x in zip(rows, logits, strict=True)]
    ).isfinite()
    sampling = settings(rows)
    value, token = torch.topk(logits / sampling.temperature[:, None], vocab)
    keep = torch.zeros_like(want).scatter(1, token, kept_candidates(value, sampling))
    assert torch.equal(keep, want)
    assert keep.any(1).all()
    assert not keep.all()


@pytest.mark.parametrize("candidates", [64, 1 << 62])
def test_choice_is_the_best_noisy_token_that_transformers_keeps(candidates: int) -> None:
    vocab = 101
    rows = [row for row in random_settings(400, vocab) if 0 < row[1] <= 64 or candidates > 64]
    assert len(rows) > 100
    logits = 3 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(3))
    position = torch.arange(len(rows)) * 7
    sampling = settings(rows, seed=99)
    got = choose(logits, position, sampling, Chooser(sample=True, max_candidates=candidates))
    for index, row in enumerate(rows):
        score = warpers(*row)(None, logits[index : index + 1])[0]
        noise = position_gumbel(sampling.seed[index], position[index], torch.arange(vocab))
        assert int(got[index]) == int((score + noise).argmax()), row


def test_whole_vocabulary_without_sorting_and_greedy_rows() -> None:
    logits = torch.randn(200, 37, generator=torch.Generator().manual_seed(1))
    rows = [(0.0 if i % 2 else 1.2, 0, 1.0, 0.0) for i in range(200)]
    position = torch.arange(200)
    unsorted = choose(logits, position, settings(rows), Chooser(sample=True))
    sorted_ = choose(logits, position, settings(rows), Chooser(sample=True, max_candidates=37))
    assert torch.equal(unsorted, sorted_)
    assert torch.equal(unsorted[1::2], logits[1::2].argmax(-1))
    assert not torch.equal(unsorted[::2], logits[::2].argmax(-1))
    assert torch.equal(choose(logits, position, settings(rows), Chooser()), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-45])
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.1)])
def test_tiny_temperatures_are_greedy(
    temperature: float, filters: tuple[int, float, float]
) -> None:
    logits = 5 * torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    candidates = 0 if filters == (0, 1.0, 0.0) else 64 if filters[0] else 1 << 62
    got = choose(
        logits,
        torch.arange(64),
        settings([(temperature, *filters)] * 64),
        Chooser(sample=True, max_candidates=candidates),
    )
    assert torch.equal(got, logits.argmax(-1))


def uniform(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The noise through its distribution function: uniform on 0..1 if it is Gumbel."""
    return torch.exp(-torch.exp(-position_gumbel(seed, position, token).double()))


SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345]


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
@pytest.mark.parametrize("start", SEEDS)
def test_noise_is_gumbel_along_each_axis(axis: str, start: int) -> None:
    n = 100_000
    steps = torch.arange(n)
    fixed = {"seed": torch.tensor(start), "position": torch.tensor(77), "token": torch.tensor(5)}
    fixed[axis] = fixed[axis] + steps if axis == "seed" else steps
    noise = position_gumbel(fixed["seed"], fixed["position"], fixed["token"]).double()
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * math.pi / math.sqrt(6 * n)
    assert abs(float(noise.var()) / (math.pi**2 / 6) - 1) < 0.03
    u = torch.exp(-torch.exp(-noise)).sort().values
    rank = (steps.double() + 0.5) / n
    assert float((u - rank).abs().max()) < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, p = 0.001
    assert noise.unique().numel() > 0.99 * n


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (0, 1, -1)])
def test_neighbours_are_independent(shift: tuple[int, int, int]) -> None:
    grid = torch.meshgrid(torch.arange(40), torch.arange(50), torch.arange(60), indexing="ij")
    here = uniform(*grid).flatten()
    there = uniform(*(axis + by for axis, by in zip(grid, shift, strict=True))).flatten()
    cell = (here * 16).long().clamp(max=15) * 16 + (there * 16).long().clamp(max=15)
    assert p_value(torch.bincount(cell, minlength=256), torch.full((256,), 1 / 256)) > 1e-4


def test_noise_depends_on_all_three_and_mix64_is_splitmix() -> None:
    one = torch.tensor(1)
    base = float(position_gumbel(one, one, one))
    for changed in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        assert float(position_gumbel(*map(torch.tensor, changed))) != base
    # First outputs of splitmix64 seeded with 1234567, from its published reference.
    golden, state = -7046029254386353131, torch.tensor(1234567)
    outs = []
    for _ in range(3):
        state = state + golden
        outs.append(int(mix64(state)) % 2**64)
    assert outs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


VOCAB, NEW, SAMPLES, CALLS = 12, 3, 3200, 16
LAW: dict[str, Any] = {"temperature": 1.3, "top_k": 6, "top_p": 0.8}
PROMPT = [3, 1, 4, 1, 5]


def exact_law(model: Any) -> Tensor:
    """Probability of every continuation of NEW tokens, `[V, V, V]`, by transformers."""
    law = torch.ones(())
    for length in range(NEW):
        prefixes = itertools.product(range(VOCAB), repeat=length)
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        logits = model(ids).logits[:, -1]
        step = warpers(LAW["temperature"], LAW["top_k"], LAW["top_p"], 0.0)(None, logits)
        law = law[..., None] * torch.softmax(step, -1).view(*(VOCAB,) * (length + 1))
    return law


DRAFTERS: dict[str, Callable[[int, int], int] | None] = {
    "oracle": oracle, "wrong": always_wrong, "ragged": ragged, "real": None, "none": None
}  # fmt: skip


@pytest.mark.parametrize("kind", DRAFTERS)
@torch.no_grad()
def test_samples_have_the_exact_law(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(vocab_size=VOCAB, seed=2)
    model.lm_head.weight.mul_(1.5)
    law = exact_law(model)
    assert (law > 0).sum() > 50
    sample = {"do_sample": True, "num_return_sequences": SAMPLES // CALLS, "max_new_tokens": NEW}
    ids = torch.tensor([PROMPT])
    outs = []
    drafter = None if kind == "none" else tiny_drafter(tmp_path, model)
    for part in range(CALLS):
        seed = 10_000 * part
        right_for = DRAFTERS[kind]
        if right_for is not None:
            rows = dscale.generate(model, ids, seed=seed, **sample, **LAW).tolist()
            script(monkeypatch, rows, right_for, VOCAB)
        # Thousands of rows at once, each in the slot of its number.
        with dscale.attach(model, drafter, mode=None if kind == "none" else "+tiles"):
            outs.append(model.generate(ids, seed=seed, **sample, **LAW)[:, len(PROMPT) :])
    place = torch.tensor([VOCAB**2, VOCAB, 1])
    count = torch.bincount((torch.cat(outs) * place).sum(1), minlength=VOCAB**NEW)
    assert p_value(count, law) > 1e-3
    for axes in ((1, 2), (0, 2), (0, 1)):
        assert p_value(count.view(law.shape).sum(axes), law.sum(axes)) > 1e-3
    # The test sees a wrong law: the same counts against another temperature's.
    flat = law.clamp(min=0) ** 1.3
    assert p_value(count, flat / flat.sum()) < 1e-6

"""Samples of mode "dscale" have the target's law, and the paper's two-draw rule has the same."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chisquare import p_value
from tiny import always_wrong, oracle, script, tiny_drafter, tiny_model
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import dscale
from dscale.compiled.decide import Decide
from dscale.compiled.flow import Requests, Step

VOCAB, NEW, CALLS, SAMPLES = 12, 4, 14, 3500
LAW: dict[str, Any] = {"temperature": 1.3, "top_k": 6, "top_p": 0.8}
PROMPT = [3, 1, 4, 1, 5]
FIXED = [7, 2, 9, *range(12)]
"""What the fixed drafter proposes in every pass."""


class Law:
    """The tiny model's exact law: `step[n]` of the token after n, `whole` of NEW tokens."""

    @torch.no_grad()
    def __init__(self) -> None:
        self.model = tiny_model(vocab_size=VOCAB, seed=2)
        self.model.lm_head.weight.mul_(1.5)
        warp = LogitsProcessorList(
            [TemperatureLogitsWarper(1.3), TopKLogitsWarper(6), TopPLogitsWarper(0.8)]
        )
        self.step: list[Tensor] = []
        self.whole = torch.ones(())
        for length in range(NEW):
            prefixes = itertools.product(range(VOCAB), repeat=length)
            ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
            warped: Tensor = warp(None, self.model(ids).logits[:, -1])
            self.step.append(torch.softmax(warped, -1).view(*(VOCAB,) * (length + 1)))
            self.whole = self.whole[..., None] * self.step[-1]

    def fits(self, tokens: Tensor) -> bool:
        """Whether samples [N, NEW] fit, jointly and at each position."""
        place = VOCAB ** torch.arange(NEW - 1, -1, -1)
        count = torch.bincount((tokens * place).sum(1), minlength=VOCAB**NEW)
        tests = [p_value(count, self.whole)]
        for kept in range(NEW):
            others = tuple(axis for axis in range(NEW) if axis != kept)
            tests.append(p_value(count.view(self.whole.shape).sum(others), self.whole.sum(others)))
        return min(tests) > 1e-3 / len(tests)

    def passes_of_fixed(self, rows: int) -> dict[int, float]:
        """Chances of the first pass's progress when it verifies FIXED in `rows` rows."""
        law = self.whole.sum(0) if NEW == 1 else self.whole
        chances: dict[int, float] = {}
        for tokens in itertools.product(range(VOCAB), repeat=NEW):
            p = float(law[tokens])
            if p:
                matches = [a == b for a, b in zip(tokens[1:], FIXED, strict=False)]
                leading = (*matches, False).index(False)
                progress = min(leading, rows - 1, NEW - 2) + 1
                chances[progress] = chances.get(progress, 0.0) + p
        return chances


@pytest.fixture(scope="module")
def law() -> Law:
    return Law()


def fixed_drafts(patch: pytest.MonkeyPatch) -> None:
    """A drafter that always proposes FIXED, with falling scores that differ by request."""

    def propose(self: Decide, requests: Requests, step: Step) -> Tensor:
        step.candidate_NC[:] = torch.tensor(FIXED)
        chance_N = 0.3 + 0.6 * (step.slot_N % 5) / 5
        return chance_N[:, None] ** torch.arange(1, 16)

    patch.setattr(Decide, "propose", propose)


KINDS: dict[str, Callable[[int, int], int] | None] = {
    "oracle": oracle, "wrong": always_wrong, "fixed": None, "real": None
}  # fmt: skip


@pytest.mark.parametrize("budget", [2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_exact_law(
    kind: str, budget: int, law: Law, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"do_sample": True, "num_return_sequences": SAMPLES // CALLS, **LAW}
    ids, outs = torch.tensor([PROMPT]), []
    drafter = tiny_drafter(tmp_path, law.model)
    for part in range(CALLS):
        how = {**settings, "max_new_tokens": NEW, "seed": 77_000 * part + budget}
        right_for = KINDS[kind]
        if kind == "fixed":
            fixed_drafts(monkeypatch)
        elif right_for is not None:
            rows = dscale.generate(law.model, ids, **how).tolist()
            script(monkeypatch, rows, right_for, VOCAB)
        with dscale.attach(law.model, drafter, mode="dscale", budget=budget) as spec:
            outs.append(spec.generate(ids, **how)[:, len(PROMPT) :])
            assert spec.stats.drafted > 0
            assert kind == "real" or (spec.stats.accepted > 0) == (kind != "wrong")
    tokens = torch.cat(outs)
    assert law.fits(tokens)
    # The test sees a wrong law: a few samples moved to their neighbours.
    moved = tokens.clone()
    moved[: SAMPLES // 10, 1] = tokens[: SAMPLES // 10, 1].roll(1)
    moved[: SAMPLES // 10, 2] = tokens[: SAMPLES // 10, 2].flip(0)
    assert not law.fits(moved)


def two_draws(law: Law, count: int) -> tuple[Tensor, Tensor]:
    """The paper's rule on FIXED: keep candidate x with probability P(x), else draw from P without
    x renormalised. Returns tokens [N, NEW] and the first pass's progress [N]."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.multinomial(law.step[0], count, replacement=True, generator=generator)[:, None]
    column = torch.zeros(count, dtype=torch.int64)  # candidate to try next
    progress, first = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.bool)
    for length in range(1, NEW):
        chance = law.step[length][tuple(tokens.T)]
        candidate = torch.tensor(FIXED)[column]
        p = chance.gather(1, candidate[:, None])[:, 0]
        keep = torch.rand(count, generator=generator) < p
        rest = chance.scatter(1, candidate[:, None], 0.0)
        rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, 1.0)
        other = torch.multinomial(rest, 1, generator=generator)[:, 0]
        progress += first
        first &= keep
        column = torch.where(keep, column + 1, 0)
        tokens = torch.cat((tokens, torch.where(keep, candidate, other)[:, None]), 1)
    return tokens, progress


def test_the_two_draw_rule_has_the_same_law(
    law: Law, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, progress = two_draws(law, 20_000)
    assert law.fits(tokens)
    chances = law.passes_of_fixed(16)
    want = torch.tensor([chances.get(n, 0.0) for n in range(1, NEW)])
    assert 0.1 < float(want[0]) < 0.99
    assert p_value(torch.bincount(progress, minlength=NEW)[1:], want) > 1e-3
    # Ours, from the same candidates: the progress is what the tokens say, and has that law.
    fixed_drafts(monkeypatch)
    drafter = tiny_drafter(tmp_path, law.model)
    found: list[int] = []
    with dscale.attach(law.model, drafter, mode="dscale", budget=16) as spec:
        for part in range(6):
            out = spec.generate(
                torch.tensor([PROMPT]), do_sample=True, num_return_sequences=500,
                max_new_tokens=NEW, seed=9_000 * part, **LAW,
            )  # fmt: skip
            for row, passes in zip(
                out[:, len(PROMPT) :].tolist(), spec.stats.last_progress, strict=True
            ):
                leading = [a == b for a, b in zip(row[1:], FIXED, strict=False)]
                assert passes[0] == min((*leading, False).index(False) + 1, NEW - 1)
                found.append(passes[0])
    assert p_value(torch.bincount(torch.tensor(found), minlength=NEW)[1:], want) > 1e-3

"""Ids equal plain decoding's in every mode and at every budget, for lucky and unlucky drafters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import overrule, random_predictor
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
from torch import Tensor

import dscale
import dscale.core
from dscale.compiled.drafter import Drafter
from dscale.decode import Decoding
from dscale.kernels.ops import MAX_LANES
from dscale.timing import LinearCosts

LENGTHS = [1, 127, 5, 128, 16, 129, 64, 33]
BATCHES = (1, 3, 8)
NEW = 13
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 50, "top_p": 0.95}


def right_for_4(slot: int, context: int) -> int:
    """Four candidates right."""
    return 4


SCRIPTS: dict[str, Callable[[int, int], int]] = {
    "oracle": oracle, "wrong": always_wrong, "ragged": ragged, "right for 4": right_for_4
}  # fmt: skip
UNIFORM = [("dflash", b) for b in (None, 1, 2, 5, 16)] + [("+tiles", b) for b in (None, 2, 5)]
SHARED = [(m, b) for m in ("+budget", "dscale") for b in (None, "half", "auto", 1, 2, 5, 16)]
CASES = pytest.mark.parametrize(("mode", "budget"), [("ar", None), *UNIFORM, *SHARED])
ADAPTIVE = pytest.mark.parametrize(("mode", "budget"), SHARED)

# Milliseconds that make budget "auto" draft always, never but for probes, and now and then.
PRICES = {
    "cheap": LinearCosts(0.01, 1.0, 0.01),
    "dear": LinearCosts(9.0, 1.0, 0.3),
    "middling": LinearCosts(0.4, 1.0, 0.1),
}


@pytest.fixture(autouse=True)
def prices(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Fix the times that budget "auto" sees; middling unless told."""

    def go(kind: str) -> None:
        monkeypatch.setattr(dscale.core, "linear_costs", lambda *args: PRICES[kind])

    go("middling")
    return go


class World:
    """A model to attach to, a drafter and a predictor of its, and what plain decoding says."""

    def __init__(self, folder: Path) -> None:
        self.model, self.reference = tiny_model(), tiny_model()
        self.drafter: Drafter = tiny_drafter(folder / "drafter", self.model)
        self.predictor = random_predictor(self.drafter, folder / "predictor")
        self.texts = [continuation(self.reference, prompt(n), 48) for n in LENGTHS]
        # Stop ids that end the eight rows of a batch at many different places.
        self.stops = [self.texts[row][LENGTHS[row] + 3 * row + 1] for row in (0, 2, 4, 6)]
        self._wants: dict[Any, Tensor] = {}
        ends = {min([*map(row.index, set(row) & set(self.stops)), 48]) for row in self.texts}
        assert len(ends) > 4

    def want(self, rows: int, **settings: Any) -> Tensor:
        """Greedy ids by transformers; sampled ones by mode "ar"."""
        key = (rows, str(settings))
        if key not in self._wants:
            if "do_sample" in settings:
                with dscale.attach(self.reference, mode="ar") as spec:
                    self._wants[key] = spec.generate(**batch(rows), **settings)
            else:
                self._wants[key] = plain(self.reference, **batch(rows), **settings)
        return self._wants[key]

    def attach(self, mode: Any, **settings: Any) -> dscale.Attachment:
        if mode == "ar":
            return dscale.attach(self.model, mode="ar")
        return dscale.attach(self.model, self.drafter, mode=mode, **settings)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def as_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes in buckets and results read one step late, as with captured graphs."""

    def late(*args: Any, **settings: Any) -> Decoding:
        return Decoding(*args, **(settings | {"late": True, "padded": True}))

    monkeypatch.setattr(dscale.core, "Decoding", late)


def batch(rows: int) -> dict[str, Tensor]:
    return left_padded([prompt(n) for n in LENGTHS[:rows]], pad=VOCAB - 1)


def check_greedy(world: World, spec: dscale.Attachment) -> None:
    for rows in BATCHES:
        want = world.want(rows, max_new_tokens=NEW)
        assert torch.equal(spec.generate(**batch(rows), max_new_tokens=NEW), want), rows
    stop = {"eos_token_id": world.stops, "pad_token_id": 7, "max_new_tokens": 29}
    want = world.want(8, **stop)
    assert torch.equal(spec.generate(**batch(8), **stop), want)
    assert len({len(progress) for progress in spec.stats.last_progress}) > 1


@CASES
def test_greedy_ids(mode: str, budget: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (*SCRIPTS, "real"):
        with monkeypatch.context() as patch:
            if kind != "real":
                script(patch, world.texts, SCRIPTS[kind])
            with world.attach(mode, budget=budget) as spec:
                check_greedy(world, spec)
                if kind == "oracle" and budget in (5, 16) and mode != "ar":
                    assert spec.stats.tokens_per_pass > 0.6 * budget
            if mode == "ar":
                break


@CASES
def test_sampled_ids(
    mode: str, budget: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SAMPLE, "max_new_tokens": NEW, "seed": [3, 1, 4]}
    want = world.want(3, **settings)
    rows = [want[row, 127 - n :].tolist() for row, n in enumerate(LENGTHS[:3])]
    for kind in (*SCRIPTS, "real"):
        with monkeypatch.context() as patch:
            if kind != "real":
                script(patch, rows, SCRIPTS[kind])
            with world.attach(mode, budget=budget) as spec:
                assert torch.equal(spec.generate(**batch(3), **settings), want), kind
                alone = {**settings, "seed": 4}
                ids = torch.tensor([prompt(LENGTHS[2])])
                if kind == "real":
                    assert spec.generate(ids, **alone)[0].tolist() == rows[2]


@pytest.mark.parametrize("scored_by", ["predictor", "script"])
@ADAPTIVE
def test_late_results_in_padded_lanes(
    mode: Any,
    budget: Any,
    scored_by: str,
    world: World,
    as_captured: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overrule(monkeypatch, world.texts, real_scores=scored_by == "predictor")
    predictor = world.predictor if scored_by == "predictor" else None
    with world.attach(mode, budget=budget, predictor=predictor) as spec:
        check_greedy(world, spec)
        stats = spec.stats
        assert stats.tokens == sum(map(sum, stats.last_progress)) + sum(
            rows * (NEW - 1) for rows in BATCHES
        )
        assert stats.accepted == stats.tokens - stats.passes
        assert stats.drafted >= stats.accepted


@pytest.mark.parametrize("kind", PRICES)
def test_automatic_budgets_at_any_price(
    kind: str, world: World, prices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices(kind)
    overrule(monkeypatch, world.texts)
    with world.attach("dscale", predictor=world.predictor) as spec:
        check_greedy(world, spec)
        drafted_passes = spec.stats.drafted > 0
    assert drafted_passes or kind == "dear"
    with world.attach("dscale") as spec:
        want = world.want(8, max_new_tokens=45)
        assert torch.equal(spec.generate(**batch(8), max_new_tokens=45), want)
        if kind == "dear":  # 44 steps: two or three of them may look again
            assert 0 < spec.stats.drafted < 16 * 15 * 8
            assert spec.stats.tokens_per_pass < 2


@pytest.mark.parametrize("seed", ["paper", "plus_anchor", "none"])
def test_budget_seeds(seed: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    overrule(monkeypatch, world.texts)
    for mode in ("+budget", "dscale"):
        with world.attach(mode, budget=3, budget_seed=seed) as spec:
            check_greedy(world, spec)
            assert spec.stats.drafted / spec.stats.passes <= 2


@pytest.mark.parametrize("block", [2, 7])
def test_small_blocks_at_every_budget(
    block: int, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = tiny_drafter(tmp_path / "drafter", world.model, block_size=block)
    predictor = random_predictor(drafter, tmp_path / "predictor")
    overrule(monkeypatch, world.texts)
    for mode, budget in SHARED:
        settings = {"mode": mode, "budget": budget, "predictor": predictor}
        with dscale.attach(world.model, drafter, **settings) as spec:
            for rows in (1, 3):
                want = world.want(rows, max_new_tokens=NEW)
                got = spec.generate(**batch(rows), max_new_tokens=NEW)
                assert torch.equal(got, want), (mode, budget, rows)
            assert max(map(max, spec.stats.last_progress)) <= block
            assert spec.stats.drafted > 0 or budget == 1


@ADAPTIVE
def test_every_length_and_every_eos_in_a_block(
    mode: Any, budget: Any, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, world.texts[:2], oracle)
    want = world.want(2, max_new_tokens=24)
    with world.attach(mode, budget=budget) as spec:
        for new in (1, 2, 3, 4, 6, 9, 16, 17, 18):
            got = spec.generate(**batch(2), max_new_tokens=new)
            assert torch.equal(got, want[:, : 127 + new]), new
        text = world.texts[0]
        for offset in (0, 1, 2, 5, 15, 16, 17):
            eos = text[1 + offset]
            first = text.index(eos, 1)
            ids = torch.tensor([text[:1]])
            got = spec.generate(ids, max_new_tokens=40, eos_token_id=eos, pad_token_id=0)
            assert got[0].tolist() == text[: first + 1]


@pytest.mark.parametrize("mode", ["dscale", "+budget"])
def test_more_rows_than_an_adaptive_step_has_lanes(mode: str, world: World) -> None:
    ids = torch.tensor([prompt(3, seed) for seed in range(MAX_LANES + 5)])
    want = plain(world.reference, ids, max_new_tokens=4)
    with world.attach(mode, budget=2) as spec:
        assert torch.equal(spec.generate(ids, max_new_tokens=4), want)

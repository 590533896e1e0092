"""Repetition penalty: the function against transformers' processor, and whole runs against
transformers' generate in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import (
    VOCAB,
    always_wrong,
    left_padded,
    oracle,
    plain,
    prompt,
    ragged,
    script,
    tiny_model,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import RepetitionPenaltyLogitsProcessor, generation

import dscale
import dscale.stages
from dscale.compiled.drafter import Drafter
from dscale.compiled.penalty import block_before, penalise, see
from dscale.compiled.target import Target
from dscale.compiled.verify import Verify
from dscale.core import Core
from dscale.kernels.reference import position_gumbel
from dscale.request import Request

MODES = ["ar", "dflash", "+tiles", "+budget", "dscale"]
SCRIPTS = {"oracle": oracle, "wrong": always_wrong, "ragged": ragged, "real": None}
LENGTHS, NEW = [1, 130, 17, 5], 34
PAD = prompt(130)[3]
INPUTS = left_padded([prompt(n) for n in LENGTHS], pad=PAD)
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": [5, 6, 7, 8]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("candidates", [0, 1, 7, 15])
def test_every_row_is_what_the_processor_makes_of_it(candidates: int, dtype: torch.dtype) -> None:
    # So few tokens that a block repeats its own and those seen before.
    vocab, slots = 23, 5
    generator = torch.Generator().manual_seed(candidates)
    penalty_S = torch.tensor([0.5, 1.3, 1.0, 0.8, 7.0])
    lane_slots = [3, 0, 4, 1, 2, 0, 3]
    lengths = [min(n, candidates + 1) for n in (16, 1, 5, 9, 16, 3, 12)]
    seen_SV = torch.rand(slots, vocab, generator=generator) < 0.2
    token_M = torch.randint(0, vocab, (sum(lengths) + 3,), generator=generator)
    tile_row_M = torch.tensor([row for n in lengths for row in range(n)] + [0] * 3)
    slot_M = torch.tensor(
        [slot for slot, n in zip(lane_slots, lengths, strict=True) for _ in range(n)] + [3] * 3
    )
    logit_MV = torch.randn(len(token_M), vocab, generator=generator).to(dtype)
    logit_MV[:, 3], logit_MV[:, 4], logit_MV[:, 5] = 0.0, -torch.inf, torch.inf
    before = logit_MV.clone()
    block_MC = block_before(token_M, tile_row_M, candidates)
    assert block_MC.shape == (len(token_M), candidates)
    is_anchor_M = tile_row_M == 0
    seen_SV[slot_M[is_anchor_M], token_M[is_anchor_M]] = True
    got = penalise(logit_MV, seen_SV, slot_M, penalty_S[slot_M], block_MC)
    assert got.dtype == torch.float32
    assert torch.equal(logit_MV, before)
    for row, (slot, place) in enumerate(zip(slot_M.tolist(), tile_row_M.tolist(), strict=True)):
        ids = seen_SV[slot].nonzero()[:, 0].tolist() + token_M[row - place : row + 1].tolist()
        processor = RepetitionPenaltyLogitsProcessor(float(penalty_S[slot]))
        want = processor(torch.tensor([ids]), logit_MV[row : row + 1].float())
        assert torch.equal(got[row : row + 1], want), row


def test_committed_tokens_are_marked_and_no_others() -> None:
    seen_SV = torch.zeros(4, 9, dtype=torch.bool)
    seen_SV[1, 8] = True
    token_NT = torch.tensor([[1, 2, 3], [4, 4, 5], [6, 7, 6], [0, 1, 2]])
    see(seen_SV, torch.tensor([2, 0, 1, 3]), token_NT, torch.tensor([2, 3, 0, 0]))
    assert [row.nonzero()[:, 0].tolist() for row in seen_SV[:3]] == [[4, 5], [8], [1, 2]]


@pytest.fixture(scope="module")
def reference() -> Any:
    """A model that nobody attaches."""
    return tiny_model()


@pytest.fixture(scope="module")
def greedy(reference: Any) -> dict[float, Tensor]:
    """What transformers makes of INPUTS at each penalty."""
    return {
        penalty: plain(reference, **INPUTS, max_new_tokens=NEW, repetition_penalty=penalty)
        for penalty in (1.0, 1.3, 0.8)
    }


def unpadded(out: Tensor) -> list[list[int]]:
    longest = max(LENGTHS)
    return [row[longest - n :].tolist() for row, n in zip(out, LENGTHS, strict=True)]


def runs(pair: tuple[Any, Drafter], monkeypatch: pytest.MonkeyPatch, rows: list[list[int]]) -> Any:
    """Attach the pair in every mode, with every drafter scripted from `rows` and the real one."""
    model, drafter = pair
    for mode in MODES:
        for kind in ["none"] if mode == "ar" else SCRIPTS:
            right_for = SCRIPTS.get(kind)
            with monkeypatch.context() as patch:
                if right_for is not None:
                    script(patch, rows, right_for)
                settings = {} if mode == "ar" else {"drafter": drafter}
                with dscale.attach(model, mode=mode, prefill_chunk=128, **settings) as spec:
                    yield mode, kind, spec


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_greedy_ids_equal_in_every_mode(
    penalty: float,
    reference: Any,
    greedy: dict[float, Tensor],
    pair: tuple[Any, Drafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want, rows = greedy[penalty], unpadded(greedy[penalty])
    new = want[:, -NEW:].tolist()
    assert not any(a == b[-NEW:] for a, b in zip(new, greedy[1.0].tolist(), strict=True))
    # A reward makes blocks repeat tokens, a penalty forbids it.
    repeats = [16 - len(set(row[i : i + 16])) for row in new for i in range(NEW - 16)]
    assert max(repeats) > 8 if penalty < 1 else max(repeats) < 2
    kwargs = {**INPUTS, "max_new_tokens": NEW, "repetition_penalty": penalty}
    # And with stop ids that end rows inside of blocks.
    stops = [rows[0][1 + 3], rows[1][130 + 20], rows[2][17 + 1]]
    stopped = {**kwargs, "eos_token_id": stops, "pad_token_id": 7}
    want_stopped = plain(reference, **stopped)
    assert (want_stopped == 7).sum() > 20
    for mode, kind, spec in runs(pair, monkeypatch, rows):
        assert torch.equal(spec.model.generate(**kwargs), want), (mode, kind)
        if kind == "oracle" and mode in ("dflash", "+tiles"):
            assert spec.stats.last_progress == [[16, 16, 1]] * len(LENGTHS)
        if kind == "ragged":
            assert 1.2 < spec.stats.tokens_per_pass < 9
        assert torch.equal(spec.model.generate(**stopped), want_stopped), (mode, kind)


@pytest.mark.parametrize(
    "law",
    [
        {"temperature": 1.2, "top_k": 0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 0.8},
        {"temperature": 1.5, "top_k": 0, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 2.0},
    ],
    ids=str,
)
def test_samples_are_the_processors_and_equal_in_every_mode(
    law: dict[str, Any],
    reference: Any,
    pair: tuple[Any, Drafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = 20
    kwargs = {"max_new_tokens": new, **SAMPLED, **law}
    with dscale.attach(pair[0], mode="ar"):
        want = pair[0].generate(**INPUTS, **kwargs)
        assert not torch.equal(want, pair[0].generate(**INPUTS, **kwargs | {"seed": 1}))
    rows = unpadded(want)
    processors = generation.LogitsProcessorList()
    processors.append(RepetitionPenaltyLogitsProcessor(law["repetition_penalty"]))
    processors.append(generation.TemperatureLogitsWarper(law["temperature"]))
    processors.append(generation.TopKLogitsWarper(law["top_k"] or VOCAB))
    processors.append(generation.TopPLogitsWarper(law.get("top_p", 1.0)))
    processors.append(generation.MinPLogitsWarper(law.get("min_p", 0.0)))
    # The row without padding, which releases of transformers treat differently.
    row, start, seed = rows[1], LENGTHS[1], torch.tensor(SAMPLED["seed"][1])
    with torch.no_grad():
        logits = reference(torch.tensor([row])).logits[0]
    for position in range(start, start + new):
        score = processors(torch.tensor([row[:position]]), logits[position - 1 : position])[0]
        noise = position_gumbel(seed, torch.tensor(position), torch.arange(VOCAB))
        assert row[position] == int((score + noise).argmax()), position
    for mode, kind, spec in runs(pair, monkeypatch, rows):
        assert torch.equal(spec.model.generate(**INPUTS, **kwargs), want), (mode, kind)


def test_padding_counts_as_it_does_in_transformers(
    reference: Any, greedy: dict[float, Tensor], pair: tuple[Any, Drafter]
) -> None:
    (model, drafter), ids = pair, [prompt(n) for n in LENGTHS]
    rows = unpadded(greedy[1.0])
    # Pads that rows say; later also masked tokens in the middle of a prompt.
    for pad, hole in ((rows[0][2], 0), (rows[2][18], 3), (rows[3][5], 2)):
        inputs = left_padded(ids, pad=pad)
        inputs["attention_mask"][2, 130 - 17 + hole : 130 - 17 + 2 * hole] = 0
        for penalty in (1.3, 0.8):
            kwargs = {**inputs, "max_new_tokens": 20, "repetition_penalty": penalty}
            want = plain(reference, **kwargs)
            with dscale.attach(model, drafter):
                assert torch.equal(model.generate(**kwargs), want), (pad, hole)
    kwargs |= {"num_return_sequences": 2, "do_sample": True, "seed": list(range(8))}
    with dscale.attach(model, drafter):
        both = model.generate(**kwargs)
    with dscale.attach(model, mode="ar"):
        assert torch.equal(model.generate(**kwargs), both)


def test_requests_of_a_batch_have_their_own_penalties(pair: tuple[Any, Drafter]) -> None:
    model, drafter = pair
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {},
        {"repetition_penalty": 0.8, "temperature": 1.1, "top_k": 30, "seed": 3},
        {"temperature": 0.9, "seed": 4},
        {"repetition_penalty": 1.6, "also_seen": [5, 6, 7]},
    ]

    def run(spec: Any, chosen: list[int]) -> list[list[int]]:
        requests = [
            Request(prompt=prompt(9, seed), max_new_tokens=NEW, **settings[seed])
            for seed in chosen
        ]
        spec.engine.generate(requests)
        return [r.tokens for r in requests]

    with dscale.attach(model, mode="ar") as spec:
        alone = [run(spec, [i])[0] for i in range(len(settings))]
    for mode in ("dflash", "dscale"):
        # At most two at a time: later ones take over the slots of earlier ones.
        with dscale.attach(model, drafter, mode=mode, max_concurrency=2) as spec:
            for order in ([0, 1, 2, 3, 4], [4, 4, 2, 0, 1, 0]):
                assert run(spec, order) == [alone[i] for i in order], (mode, order)
            assert spec.engine.batcher.core.workspace.max_requests == 2


def test_calls_without_a_penalty_before_and_after(
    greedy: dict[float, Tensor], pair: tuple[Any, Drafter]
) -> None:
    model, drafter = pair
    for mode in ("ar", "+tiles", "dscale"):
        with dscale.attach(model, None if mode == "ar" else drafter, mode=mode) as spec:
            for penalty in (1.0, 1.3, None, 0.8, 1):
                out = model.generate(**INPUTS, max_new_tokens=NEW, repetition_penalty=penalty)
                assert torch.equal(out, greedy[penalty or 1.0]), (mode, penalty)
                core = spec.engine.batcher.core
                assert core.workspace.seen == (1 if spec.stats.calls == 1 else VOCAB)
            assert {chooser.penalty for chooser in core._stages} == {True, False}


def test_verify_with_a_penalty_is_one_graph_for_all_batches(
    pair: tuple[Any, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counted = CompileCounterWithBackend("aot_eager")

    def trace(stage: nn.Module) -> Callable[..., Any]:
        compiled = torch.compile(stage, fullgraph=True, backend=counted)
        return compiled if isinstance(stage, Verify) else stage

    model, drafter = pair
    kwargs = {"max_new_tokens": 3, "repetition_penalty": 1.3, "do_sample": True, "top_k": 7}
    batches = [left_padded([prompt(n, 4) for n in (3, 9, 5)[:count]]) for count in (3, 2)]
    with dscale.attach(model, mode="ar"):
        want = [model.generate(**inputs, **kwargs, seed=5) for inputs in batches]
    monkeypatch.setattr(dscale.stages, "capture", trace)
    monkeypatch.setattr(Core, "flex", property(lambda self: True))
    with dscale.attach(model, drafter, mode="dscale", budget=4, pool_tokens=384):
        for inputs, rows in zip(batches, want, strict=True):
            assert torch.equal(model.generate(**inputs, **kwargs, seed=5), rows)
    assert counted.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("value", [0.0, -1.0, 2, float("nan"), "1.2", [1.2]])
@pytest.mark.filterwarnings("ignore")
def test_values_that_transformers_refuses(
    value: Any, reference: Any, pair: tuple[Any, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, drafter = pair
    forwards: list[Target] = []
    monkeypatch.setattr(Target, "forward", lambda self, *args: forwards.append(self))
    ids = torch.tensor([prompt(4)])
    with pytest.raises((ValueError, TypeError)):
        plain(reference, ids, max_new_tokens=3, repetition_penalty=value)
    named = "repetition_penalty: expected a strictly positive float"
    with dscale.attach(model, drafter), pytest.raises(ValueError, match=named):
        model.generate(ids, max_new_tokens=3, repetition_penalty=value)
    with pytest.raises(ValueError, match=named):
        Request(prompt=[1], max_new_tokens=3, repetition_penalty=value).check(VOCAB)
    with pytest.raises(ValueError, match=f"also_seen: expected token ids in 0..{VOCAB - 1}"):
        Request(prompt=[1], max_new_tokens=3, also_seen=[VOCAB]).check(VOCAB)
    assert forwards == []

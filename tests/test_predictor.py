"""The predictor: sizes, scores that fall and stay finite, its inputs, one dynamic compilation."""

import math

import pytest
import torch
from torch import Tensor

from dscale.compiled.predictor import (
    NUM_CONTEXT,
    Predictor,
    PredictorConfig,
    batch_context,
    falling,
    running_product,
)
from dscale.kernels.reference_rows import allocate_budget
from dscale.kernels.reference_statistics import features_from_statistics, row_statistics

CANDIDATES, HIDDEN = 15, 32


def predictor(seed: int = 0) -> Predictor:
    """Random in every tensor."""
    generator = torch.Generator().manual_seed(seed)
    made = Predictor(PredictorConfig(hidden_size=HIDDEN, block_size=16))
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
        made.std.abs_().add_(0.5)
    return made.eval().requires_grad_(False)


def inputs(lanes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(lanes * CANDIDATES, 60, generator=generator) * 3
    feature = features_from_statistics(row_statistics(logits), CANDIDATES)
    hidden = torch.randn(lanes, CANDIDATES, HIDDEN, generator=generator)
    live = torch.ones(lanes, dtype=torch.bool)
    recent = torch.randint(-1, 16, (lanes, 3), generator=generator, dtype=torch.int32)
    context = torch.randint(1, 900, (lanes,), generator=generator, dtype=torch.int32)
    return feature, hidden, batch_context(live, 8.0, recent, context)


def test_at_most_112k_parameters_without_the_projection() -> None:
    made = Predictor(PredictorConfig(hidden_size=576, block_size=16))
    assert made.config.num_inputs == 396
    assert sum(p.numel() for p in made.parameters()) == 111_263 + 15
    assert sum(p.numel() for p in made.parameters()) <= 112_000


def test_an_untrained_predictor_is_the_running_product() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4 * CANDIDATES, 60) * 4
    statistics = row_statistics(logits)
    made = Predictor(PredictorConfig(hidden_size=HIDDEN, block_size=16))
    _, hidden, context = inputs(4)
    score = made(features_from_statistics(statistics, CANDIDATES), hidden, context)
    top = logits.softmax(1).amax(1).view(4, CANDIDATES)
    torch.testing.assert_close(running_product(statistics, 4), top.cumprod(1))
    torch.testing.assert_close(score, top.cumprod(1), atol=2e-4, rtol=1e-3)


def test_scores_are_the_cumulative_minimum_of_raw() -> None:
    made, (feature, hidden, context) = predictor(), inputs(5)
    raw = made.raw(feature, made.project(hidden), context)
    score = made(feature, hidden, context)
    assert raw.dtype == score.dtype == torch.float32
    assert torch.equal(score, raw.cummin(1).values)
    assert (raw.diff(dim=1) > 0).any(), "otherwise the minimum did nothing"
    assert torch.equal(score, made(feature, hidden.double(), context))
    x = torch.randn(7, CANDIDATES)
    assert torch.equal(falling(x), x.cummin(1).values)


@pytest.mark.parametrize("where", ["feature", "hidden", "context"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_other_requests_do_not_notice_a_bad_one(where: str, value: float) -> None:
    made, parts = predictor(), dict(zip(("feature", "hidden", "context"), inputs(3), strict=True))
    clean = made(*parts.values())
    parts[where][1].view(-1)[3] = value
    score = made(*parts.values())
    assert score.isfinite().all()
    assert torch.equal(score[[0, 2]], clean[[0, 2]])
    if math.isnan(value):
        assert (score[1] == 0).all()
    else:
        assert ((score >= 0) & (score <= 1)).all()


def test_nan_logits_leave_the_anchor_its_row() -> None:
    logits = torch.randn(2 * CANDIDATES, 60)
    logits[3, 5] = math.nan
    statistics = row_statistics(logits)
    _, hidden, context = inputs(2)
    score = predictor()(features_from_statistics(statistics, CANDIDATES), hidden, context)
    live, limit = torch.ones(2, dtype=torch.bool), torch.full((2,), 99, dtype=torch.int32)
    for scores in (score, running_product(statistics, 2)):
        assert scores.isfinite().all()
        room = torch.tensor([32, 1], dtype=torch.int32)
        assert allocate_budget(scores, live, limit, room, "none").tolist() == [1, 1]
    assert (score[0] == 0).all()
    assert (running_product(statistics, 2)[0, 3:] == 0).all()


def test_batch_context_written_out() -> None:
    live = torch.tensor([True, False, True, True])
    recent = torch.tensor([[15, 3, 0], [-1, -1, -1], [6, -1, -1], [0, 0, 0]], dtype=torch.int32)
    context = torch.tensor([0, 1, 255, 1023], dtype=torch.int32)
    out = batch_context(live, 8, recent, context)
    assert out.dtype == torch.float32
    assert out.shape == (4, NUM_CONTEXT)
    torch.testing.assert_close(out[0], torch.tensor([0.25, 0.5, 1.0, 0.2, 0.0, 0.0]))
    torch.testing.assert_close(out[2], torch.tensor([0.25, 0.5, 0.4, -1 / 15, -1 / 15, 0.5]))
    assert torch.equal(out, batch_context(live, torch.tensor(8.0), recent, context))
    assert torch.equal(out, batch_context(live, torch.full((4,), 8.0), recent, context))


def test_a_request_s_scores_do_not_depend_on_its_neighbours() -> None:
    made, (feature, hidden, context) = predictor(), inputs(6)
    whole = made(feature, hidden, context)
    alone = torch.cat([made(feature[i : i + 1], hidden[i : i + 1], context[i : i + 1])
                       for i in range(6)])  # fmt: skip
    torch.testing.assert_close(whole, alone, atol=1e-6, rtol=1e-5)


def test_one_graph_for_every_number_of_requests() -> None:
    made, head = predictor(), torch.randn(60, HIDDEN)
    live_S = torch.arange(16) != 1
    recent_SK = torch.randint(-1, 16, (16, 3), dtype=torch.int32)

    def decide(hidden_NCD: Tensor, slot_N: Tensor) -> list[Tensor]:
        lanes = hidden_NCD.shape[0]
        statistics = row_statistics((hidden_NCD @ head.T).flatten(0, 1))
        feature = features_from_statistics(statistics, CANDIDATES)
        live_N, recent_NK = live_S[slot_N], recent_SK[slot_N]
        context = batch_context(live_N, live_N.sum() * 1.5, recent_NK, slot_N)
        return [made(feature, hidden_NCD, context), running_product(statistics, lanes)]

    torch._dynamo.reset()
    compiled = torch.compile(decide, fullgraph=True, dynamic=True, backend="eager")
    torch._dynamo.utils.counters.clear()
    for lanes in (5, 7, 12):  # not 3, which would pass for the number of recent passes
        hidden, slots = torch.randn(lanes, CANDIDATES, HIDDEN), torch.randperm(16)[:lanes]
        expected = decide(hidden, slots)
        for ours, theirs in zip(compiled(hidden, slots), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

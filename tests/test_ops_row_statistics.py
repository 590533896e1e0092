"""row_statistics against float64 and sorted Python lists, and the features made from it."""

import math

import pytest
import torch
from ops_runs import RUNS, runner
from torch import Tensor

from dscale.kernels.ops import row_statistics
from dscale.kernels.reference_statistics import GAP_MAX, features_from_statistics

NAN, INF = float("nan"), float("inf")
SHAPES = [(1, 1), (2, 15), (3, 16), (5, 2048), (7, 2049), (2, 33_333), (1, 152_064)]


def check(got: tuple[Tensor, ...], logit: Tensor) -> None:
    top, index, lse, entropy = got
    value = logit.double()
    rows, vocab = value.shape
    want = torch.full((rows, 16), -INF, dtype=torch.float64)
    want[:, :vocab] = value.sort(1, descending=True).values[:, :16]
    log_probability = value.log_softmax(1)
    assert [x.dtype for x in got] == [torch.float32, torch.int64, torch.float32, torch.float32]
    assert torch.equal(top.double(), want)
    assert index.tolist() == [row.index(max(row)) for row in value.tolist()]
    torch.testing.assert_close(lse.double(), value.logsumexp(1), rtol=1e-6, atol=1e-5)
    plain = -(log_probability.exp() * log_probability).nan_to_num(0.0).sum(1)
    torch.testing.assert_close(entropy.double(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_logits(run: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    logit = (torch.randn(shape, generator=generator) * 4 + 3).to(dtype)
    check(runner("row_statistics", run)(logit), logit)


@pytest.mark.parametrize("run", RUNS)
def test_awkward_rows(run: str) -> None:
    vocab = 5000
    ramp = torch.arange(vocab) / 64
    rows = [
        torch.zeros(vocab),  # ties everywhere
        ramp, ramp.flip(0),  # the top changes in every chunk, or never
        (torch.arange(vocab) % 7).float(),
        torch.where(torch.arange(vocab) == 4999, 9.0, -INF),  # one possible token
        torch.where(torch.arange(vocab) < 2500, torch.finfo(torch.float32).min, 1.0),
        torch.where(torch.arange(vocab) < 20, -1e4, -3e4),
        torch.where(torch.arange(vocab) % 2500 == 9, 70.0, -70.0),  # the best twice
    ]  # fmt: skip
    logit = torch.stack(rows)
    check(runner("row_statistics", run)(logit), logit)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("vocab", [100, 40_000])
def test_rows_that_are_not_finite(run: str, vocab: int) -> None:
    logit = torch.zeros(4, vocab)
    logit[0, [3, vocab - 1]] = NAN
    logit[1, 0], logit[1, [vocab // 2, vocab - 1]] = NAN, INF
    logit[2, [7, vocab - 3, vocab - 2]] = INF
    logit[3] = -INF
    top, index, lse, entropy = runner("row_statistics", run)(logit)
    assert top[:2].isnan().all()
    assert index.tolist() == [3, 0, 7, 0]
    assert lse.isnan().tolist() == entropy.isnan().tolist() == [True, True, False, False]
    assert top[2].tolist() == [INF] * 3 + [0.0] * 13
    assert (top[3] == -INF).all()
    assert lse[2:].tolist() == [INF, -INF]
    torch.testing.assert_close(entropy[2:], torch.tensor([math.log(3), math.log(vocab)]))


@pytest.mark.parametrize("run", RUNS)
def test_views_and_no_rows(run: str) -> None:
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    for view in (wide[::2], wide[:, 10:29], wide.t(), wide[:, ::3]):
        check(runner("row_statistics", run)(view), view)
    empty = runner("row_statistics", run)(wide[:0])
    assert [tuple(x.shape) for x in empty] == [(0, 16), (0,), (0,), (0,)]


def test_features() -> None:
    logit = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    logit[4, 1:] = -INF
    logit[5, 2] = NAN
    feature = features_from_statistics(row_statistics(logit), 3)
    assert feature.shape == (2, 3, 18)
    assert feature.dtype == torch.float32
    for row in range(4):
        best = sorted(logit[row].tolist(), reverse=True)
        probability = logit[row].softmax(0)
        want = [best[0], *(best[0] - x for x in best[1:16]), probability.max().log().item()]
        want.append(-(probability * probability.log()).sum().item())
        torch.testing.assert_close(feature[row // 3, row % 3], torch.tensor(want))
    sure = feature[1, 1].tolist()
    assert sure == [logit[4, 0].item(), *[GAP_MAX] * 15, 0.0, 0.0]
    assert feature[1, 2].isnan().all()

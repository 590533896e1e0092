"""argmax against Python lists, and where the stages call it."""

from importlib import import_module

import pytest
import torch
from ops_runs import INTERPRETED, RUNS, runner
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dscale.compiled.sampling import best_tokens

NAN, INF = float("nan"), float("inf")
SHAPES = [(1, 1), (3, 5), (2, 4095), (3, 4096), (2, 4097), (2, 49_152), (1, 151_936)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def first_best(row: list[float]) -> int:
    """The first NaN, or else the first of the largest."""
    return next((at for at, x in enumerate(row) if x != x), row.index(max(row)))


def check(run: str, logit: Tensor) -> None:
    got = runner("argmax", run)(logit)
    assert got.dtype == torch.int64
    assert got.tolist() == [first_best(row) for row in logit.tolist()]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_logits(run: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    # Half-precision numbers near the top are few, so that the best is there more than once.
    check(run, (torch.randn(shape, generator=generator) * 4 + 3).to(dtype))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_ties(run: str, dtype: torch.dtype) -> None:
    vocab = 9000
    place = torch.arange(vocab)
    rows = [
        torch.zeros(vocab),
        torch.where(place % 2 == 0, -0.0, 0.0),  # equal to one another
        torch.where(place < 100, -0.0, 0.0),
        torch.where(place < 8500, -1.0, -0.0),
        (place % 4096).float(),
        *(torch.isin(place, torch.tensor(at)).float() for at in TIED),
    ]
    check(run, torch.stack(rows).to(dtype))


TIED = [[8, 15], [7, 8], [4095, 4096], [4100, 8191], [13, 4104], [8999], [2047, 2048], [16, 5000]]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 9000])
def test_rows_that_are_not_finite(run: str, vocab: int, dtype: torch.dtype) -> None:
    draws = torch.randn(9, vocab, generator=torch.Generator().manual_seed(0))
    logit = (draws * 4).to(dtype)
    middle, end = vocab // 2, vocab - 1
    logit[0] = -INF
    logit[1, [middle, end]] = INF
    logit[2, [0, end]] = NAN
    logit[3, 1], logit[3, [middle, end]] = INF, NAN
    logit[4, middle], logit[4, end] = -NAN, INF
    logit[5] = -INF
    logit[5, end] = torch.finfo(dtype).min
    logit[6] = NAN
    logit[7] = -INF
    logit[7, end] = NAN
    logit[8, 0] = -INF
    check(run, logit)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [x for x in TYPES if x != torch.bfloat16 or not INTERPRETED])
def test_subnormal_numbers(run: str, dtype: torch.dtype) -> None:
    """Which the interpreter takes for zeros in bfloat16; the kernel does not."""
    logit = torch.full((1, 40), torch.finfo(dtype).smallest_normal / -4, dtype=dtype)
    logit[0, 30] /= 2
    assert logit[0, 0] < logit[0, 30] < 0
    check(run, logit)


@pytest.mark.parametrize("run", RUNS)
def test_a_nan_anywhere(run: str) -> None:
    logit = torch.full((9, 4200), 5.0)
    for row, at in enumerate((0, 1, 3, 6, 7, 2047, 2048, 4096, 4199)):
        logit[row, at:] = NAN
        logit[row, at + 1 :: 2] = INF
    check(run, logit.bfloat16())


@pytest.mark.parametrize("run", RUNS)
def test_views_and_no_rows(run: str) -> None:
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    for view in (wide[::2], wide[:, 10:29], wide.t(), wide[:, ::3], wide[:1].expand(5, -1)):
        check(run, view)
    assert runner("argmax", run)(wide[:0]).shape == (0,)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rows", [2, 7])
def test_parts_of_several_chunks(run: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows have them: three parts of three chunks each, or one of nine."""
    monkeypatch.setattr(import_module("dscale.kernels.argmax"), "PROGRAMS", 6)
    logit = torch.randn(rows, 33_000, generator=torch.Generator().manual_seed(rows)).half()
    logit[1, 5000:] = logit[1].max()
    logit[0, [20_000, 20_003, 31_000]] = NAN
    check(run, logit)


@pytest.mark.parametrize("rows", [1, 8, 31, 64, 480, 512, 528, 529, 4000])
@pytest.mark.parametrize("vocab", [1, 4096, 49_152, 151_936])
def test_parts_cover_a_row(rows: int, vocab: int) -> None:
    parts, chunks = import_module("dscale.kernels.argmax").split(rows, vocab, 4096)
    assert parts * chunks * 4096 >= vocab > (parts - 1) * chunks * 4096
    assert rows * parts <= max(rows, 528)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stages_call_it_on_a_gpu_only(device: str) -> None:
    with FakeTensorMode():
        graph = make_fx(best_tokens)(torch.empty(3, 50, device=device))
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert called == {"aten.argmax.default" if device == "cpu" else "dscale.argmax.default"}

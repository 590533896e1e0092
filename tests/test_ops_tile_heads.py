"""tile_heads against a loop over tile cells and heads in float64."""

import pytest
import torch
from ops_runs import INTERPRETED, RUNS, runner
from torch import Tensor

from dscale.kernels import reference_heads

EPS = 1e-6
Arguments = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor]


def arguments(
    rows: int, lanes: int, height: int, heads: int, kv_heads: int, head_dim: int,
    *, normed: bool = True, dtype: torch.dtype = torch.float32,
) -> Arguments:  # fmt: skip
    generator = torch.Generator().manual_seed(rows + heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angle = torch.rand(rows, 1, head_dim // 2, generator=generator) * 99
    norms = (random(head_dim), random(head_dim)) if normed else (None, None)
    row_NT = torch.randint(rows, (lanes, height), generator=generator)
    qkv = random(rows, heads + 2 * kv_heads, head_dim)
    return qkv, *norms, angle.cos().to(dtype), angle.sin().to(dtype), row_NT


def turned(x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """One head of one row."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean() + EPS).sqrt() * norm.double()
    a, b = x.chunk(2)
    c, s = cos.double(), sin.double()
    return torch.cat((a * c - b * s, b * c + a * s))


def loop(args: Arguments, kv_heads: int, shared: int) -> tuple[Tensor, Tensor]:
    qkv, q_norm, k_norm, cos, sin, row_NT = args
    heads, (lanes, height) = qkv.shape[1] - 2 * kv_heads, row_NT.shape
    tile = torch.empty(lanes, heads // shared, shared * height, qkv.shape[2])
    key = torch.empty(qkv.shape[0], kv_heads, qkv.shape[2])
    for lane, cells in enumerate(row_NT.tolist()):
        for cell, row in enumerate(cells):
            for head in range(heads):
                one = turned(qkv[row, head], q_norm, cos[row, 0], sin[row, 0])
                tile[lane, head // shared, head % shared * height + cell] = one
    for row in range(qkv.shape[0]):
        for head in range(kv_heads):
            key[row, head] = turned(qkv[row, heads + head], k_norm, cos[row, 0], sin[row, 0])
    return tile, key


SHAPES = [(5, 2, 16, 8, 2, 16), (1, 1, 16, 9, 3, 64), (7, 3, 32, 4, 4, 128), (3, 2, 16, 6, 1, 24)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_loop(run: str, normed: bool, shape: tuple[int, ...]) -> None:
    args, kv_heads = arguments(*shape, normed=normed), shape[4]  # type: ignore[misc]
    for shared in {1, shape[3] // kv_heads}:
        got = runner("tile_heads", run)(*args, kv_heads, shared, EPS)
        want = loop(args, kv_heads, shared)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_rounding(run: str, dtype: torch.dtype, unit: float) -> None:
    """Four roundings on the CPU, as transformers does it; one in the kernel."""
    args = arguments(9, 2, 16, 8, 2, 64, dtype=dtype)
    got = runner("tile_heads", run)(*args, 2, 4, EPS)
    assert got[0].dtype == dtype
    # The interpreter truncates bfloat16 where a GPU rounds.
    once = 2 * unit if INTERPRETED else 1.01 * unit
    roundings = 4 * unit if run == "op" else once
    for x, y in zip(got, loop(args, 2, 4), strict=True):
        # Of the largest head: the two products of a rotation may cancel.
        assert (x.float() - y).abs().max() <= roundings * y.abs().max()


@pytest.mark.parametrize("run", RUNS)
def test_rows_that_are_not_contiguous(run: str) -> None:
    args = arguments(4, 1, 16, 4, 2, 16)
    wide = torch.cat((args[0], args[0]), 1)[:, : args[0].shape[1]]
    assert not wide.is_contiguous()
    got = runner("tile_heads", run)(wide, *args[1:], 2, 2, EPS)
    want = reference_heads.tile_heads(*args, 2, 2, EPS)
    torch.testing.assert_close(got, want)

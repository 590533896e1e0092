"""tile_heads against a loop over tile cells and heads in float64, and compiled."""

import re
from typing import Any

import pytest
import torch
from ops_runs import INTERPRETED, RUNS, runner
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from dscale.compiled.capture import fixed
from dscale.kernels import ops, reference_heads

EPS = 1e-6
SLOTS = 64
Arguments = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Tensor]


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
    slot_R = torch.randperm(SLOTS, generator=generator)[:rows]
    return qkv, *norms, angle.cos().to(dtype), angle.sin().to(dtype), row_NT, slot_R


def pools(args: Arguments, kv_heads: int) -> list[Tensor]:
    """Full of what must stay where no row goes."""
    shape = (SLOTS, kv_heads, args[0].shape[2])
    return [torch.full(shape, filler, dtype=args[0].dtype) for filler in (0.5, 0.25)]


def ran(run: str, args: Arguments, kv_heads: int, shared: int) -> tuple[Tensor, ...]:
    """The tiles and both pools."""
    pool = pools(args, kv_heads)
    if run == "op" or INTERPRETED:
        return runner("tile_heads", run)(*args, *pool, shared, EPS), *pool
    pool = [x.cuda() for x in pool]
    tile = runner("tile_heads", run)(*args, *pool, shared, EPS)
    return tile, *(x.cpu() for x in pool)


def turned(x: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """One head of one row."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean() + EPS).sqrt() * norm.double()
    a, b = x.chunk(2)
    c, s = cos.double(), sin.double()
    return torch.cat((a * c - b * s, b * c + a * s))


def loop(args: Arguments, kv_heads: int, shared: int) -> tuple[Tensor, ...]:
    qkv, q_norm, k_norm, cos, sin, row_NT, slot_R = args
    heads, (lanes, height) = qkv.shape[1] - 2 * kv_heads, row_NT.shape
    tile = torch.empty(lanes, heads // shared, shared * height, qkv.shape[2])
    key, value = (x.float() for x in pools(args, kv_heads))
    for lane, cells in enumerate(row_NT.tolist()):
        for cell, row in enumerate(cells):
            for head in range(heads):
                one = turned(qkv[row, head], q_norm, cos[row, 0], sin[row, 0])
                tile[lane, head // shared, head % shared * height + cell] = one
    for row, slot in enumerate(slot_R.tolist()):
        value[slot] = qkv[row, heads + kv_heads :]
        for head in range(kv_heads):
            key[slot, head] = turned(qkv[row, heads + head], k_norm, cos[row, 0], sin[row, 0])
    return tile, key, value


SHAPES = [(5, 2, 16, 8, 2, 16), (1, 1, 16, 9, 3, 64), (7, 3, 32, 4, 4, 128), (3, 2, 16, 6, 1, 24)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_loop(run: str, normed: bool, shape: tuple[int, ...]) -> None:
    args, kv_heads = arguments(*shape, normed=normed), shape[4]  # type: ignore[misc]
    for shared in {1, shape[3] // kv_heads}:
        got = ran(run, args, kv_heads, shared)
        want = loop(args, kv_heads, shared)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_rounding(run: str, dtype: torch.dtype, unit: float) -> None:
    """Four roundings on the CPU, as transformers does it; one in the kernel."""
    args = arguments(9, 2, 16, 8, 2, 64, dtype=dtype)
    got = ran(run, args, 2, 4)
    assert got[0].dtype == dtype
    assert torch.equal(got[2][args[-1]], args[0][:, -2:])  # values are copied
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
    got = ran(run, (wide, *args[1:]), 2, 2)
    pool = pools(args, 2)
    want = reference_heads.tile_heads(*args, *pool, 2, EPS)
    torch.testing.assert_close(got, (want, *pool))


@pytest.mark.parametrize("run", RUNS)
def test_rows_may_share_a_slot(run: str) -> None:
    """As padding rows do: what stays is some row's, and no other slot changes."""
    args = arguments(6, 1, 16, 4, 2, 16)
    slot_R = torch.tensor([0, 0, 5, 0, 9, 0])
    _, key, value = ran(run, (*args[:-1], slot_R), 2, 2)
    _, alone, _ = ran(run, args, 2, 2)
    rows = torch.cat((alone[args[-1]], args[0][:, -2:]), 1)
    got = torch.cat((key, value), 1)
    torch.testing.assert_close(got[[5, 9]], rows[[2, 4]])
    assert torch.isclose(got[0], rows[[0, 1, 3, 5]]).any(0).all()
    empty = torch.cat(pools(args, 2), 1)
    kept = [slot for slot in range(SLOTS) if slot not in (0, 5, 9)]
    assert torch.equal(got[kept], empty[kept])


def layer(x: Tensor, others: tuple[Any, ...], key: Tensor, value: Tensor) -> Tensor:
    """Stands in for a decoder's: products with the pools, behind the write."""
    ops.tile_heads(x, *others, key, value, 2, EPS)
    width = x[0].numel()
    score = x.view(-1, width) @ key.view(-1, width).mT
    return (score @ value.view(-1, width)).view(x.shape)


def test_a_compiled_layer_writes_the_pools_in_place() -> None:
    """Not to a clone: it would cost more than the whole step."""
    compiled = torch.compile(layer, fullgraph=True)
    codes: list[str] = []
    for rows in (5, 7):
        x, *others = arguments(rows, 2, 16, 4, 2, 16)
        for moving in (x, *others[2:4], others[5]):
            torch._dynamo.mark_dynamic(moving, 0)
        pool = [fixed(x) for x in pools(arguments(1, 1, 1, 4, 2, 16), 2)]
        plain = [x.clone() for x in pool]
        want = layer(x, tuple(others), *plain)
        if codes:  # other pools and rows
            with torch._dynamo.config.patch(error_on_recompile=True):
                got = compiled(x, tuple(others), *pool)
        else:
            got, codes = run_and_get_code(compiled, x, tuple(others), *pool)
        torch.testing.assert_close((got, *pool), (want, *plain))
    assert "dscale.tile_heads.default(" in codes[0]
    assert re.findall(rf"empty_strided\w*\(\(({SLOTS}|{pool[0].numel()}),.*", codes[0]) == []
    torch._dynamo.reset()

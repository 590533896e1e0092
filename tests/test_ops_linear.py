"""linear against a product in float64, in tiles that do and do not fit."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_runs import INTERPRETED, RUNS
from tiny import tiny_drafter, tiny_model
from torch import Tensor

from dscale.kernels import ops
from dscale.kernels.linear_plans import Plan, plans_for, table
from dscale.load import build_target
from dscale.stages import split_products

PLANS = [Plan(16, 32, 64, 1, 2, 4), Plan(16, 32, 64, 3, 2, 4), Plan(64, 32, 64, 4, 2, 4)]
# The interpreter's dot takes no bfloat16.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = ("bfloat16", "float8_e4m3fn")
SHAPES = [(1, 32, 64), (16, 96, 256), (40, 48, 328), (70, 128, 512)]


def product(run: str, plan: Plan, args: tuple[Tensor, Tensor, Tensor | None, Tensor]) -> Any:
    if run == "op":
        return ops.linear(*args)
    launch = import_module("dscale.kernels.linear").split_linear
    if INTERPRETED:
        return launch(*args, plan)
    moved = [x if x is None else x.cuda() for x in args]
    out = launch(*moved, plan).cpu()
    args[3].copy_(moved[3])
    return out


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(run: str, biased: bool, plan: Plan, shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    generator = torch.Generator().manual_seed(rows)
    # Small whole numbers: exact in 8 bits.
    x = torch.randint(-2, 3, (rows, inner), generator=generator).to(DTYPE)
    weight = torch.randint(-1, 2, (columns, inner), generator=generator).to(DTYPE)
    bias = torch.randint(-4, 5, (columns,), generator=generator).to(DTYPE) if biased else None
    turn = torch.zeros(64, dtype=torch.int32)
    want = x.double() @ weight.double().t()
    want = want if bias is None else want + bias
    for _ in range(2):
        got = product(run, plan, (x, weight, bias, turn))
        assert got.dtype == DTYPE
        # Sums above 256 are rounded to 8 bits.
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=0)
        assert turn.count_nonzero() == 0


@pytest.mark.parametrize("run", RUNS)
def test_rows_that_are_not_contiguous(run: str) -> None:
    wide = torch.arange(64 * 40).reshape(64, 40).remainder(5).to(DTYPE)
    x, turn = wide[::2, :32], torch.zeros(8, dtype=torch.int32)
    weight = torch.ones(32, 32).to(DTYPE)
    got = product(run, PLANS[0], (x, weight, None, turn))
    torch.testing.assert_close(got.float(), x.float() @ weight.float().t())


def test_a_plan_fits_its_gpu() -> None:
    """Every entry of the table is of a GPU's shared memory and leaves no program without work."""
    every = [(key, dtype) for dtype in DTYPES for key in table("9.0", 132, dtype).items()]
    assert every
    for ((columns, inner), plans), dtype in every:
        for rows, plan in plans.items():
            size = getattr(torch, dtype).itemsize
            assert plan is None or plan.shared_bytes(size) <= 227 * 1024, (columns, inner, rows)
            assert plan is None or plan.parts <= inner // plan.block_k
            assert plan is None or plan.tiles(rows, columns) <= 4096


def test_no_plan_elsewhere() -> None:
    assert table("8.0", 108) == {}
    assert plans_for(torch.zeros(4096, 4096, dtype=torch.bfloat16)) == {}


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("x", 0, torch.zeros(3, 5)), ("weight", 1, torch.zeros(4)), ("bias", 2, torch.zeros(3)),
     ("turn", 3, torch.zeros(4))],
)  # fmt: skip
def test_wrong_arguments(name: str, index: int, value: Tensor) -> None:
    args: list[Any] = [torch.zeros(3, 4), torch.zeros(2, 4), None, torch.zeros(1).int()]
    ops.linear(*args)
    args[index] = value
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        ops.linear(*args)


def test_a_drafter_takes_turns_with_no_target(tmp_path: Path) -> None:
    """Engines of two models may share it, whose threads run at the same time."""
    models = [tiny_model(), tiny_model(seed=1)]
    drafter = tiny_drafter(tmp_path / "drafter", models[0])
    targets = [build_target(model, (0,)) for model in models]
    for target in targets:
        split_products(target, drafter)
    buffers = [x.turn for x in (*targets, drafter) if x.turn is not None]
    assert len({x.data_ptr() for x in buffers}) == 3

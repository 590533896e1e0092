"""scaled_linear against a product in float64, gated_rows against what it is made of, and the plans
of 8-bit products on a GPU."""

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops_runs import INTERPRETED, RUNS, runner
from torch import Tensor

from dscale.kernels import ops
from dscale.kernels.linear_plans import Plan, device_kind, table
from dscale.kernels.reference_scaled import E4M3, quantize_rows

PLANS = [Plan(16, 32, 64, 1, 2, 4), Plan(16, 32, 64, 3, 2, 4), Plan(64, 32, 64, 4, 2, 4)]
# The interpreter takes no bfloat16 bias.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SHAPES = [(1, 32, 64), (16, 96, 256), (40, 48, 336), (70, 128, 512)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]


def operands(rows: int, columns: int, inner: int, biased: bool = False) -> Args:
    """Small whole numbers and scales that are powers of two: all sums are exact."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-2, 3, (rows, inner), generator=generator).float().to(E4M3)
    weight = torch.randint(-1, 2, (columns, inner), generator=generator).float().to(E4M3)
    x_scale = 2.0 ** torch.randint(-3, 3, (rows,), generator=generator)
    weight_scale = 2.0 ** torch.randint(-3, 3, (columns,), generator=generator)
    bias = torch.randint(-4, 5, (columns,), generator=generator).to(DTYPE) if biased else None
    return x, x_scale, weight, weight_scale, bias, torch.zeros(64, dtype=torch.int32)


def wanted(args: Args) -> Tensor:
    x, x_scale, weight, weight_scale, bias, _ = args
    wide = weight.double() * weight_scale.double()[:, None]
    return F.linear(x.double() * x_scale[:, None], wide, None if bias is None else bias.double())


def product(run: str, plan: Plan, args: Args) -> Any:
    if run == "op":
        return ops.scaled_linear(*args, DTYPE)
    x, x_scale, weight, weight_scale, bias, turn = (
        value if INTERPRETED or value is None else value.cuda() for value in args
    )
    launch = import_module("dscale.kernels.linear").split_linear
    out = launch(x, weight, bias, turn, plan, scales=(x_scale, weight_scale), dtype=DTYPE).cpu()
    args[-1].copy_(turn)
    return out


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(run: str, biased: bool, plan: Plan, shape: tuple[int, int, int]) -> None:
    args = operands(*shape, biased)
    for _ in range(2):
        got = product(run, plan, args)
        assert got.dtype == DTYPE
        torch.testing.assert_close(got.double(), wanted(args), rtol=2**-7, atol=0)
        assert args[-1].count_nonzero() == 0


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("rows", "inner"), [(1, 48), (19, 300), (5, 1024)])
def test_gated_rows(run: str, rows: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    x = torch.randn(rows, 2 * inner, generator=generator).to(dtype)
    if rows > 4:
        x[1], x[2, 3] = 0, float("nan")
    values, scale = runner("gated_rows", run)(x)
    assert (values.dtype, scale.dtype) == (E4M3, torch.float32)
    want = (F.silu(x[:, :inner]) * x[:, inner:]).float()
    clean = [row for row in range(rows) if rows <= 4 or row not in (1, 2)]
    got = values.float() * scale[:, None]
    torch.testing.assert_close(scale[clean], want[clean].abs().amax(1) / 448, rtol=2**-6, atol=0)
    # 3 bits behind the leading one, nothing below 2^-9 of a scale. The interpreter has nothing
    # below 2^-6, and where rounding carries into the exponent it loses the carry.
    share, least = (0.52, 2**-6) if INTERPRETED else (0.08, 2**-9)
    error = (got - want).abs()[clean] / (want.abs() + scale[:, None])[clean]
    assert ((got - want).abs() <= want.abs() * share + scale[:, None] * least)[clean].all()
    assert error.median() < 0.04
    if rows > 4:
        assert got[1].count_nonzero() == 0
        assert got[2].isnan().any()
        assert scale[2].isnan()
        assert scale[1] > 0


def test_rows_are_quantized_alone() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * 50
    x[0], x[1] = 0, x[1] * 1e-42  # denormal
    x[2, 5], x[3, 5] = float("nan"), float("inf")
    values, scale = quantize_rows(x)
    for row in range(7):
        alone, own = quantize_rows(x[row : row + 1])
        assert torch.equal(values[row].view(torch.uint8), alone[0].view(torch.uint8))
        torch.testing.assert_close(scale[row], own[0], rtol=0, atol=0, equal_nan=True)
    got = values.float() * scale[:, None]
    assert got[:2].isfinite().all()
    assert got[2].isnan().any()
    assert got[3].isnan().any()
    assert got[4:].isfinite().all()
    assert ((got - x)[4:].abs() <= x[4:].abs() / 16 + scale[4:, None] * 2**-10).all()
    assert (values[4:].float().abs().amax(1) == 448).all()
    # A row that is not a number stays in its own row of a product.
    weight, weight_scale = quantize_rows(torch.randn(32, 64))
    out = ops.scaled_linear(values, scale, weight, weight_scale, None, None, torch.float32)
    assert out.isnan().all(1).tolist() == [False, False, True, True, False, False, False]


WRONG: list[tuple[str, int, Any]] = [
    ("x", 0, torch.zeros(3, 5).to(E4M3)),
    ("x", 0, torch.zeros(3, 16)),
    ("x_scale", 1, torch.zeros(2)),
    ("weight", 2, torch.zeros(32, 16).half()),
    ("weight_scale", 3, torch.zeros(32).double()),
    ("bias", 4, torch.zeros(3)),
    ("turn", 5, torch.zeros(4)),
]


@pytest.mark.parametrize(("name", "index", "value"), WRONG)
def test_wrong_arguments(name: str, index: int, value: Any) -> None:
    args: list[Any] = [*operands(3, 32, 16), torch.float32]
    ops.scaled_linear(*args)
    args[index] = value
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        ops.scaled_linear(*args)
    with pytest.raises(ValueError, match=r"^x: expected floats"):
        ops.gated_rows(torch.zeros(2, 5))


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_library_does_what_has_no_plan() -> None:
    for shape in ((1, 32, 64), (40, 48, 336), (300, 128, 512)):
        args = operands(*shape)
        moved = [value if value is None else value.cuda() for value in args]
        for turn in (None, moved[-1]):
            got = ops.scaled_linear(*moved[:-1], turn, torch.bfloat16).cpu()
            torch.testing.assert_close(got.double(), wanted(args), rtol=2**-7, atol=0)
    for bad, name in ((operands(3, 24, 64), "weight"), (operands(3, 32, 40), "weight")):
        moved = [value if value is None else value.cuda() for value in bad]
        with pytest.raises(ValueError, match=f"^{name}: expected multiples of 16"):
            ops.scaled_linear(*moved, torch.bfloat16)
    moved = [value if value is None else value.cuda() for value in args]
    with pytest.raises(ValueError, match=r"^dtype: expected torch\.bfloat16"):
        ops.scaled_linear(*moved, torch.float32)


@pytest.mark.gpu
@needs_gpu
def test_every_plan_of_this_gpu_runs() -> None:
    turn = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for (columns, inner), plans in table(*device_kind(turn.device), "float8_e4m3fn").items():
        weight, weight_scale = quantize_rows(torch.randn(columns, inner, device="cuda"))
        for rows, plan in plans.items():
            if plan is None:
                continue
            x, x_scale = quantize_rows(torch.randn(rows - 3, inner, device="cuda"))
            args = (x, x_scale, weight, weight_scale, None)
            got = ops.scaled_linear(*args, turn, torch.bfloat16)
            want = ops.scaled_linear(*args, None, torch.bfloat16)
            error = (got - want).abs().max() / want.abs().max()
            assert error < 0.01, (columns, inner, rows)
            assert turn.count_nonzero() == 0

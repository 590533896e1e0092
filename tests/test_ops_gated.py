"""gated: silu(gate) * up against the two operations it stands for."""

import pytest
import torch
import torch.nn.functional as F
from ops_runs import INTERPRETED, RUNS, runner

from dscale.kernels import ops

NARROW = torch.float16 if INTERPRETED else torch.bfloat16


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize(("rows", "inner"), [(1, 48), (19, 300), (3, 2500)])
def test_gated(run: str, dtype: torch.dtype, rows: int, inner: int) -> None:
    x = 4 * torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(inner))
    x[0, 5], x[0, 7], x[0, 9] = float("nan"), float("-inf"), -200.0
    x = x.to(dtype)
    got = runner("gated", run)(x)
    want = F.silu(x[:, :inner]) * x[:, inner:]
    assert got.dtype == dtype
    # exp may differ in its last bits, which a narrow dtype rounds to a neighbour now and then.
    rtol = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-30, equal_nan=True)
    assert (got == want).float().mean() > 0.9 or dtype == torch.float32


def test_refusals() -> None:
    for wrong in (torch.zeros(2, 5), torch.zeros(4), torch.zeros(2, 4, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"x: expected floats \[M, 2 \* K\]"):
            ops.gated(wrong)

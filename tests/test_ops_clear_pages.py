"""Pages of a pool are zeroed, and no others: in eager code, and by the kernel."""

import pytest
import torch
from ops_runs import INTERPRETED, RUNS

from dscale.compiled.kv import PAGE, KVPool
from dscale.kernels.clear_pages import clear_pages


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 3), (3, 64), (2, 40)])
def test_pages(run: str, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    device = torch.device("cuda" if run == "kernel" and not INTERPRETED else "cpu")
    pool, cleared = KVPool(3, 7, heads, head_dim, dtype, device), [0, 4, 6]
    for buffer in pool.buffers():
        buffer.fill_(torch.nan)
    if run == "kernel" and INTERPRETED:
        buffers = list(pool.buffers())
        table = torch.tensor([b.data_ptr() for b in buffers] + cleared)
        clear_pages(table, len(buffers), buffers[0].nbytes // 7)
    else:
        pool.clear(cleared)
    for buffer in pool.buffers():
        zero = (buffer.view(7, PAGE, heads, head_dim) == 0).flatten(1).cpu()
        assert zero.all(1).nonzero().flatten().tolist() == cleared
        assert not zero[[1, 2, 3, 5]].any()

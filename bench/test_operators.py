"""Benchmarks of the operators and the predictor, one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.operators import KEYS, calls, measured
from bench.result_files import ResultFile
from bench.shapes import Models
from bench.sizes import REQUESTS, ROUNDS, SHAPE, needs_gpu

NAMES = (
    "row_statistics",
    "argmax",
    "predictor",
    "allocate_budget",
    "pack_rows",
    "accept_prefix",
)


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("name", NAMES)
def test_operator(timed: Callable[..., None], models: Models, name: str, requests: int) -> None:
    norm = models.target.norm
    call = calls(SHAPE, requests, norm.device, norm.dtype)[name]
    timed(call, 5 * ROUNDS, requests=requests)
    for found in torch.utils._pytree.tree_leaves(call()):
        assert found.numel() > 0


@needs_gpu
def test_operators_over_their_floors(
    models: Models, base: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    """Captured calls, launches left out, beside what memory traffic takes."""
    norm, out = models.target.norm, pytestconfig.getoption("--bench-out")
    rows = list(measured(SHAPE, REQUESTS, norm.device, norm.dtype))
    assert {row["operator"] for row in rows} == set(NAMES)
    # Logits that stay in the cache from call to call are read faster than memory is.
    assert all(row["us"] >= row["floor_us"] for row in rows if row["operator"] != "argmax")
    for row in rows if isinstance(out, Path) else ():
        print(ResultFile(out / "operators.json", KEYS, base).put(row))

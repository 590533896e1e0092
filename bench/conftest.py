"""`pytest bench`: a small set on a CPU in about a minute, everything on a GPU.

Needs pytest-benchmark (`pip install -e '.[bench]'`). With `--bench-out FOLDER` the rows are kept
as the modules of the same names keep them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rows import environment
from bench.shapes import Models, build
from bench.simulated import SETTINGS, Trace, draw
from bench.sizes import CONTEXT, CUDA, REQUESTS, ROUNDS, SHAPE
from bench.step_cases import Rig, make_rig
from bench.step_parts import room_for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench-out", type=Path, help="folder for result rows; default: none kept")


def pytest_configure(config: pytest.Config) -> None:
    if find_spec("pytest_benchmark") is None:
        raise pytest.UsageError(
            "the benchmarks need pytest-benchmark: pip install -e '.[bench]' "
            "(python -m bench.graphs and the other modules run without it)"
        )


def pytest_report_header(config: pytest.Config) -> list[str]:
    if CUDA:
        return [f"bench: {torch.cuda.get_device_name(0)}, {SHAPE.name}, random weights"]
    return [
        f"bench: no CUDA device, so a small set: {SHAPE.name}, eager steps in float32; its times",
        "bench: say that everything runs and no more. Skipped: captured graphs against their",
        "bench: floors, Qwen3-8B shapes, 16 and 32 requests, the tile of each head on its own",
    ]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def base() -> dict[str, Any]:
    """What every row carries."""
    return environment() | {"model": SHAPE.name, "dtype": "bfloat16" if CUDA else "float32"}


@pytest.fixture(scope="session")
def models() -> Models:
    """Random weights of the shape, built once."""
    device = torch.device("cuda:0" if CUDA else "cpu")
    with torch.no_grad():
        return build(SHAPE, device, torch.bfloat16 if CUDA else torch.float32)


@pytest.fixture(scope="session")
def rig(models: Models) -> Rig:
    """Steps with simulated acceptance; what one test compiles, the next finds ready."""
    most, device = max(REQUESTS), models.target.norm.device
    with torch.no_grad():
        trace = Trace(*draw(SETTINGS["paper"], 1024, most + 1), device)
        return make_rig(models, trace, most, CONTEXT + room_for(256))


@pytest.fixture
def timed(benchmark: Any) -> Callable[..., None]:
    """Run a call over and over and time each round until the device is done."""

    def run(call: Callable[[], Any], rounds: int = ROUNDS, **extra: Any) -> None:
        def wait() -> None:
            call()
            if CUDA:
                torch.cuda.synchronize()

        benchmark.extra_info.update(extra)
        benchmark.pedantic(wait, rounds=rounds, iterations=1, warmup_rounds=2)

    return run

"""The Triton kernels without a GPU: run by the interpreter, and compiled for an H200."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dscale.kernels.linear_plans import Plan

TESTS = Path(__file__).parent
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    int: "i32",
    float: "fp32",
}
# Called by a kernel, not launched.
HELPERS = {"_head", "_joined", "_below", "_finish", "_scaled", "_max", "_run_max", "_key"}
NAMES = ["row_statistics", "argmax", "allocate_budget", "pack_rows", "accept_prefix"]
LAYERS = ["tile_heads", "share_pages", "merge_shares"]
OTHERS = ["gated", "gated_rows", "clear_pages"]
LAUNCHERS = {"linear": "split_linear", "scaled_linear": "split_linear"}
"""Where it is not named as the operation."""
MODULES = {"scaled_linear": "linear"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are tested on the GPU")
def test_all_kernel_tests_pass_under_the_interpreter() -> None:
    """In a process of its own, because Triton decides when it is imported."""
    files = [str(p) for p in TESTS.glob("test_ops_*.py") if p.name != Path(__file__).name]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", "kernel"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=TESTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    summary = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", str(summary))
    assert passed is not None
    assert int(passed[1]) >= 60, summary
    assert "skipped" not in str(summary)


class CompileOnly:
    """Stands in for a kernel: compiles what would be launched for compute capability 9.0."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.names: list[str] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants = {}, {}
        for parameter, value in zip(self.kernel.params, args, strict=True):
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            else:
                signature[parameter.name] = type_of(value)
        source = ASTSource(self.kernel, signature, constexprs=constants)
        target = GPUTarget("cuda", 90, 32)
        self.names.append(triton.compile(source, target=target, options=options).name)


def type_of(value: Any) -> str:
    """As signatures name it."""
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    return TYPES[value.dtype if isinstance(value, Tensor) else type(value)]


def arguments(name: str, lanes: int, dtype: torch.dtype) -> tuple[Any, ...]:
    ints = torch.ones(lanes, dtype=torch.int32)
    longs, table = ints.long(), torch.ones(lanes, 15, dtype=torch.int64)
    heads = torch.ones(8 * lanes, 9 + 2 * 3, 128, dtype=dtype)
    norm = heads[0, 0] if lanes > 1 else None
    half, cell = heads[:, :1, :64], torch.zeros(lanes, 16, dtype=torch.int64)
    return {
        "row_statistics": (torch.zeros(lanes, 152_064, dtype=dtype),),
        "argmax": (torch.zeros(lanes, 152_064, dtype=dtype),),
        "allocate_budget": (table.float(), ints.bool(), ints, ints[:2], "paper"),
        "pack_rows": (ints, table, longs, ints, ints[:, None], 8 * lanes, 128),
        "accept_prefix": (table, ints, longs, torch.ones(8 * lanes).long()),
        "tile_heads": (
            *(heads, norm, norm, half, half, cell, torch.arange(8 * lanes)),
            *(heads[:, :3].contiguous(), heads[:, :3].contiguous(), 3, 1e-6),
        ),
        "share_pages": (ints, torch.zeros(8 * lanes).long(), 16, 70),
        "merge_shares": (
            torch.zeros(lanes, 3, 48, 128, dtype=dtype),
            *(torch.zeros(lanes, 3, 48), longs, longs, longs, 16),
        ),
        "linear": (heads[0], heads[0], None, ints, Plan(64, 64, 64, 4, 3, 4)),
        "scaled_linear": (
            *(heads[0].to(torch.float8_e4m3fn), heads[0].to(torch.float8_e4m3fn), None, ints),
            Plan(16 if lanes > 1 else 64, 64, 64, 4, 3, 4),
            (heads[0, :, 0].float(), heads[0, :, 0].float()),
            dtype,
        ),
        "gated_rows": (heads[:, 0],),
        "gated": (heads[:, 0],),
        "clear_pages": (longs, 1, 4096),
    }[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled anyway")
@pytest.mark.parametrize("name", [*NAMES, *LAYERS, *LAUNCHERS, *OTHERS])
def test_kernels_compile_for_an_h200(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler refuses what the interpreter lets pass."""
    module = import_module(f"dscale.kernels.{MODULES.get(name, name)}")
    found = {k for k, v in vars(module).items() if type(v).__name__ == "JITFunction"}
    kernels = found - HELPERS
    stands = {k: CompileOnly(getattr(module, k)) for k in kernels}
    for kernel, stand in stands.items():
        monkeypatch.setattr(module, kernel, stand)
    if hasattr(module, "starts_early"):
        monkeypatch.setattr(module, "starts_early", lambda device: True)
    for lanes, dtype in ((1, torch.float32), (33, torch.bfloat16)):
        getattr(module, LAUNCHERS.get(name, name))(*arguments(name, lanes, dtype))
    assert kernels
    assert {k: len(stand.names) for k, stand in stands.items()} == dict.fromkeys(kernels, 2)


@pytest.mark.parametrize(
    ("device", "major", "hip", "early"),
    [
        ("cuda:0", 9, None, True),
        ("cuda:0", 8, None, False),
        ("cuda:0", 12, None, False),
        ("cuda:0", 9, "6.4", False),  # an MI300 says 9, too
        ("cpu", 9, None, False),
    ],
)
def test_kernels_start_early_on_hopper_alone(
    device: str, major: int, hip: str | None, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dscale.kernels import dependent

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(dependent, "device_kind", lambda device: (f"{major}.0", 132))
    assert dependent.starts_early(torch.device(device)) == early
    assert dependent.launch_options(early) == ({"launch_pdl": True} if early else {})

"""Inductor's kernels that start early: each waits before anything else, and only where told to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer

import dscale.compiled.dependent as dependent
from dscale.compiled.capture import capture

WAIT, LAUNCH = TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernel, "_filter_pdl", TritonKernel._filter_pdl)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `torch.compile` is asked for."""
    seen: dict[str, Any] = {}

    def compile_(function: Any, **options: Any) -> Any:
        seen.update(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    return seen


@pytest.mark.parametrize("early", [True, False])
def test_a_kernel_waits_before_it_reads(early: bool) -> None:
    assert dependent.wait_first()
    kernel: Any = SimpleNamespace(
        GDC_WAIT=WAIT, GDC_LAUNCH=LAUNCH, _enable_pdl_codegen=lambda: early
    )
    body = IndentedBuffer()
    body.writeline("x0 = xindex")
    body.writeline("for r0_offset in tl.range(0, r0_numel, R0_BLOCK):")
    with body.indent():
        body.writelines(["tmp0 = tl.load(in_ptr0 + x0)", WAIT, LAUNCH])
    written = body.getvalue()
    TritonKernel._filter_pdl(kernel, body)
    lines = body.getvalue().splitlines()
    if early:
        assert lines[:3] == [WAIT, LAUNCH, "x0 = xindex"]
        assert [line for line in lines if "gdc" in line] == [WAIT, LAUNCH]
        assert lines[-1] == "    tmp0 = tl.load(in_ptr0 + x0)"
    else:
        assert body.getvalue() == written


@pytest.mark.parametrize("known", [True, False], ids=["as known", "another PyTorch"])
@pytest.mark.parametrize("early", [True, False])
def test_a_stage_is_compiled_in_its_mode(
    early: bool, known: bool, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependent, "starts_early", lambda device: early)
    if not known:
        monkeypatch.delattr(TritonKernel, "_filter_pdl")
    capture(nn.Linear(2, 2))
    if early and known:
        options = torch._inductor.list_mode_options("reduce-overhead")
        assert options["triton.cudagraphs"] is True
        assert asked == {"fullgraph": True, "options": {**options, "triton.enable_pdl": True}}
    else:
        assert asked == {"fullgraph": True, "mode": "reduce-overhead"}


def test_nothing_starts_early_on_a_cpu_or_without_weights(asked: dict[str, Any]) -> None:
    for stage in (nn.Linear(2, 2), nn.Identity()):
        capture(stage)
        assert asked == {"fullgraph": True, "mode": "reduce-overhead"}

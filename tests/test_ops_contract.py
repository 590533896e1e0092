"""What every custom operation promises torch: schema, fake shapes, whole graphs, errors."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from ops_runs import room
from torch import Tensor

from dscale.kernels import ops

NAMES = ["row_statistics", "argmax", "allocate_budget", "pack_rows", "accept_prefix"]
NAMES += ["tile_heads", "share_pages", "merge_shares", "linear", "gated_rows", "gated"]
NAMES += ["scaled_linear"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def arguments(name: str, lanes: int, device: str = "cpu") -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(lanes)
    live = torch.ones(lanes, dtype=torch.bool)
    live[1::3] = False
    score = torch.rand(lanes, 15, generator=generator).cumprod(1)
    limit = torch.randint(1, 20, (lanes,), generator=generator, dtype=torch.int32)
    length = 3 * live.int()
    candidate = torch.randint(9, (lanes, 15), generator=generator)
    anchor, context = candidate[:, 0].contiguous(), limit * 50
    page_table = torch.randint(1, 9, (lanes, 7), generator=generator, dtype=torch.int32)
    offset = torch.where(live, length.cumsum(0) - length, length.sum())
    choice = torch.randint(9, (6 * lanes,), generator=generator)
    args: tuple[Any, ...] = {
        "row_statistics": (torch.randn(lanes, 50, generator=generator).bfloat16(),),
        "argmax": (torch.randn(lanes, 50, generator=generator).half(),),
        "allocate_budget": (score, live, limit, room(6 * lanes, 6).to(device), "paper"),
        "pack_rows": (length, candidate, anchor, context, page_table, 6 * lanes, 128),
        "accept_prefix": (candidate, length, offset, choice),
        "tile_heads": (
            torch.randn(6 * lanes, 8, 16, generator=generator),
            *torch.randn(2, 16, generator=generator),
            *torch.randn(2, 6 * lanes, 1, 8, generator=generator),
            candidate % (6 * lanes),
            torch.arange(6 * lanes),
            *(torch.randn(9 * lanes, 2, 16, generator=generator) for _ in range(2)),
            4,
            1e-6,
        ),
        "share_pages": (length + 1, candidate[:, 0] % lanes, 16, 20),
        "merge_shares": (
            torch.randn(2 * lanes, 2, 48, 16, generator=generator),
            torch.randn(2 * lanes, 2, 48, generator=generator),
            *(torch.arange(lanes) * 2, torch.full((lanes,), 2), candidate[:, 0], 16),
        ),
        "gated_rows": (torch.randn(lanes, 96, generator=generator).bfloat16(),),
        "gated": (torch.randn(lanes, 96, generator=generator).bfloat16(),),
        "scaled_linear": (
            torch.randn(lanes, 32, generator=generator).to(torch.float8_e4m3fn),
            torch.rand(lanes, generator=generator),
            torch.randn(48, 32, generator=generator).to(torch.float8_e4m3fn),
            torch.rand(48, generator=generator),
            torch.randn(48, generator=generator).bfloat16(),
            torch.zeros(4, dtype=torch.int32),
            torch.bfloat16,
        ),
        "linear": (
            torch.randn(lanes, 32, generator=generator),
            torch.randn(32, 32, generator=generator),
            torch.randn(32, generator=generator),
            torch.zeros(4, dtype=torch.int32),
        ),
    }[name]
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in args)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lanes", [1, 5])
def test_opcheck(name: str, lanes: int, device: str) -> None:
    op = getattr(torch.ops.dscale, name).default
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name != "scaled_linear":  # it would multiply the arguments, which 8-bit floats cannot
        checks.append("test_schema")
    results = torch.library.opcheck(op, arguments(name, lanes, device), test_utils=checks)
    assert set(results.values()) == {"SUCCESS"}


def step(
    logit_RV: Tensor, score_NC: Tensor, live_N: Tensor, limit_N: Tensor, page_NL: Tensor, out: Any
) -> None:
    """All four in a row, over fixed-address results."""
    lanes, rows = score_NC.shape[0], out[0].shape[0]
    best = ops.row_statistics(logit_RV)
    candidate = best.index_R.view(lanes, 15)
    length = ops.allocate_budget(score_NC, live_N, limit_N, limit_N.new_full((2,), rows))
    packed = ops.pack_rows(length, candidate, candidate[:, 0], limit_N, page_NL, rows, 128)
    accepted, successor = ops.accept_prefix(candidate, length, packed.offset_N, packed.token_M)
    for buffer, x in zip(out, (packed.token_M, packed.slot_M, accepted, successor), strict=True):
        buffer.copy_(x)


def step_arguments(lanes: int, device: str) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(lanes)
    score, live, limit = arguments("allocate_budget", lanes)[:3]
    page = arguments("pack_rows", lanes)[4]
    logit = torch.randn(15 * lanes, 300, generator=generator)
    out = [torch.zeros(n, dtype=torch.int64) for n in (8 * lanes, 8 * lanes, lanes, lanes)]
    for tensor in out:
        torch._dynamo.mark_dynamic(tensor, 0)
    moved = [x.to(device) for x in (logit, score, live, limit, page)]
    for tensor in moved:
        torch._dynamo.mark_dynamic(tensor, 0)
    return *moved, [x.to(device) for x in out]


@pytest.mark.parametrize("device", DEVICES)
def test_one_whole_graph_for_every_batch(device: str) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for lanes in (2, 3, 8, 32):
        got, want = step_arguments(lanes, device), step_arguments(lanes, "cpu")
        compiled(*got)
        step(*want)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(got[-1], want[-1], strict=True))
        assert want[-1][0].count_nonzero() > 0
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.gpu
@needs_gpu
def test_replay_of_a_captured_step() -> None:
    """A CUDA graph of all four gives what they give when launched, for inputs it never saw."""
    args = step_arguments(5, "cuda")
    step(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*args)
    for seed in range(5):
        want = step_arguments(5, "cpu")
        want[0].normal_(generator=torch.Generator().manual_seed(seed))
        want[2].copy_(torch.arange(5) != seed)
        for x, y in zip(args[:-1], want[:-1], strict=True):
            x.copy_(y)
        graph.replay()
        step(*want)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(args[-1], want[-1], strict=True))


def test_kernels_are_imported_when_they_run() -> None:
    code = """
import sys, torch
sys.modules["triton"] = None  # importing it now raises
import dscale.kernels.ops as ops
ops.row_statistics(torch.zeros(1, 3))
print(*(n for n in sys.modules if n.startswith("dscale.kernels.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = {name.removeprefix("dscale.kernels.") for name in done.stdout.split()}
    assert loaded.isdisjoint(NAMES)
    assert "ops" in loaded


# Operation, argument to replace, its new value, and the argument the error must name.
REFUSED: list[tuple[str, int, Any, str]] = [
    ("row_statistics", 0, torch.zeros(3), "logit"),
    ("row_statistics", 0, torch.zeros(3, 0), "logit"),
    ("row_statistics", 0, torch.zeros(3, 4, dtype=torch.int64), "logit"),
    ("argmax", 0, torch.zeros(3), "logit"),
    ("argmax", 0, torch.zeros(3, 0), "logit"),
    ("argmax", 0, torch.zeros(3, 4, dtype=torch.float64), "logit"),
    ("allocate_budget", 0, torch.zeros(4, 16), "score"),
    ("allocate_budget", 0, torch.zeros(4, 15, dtype=torch.float64), "score"),
    ("allocate_budget", 0, torch.zeros(257, 15), "score"),
    ("allocate_budget", 1, torch.ones(4), "live"),
    ("allocate_budget", 2, torch.ones(5, dtype=torch.int32), "limit"),
    ("allocate_budget", 3, torch.ones(2), "room"),
    ("allocate_budget", 3, torch.ones(3, dtype=torch.int32), "room"),
    ("allocate_budget", 4, "best", "seed"),
    ("pack_rows", 0, torch.ones(4, dtype=torch.int64), "length"),
    ("pack_rows", 1, torch.ones(4, 15), "candidate"),
    ("pack_rows", 1, torch.ones(0, 15, dtype=torch.int64), "candidate"),
    ("pack_rows", 2, torch.ones(3, dtype=torch.int64), "anchor"),
    ("pack_rows", 3, torch.ones(4, dtype=torch.int64), "context"),
    ("pack_rows", 4, torch.ones(4, dtype=torch.int32), "page_table"),
    ("pack_rows", 4, torch.ones(4, 0, dtype=torch.int32), "page_table"),
    ("pack_rows", 5, 3, "rows"),
    ("pack_rows", 6, 0, "page"),
    ("accept_prefix", 0, torch.ones(4, 0, dtype=torch.int64), "candidate"),
    ("accept_prefix", 1, torch.ones(4, dtype=torch.int64), "length"),
    ("accept_prefix", 2, torch.ones(4, dtype=torch.int32), "offset"),
    ("accept_prefix", 3, torch.ones(0, dtype=torch.int64), "choice"),
    ("tile_heads", 0, torch.ones(24, 8, 15), "qkv"),
    ("tile_heads", 0, torch.ones(24, 8, 16).long(), "qkv"),
    ("tile_heads", 1, None, "k_norm"),
    ("tile_heads", 1, torch.ones(15), "q_norm"),
    ("tile_heads", 2, torch.ones(16).bfloat16(), "k_norm"),
    ("tile_heads", 3, torch.ones(23, 1, 8), "cos"),
    ("tile_heads", 4, torch.ones(24, 8), "sin"),
    ("tile_heads", 5, torch.ones(4, 16), "row"),
    ("tile_heads", 6, torch.arange(24).int(), "slot"),
    ("tile_heads", 6, torch.arange(23), "slot"),
    ("tile_heads", 7, torch.ones(36, 4, 16), "key_pool"),
    ("tile_heads", 7, torch.ones(36, 2, 15), "key_pool"),
    ("tile_heads", 7, torch.ones(36, 2, 16).bfloat16(), "key_pool"),
    ("tile_heads", 7, torch.ones(2, 36, 16).transpose(0, 1), "key_pool"),
    ("tile_heads", 8, torch.ones(35, 2, 16), "value_pool"),
    ("tile_heads", 9, 3, "shared"),
    ("tile_heads", 10, -1.0, "eps"),
    ("share_pages", 0, torch.ones(4).long(), "used"),
    ("share_pages", 0, torch.ones(0).int(), "used"),
    ("share_pages", 1, torch.zeros(4).int(), "lane"),
    ("share_pages", 2, 0, "parts"),
    ("share_pages", 3, 0, "most"),
    ("merge_shares", 0, torch.ones(8, 2, 48), "out"),
    ("merge_shares", 0, torch.ones(8, 2, 48, 16).long(), "out"),
    ("merge_shares", 1, torch.ones(8, 2, 47), "lse"),
    ("merge_shares", 1, torch.ones(8, 2, 48).bfloat16(), "lse"),
    ("merge_shares", 2, torch.zeros(4).int(), "first"),
    ("merge_shares", 3, torch.ones(3).long(), "count"),
    ("merge_shares", 4, torch.zeros(4, 1).long(), "tile_row"),
    ("merge_shares", 5, 5, "height"),
]


@pytest.mark.parametrize(("name", "position", "value", "named"), REFUSED)
def test_wrong_arguments_are_named(name: str, position: int, value: Any, named: str) -> None:
    args = list(arguments(name, 4))
    args[position] = value
    with pytest.raises(ValueError, match=rf"^{named}: expected .+, got "):
        getattr(ops, name)(*args)

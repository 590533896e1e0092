"""What the GPU does in a step: kernels out of a profiler trace, idle time, the allocator's share;
and what CUDA graphs hold and how often anything was compiled or recorded."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

GRAPH_KERNELS = 4
"""A launch of more kernels than this is a captured graph; the eager ones launch one each."""

MIB = 2**20

_UNNUMBERED = re.compile(r"_\d+$")  # the number Inductor ends a kernel's name with
_KIND = re.compile(r"triton_[a-z]+_fused")
_STATISTICS_END = "_join_groups"  # the last kernel of row_statistics
# Besides what follows the row statistics: float32 products, which only the predictor has.
_FLOAT32_PRODUCT = re.compile(r"sgemm|f32f32|tf32|gemmSN|gemv|nvjet_ss|dot_kernel")


class Kernel(NamedTuple):
    """One kernel or copy on the GPU. Microseconds; `launch`: what the host launched it with, one
    number for all kernels of a graph."""

    name: str
    start: float
    length: float
    launch: int

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.length


def record(step: Callable[[], None], steps: int) -> list[Kernel]:
    """Run `step` so often under the profiler; returns what ran on the GPU, in order of start."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def read_trace(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels, copies and fills of a Chrome trace, in order of start."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Kernel(event["name"], event["ts"], event["dur"], event["args"].get("correlation", -1))
        for event in trace["traceEvents"]
        if event.get("cat") in kinds and event.get("ph") == "X"
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def graphs_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The captured graphs among what ran, in order, each the list of its kernels."""
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.launch].append(kernel)
    graphs = [launch for launch in launches.values() if len(launch) > GRAPH_KERNELS]
    return sorted(graphs, key=lambda graph: graph[0].start)


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one of them ran; they come in order of start."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def span(kernels: Sequence[Kernel]) -> float:
    """Microseconds from the first start to the last end."""
    return max(kernel.end for kernel in kernels) - kernels[0].start


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step as the GPU saw it, mean over the steps of a trace; microseconds and shares of time.

    `idle_share`: of the whole, gaps between steps included; `idle_in_graphs`: inside the graphs
    alone. `graph_gap`: between decide and verify; `step_gap`: between verify and the next decide.
    `allocator`: predictor, budget and packing; `allocator_names`: the kernels counted there."""

    step: float
    busy: float
    idle_share: float
    idle_in_graphs: float
    graph_gap: float | None
    step_gap: float
    allocator: float
    allocator_names: tuple[str, ...]
    kernels: list[dict[str, Any]]

    @property
    def fields(self) -> dict[str, Any]:
        """As result rows carry them."""
        return {
            "idle_share": round(self.idle_share, 4),
            "allocator_share": round(self.allocator / self.busy, 5),
            "idle_in_graphs": round(self.idle_in_graphs, 4),
            "graph_gap_us": None if self.graph_gap is None else round(self.graph_gap, 1),
            "step_gap_us": round(self.step_gap, 1),
            "busy_ms": round(self.busy / 1e3, 4),
            "traced_step_ms": round(self.step / 1e3, 4),
            "kernels_per_step": sum(row["count"] for row in self.kernels),
        }


def step_profile(kernels: Sequence[Kernel], per_step: int, skip: int) -> StepProfile:
    """Figures of the steps after the first `skip`, of `per_step` graphs each (decide, verify, or
    verify alone).

    Raises ValueError when the trace does not hold whole steps of that many graphs."""
    graphs = graphs_of(kernels)
    steps = len(graphs) // per_step - skip
    if len(graphs) % per_step or steps < 2:
        raise ValueError(
            f"kernels: expected {per_step} graphs a step and at least {skip + 2} steps, got "
            f"{len(graphs)} launches of more than {GRAPH_KERNELS} kernels in {len(kernels)}"
        )
    graphs = graphs[skip * per_step :]
    first, last = graphs[0][0].start, max(kernel.end for kernel in graphs[-1])
    inside = [kernel for kernel in kernels if first <= kernel.start < last]
    gaps = [after[0].start - max(k.end for k in before) for before, after in pairwise(graphs)]
    allocator = [k for graph in graphs[::per_step] for k in allocator_kernels(graph)]
    in_graphs = sum(map(span, graphs))
    return StepProfile(
        step=(last - first) / steps,
        busy=busy(inside) / steps,
        idle_share=1 - busy(inside) / (last - first),
        idle_in_graphs=1 - sum(map(busy, graphs)) / in_graphs,
        graph_gap=median(gaps[0::2]) if per_step == 2 else None,
        step_gap=median(gaps[per_step - 1 :: per_step]),
        allocator=sum(k.length for k in allocator) / steps,
        allocator_names=tuple(dict.fromkeys(k.name for k in allocator)),
        kernels=kernel_table(inside, steps),
    )


def allocator_kernels(decide: Sequence[Kernel]) -> list[Kernel]:
    """Of a decide graph: what follows the row statistics (scores, budget, packing and the copies
    that hand them on), and the predictor's float32 products wherever they stand. None where
    nothing is scored."""
    ends = [i for i, kernel in enumerate(decide) if kernel.name.startswith(_STATISTICS_END)]
    if not ends:
        return []
    before = [k for k in decide[: ends[-1]] if _FLOAT32_PRODUCT.search(k.name)]
    return [*before, *decide[ends[-1] + 1 :]]


def kernel_table(kernels: Sequence[Kernel], steps: int) -> list[dict[str, Any]]:
    """Per name, most time first: calls and microseconds a step, microseconds a call, share."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        lengths[kernel.name].append(kernel.length)
    total = sum(map(sum, lengths.values()))
    rows = [
        {
            "name": name,
            "count": round(len(taken) / steps, 2),
            "us": round(sum(taken) / steps, 2),
            "us_each": round(sum(taken) / len(taken), 2),
            "share": round(sum(taken) / total, 4),
        }
        for name, taken in lengths.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def format_table(title: str, rows: Sequence[dict[str, Any]], most: int = 25) -> str:
    """A kernel table as text, its tail in one line."""
    lines = [title, f"{'us a step':>10} {'calls':>8} {'us each':>9} {'share':>7}  kernel"]
    for row in rows[:most]:
        lines.append(
            f"{row['us']:10.1f} {row['count']:8.2f} {row['us_each']:9.2f} {row['share']:7.1%}  "
            f"{row['name'][:90]}"
        )
    rest = rows[most:]
    if rest:
        us, count = (sum(row[key] for row in rest) for key in ("us", "count"))
        share = sum(row["share"] for row in rest)
        lines.append(f"{us:10.1f} {count:8.2f} {'':9} {share:7.1%}  {len(rest)} more kernels")
    return "\n".join(lines) + "\n"


def growth(
    small: Sequence[dict[str, Any]], large: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Microseconds a step of every kernel with a small and a large pool, most growth first.

    Inductor numbers its kernels, and names some anew for other sizes: names count without their
    number, and those of one table only are added up by kind (templates, pointwise, ...)."""
    names = [{_UNNUMBERED.sub("", row["name"]) for row in rows} for rows in (small, large)]
    both = names[0] & names[1]
    tables: list[dict[str, float]] = []
    for rows in (small, large):
        table: dict[str, float] = defaultdict(float)
        for row in rows:
            name = _UNNUMBERED.sub("", row["name"])
            kind = _KIND.match(name)
            table[name if name in both or kind is None else kind[0]] += row["us"]
        tables.append(table)
    before, after = tables
    found = [
        {
            "name": n,
            "us_small": round(before.get(n, 0.0), 2),
            "us_large": round(after.get(n, 0.0), 2),
        }
        for n in before | after
    ]
    return sorted(found, key=lambda row: row["us_small"] - row["us_large"])


class Counts(NamedTuple):
    """What was compiled and recorded so far."""

    graphs: int
    recordings: int
    skips: int
    breaks: int

    def since(self, before: Counts) -> dict[str, int]:
        """Growth from an earlier count on."""
        names = ("recompiles", "recordings", "cudagraph_skips", "graph_breaks")
        return {n: a - b for n, a, b in zip(names, self, before, strict=True)}


def counts() -> Counts:
    """Count Dynamo's graphs and breaks, Inductor's skipped CUDA graphs, and the recordings."""
    counters = torch._dynamo.utils.counters
    return Counts(
        counters["stats"]["unique_graphs"],
        _recordings(),
        counters["inductor"]["cudagraph_skips"],
        sum(counters["graph_break"].values()),
    )


def _recordings() -> int:
    manager = _manager()
    waiting = [node for nodes in manager.roots.values() for node in nodes] if manager else []
    found = 0
    while waiting:
        node = waiting.pop()
        found += 1
        waiting += [child for children in node.children.values() for child in children]
    return found


def graph_pool_mib() -> float | None:
    """Device memory of the pool that all CUDA graphs share; None where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    manager = _manager()
    if manager is None:
        return 0.0
    pool = tuple(manager.cuda_graphs_thread_pool)
    snapshot: Any = torch.cuda.memory_snapshot
    segments = snapshot()
    held = sum(int(s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == pool)
    return round(held / MIB, 1)


def _manager() -> Any:
    if not torch.cuda.is_available():
        return None
    from torch._inductor.cudagraph_trees import get_manager

    return get_manager(torch.cuda.current_device(), create_if_none_exists=False)

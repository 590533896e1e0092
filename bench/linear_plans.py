"""Which products the split kernel should do, and in what tiles, measured on this GPU.

`python -m bench.linear_plans --models 8b 4b` tries every tile on every projection and writes the
table that the products read, kernels/tuned/linear.json, beside the library's time for each.
Weights are read from memory, not from the L2 cache: copies take turns. Times are of a product
and a small kernel before it, as a layer has them: our products start while that one ends.
`--dtype float8_e4m3fn` does so for weights and rows of 8-bit floats, as `weights="fp8"` has them,
`--heads` for LM heads alone.
`--again` measures the table's tiles once more, not all of them. `TRITON_INTERPRET=1 python -m
bench.linear_plans --tiny --out FILE` goes through it at toy size on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bench.graphs import BYTES_PER_S
from bench.result_files import ResultFile
from bench.rows import environment
from bench.shapes import SHAPES, Shape
from dscale.compiled.packed import MAX_TILES, turns
from dscale.kernels import ops
from dscale.kernels.linear_plans import FILE, Plan, device_kind

KEYS = ("capability", "processors", "dtype", "columns", "inner", "rows")
CASE = ("rows", "columns", "inner")
ROWS = (16, 64, 128, 256, 512)
PARTS = (1, 2, 3, 4, 6, 8)
DEPTHS = {"bfloat16": (64, 128), "float8_e4m3fn": (128, 256)}
SHARED = (110 * 1024, 222 * 1024)
"""Shared memory of a program when two, or one, are to fit on a Hopper multiprocessor."""
SPREAD = 384 * 2**20  # bytes of weights in turn: six times an H200's L2 cache
WORTH = 0.97
"""Of the library's time, to be worth an entry: repeated measurements differ by 1 to 2 %."""

OUT = {"cuda": torch.bfloat16, "cpu": torch.float16}
"""Of products of 8-bit floats: the interpreter writes no bfloat16."""

Run = Callable[[Tensor, Tensor], Tensor]


def weights_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """(columns, inner) of a layer's projections."""
    projected = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return {
        "qkv": (projected, shape.hidden),
        "o": (shape.hidden, shape.heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def candidates(rows: int, columns: int, inner: int, dtype: str = "bfloat16") -> Iterator[Plan]:
    """Tiles worth a try: as deep a pipeline as one or two programs a multiprocessor allow."""
    size = getattr(torch, dtype).itemsize
    heights = {16: (16, 64), 64: (64,), 128: (64, 128)}.get(rows, (128, 256))
    for height, width, depth, parts, shared in product(
        heights, (32, 64, 128, 256), DEPTHS[dtype], PARTS, SHARED
    ):
        stages = min(shared // (size * depth * (height + width)), 8)
        tiles = -(-rows // height) * -(-columns // width)
        too_small = tiles * parts < 48 or parts * depth * 4 > inner
        most = MAX_TILES if parts == 1 and columns > 2**16 else 1600  # an LM head has many
        if stages < 3 or height * width > 2**15 or too_small or tiles * parts > most:
            continue
        if size == 1 and height < width == 32:
            continue  # few rows stand on the right there, and the left takes 64
        warps = (8,) if height * width >= 2**15 else (4, 8) if height * width >= 2**14 else (4,)
        for count in warps:
            yield Plan(height, width, depth, parts, stages, count)


def kernel(plan: Plan) -> Plan:
    """Plans that differ in parts alone have one kernel."""
    return replace(plan, parts=1)


class Clock:
    """Times products over weights that take turns, in one captured graph on a GPU."""

    def __init__(
        self, rows: int, columns: int, inner: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        copies = 1
        if self.cuda:
            copies = max(2, -(-SPREAD // (dtype.itemsize * columns * inner)))
        self.weights = [
            torch.randn(columns, inner, device=device).to(dtype) for _ in range(copies)
        ]
        self.x = torch.randn(rows, inner, device=device).to(dtype)
        self.turns = -(-12 // copies) if self.cuda else 1
        self.before = torch.zeros(rows, inner, dtype=torch.bfloat16, device=device)

    def microseconds(self, run: Run, repeats: int) -> float:
        """Median time of one product and the small kernel before it."""
        if not self.cuda:
            began = time.perf_counter()
            run(self.x, self.weights[0])
            return 1e6 * (time.perf_counter() - began)
        run(self.x, self.weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.turns):
                for weight in self.weights:
                    self.before.mul_(1.0)
                    run(self.x, weight)
        graph.replay()
        found = []
        for _ in range(repeats):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            found.append(1e3 * first.elapsed_time(last) / (self.turns * len(self.weights)))
        return median(found)


def scales_of(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scales of 8-bit operands: ones."""
    if weight.dtype.itemsize > 1:
        return None
    return ones(len(x), x.device), ones(len(weight), x.device)


@functools.cache
def ones(count: int, device: torch.device) -> Tensor:
    """Made before a graph is captured."""
    return torch.ones(count, device=device)


def library(x: Tensor, weight: Tensor) -> Tensor:
    """What is to be beaten."""
    scales = scales_of(x, weight)
    if scales is None:
        return torch.nn.functional.linear(x, weight)
    return ops.scaled_linear(x, scales[0], weight, scales[1], None, None, OUT[x.device.type])


def split(plan: Plan, turn: Tensor) -> Run:
    """A product in a plan's tiles."""
    from dscale.kernels.linear import split_linear

    def run(x: Tensor, weight: Tensor) -> Tensor:
        scales = scales_of(x, weight)
        dtype = None if scales is None else OUT[x.device.type]
        return split_linear(x, weight, None, turn, plan, scales, dtype)

    return run


def compile_all(plans: Sequence[Plan], device: torch.device, dtype: torch.dtype) -> set[Plan]:
    """Compile each plan's kernel, several at a time; returns those that the GPU takes."""
    x, weight = (torch.ones(n, 2048, device=device).to(dtype) for n in (256, 4096))
    works: set[Plan] = set()

    def run(plan: Plan) -> None:
        try:
            split(plan, turns(device))(x, weight)
            torch.cuda.synchronize()
            works.add(plan)
        except Exception as error:
            tqdm.write(f"{plan}: {type(error).__name__}: {str(error)[:100]}")

    # One thread first, so that what they share is made once.
    run(plans[0])
    with ThreadPoolExecutor(12) as pool:
        list(tqdm(pool.map(run, plans[1:]), total=len(plans) - 1, desc="compile", mininterval=2))
    return works


def best(
    rows: int,
    columns: int,
    inner: int,
    plans: Sequence[Plan],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """A row of the table: the fastest plan and the library, both measured again at the end."""
    clock, turn = Clock(rows, columns, inner, device, dtype), turns(device)
    first = {plan: clock.microseconds(split(plan, turn), 3) for plan in plans}
    again = {
        plan: clock.microseconds(split(plan, turn), 15)
        for plan in sorted(first, key=first.__getitem__)[:6]
    }
    theirs = clock.microseconds(library, 15)
    plan = min(again, key=again.__getitem__)
    got, want = (f(clock.x, clock.weights[0]).float() for f in (split(plan, turn), library))
    error = float((got - want).abs().max() / want.abs().max())
    if not error < 0.02:
        raise RuntimeError(f"{plan}: {rows} x {columns} x {inner} is off by {error}")
    return {
        "columns": columns,
        "inner": inner,
        "rows": rows,
        "split": again[plan] < WORTH * theirs,
        **asdict(plan),
        "us": round(again[plan], 2),
        "library_us": round(theirs, 2),
        "floor_us": round(1e6 * dtype.itemsize * columns * inner / BYTES_PER_S, 2),
        "tried": len(plans),
    }


def known(row: dict[str, Any]) -> Plan:
    """The tile of a row of the table, used or not."""
    return Plan(**{field.name: row[field.name] for field in fields(Plan)})


def main() -> None:
    args = parse()
    device = torch.device("cpu" if args.tiny else "cuda:0")
    base = environment(args.commit) | {"capability": "", "processors": 0, "dtype": args.dtype}
    dtype = getattr(torch, args.dtype)
    if not args.tiny:
        base["capability"], base["processors"] = device_kind(device)
    file = ResultFile(args.out, KEYS, base)
    cases = [
        (rows, columns, inner)
        for name in args.models
        for columns, inner in (
            [(SHAPES[name].vocab, SHAPES[name].hidden)]
            if args.heads
            else weights_of(SHAPES[name]).values()
        )
        for rows in args.rows
    ]
    plans = {case: list(candidates(*case, args.dtype)) for case in cases}
    if args.tiny:
        # The interpreter's dot takes no bfloat16.
        dtype = torch.float16 if dtype == torch.bfloat16 else dtype
        cases, plans = [(16, 64, 128)], {(16, 64, 128): [Plan(16, 32, 64, 2, 2, 4)]}
    old = {case: file.find(dict(zip(CASE, case, strict=True))) for case in cases}
    if args.again:
        plans = {case: [known(row)] for case, row in old.items() if row is not None}
        cases = list(plans)
    if not args.tiny:
        kernels = {kernel(p): p for found in plans.values() for p in found}
        works = compile_all(list(kernels.values()), device, dtype)
        plans = {c: [p for p in plans[c] if kernels[kernel(p)] in works] for c in cases}
        for case in (c for c in cases if not plans[c]):
            print(f"{case}: no tiles of it compile here", flush=True)
        cases = [case for case in cases if plans[case]]
    for case in tqdm(cases, desc="products", unit="product"):
        row = best(*case, plans[case], device, dtype)
        if args.again and (before := old[case]) is not None:
            row["tried"] = before["tried"]
        tqdm.write(str(row))
        file.put(row)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b", "4b"])
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=list(ROWS[:4]))
    parser.add_argument("--dtype", choices=list(DEPTHS), default="bfloat16")
    parser.add_argument("--heads", action="store_true", help="LM heads, not the layers' weights")
    parser.add_argument("--again", action="store_true", help="the tiles of the table alone")
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.tiny:
        if os.environ.get("TRITON_INTERPRET") != "1" or args.out == FILE:
            parser.error("--tiny needs TRITON_INTERPRET=1 in the environment and another --out")
        args.models = []
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs it at toy size under the interpreter")
    return args


if __name__ == "__main__":
    main()

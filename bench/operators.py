"""The operators and the predictor one by one, beside the time their memory traffic takes.

`python -m bench.operators --models 8b` writes bench/results/operators.json; `--tiny` runs at toy
size on a CPU. Shapes: N requests, 15 candidates each, M packed rows, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.arguments import parsed, shape_parser
from bench.graphs import BYTES_PER_S
from bench.result_files import ResultFile
from bench.rows import environment, machine
from bench.shapes import SHAPES, Shape
from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.kv import PAGE
from dscale.compiled.predictor import Predictor, PredictorConfig
from dscale.kernels import ops

KEYS = ("operator", "requests", "model")
CANDIDATES, HALF = VERIFY_TILE - 1, 8
CONTEXT = 1000

Call = Callable[[], Any]


def calls(
    shape: Shape, requests: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Call]:
    """Each operator as a step of so many requests calls it, with 8 rows a request."""
    draws = torch.Generator(device).manual_seed(0)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=draws, device=device)

    n, rows = requests, HALF * requests
    logit = uniform(n * CANDIDATES, shape.vocab).to(dtype)
    score = uniform(n, CANDIDATES).cummin(1).values
    candidate = torch.randint(shape.vocab, (n, CANDIDATES), device=device)
    live = torch.ones(n, dtype=torch.bool, device=device)
    limit = torch.full((n,), 256, dtype=torch.int32, device=device)
    room = torch.tensor([rows, HALF], dtype=torch.int32, device=device)
    length = ops.allocate_budget(score, live, limit, room)
    anchor, context = candidate[:, 0].contiguous(), limit + CONTEXT
    pages = torch.arange(-(-(CONTEXT + 512) // PAGE), device=device).int().repeat(n, 1)
    offset = (length.cumsum(0) - length).long()
    choice = torch.randint(shape.vocab, (rows,), device=device)
    predictor = Predictor(PredictorConfig(hidden_size=shape.hidden, block_size=VERIFY_TILE))
    predictor = predictor.to(device).requires_grad_(False).eval()
    feature, hidden = uniform(n, CANDIDATES, 18), uniform(n, CANDIDATES, shape.hidden).to(dtype)
    batch = uniform(n, 6)
    return {
        "row_statistics": lambda: ops.row_statistics(logit),
        "argmax": lambda: ops.argmax(logit[:rows]),
        "predictor": lambda: predictor(feature, hidden, batch),
        "allocate_budget": lambda: ops.allocate_budget(score, live, limit, room),
        "pack_rows": lambda: ops.pack_rows(
            length, candidate, anchor, context, pages, rows, PAGE
        ),
        "accept_prefix": lambda: ops.accept_prefix(candidate, length, offset, choice),
    }  # fmt: skip


def traffic(shape: Shape, requests: int, itemsize: int) -> dict[str, int]:
    """Bytes each must read and write at least."""
    n, rows = requests, HALF * requests
    weights = Predictor(PredictorConfig(hidden_size=shape.hidden, block_size=VERIFY_TILE))
    parameters = sum(p.nbytes for p in weights.parameters())
    return {
        "row_statistics": n * CANDIDATES * (shape.vocab * itemsize + 4 * 20),
        "argmax": rows * (shape.vocab * itemsize + 8),
        "predictor": parameters + n * CANDIDATES * (shape.hidden * itemsize + 4 * 19) + 24 * n,
        "allocate_budget": n * (4 * CANDIDATES + 9) + 8,
        "pack_rows": 40 * rows + n * (8 * CANDIDATES + 8 * VERIFY_TILE + 60),
        "accept_prefix": n * (8 * CANDIDATES + 28) + 8 * rows,
    }


def microseconds(call: Call, device: torch.device, repeats: int = 20) -> float:
    """Median time: on a GPU of a captured call, without its launch."""
    call()
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        return 1e3 * float(do_bench_cudagraph(call, rep=repeats, return_mode="median"))
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - began))
    return median(found)


def measured(
    shape: Shape, requests: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """A row for each operator and number of requests."""
    for count in requests:
        least = traffic(shape, count, dtype.itemsize)
        for name, call in calls(shape, count, device, dtype).items():
            yield {
                "operator": name,
                "requests": count,
                "model": shape.name,
                "us": round(microseconds(call, device), 3),
                "floor_us": round(1e6 * least[name] / BYTES_PER_S, 4),
            }


def main() -> None:
    args = parse()
    device, dtype = machine(args.tiny)
    base = environment(args.commit, dtype)
    file = ResultFile(args.out / "operators.json", KEYS, base)
    with torch.no_grad():
        for name in args.models:
            rows = measured(SHAPES[name], args.requests, device, dtype)
            file.keep(rows, SHAPES[name].name)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = shape_parser(__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 16, 32])
    return parsed(parser, arguments, {"models": ["tiny"], "requests": [2, 8]})


if __name__ == "__main__":
    main()

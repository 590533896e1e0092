"""The verify graph and the decide graph beside what the hardware allows.

`python -m bench.graphs --models 8b` writes bench/results/verify_graph.json and decide_graph.json:
times of captured graphs, and the least that memory traffic and arithmetic would take.
`--from-steps bench/results/decode_step.json` makes them of steps measured before, without a GPU.
`--tiny` runs at toy size on a CPU, where neither is of use.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.aggregate import read_rows
from bench.arguments import add_weights, folder_of, numbers_of, shape_parser, short
from bench.result_files import ResultFile
from bench.rows import aside, environment, machine
from bench.shapes import SHAPES, Models, Shape, build
from bench.simulated import SETTINGS, Trace, draw
from bench.step_bench import STEP_KEYS
from bench.step_cases import CASES, make_rig
from bench.step_parts import Stepper, room_for
from dscale.compiled.attention import VERIFY_TILE

BYTES_PER_S, FLOPS_PER_S = 4.26e12, 790e12
"""What an H200 moves and computes at best in measurement (bfloat16): docs/design.md."""

VERIFY_KEYS = ("model", "mode", "budget", "tile", "requests", "rows", "context")
DECIDE_KEYS = ("model", "mode", "budget", "requests", "rows", "context")
ENVIRONMENT = ("gpu", "torch", "triton", "transformers", "commit", "date", "model", "dtype")
FIELDS = ("mode", "budget", "tile")
VERIFIED = ("dscale-half", "+tiles", "dflash")
DECIDED = ("dscale-half", "dflash")


@dataclass(frozen=True, slots=True)
class Floor:
    """What a pass must read and multiply. `weights`: numbers in its products, each read once;
    `kv`: numbers of keys and values per token of context; `itemsize`: bytes of a number; `fp8`:
    how many of the weights are read in one byte each."""

    weights: int
    kv: int
    itemsize: int
    fp8: int = 0

    def milliseconds(self, rows: int, requests: int, context: int) -> float:
        """The longer of reading the weights and multiplying, and then reading the context."""
        read = (self.weights - self.fp8) * self.itemsize + self.fp8
        # Products of 8-bit numbers run at twice the rate.
        flops = 2 * rows * (self.weights - self.fp8 / 2)
        products = max(read / BYTES_PER_S, flops / FLOPS_PER_S)
        cache = requests * context * self.kv * self.itemsize / BYTES_PER_S
        return 1e3 * (products + cache)


def verify_floor(shape: Shape, itemsize: int, weights: str = "bf16") -> Floor:
    """Of the target: its layers, in one byte a number where `weights` is "fp8", and the LM head.
    The draft cache's projections do not count."""
    floor = _floor(shape, shape.layers, itemsize)
    layers = floor.weights - shape.vocab * shape.hidden
    return replace(floor, fp8=layers) if weights == "fp8" else floor


def decide_floor(shape: Shape, itemsize: int, weights: str = "bf16") -> Floor:
    """Of the drafter's layers and the LM head, in one byte a number where `weights` is an 8-bit
    one; the predictor does not count."""
    floor = _floor(shape, shape.draft_layers, itemsize)
    return replace(floor, fp8=floor.weights) if weights.startswith("fp8") else floor


def _floor(shape: Shape, layers: int, itemsize: int) -> Floor:
    s, width = shape, shape.heads * shape.head_dim
    key_values = 2 * s.kv_heads * s.head_dim
    layer = s.hidden * (width + key_values) + width * s.hidden + 3 * s.hidden * s.intermediate
    return Floor(layers * layer + s.vocab * s.hidden, layers * key_values, itemsize)


def measured(
    models: Models,
    requests: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    weights: str = "bf16",
) -> Iterator[tuple[str, dict[str, Any]]]:
    """("verify" or "decide", row) of every mode, number of requests and context."""
    trace = Trace(*draw(SETTINGS["paper"], 64, max(requests) + 1), models.target.norm.device)
    rig = make_rig(models, trace, max(requests), max(contexts) + room_for(0))
    floors = floors_of(models.shape, models.target.norm.element_size(), weights)
    for name in dict.fromkeys((*VERIFIED, *DECIDED)):
        case = CASES[name]
        for lanes in sorted(requests, reverse=True):
            for context in contexts:
                stepper = Stepper(rig, case, lanes, context)
                stepper.warm_up()
                times = stepper.times(repeats)
                for graph, floor in floors.items():
                    if name in (VERIFIED if graph == "verify" else DECIDED):
                        rows = (case.rows(rig.lanes_of(lanes)), VERIFY_TILE * lanes)
                        row = row_of(floor, graph, lanes, rows[graph != "verify"], context, times)
                        yield graph, {k: case.fields[k] for k in FIELDS} | row


def floors_of(shape: Shape, itemsize: int, weights: str = "bf16") -> dict[str, Floor]:
    """By the names of the graphs."""
    verify = verify_floor(shape, itemsize, weights)
    return {"verify": verify, "decide": decide_floor(shape, itemsize, weights)}


def row_of(
    floor: Floor,
    graph: str,
    requests: int,
    rows: int | None,
    context: int,
    times: dict[str, float],
) -> dict[str, Any]:
    """Figures of one row; rows of the decide graph are those drafted, 16 a request."""
    assert rows is not None
    least, took = floor.milliseconds(rows, requests, context), times[f"{graph}_ms"]
    return {
        "requests": requests,
        "rows": rows,
        "context": context,
        f"{graph}_ms": took,
        "floor_ms": round(least, 6),
        "over_floor": round(took / least, 4),
    }


def from_steps(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same rows out of decode_step.json, whose stages are these graphs; each keeps the
    environment it was measured in. Raises ValueError for a file of other rows."""
    needed = ("model", "mode", "sampling", "dtype", "verify_ms", "decide_ms", *VERIFY_KEYS)
    for step in read_rows(path, (*STEP_KEYS, "context", "dtype")):
        shapes = [shape for shape in SHAPES.values() if shape.name == step["model"]]
        if step["sampling"] != "greedy" or not shapes or any(k not in step for k in needed):
            continue  # profiled alone, or of other models
        weights = step.get("weights") or short(step["dtype"])
        floors = floors_of(shapes[0], getattr(torch, step["dtype"]).itemsize, weights)
        about = {k: step[k] for k in (*ENVIRONMENT, *FIELDS)} | {"weights": weights}
        for graph, modes in (("verify", VERIFIED), ("decide", DECIDED)):
            if step["mode"] not in {CASES[name].mode for name in modes}:
                continue
            rows = step["rows"] if graph == "verify" else VERIFY_TILE * step["requests"]
            yield (
                graph,
                about
                | row_of(floors[graph], graph, step["requests"], rows, step["context"], step),
            )


def main() -> None:
    args = parse()
    if args.from_steps is not None:
        folders: dict[Path, dict[str, ResultFile]] = {}
        for graph, row in from_steps(args.from_steps):
            folder = folder_of(args.out, row["weights"])
            files = folders.setdefault(folder, files_of(folder, {}))
            files[graph].put(row)
        for folder, files in folders.items():
            print(folder, {name: len(file.rows) for name, file in files.items()})
        return
    device, dtype = machine(args.tiny)
    base = environment(args.commit, dtype) | {"weights": numbers_of(args)}
    with torch.no_grad():
        for name in args.models:
            models = build(SHAPES[name], device, dtype, weights=args.weights)
            here = base | {"model": models.shape.name}
            files = files_of(args.out, here)
            sizes = (args.requests, args.contexts, args.repeats)
            rows = measured(models, *sizes, weights=base["weights"])
            for graph, row in tqdm(rows, desc=models.shape.name, unit="row"):
                files[graph].put(row)
                names = ("mode", "requests", "rows", "context", f"{graph}_ms", "floor_ms")
                tqdm.write(str({k: row[k] for k in (*names, "over_floor")}))
            del models, rows
            gc.collect()
            torch._dynamo.reset()


def files_of(folder: Path, base: dict[str, Any]) -> dict[str, ResultFile]:
    """The result files, by the names of the graphs."""
    return {
        "verify": ResultFile(folder / "verify_graph.json", VERIFY_KEYS, base),
        "decide": ResultFile(folder / "decide_graph.json", DECIDE_KEYS, base),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = shape_parser(__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1000])
    parser.add_argument("--repeats", type=int, default=20, help="steps a time is the median of")
    parser.add_argument("--from-steps", type=Path, help="decode_step.json: measure nothing anew")
    add_weights(parser)
    args = parser.parse_args(arguments)
    args.dtype = "float32" if args.tiny else "bfloat16"
    if args.tiny:
        args.out = aside(args.out)
        args.models, args.requests, args.contexts, args.repeats = ["tiny"], [2, 3], [40], 2
    elif args.from_steps is None and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs everything at toy size on a CPU")
    if args.from_steps is None:
        args.out = folder_of(args.out, args.weights)
    return args


if __name__ == "__main__":
    main()

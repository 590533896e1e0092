"""The verify graph and the decide graph beside what the hardware allows.

`python -m bench.graphs --models 8b` writes bench/results/verify_graph.json and decide_graph.json:
times of captured graphs, and the least that memory traffic and arithmetic would take. `--tiny`
runs at toy size on a CPU, where neither is of use.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from bench.result_files import ResultFile
from bench.rows import RESULTS, environment
from bench.shapes import SHAPES, Models, build
from bench.simulated import SETTINGS, Trace, draw
from bench.step_cases import CASES, make_rig
from bench.step_parts import Stepper, room_for
from dscale.compiled.attention import VERIFY_TILE

BYTES_PER_S, FLOPS_PER_S = 4.26e12, 790e12
"""What an H200 moves and computes at best in measurement (bfloat16): docs/design.md."""

VERIFY_KEYS = ("model", "mode", "budget", "tile", "requests", "rows", "context")
DECIDE_KEYS = ("model", "mode", "budget", "requests", "rows", "context")
FIELDS = ("mode", "budget", "tile")
VERIFIED = ("dscale-half", "+tiles", "dflash")
DECIDED = ("dscale-half", "dflash")


@dataclass(frozen=True, slots=True)
class Floor:
    """What a pass must read and multiply. `weights`: numbers in its products, each read once;
    `kv`: numbers of keys and values per token of context; `itemsize`: bytes of a number."""

    weights: int
    kv: int
    itemsize: int

    def milliseconds(self, rows: int, requests: int, context: int) -> float:
        """The longer of reading the weights and multiplying, and then reading the context."""
        products = max(
            self.weights * self.itemsize / BYTES_PER_S, 2 * self.weights * rows / FLOPS_PER_S
        )
        cache = requests * context * self.kv * self.itemsize / BYTES_PER_S
        return 1e3 * (products + cache)


def verify_floor(models: Models) -> Floor:
    """Of the target: its layers and the LM head. The draft cache's projections do not count."""
    c = models.target.config
    return Floor(
        _numbers(models.target.layers) + c.vocab_size * c.hidden_size,
        2 * c.num_layers * c.num_kv_heads * c.head_dim,
        models.target.norm.element_size(),
    )


def decide_floor(models: Models) -> Floor:
    """Of the drafter's layers and the LM head; the predictor does not count."""
    c, target = models.drafter.config, models.target.config
    return Floor(
        _numbers(models.drafter.layers)
        + models.drafter.qkv.numel()
        + target.vocab_size * target.hidden_size,
        2 * c.num_layers * c.num_kv_heads * c.head_dim,
        models.target.norm.element_size(),
    )


def _numbers(layers: nn.Module) -> int:
    return sum(p.numel() for p in layers.parameters() if p.dim() == 2)


def measured(
    models: Models, requests: Sequence[int], contexts: Sequence[int], repeats: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """("verify" or "decide", row) of every mode, number of requests and context."""
    trace = Trace(*draw(SETTINGS["paper"], 64, max(requests) + 1), models.target.norm.device)
    rig = make_rig(models, trace, max(requests), max(contexts) + room_for(0))
    floors = {"verify": verify_floor(models), "decide": decide_floor(models)}
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


def main() -> None:
    args = parse()
    device = torch.device("cpu" if args.tiny else "cuda:0")
    dtype = torch.float32 if args.tiny else torch.bfloat16
    base = environment(args.commit) | {"dtype": str(dtype).removeprefix("torch.")}
    with torch.no_grad():
        for name in args.models:
            models = build(SHAPES[name], device, dtype)
            here = base | {"model": models.shape.name}
            files = {
                "verify": ResultFile(args.out / "verify_graph.json", VERIFY_KEYS, here),
                "decide": ResultFile(args.out / "decide_graph.json", DECIDE_KEYS, here),
            }
            rows = measured(models, args.requests, args.contexts, args.repeats)
            for graph, row in tqdm(rows, desc=models.shape.name, unit="row"):
                files[graph].put(row)
                names = ("mode", "requests", "rows", "context", f"{graph}_ms", "floor_ms")
                tqdm.write(str({k: row[k] for k in (*names, "over_floor")}))
            del models, rows
            gc.collect()
            torch._dynamo.reset()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1000])
    parser.add_argument("--repeats", type=int, default=20, help="steps a time is the median of")
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.models, args.requests, args.contexts, args.repeats = ["tiny"], [2, 3], [40], 2
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs everything at toy size on a CPU")
    return args


if __name__ == "__main__":
    main()

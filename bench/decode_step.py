"""A decode step on one GPU, with the shapes of Qwen3-8B and Qwen3-4B, random weights and
simulated acceptance: stage times, gains of each mode, kernels, idle time, recompiles, sampling.

`python -m bench.decode_step --models 8b --requests 8 16 32`; `--parts` picks measurements. Rows
go to bench/results/{decode_step,mode_gains,graph_counters,sampling_cost,pool_growth}.json as they
are measured, kernels to decode_step_kernels_MODEL.txt. `--tiny` does it all at toy size on a CPU,
to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import math
from pathlib import Path

import torch

from bench.arguments import add_weights, folder_of, numbers_of
from bench.attempts import Attempts
from bench.rows import RESULTS, aside, environment
from bench.shapes import SHAPES
from bench.simulated import SETTINGS
from bench.step_bench import PARTS, Bench
from bench.step_cases import CASES


def main() -> None:
    args = parse()
    base = environment(args.commit) | {"acceptance": "simulated", "dtype": args.dtype}
    base |= {"weights": numbers_of(args)}
    args.out.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(most=math.inf)
    with torch.no_grad():
        for name in args.models:
            bench = Bench(SHAPES[name], args, base, attempts)
            bench.run()
            del bench
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    attempts.end()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--requests", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1000])
    modes = ["dscale-half", "+tiles", "dflash", "+tiles-per-head", "+budget", "dscale-auto", "ar"]
    parser.add_argument("--modes", nargs="+", choices=list(CASES), default=modes)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--traces", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--new-tokens", type=int, default=256, help="of each request, in gains")
    parser.add_argument(
        "--round-requests", type=int, default=32, help="requests of a gain, in two rounds or more"
    )
    parser.add_argument("--ragged-requests", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=20, help="steps a time is the median of")
    add_weights(parser)
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    if args.tiny:
        args.out = aside(args.out)
        args.models, args.requests, args.contexts = ["tiny"], [2, 3], [5, 40]
        args.new_tokens, args.repeats, args.ragged_requests = 24, 2, 7
        args.round_requests, args.traces = 4, args.traces[:1]
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs everything at toy size on a CPU")
    args.out = folder_of(args.out, args.weights)
    args.device = torch.device("cpu" if args.tiny else "cuda:0")
    args.dtype = "float32" if args.tiny else "bfloat16"
    return args


if __name__ == "__main__":
    main()

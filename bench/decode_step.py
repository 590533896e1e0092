"""A decode step on one GPU, with the shapes of Qwen3-8B and Qwen3-4B, random weights and
simulated acceptance: stage times, gains of each mode, kernels, idle time, recompiles, sampling.

`python -m bench.decode_step --models 8b --requests 8 16 32`; `--parts` picks measurements, in
the order they run. Rows go to bench/results/{decode_step,mode_gains,graph_counters,sampling_cost,
pool_growth}.json as they are measured, kernels to decode_step_kernels.txt. `--tiny` does it all at
toy size on a CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.profile_step import counts, format_table, graph_pool_mib
from bench.result_files import ResultFile
from bench.rows import RESULTS, environment
from bench.shapes import SHAPES, Shape, build
from bench.simulated import SETTINGS, Trace, draw
from bench.step_cases import CASES, SAMPLING, Case, Rig, make_rig
from bench.step_parts import (
    POOL_FACTOR,
    Stepper,
    decode_rate,
    default_cases,
    device_memory,
    pool_growth,
    ragged,
    room_for,
)

TRACE_STEPS = 1024
POOL_LAYERS = 4

STEP_KEYS = ("model", "mode", "budget", "tile", "sampling", "requests")
STEP_FIELDS: dict[str, Any] = dict.fromkeys(
    ("idle_share", "allocator_share", "graph_pool_mib", "graph_gap_us", "step_gap_us", "busy_ms")
)


def main() -> None:
    args = parse()
    base = environment(args.commit) | {"acceptance": "simulated", "dtype": args.dtype}
    with torch.no_grad():
        for name in args.models:
            Bench(SHAPES[name], args, base).run()
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


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
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    if args.tiny:
        args.models, args.requests, args.contexts = ["tiny"], [2, 3], [5, 40]
        args.new_tokens, args.repeats, args.ragged_requests = 24, 2, 7
        args.round_requests, args.traces = 4, args.traces[:1]
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs everything at toy size on a CPU")
    args.device = torch.device("cpu" if args.tiny else "cuda:0")
    args.dtype = "float32" if args.tiny else "bfloat16"
    return args


class Bench:
    """All measurements of one model."""

    def __init__(self, shape: Shape, args: argparse.Namespace, base: dict[str, Any]) -> None:
        self.shape, self.args = shape, args
        self.lanes = max(args.requests)
        self.cases = default_cases(args.modes)
        base = base | {"model": shape.name}
        self.traces = {
            name: draw(SETTINGS[name], TRACE_STEPS, self.lanes + 1) for name in args.traces
        }

        def file(name: str, keys: tuple[str, ...]) -> ResultFile:
            return ResultFile(args.out / f"{name}.json", keys, base)

        self.steps = file("decode_step", (*STEP_KEYS, "context"))
        self.gains = file("mode_gains", (*STEP_KEYS, "prompt", "trace"))
        self.counters = file("graph_counters", STEP_KEYS)
        self.sampling = file("sampling_cost", (*STEP_KEYS, "context"))
        self.pools = file("pool_growth", (*STEP_KEYS, "context"))
        self.kernels = args.out / f"decode_step_kernels_{shape.name.split()[0].lower()}.txt"

    def run(self) -> None:
        """The parts asked for, in their order; a part that needs a GPU says so without one."""
        self.rig = self.build(self.shape)
        for name in self.args.parts:
            part, needs_gpu = PARTS[name]
            if needs_gpu and self.args.tiny:
                print(f"{name}: skipped, it needs a CUDA device", flush=True)
                continue
            began = time.perf_counter()
            part(self)
            took = round(time.perf_counter() - began, 1)
            print({"part": name, "seconds": took, **device_memory()}, flush=True)

    def build(self, shape: Shape, spare: int = 1) -> Rig:
        """Random models of a shape and a rig for them, with the first trace."""
        models = build(shape, self.args.device, getattr(torch, self.args.dtype))
        trace = Trace(*self.traces[self.args.traces[0]], self.args.device)
        tokens = max(self.args.contexts) + room_for(self.args.new_tokens)
        return make_rig(models, trace, self.lanes, tokens, spare)

    def each(
        self, cases: list[Case], contexts: list[int], label: str
    ) -> Iterable[tuple[Case, int, int]]:
        """Every case at every number of requests, the largest first, and every context."""
        every = [
            (case, lanes, context)
            for case in cases
            for lanes in sorted(self.args.requests, reverse=True)
            for context in contexts
        ]
        bar: Iterable[tuple[Case, int, int]] = tqdm(every, desc=label)
        return bar

    def say(self, row: dict[str, Any], *names: str) -> None:
        """Print the telling fields of a row."""
        tqdm.write(str({name: row[name] for name in ("mode", "tile", "requests", *names)}))

    def part_steps(self) -> None:
        """Times of the stages, every mode but "auto", whose rows change from step to step."""
        cases = [case for case in self.cases if case.rows(1) is not None]
        for case, lanes, context in self.each(cases, self.args.contexts, "steps"):
            stepper = Stepper(self.rig, case, lanes, context)
            warm_up = stepper.warm_up()
            row = self.steps.put(
                STEP_FIELDS
                | case.fields
                | {"requests": lanes, "rows": case.rows(lanes), "context": context}
                | stepper.times(self.args.repeats)
                | {"graph_pool_mib": graph_pool_mib(), "warm_up_s": round(warm_up, 2)}
                | {"recordings": counts().recordings, "cudagraph_skips": counts().skips}
            )
            self.say(row, "context", "decide_ms", "verify_ms", "step_ms", "host_ms", "warm_up_s")

    def part_gains(self) -> None:
        """Decode rates of the modes one by one, and what each gains over the one before."""
        for name, trace in self.traces.items():
            self.rig.trace.load(*trace)
            ladder = [CASES[key] for key in CASES if CASES[key] in self.cases]
            prompts = self.args.contexts
            if name != self.args.traces[0]:
                ladder = [c for c in ladder if c.mode in ("dflash", "dscale")]
                prompts = prompts[:1]
            for prompt in prompts:
                rates: dict[tuple[Case, int], float] = {}
                for case, lanes, _ in self.each(ladder, [prompt], f"gains, prompt {prompt}"):
                    rounds = max(2, self.args.round_requests // lanes)
                    found = decode_rate(
                        self.rig, case, lanes, prompt, self.args.new_tokens, rounds
                    )
                    rates[case, lanes] = found["decode_tokens_per_s"]
                    row = self.gains.put(
                        case.fields
                        | {"requests": lanes, "prompt": prompt, "trace": name}
                        | {"new_tokens": self.args.new_tokens}
                        | found
                        | gain(ladder, case, lanes, rates)
                    )
                    self.say(
                        row, "prompt", "trace", "decode_tokens_per_s", "step_ms",
                        "tokens_per_step", "rows_per_step", "gain", "gain_over_dflash",
                    )  # fmt: skip

    def part_profile(self) -> None:
        """Idle time, the allocator's share and the kernels of a step, at the longest context."""
        cases = [case for case in self.cases if case.rows(1) is not None]
        self.kernels.unlink(missing_ok=True)
        for case, lanes, context in self.each(cases, [max(self.args.contexts)], "profile"):
            stepper = Stepper(self.rig, case, lanes, context)
            stepper.warm_up()
            where = case.fields | {"requests": lanes, "context": context}
            found = stepper.profile()
            row = self.steps.put(
                where
                | found.fields
                | {"rows": case.rows(lanes), "allocator_kernels": list(found.allocator_names)}
            )
            title = f"{self.shape.name}, {where}, {found.busy:.0f} us busy of {found.step:.0f}"
            with self.kernels.open("a") as file:
                file.write(format_table(title, found.kernels) + "\n")
            self.say(row, "idle_share", "idle_in_graphs", "graph_gap_us", "allocator_share")

    def part_ragged(self) -> None:
        """Recompiles, recordings and skips over a ragged trace, all buckets captured before."""
        case = CASES["dscale-auto"]
        found = ragged(
            self.rig, case, self.args.ragged_requests, max(self.args.contexts),
            self.args.new_tokens // 2,
        )  # fmt: skip
        print(self.counters.put(case.fields | found), flush=True)

    def part_sampling(self) -> None:
        """A step with sampling over a greedy one, at the most requests."""
        half, context = CASES["dscale-half"], max(self.args.contexts)
        greedy = 0.0
        for name in SAMPLING:
            case = replace(half, sampling=name)
            stepper = Stepper(self.rig, case, self.lanes, context)
            stepper.warm_up()
            times = stepper.times(self.args.repeats)
            greedy = greedy or times["step_ms"]
            row = self.sampling.put(
                case.fields
                | {"requests": self.lanes, "context": context, "rows": case.rows(self.lanes)}
                | times
                | {"over_greedy": round(times["step_ms"] / greedy, 4)}
            )
            self.say(row, "sampling", "step_ms", "over_greedy")

    def part_pool(self) -> None:
        """Kernels of a step with a larger pool, over a few layers of the same widths."""
        case, shape = CASES["dscale-half"], self.shape.shallow(POOL_LAYERS)
        del self.rig
        profiles, pages = [], []
        for spare in (1, POOL_FACTOR):
            gc.collect()
            torch._dynamo.reset()
            rig = self.build(shape, spare)
            stepper = Stepper(rig, case, self.lanes, max(self.args.contexts))
            stepper.warm_up()
            profiles.append(stepper.profile())
            pages.append(rig.workspace.num_pages)
        row = case.fields | {"requests": self.lanes, "context": max(self.args.contexts)}
        row |= {"model": shape.name, "pages_small": pages[0], "pages_large": pages[1]}
        print(self.pools.put(row | pool_growth(*profiles)), flush=True)


def gain(
    ladder: list[Case], case: Case, lanes: int, rates: dict[tuple[Case, int], float]
) -> dict[str, Any]:
    """Rate over that of the mode before in the ladder, and over "dflash"; None without one."""
    at = ladder.index(case)
    before = rates.get((ladder[at - 1], lanes)) if at else None
    dflash = rates.get((CASES["dflash"], lanes))
    rate = rates[case, lanes]
    return {
        "gain": round(rate / before, 4) if before else None,
        "gain_over_dflash": round(rate / dflash, 4) if dflash else None,
    }


PARTS: dict[str, tuple[Callable[[Bench], None], bool]] = {
    "steps": (Bench.part_steps, False),
    "gains": (Bench.part_gains, False),
    "profile": (Bench.part_profile, True),
    "ragged": (Bench.part_ragged, False),
    "sampling": (Bench.part_sampling, False),
    "pool": (Bench.part_pool, True),
}
"""By their names on the command line: the measurement, and whether it needs a GPU."""


if __name__ == "__main__":
    main()

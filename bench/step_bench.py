"""All measurements of a decode step for one model, in parts, written as they are made."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from tqdm import tqdm

from bench.aggregate import GAIN_CELL
from bench.attempts import Attempts
from bench.profile_step import counts, format_table, graph_pool_mib
from bench.result_files import ResultFile
from bench.shapes import Shape, build
from bench.simulated import SETTINGS, Trace, draw
from bench.step_cases import CASES, SAMPLING, Case, Rig, make_rig
from bench.step_parts import (
    POOL_FACTOR,
    Stepper,
    decode_rate,
    device_memory,
    pool_growth,
    ragged,
    room_for,
)

TRACE_STEPS = 1024
POOL_LAYERS = 4

Measure = Callable[[Case, int, int], None]

STEP_KEYS = ("model", "mode", "budget", "tile", "sampling", "requests")
STEP_FIELDS: dict[str, Any] = dict.fromkeys(
    ("idle_share", "allocator_share", "graph_pool_mib", "graph_gap_us", "step_gap_us", "busy_ms")
)


class Bench:
    """All measurements of one model; where one fails, `attempts` goes on with the next."""

    def __init__(
        self, shape: Shape, args: argparse.Namespace, base: dict[str, Any], attempts: Attempts
    ) -> None:
        self.shape, self.args, self.attempts = shape, args, attempts
        self.lanes = max(args.requests)
        self.cases = [CASES[name] for name in args.modes]
        self.fixed_cases = [case for case in self.cases if case.rows(1) is not None]
        base = base | {"model": shape.name}
        self.traces = {
            name: draw(SETTINGS[name], TRACE_STEPS, self.lanes + 1) for name in args.traces
        }

        def file(name: str, keys: tuple[str, ...]) -> ResultFile:
            return ResultFile(args.out / f"{name}.json", keys, base)

        self.steps = file("decode_step", (*STEP_KEYS, "context"))
        # Of every commit: what modes gain over each other is a ratio within one.
        self.gains = file("mode_gains", (*GAIN_CELL, "commit"))
        self.counters = file("graph_counters", STEP_KEYS)
        self.sampling = file("sampling_cost", (*STEP_KEYS, "context"))
        self.pools = file("pool_growth", (*STEP_KEYS, "context"))
        self.kernels = args.out / f"decode_step_kernels_{shape.name.split()[0].lower()}.txt"

    @cached_property
    def rig(self) -> Rig:
        """The model at its full depth."""
        return self.build(self.shape)

    def run(self) -> None:
        """The parts asked for; one that needs a GPU says so without one."""
        for name, (part, needs_gpu) in PARTS.items():
            if name not in self.args.parts:
                continue
            if needs_gpu and self.args.tiny:
                print(f"{name}: skipped, it needs a CUDA device", flush=True)
                continue
            began = time.perf_counter()
            with self.attempts.attempt(f"{self.shape.name} {name}"):
                part(self)
            took = round(time.perf_counter() - began, 1)
            print({"part": name, "seconds": took, **device_memory()}, flush=True)

    def build(self, shape: Shape, spare: int = 1) -> Rig:
        """Random models of a shape and a rig for them, with the first trace."""
        dtype = getattr(torch, self.args.dtype)
        models = build(shape, self.args.device, dtype, weights=self.args.weights)
        trace = Trace(*self.traces[self.args.traces[0]], self.args.device)
        tokens = max(self.args.contexts) + room_for(self.args.new_tokens)
        return make_rig(models, trace, self.lanes, tokens, spare)

    def each(self, label: str, measure: Measure, cases: list[Case], contexts: list[int]) -> None:
        """Measure every case at every number of requests, the largest first, and every context."""
        every = [
            (case, lanes, context)
            for case in cases
            for lanes in sorted(self.args.requests, reverse=True)
            for context in contexts
        ]
        for case, lanes, context in tqdm(every, desc=label, mininterval=2):
            what = f"{self.shape.name} {label} {case} {lanes} {context}"
            with self.attempts.attempt(what):
                measure(case, lanes, context)

    def say(self, row: dict[str, Any], *names: str) -> None:
        """Print the telling fields of a row."""
        tqdm.write(str({name: row[name] for name in ("mode", "tile", "requests", *names)}))

    def part_steps(self) -> None:
        """Times of the stages, every mode but "auto", whose rows change from step to step."""

        def measure(case: Case, lanes: int, context: int) -> None:
            stepper = Stepper(self.rig, case, lanes, context)
            warm_up = stepper.warm_up()
            row = self.steps.put(
                STEP_FIELDS
                | case.fields
                | {
                    "requests": lanes,
                    "rows": case.rows(self.rig.lanes_of(lanes)),
                    "context": context,
                }
                | stepper.times(self.args.repeats)
                | {"graph_pool_mib": graph_pool_mib(), "warm_up_s": round(warm_up, 2)}
                | {"recordings": counts().recordings, "cudagraph_skips": counts().skips}
            )
            self.say(row, "context", "decide_ms", "verify_ms", "step_ms", "host_ms", "warm_up_s")

        self.each("steps", measure, self.fixed_cases, self.args.contexts)

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
                self.gains_of(name, ladder, prompt)

    def gains_of(self, trace: str, ladder: list[Case], prompt: int) -> None:
        """Decode rates of a ladder of modes from one prompt length on."""
        rates: dict[tuple[Case, int], float] = {}

        def measure(case: Case, lanes: int, prompt: int) -> None:
            rounds = max(2, self.args.round_requests // lanes)
            found = decode_rate(self.rig, case, lanes, prompt, self.args.new_tokens, rounds)
            rates[case, lanes] = found["decode_tokens_per_s"]
            row = self.gains.put(
                case.fields
                | {"requests": lanes, "prompt": prompt, "trace": trace}
                | {"new_tokens": self.args.new_tokens}
                | found
                | gain(ladder, case, lanes, rates)
            )
            self.say(
                row, "prompt", "trace", "decode_tokens_per_s", "step_ms", "tokens_per_step",
                "rows_per_step", "gain", "gain_over_dflash",
            )  # fmt: skip

        self.each(f"gains, prompt {prompt}", measure, ladder, [prompt])

    def part_profile(self) -> None:
        """Idle time, the allocator's share and the kernels of a step, at the longest context."""
        self.kernels.unlink(missing_ok=True)

        def measure(case: Case, lanes: int, context: int) -> None:
            stepper = Stepper(self.rig, case, lanes, context)
            stepper.warm_up()
            where = case.fields | {"requests": lanes, "context": context}
            found = stepper.profile(self.args.out / "unread_trace.json")
            row = self.steps.put(
                where
                | found.fields
                | {
                    "rows": case.rows(self.rig.lanes_of(lanes)),
                    "allocator_kernels": list(found.allocator_names),
                }
            )
            title = f"{self.shape.name}, {where}, {found.busy:.0f} us busy of {found.step:.0f}"
            with self.kernels.open("a") as file:
                file.write(format_table(title, found.kernels) + "\n")
            self.say(row, "idle_share", "idle_in_graphs", "graph_gap_us", "allocator_share")

        self.each("profile", measure, self.fixed_cases, [max(self.args.contexts)])

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
                | {
                    "requests": self.lanes,
                    "context": context,
                    "rows": case.rows(self.rig.lanes_of(self.lanes)),
                }
                | times
                | {"over_greedy": round(times["step_ms"] / greedy, 4)}
            )
            self.say(row, "sampling", "step_ms", "over_greedy")

    def part_pool(self) -> None:
        """Kernels of a step with a larger pool, over a few layers of the same widths."""
        case, shape = CASES["dscale-half"], self.shape.shallow(POOL_LAYERS)
        self.__dict__.pop("rig", None)  # for its memory; no part comes after this one
        profiles, pages = [], []
        for spare in (1, POOL_FACTOR):
            gc.collect()
            torch._dynamo.reset()
            rig = self.build(shape, spare)
            stepper = Stepper(rig, case, self.lanes, max(self.args.contexts))
            stepper.warm_up()
            profiles.append(stepper.profile(self.args.out / "unread_trace.json"))
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
"""In the order they run, by their names on the command line; whether each needs a GPU."""

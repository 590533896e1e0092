"""Closed loops at the shapes of Qwen3-8B and Qwen3-4B: random weights, simulated acceptance,
prefill included; on a GPU, and replayed from measured times anywhere.

`python -m bench.closed_loop_simulated --models 8b` serves requests on the GPU and writes
bench/results/closed_loop.json, bucket_times.json and prefill.json. `--parts replay` then replays
every concurrency from the times, compares with the loops that were measured, and fails where they
differ by more than 3 %. `--tiny` does both at toy size on a CPU, where times are no use.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bench import recorded
from bench.aggregate import LOOP_FIELDS, LOOP_KEYS, Row, read_rows
from bench.attempts import Attempts
from bench.client import closed_loop, figures
from bench.loop_cells import CONCURRENCIES, Cell, all_cases, grid
from bench.replay import Replay
from bench.result_files import ResultFile
from bench.rows import RESULTS, environment
from bench.serving_times import PREFILL_KEYS, STEP_KEYS, read_times, write_times
from bench.shapes import SHAPES, build
from bench.simulated import SETTINGS, Trace, draw
from bench.switched import SwitchedEngine
from dscale.config import EngineConfig
from dscale.request import Request
from dscale.workspace import bucket_of

TRACE_STEPS = 1024
ABLATION = ("dflash", "+tiles", "+budget", "dscale-half", "dscale-auto")
HEADLINE = ("ar", "dflash", "dscale-half", "dscale-auto")
REPLAYED = ("ar", "dflash", "+tiles", "dscale-half", "dscale-auto")
"""Mode "+budget" waits for the host in the middle of a step: no table of times says how long."""

cached_times = functools.cache(read_times)

RECORDED = "recorded"
CHAT = ((60, 250), (64, 512))
AGREE = 0.03


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    attempts = Attempts(args.seconds)
    for name in args.models:
        if "loops" in args.parts:
            with torch.no_grad():
                loops(name, args, attempts)
            gc.collect()
            torch._dynamo.reset()
        if "replay" in args.parts:
            replay_all(SHAPES[name].name, args)
    attempts.end()


def lengths(name: str, requests: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, new tokens) of each request: "prompt128-new256" and the like, all alike, or "chat",
    drawn from 60 to 250 and 64 to 512. Raises ValueError for another name."""
    if name == "chat":
        random = np.random.default_rng(seed)
        (a, b), (c, d) = CHAT
        prompts, news = random.integers(a, b + 1, requests), random.integers(c, d + 1, requests)
        return list(zip(prompts.tolist(), news.tolist(), strict=True))
    prompt, _, new = name.removeprefix("prompt").partition("-new")
    if not (prompt.isdecimal() and new.isdecimal() and int(prompt) and int(new)):
        raise ValueError(f"set: expected 'chat' or 'promptP-newN', got {name!r}")
    return [(int(prompt), int(new))] * requests


def draws(args: argparse.Namespace, trace: str, seed: int) -> tuple[Tensor, Tensor]:
    """Scores and accepted counts of a trace: drawn, or of the recorded file."""
    if trace == RECORDED:
        return recorded.load(args.recorded, TRACE_STEPS, args.slots + 1, seed)
    return draw(SETTINGS[trace], TRACE_STEPS, args.slots + 1, seed)


def requests_of(cell: Cell, vocab: int) -> list[Request]:
    """Warm-up and measured requests of a cell, random ids for prompts."""
    random = np.random.default_rng(cell.repetition)
    return [
        Request(prompt=random.integers(0, vocab, prompt).tolist(), max_new_tokens=new, seed=at)
        for at, (prompt, new) in enumerate(
            lengths(cell.set, cell.warmup + cell.requests, cell.repetition)
        )
    ]


def cells_of(args: argparse.Namespace, trace: str) -> list[Cell]:
    """Cells of a trace: few requests each, as many rounds of all workers at any concurrency."""
    wanted = {"paper": ABLATION, "six": HEADLINE}.get(trace, REPLAYED)
    cases = [case for case in args.modes if case in wanted]
    at = [c for c in args.concurrency if trace != "paper" or c > 1]
    cap = max(new for _, new in lengths(args.set, 1000))
    return [
        Cell(args.set, c, 0.0, case, repetition, waves * c, c, cap)
        for repetition in range(args.repetitions)
        for c in at
        for case in cases
        for waves in [2 if case == "ar" else args.waves]
    ]


def loops(name: str, args: argparse.Namespace, attempts: Attempts) -> None:
    """Measure all cells of a model, and the times that a replay needs."""
    shape, most = SHAPES[name], max(args.concurrency)
    base = environment(args.commit) | {"model": shape.name, "dtype": args.dtype}
    looped = {"acceptance": "simulated", "source": "measured", "prefix_cache": False}
    looped |= {"compile_prefill": args.compile_prefill}
    results = ResultFile(args.out / "closed_loop.json", LOOP_KEYS, base | looped)
    times = (
        ResultFile(args.out / "bucket_times.json", STEP_KEYS, base),
        ResultFile(args.out / "prefill.json", PREFILL_KEYS, base),
    )
    models = build(shape, args.device, getattr(torch, args.dtype))
    slots = EngineConfig(
        max_concurrency=most,
        prefix_cache=False,
        compile_prefill=None if args.compile_prefill else False,
    )
    trace = Trace(*draws(args, args.traces[0], 0), args.device)
    engine = SwitchedEngine(models.target, models.drafter, models.predictor, slots, trace)
    try:
        ready = warm_up(engine, args, times, attempts)
        for label in args.traces:
            for cell in tqdm(cells_of(args, label), desc=f"{name}, {label}", mininterval=2):
                if cell.case not in ready or not attempts.may_start():
                    continue
                with attempts.attempt(f"{label} c={cell.concurrency} {cell.case}"):
                    drawn = draws(args, label, cell.repetition)
                    row = measure(engine, cell, drawn, shape.vocab)
                    results.put(row | {"trace": label})
                    say(row)
    finally:
        engine.close()


def warm_up(
    engine: SwitchedEngine,
    args: argparse.Namespace,
    times: tuple[ResultFile, ResultFile],
    attempts: Attempts,
) -> set[str]:
    """Compile and capture every mode and keep its times; returns the modes that run."""
    longest, ready = lengths(args.set, 1000), set()
    prompt, new = (max(pair[i] for pair in longest) for i in (0, 1))
    room = [Request(prompt=[0] * prompt, max_new_tokens=new)] * max(args.concurrency)
    for name in args.modes:
        case, began = all_cases()[name], time.perf_counter()
        with attempts.attempt(name):
            took = engine.use(case, room)
            if name in REPLAYED:
                write_times(engine, case, *times, min(prompt, 128))
            seconds = time.perf_counter() - began
            print(
                f"{name}: {took:.1f} s to compile and capture, {seconds:.1f} s in all", flush=True
            )
            ready.add(name)
    return ready


def measure(engine: SwitchedEngine, cell: Cell, drawn: tuple[Tensor, Tensor], vocab: int) -> Row:
    """One closed loop on the device, over scores and accepted counts of a trace."""
    case = all_cases()[cell.case]
    requests = requests_of(cell, vocab)
    engine.use(case)
    closed_loop(engine.submit, requests[: cell.warmup], cell.concurrency)
    assert engine.core.trace is not None
    engine.core.trace.load(*drawn)
    engine.forget()
    served = closed_loop(engine.submit, requests[cell.warmup :], cell.concurrency)
    return row_of(cell) | figures(served, engine.stats, engine.batcher.intervals, cell.output_cap)


def row_of(cell: Cell) -> Row:
    """Fields of a simulated cell."""
    adaptive = all_cases()[cell.case].config.adaptive
    return cell.fields | {"predictor": "random" if adaptive else None, "prompts": "random ids"}


def replay_all(model: str, args: argparse.Namespace) -> None:
    """Replay the sweep of a model from its times; compare where loops were measured."""
    measured = read_rows(args.out / "closed_loop.json", LOOP_FIELDS)
    measured = [r for r in measured if (r["model"], r["source"]) == (model, "measured")]
    here = [r for r in measured if r["acceptance"] == "simulated" and r["set"] == args.set]
    wrong, file = [], ResultFile(args.out / "closed_loop.json", LOOP_KEYS, {})
    for row in tqdm([r for r in here if name_of(r) in REPLAYED], desc="against loops"):
        found = replay(model, cell_of(row), row["trace"], args)
        error = found["tokens_per_s"] / row["tokens_per_s"] - 1
        file.put(found | {"replay_error": round(error, 4)})
        tqdm.write(f"{row['trace']} c={row['concurrency']} {name_of(row)}: {error:+.2%}")
        wrong += [(name_of(row), row["concurrency"])] if abs(error) > AGREE else []
    sweep = [
        (trace, cell)
        for trace in args.traces
        for cell in grid(
            [args.set], args.sweep, [m for m in REPLAYED if m in args.modes],
            repetitions=args.replays, requests=args.replayed_requests,
            output_cap=max(new for _, new in lengths(args.set, 1000)),
        )
    ]  # fmt: skip
    for trace, cell in tqdm(sweep, desc="replay"):
        file.put(replay(model, cell, trace, args))
    if wrong and not args.tiny:
        raise SystemExit(f"replay and loops differ by more than {AGREE:.0%}: {wrong}")


def replay(model: str, cell: Cell, trace: str, args: argparse.Namespace) -> Row:
    """One closed loop, replayed."""
    case = all_cases()[cell.case]
    times, origin = cached_times(args.out, model, case)
    drawn = draws(args, trace, cell.repetition)
    late = not origin["gpu"].startswith("none")
    loop = Replay(case, times, *drawn, late=late, padded=late)
    served = loop.run(requests_of(cell, 2)[cell.warmup :], cell.concurrency)
    kept = ("gpu", "torch", "triton", "transformers", "commit", "date", "dtype")
    return (
        {name: origin[name] for name in kept}
        | {"model": model, "acceptance": "simulated", "source": "replayed", "trace": trace}
        | row_of(cell)
        | {"prefix_cache": False}
        | figures(served, loop.stats, loop.intervals, cell.output_cap)
    )


def cell_of(row: Row) -> Cell:
    """The cell a row was measured for."""
    return Cell(
        row["set"], row["concurrency"], row["temperature"], name_of(row), row["repetition"],
        row["requests"], row["warmup"], row["output_cap"],
    )  # fmt: skip


def name_of(row: Row) -> str:
    """The name of a row's mode among the cases."""
    wanted = {name: row[name] for name in ("mode", "budget", "tile")}
    names = [
        name
        for name, case in all_cases().items()
        if {key: case.fields[key] for key in wanted} == wanted
    ]
    if not names:
        raise ValueError(f"row: expected a known mode, got {wanted}")
    return names[0]


def say(row: Row) -> None:
    """Print the telling fields."""
    names = ("mode", "budget", "concurrency", "tokens_per_s", "decode_tokens_per_s", "step_ms")
    tqdm.write(str({name: row[name] for name in (*names, "tokens_per_step", "window_s")}))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--parts", nargs="+", choices=("loops", "replay"), default=["loops"])
    parser.add_argument("--traces", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--recorded", type=Path, help="a trace of bench.recorded, in their place")
    parser.add_argument("--set", default="prompt128-new256", help="or promptP-newN, or chat")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 16, 32])
    every = sorted({*HEADLINE, *ABLATION}, key=list(all_cases()).index)
    parser.add_argument("--modes", nargs="+", choices=list(all_cases()), default=every)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--waves", type=int, default=4, help="requests of each worker")
    parser.add_argument("--sweep", nargs="+", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--replays", type=int, default=5, help="repetitions of the sweep")
    parser.add_argument("--replayed-requests", type=int, default=512)
    parser.add_argument("--eager-prefill", dest="compile_prefill", action="store_false")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no loop after this")
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.models, args.parts, args.set = ["tiny"], ["loops", "replay"], "prompt8-new24"
        args.concurrency, args.repetitions, args.waves = [1, 3], 1, 2
        args.sweep, args.replays, args.replayed_requests = [2, 3], 2, 12
    elif "loops" in args.parts and not torch.cuda.is_available():
        parser.error("loops need a CUDA device; --tiny runs everything at toy size on a CPU")
    args.device = torch.device("cpu" if args.tiny else "cuda:0")
    args.dtype = "float32" if args.tiny else "bfloat16"
    args.traces = args.traces if args.recorded is None else [RECORDED]
    # Loops and replays draw alike only for as many slots.
    args.slots = bucket_of(max(32, *args.concurrency, *args.sweep))
    return args


if __name__ == "__main__":
    main()

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
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from bench.aggregate import LOOP_FIELDS, LOOP_KEYS, Row, read_rows
from bench.arguments import add_weights, folder_of, numbers_of
from bench.attempts import Attempts
from bench.client import closed_loop, figures
from bench.loop_cells import CONCURRENCIES, Cell, all_cases, grid
from bench.replay import Replay
from bench.result_files import ResultFile
from bench.rows import RESULTS, aside, environment
from bench.serving_times import (
    PREFILL_KEYS,
    STEP_KEYS,
    read_times,
    write_prefills,
    write_steps,
)
from bench.shapes import SHAPES, build
from bench.simulated import SETTINGS, Trace
from bench.simulated_cells import (
    ABLATION,
    HEADLINE,
    RECORDED,
    REPLAYED,
    cell_of,
    cells_of,
    draws,
    lengths,
    name_of,
    requests_of,
    row_of,
)
from bench.switched import SwitchedEngine
from dscale.config import EngineConfig
from dscale.request import Request
from dscale.workspace import bucket_of

cached_times = functools.cache(read_times)

AGREE = 0.03


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    attempts, wrong = Attempts(args.seconds), []
    for name in args.models:
        if "loops" in args.parts:
            with torch.no_grad():
                loops(name, args, attempts)
            gc.collect()
            torch._dynamo.reset()
        if "replay" in args.parts:
            wrong += replay_all(SHAPES[name].name, args)
    attempts.end()
    if wrong and not args.tiny:
        raise SystemExit(f"replay and loops differ by more than {AGREE:.0%}: {wrong}")


def loops(name: str, args: argparse.Namespace, attempts: Attempts) -> None:
    """Measure all cells of a model, and the times that a replay needs."""
    shape, most = SHAPES[name], max(args.concurrency)
    base = environment(args.commit) | {"model": shape.name, "dtype": args.dtype}
    base |= {"weights": numbers_of(args)}
    looped = {"acceptance": "simulated", "source": "measured", "prefix_cache": False}
    looped |= {"compile_prefill": args.compile_prefill}
    results = ResultFile(args.out / "closed_loop.json", LOOP_KEYS, base | looped)
    times = (
        ResultFile(args.out / "bucket_times.json", STEP_KEYS, base),
        ResultFile(args.out / "prefill.json", PREFILL_KEYS, base),
    )
    models = build(shape, args.device, getattr(torch, args.dtype), weights=args.weights)
    slots = EngineConfig(
        max_concurrency=most,
        prefix_cache=False,
        compile_prefill=None if args.compile_prefill else False,
    )
    trace = Trace(*draws(args, args.traces[0], 0), args.device)
    engine = SwitchedEngine(models.target, models.drafter, models.predictor, slots, trace)
    try:
        ready = warm_up(engine, args, times, attempts)
        attempts.begin()
        for label in args.traces:
            for cell in tqdm(cells_of(args, label), desc=f"{name}, {label}", mininterval=2):
                if (cell.case, cell.temperature) not in ready or not attempts.may_start():
                    continue
                what = f"{label} c={cell.concurrency} T={cell.temperature:g} {cell.case}"
                with attempts.attempt(what):
                    drawn = draws(args, label, cell.repetition)
                    row = measure(engine, cell, drawn, shape.vocab)
                    results.put(row | {"trace": label})
                    say(row)
        for mode, temperature in sorted(ready):
            if mode in REPLAYED:  # once more, as serving has corrected them
                with attempts.attempt(f"times of {mode}, temperature {temperature:g}"):
                    engine.use(all_cases()[mode])
                    write_steps(engine, all_cases()[mode], times[0], temperature)
    finally:
        engine.close()


def warm_up(
    engine: SwitchedEngine,
    args: argparse.Namespace,
    times: tuple[ResultFile, ResultFile],
    attempts: Attempts,
) -> set[tuple[str, float]]:
    """Compile and capture every mode at every temperature and keep its times; returns those that
    run."""
    longest, ready = lengths(args.set, 1000), set()
    prompt, new = (max(pair[i] for pair in longest) for i in (0, 1))
    for name, temperature in itertools.product(args.modes, args.temperature):
        case, began = all_cases()[name], time.perf_counter()
        request = Request(prompt=[0] * prompt, max_new_tokens=new, temperature=temperature)
        label = f"{name}, temperature {temperature:g}"
        with attempts.attempt(label):
            took = engine.use(case, [request] * max(args.concurrency))
            if name in REPLAYED:
                write_steps(engine, case, times[0], temperature)
            seconds = time.perf_counter() - began
            print(
                f"{label}: {took:.1f} s to compile and capture, {seconds:.1f} s in all", flush=True
            )
            ready.add((name, temperature))
    for temperature in args.temperature:  # last: no mode's steps are timed in pages that served
        timed = [m for m in args.modes if m in REPLAYED and (m, temperature) in ready]
        for name in timed[-1:]:
            with attempts.attempt(f"prefills, temperature {temperature:g}"):
                engine.use(all_cases()[name])
                write_prefills(engine, times[1], min(prompt, 128), temperature)
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


def replay_all(model: str, args: argparse.Namespace) -> list[str]:
    """Replay the sweep of a model from its times; returns the loops that were measured and differ
    by too much."""
    measured = read_rows(args.out / "closed_loop.json", LOOP_FIELDS)
    measured = [r for r in measured if (r["model"], r["source"]) == (model, "measured")]
    here = [r for r in measured if r["acceptance"] == "simulated" and r["set"] == args.set]
    wrong, file = [], ResultFile(args.out / "closed_loop.json", LOOP_KEYS, {})
    for row in tqdm([r for r in here if name_of(r) in REPLAYED], desc="against loops"):
        found = replay(model, cell_of(row), row["trace"], args)
        error = found["tokens_per_s"] / row["tokens_per_s"] - 1
        file.put(found | {"replay_error": round(error, 4)})
        what = f"{row['trace']} c={row['concurrency']} T={row['temperature']:g} {name_of(row)}"
        tqdm.write(f"{what}: {error:+.2%}")
        wrong += [f"{model} {what}"] if abs(error) > AGREE else []
    sweep = [
        (trace, cell)
        for trace, temperature in itertools.product(args.traces, args.temperature)
        for cell in grid(
            [args.set], args.sweep, timed_modes(model, temperature, args),
            repetitions=args.replays, requests=args.replayed_requests, temperature=temperature,
            output_cap=max(new for _, new in lengths(args.set, 1000)),
        )
    ]  # fmt: skip
    for trace, cell in tqdm(sweep, desc="replay"):
        file.put(replay(model, cell, trace, args))
    return wrong


def timed_modes(model: str, temperature: float, args: argparse.Namespace) -> list[str]:
    """The modes to replay; says which of them have no times. Raises ValueError where none has."""
    found, refused = [], None
    for name in (m for m in REPLAYED if m in args.modes):
        try:
            cached_times(args.out, model, all_cases()[name], temperature > 0)
            found.append(name)
        except ValueError as error:
            refused = error
            print(f"{name} is left out. {error}", flush=True)
    if not found and refused is not None:
        raise refused
    return found


def replay(model: str, cell: Cell, trace: str, args: argparse.Namespace) -> Row:
    """One closed loop, replayed."""
    case = all_cases()[cell.case]
    times, origin = cached_times(args.out, model, case, cell.temperature > 0)
    drawn = draws(args, trace, cell.repetition)
    late = not origin["gpu"].startswith("none")
    loop = Replay(case, times, *drawn, late=late, padded=late)
    served = loop.run(requests_of(cell, 2)[cell.warmup :], cell.concurrency)
    kept = ("gpu", "torch", "triton", "transformers", "commit", "date", "dtype", "weights")
    return (
        {name: origin[name] for name in kept if name in origin}
        | {"model": model, "acceptance": "simulated", "source": "replayed", "trace": trace}
        | row_of(cell)
        | {"prefix_cache": False}
        | figures(served, loop.stats, loop.intervals, cell.output_cap)
    )


def say(row: Row) -> None:
    """Print the telling fields."""
    names = ("mode", "budget", "concurrency", "temperature", "tokens_per_s")
    names += ("decode_tokens_per_s", "step_ms", "tokens_per_step", "window_s")
    tqdm.write(str({name: row[name] for name in names}))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--parts", nargs="+", choices=("loops", "replay"), default=["loops"])
    parser.add_argument("--traces", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--recorded", type=Path, help="a trace of bench.recorded, in their place")
    parser.add_argument("--set", default="prompt128-new256", help="or promptP-newN, or chat")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="0 is greedy")
    every = sorted({*HEADLINE, *ABLATION}, key=list(all_cases()).index)
    parser.add_argument("--modes", nargs="+", choices=list(all_cases()), default=every)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--waves", type=int, default=4, help="requests of each worker")
    parser.add_argument("--sweep", nargs="+", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--replays", type=int, default=5, help="repetitions of the sweep")
    parser.add_argument("--replayed-requests", type=int, default=512)
    parser.add_argument("--eager-prefill", dest="compile_prefill", action="store_false")
    parser.add_argument(
        "--seconds", type=float, default=1e9,
        help="start no loop of a model so long after its first one; compiling comes on top",
    )  # fmt: skip
    add_weights(parser)
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args(arguments)
    if not all(temperature >= 0 for temperature in args.temperature):
        parser.error(f"--temperature: expected numbers of at least 0, got {args.temperature}")
    if args.tiny:
        args.out = aside(args.out)
        args.models, args.parts, args.set = ["tiny"], ["loops", "replay"], "prompt8-new24"
        args.concurrency, args.repetitions, args.waves = [1, 3], 1, 2
        args.sweep, args.replays, args.replayed_requests = [2, 3], 2, 12
    elif "loops" in args.parts and not torch.cuda.is_available():
        parser.error("loops need a CUDA device; --tiny runs everything at toy size on a CPU")
    args.out = folder_of(args.out, args.weights)
    args.device = torch.device("cpu" if args.tiny else "cuda:0")
    args.dtype = "float32" if args.tiny else "bfloat16"
    args.traces = args.traces if args.recorded is None else [RECORDED]
    # Loops and replays draw alike only for as many slots.
    args.slots = bucket_of(max(32, *args.concurrency, *args.sweep))
    return args


if __name__ == "__main__":
    main()

"""The real pair served to closed-loop clients: SmolLM2 with its drafter and predictor, every mode.

`python -m bench.closed_loop --prompts FOLDER` measures what the repository keeps and
`--grid reduced` a part of it in minutes; `--full` is the paper's whole protocol. --sets, --modes
and the like leave some cells of a grid out. Rows go to bench/results/closed_loop.json as they are
measured, and a cell that is there already, from the same commit and device, is not measured
again. `--shard 0/4` takes one set of four, for one process per GPU. `--tiny` runs toy models on a
CPU, to see that it works. Rows of toys, or without a GPU, go to runs/bench.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import dscale
from bench.aggregate import LOOP_KEYS
from bench.attempts import Attempts
from bench.client import closed_loop, figures
from bench.loop_cells import GRIDS, MODES, Cell, all_cases, grid, shard
from bench.result_files import ResultFile
from bench.rows import RESULTS, aside, environment
from bench.shapes import SHAPES, build
from bench.switched import SwitchedEngine
from bench.workload import SETS, WARM_UP, Workload, load_workload
from dscale.config import EngineConfig
from dscale.drafter_files import load_drafter
from dscale.load import build_target, target_config
from dscale.predictor_files import load_predictor
from dscale.request import Request

Encode = Callable[[str], list[int]]

SIZES = ("requests", "warmup", "output_cap")
WHICH = ("sets", "concurrency", "modes", "repetitions", "temperature")
"""Options that say how large a cell is, and which cells there are."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A model that runs in an engine. `encode`: a user turn to prompt ids. `scores`: where those
    of the drafts come from."""

    model: str
    dtype: str
    engine: SwitchedEngine
    encode: Encode
    stop_ids: tuple[int, ...]
    scores: str


def main() -> None:
    args = parse()
    cells = args.cells = cells_of(args)
    base = environment(args.commit) | {"acceptance": "real", "source": "measured", "trace": None}
    workloads = {name: load_workload(name, args.prompts) for name in {c.set for c in cells}}
    pair = toy(args) if args.tiny else smollm2(args)
    base |= {"model": pair.model, "dtype": pair.dtype, "prefix_cache": args.prefix_cache}
    base |= {"compile_prefill": args.compile_prefill}
    results = ResultFile(args.out / "closed_loop.json", LOOP_KEYS, base)
    attempts = Attempts(args.seconds)
    try:
        run(pair, cells, workloads, results, attempts, again=args.again)
    finally:
        pair.engine.close()
    attempts.end()


def run(
    pair: Pair,
    cells: Sequence[Cell],
    workloads: dict[str, Workload],
    results: ResultFile,
    attempts: Attempts,
    *,
    again: bool = False,
) -> None:
    """Measure the cells that `results` does not have yet, each mode compiled beforehand; those of
    a mode that cannot be compiled are left out."""
    left = [cell for cell in cells if again or not known(results, cell)]
    print(f"{len(cells)} cells, {len(cells) - len(left)} of them measured already", flush=True)
    prompts = {
        name: [pair.encode(p) for p in (*w.warmup, *w.measured)] for name, w in workloads.items()
    }
    if not left:
        return
    longest = max(len(p) for cell in left for p in prompts[cell.set])
    ready = warm_up(pair, left, longest, attempts)
    attempts.begin()
    for cell in tqdm(left, desc="cells", mininterval=2):
        if (cell.case, cell.temperature) not in ready or not attempts.may_start():
            continue
        label = f"{cell.set} c={cell.concurrency} T={cell.temperature:g} {cell.case}"
        with attempts.attempt(label):
            row = measure(pair, cell, prompts[cell.set])
            results.put(row | {"prompts": workloads[cell.set].source})
            tqdm.write(
                f"{label}: {row['tokens_per_s']} tokens/s, {row['step_ms']} ms a step, "
                f"{row['tokens_per_step']} tokens per step, {row['window_s']} s"
            )


def known(results: ResultFile, cell: Cell) -> bool:
    """Whether a row of this cell is there, from the same commit and device."""
    wanted = results.base | cell.fields
    row = results.rows.get(tuple(wanted[key] for key in results.keys))
    same = ("commit", "gpu", "warmup", "prefix_cache", "compile_prefill")
    return row is not None and all(row.get(key) == wanted[key] for key in same)


def warm_up(
    pair: Pair, cells: Sequence[Cell], longest: int, attempts: Attempts
) -> set[tuple[str, float]]:
    """Compile and capture every mode and temperature, and say how long each took; returns those
    that run."""
    most, cap = max(c.concurrency for c in cells), max(c.output_cap for c in cells)
    ids, ready = pair.encode("Why is the sky blue?"), set()
    captured: dict[tuple[str, float], dict[str, Any]] = {}
    for case, temperature in dict.fromkeys((c.case, c.temperature) for c in cells):
        settings: dict[str, Any] = {"temperature": temperature, "stop_ids": pair.stop_ids}
        what = f"{case}, temperature {temperature:g}"
        with attempts.attempt(what):
            room = [Request(prompt=[0] * longest, max_new_tokens=cap, **settings)] * most
            took = pair.engine.use(all_cases()[case], room)
            print(f"{what}: {took:.1f} s to compile and capture", flush=True)
            captured[case, temperature] = settings
    for (case, temperature), settings in captured.items():  # last: steps are timed before any
        what, began = f"first requests, {case}, temperature {temperature:g}", time.perf_counter()
        with attempts.attempt(what):
            pair.engine.use(all_cases()[case])
            first = [Request(prompt=ids, max_new_tokens=24, **settings) for _ in range(2 * most)]
            closed_loop(pair.engine.submit, first, most)
            print(f"{what}: {time.perf_counter() - began:.1f} s", flush=True)
            ready.add((case, temperature))
    return ready


def measure(pair: Pair, cell: Cell, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """One cell's row: its warm-up requests, then the measured ones."""
    case, engine = all_cases()[cell.case], pair.engine
    requests = [
        Request(
            prompt=ids,
            max_new_tokens=cell.output_cap,
            stop_ids=pair.stop_ids,
            temperature=cell.temperature,
            seed=1000 * cell.repetition + at,
        )
        for at, ids in enumerate(prompts)
    ]
    warmup, measured = requests[: cell.warmup], requests[WARM_UP : WARM_UP + cell.requests]
    engine.use(case)
    closed_loop(engine.submit, warmup, cell.concurrency)
    engine.forget()
    served = closed_loop(engine.submit, measured, cell.concurrency)
    found = figures(served, engine.stats, engine.batcher.intervals, cell.output_cap)
    return cell.fields | {"predictor": pair.scores if case.config.adaptive else None} | found


def settings_of(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings, mode and budget aside."""
    most = max(cell.concurrency for cell in args.cells)
    return EngineConfig(
        mode="dflash",
        max_concurrency=most,
        prefix_cache=args.prefix_cache,
        compile_prefill=None if args.compile_prefill else False,
    )


def smollm2(args: argparse.Namespace) -> Pair:
    """The shipped pair, or the drafter and predictor of the command line."""
    dtype = getattr(torch, args.dtype)
    model, tokenizer = dscale.demo.load(dtype=dtype)
    path = args.drafter or dscale.demo.drafter()
    shape, device = target_config(model), model.device
    drafter = load_drafter(path, shape, dtype=dtype, device=device)
    predictor, scores = args.predictor, "running product"
    if predictor is None and args.drafter is None:
        predictor, scores = dscale.demo.predictor(), "shipped"
    elif predictor is not None:
        scores = predictor.name
    loaded = None
    if predictor is not None:
        loaded = load_predictor(predictor, drafter.config, drafter.fingerprint, device)
    engine = SwitchedEngine(
        build_target(model, drafter.config.taps), drafter, loaded, settings_of(args)
    )

    def encode(prompt: str) -> list[int]:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    stop = model.generation_config.eos_token_id
    stops = tuple(stop) if isinstance(stop, list) else (stop,)
    return Pair("SmolLM2-135M-Instruct", args.dtype, engine, encode, stops, scores)


def toy(args: argparse.Namespace) -> Pair:
    """Random models of toy size on the CPU; a prompt's ids are its characters."""
    models = build(SHAPES["tiny"], torch.device("cpu"), torch.float32)
    engine = SwitchedEngine(models.target, models.drafter, models.predictor, settings_of(args))

    def encode(prompt: str) -> list[int]:
        return [ord(letter) % 200 for letter in prompt[:40]]

    return Pair(models.shape.name, "float32", engine, encode, (), "random")


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for: of a grid by name those that the other options
    leave, else a grid of the options' own."""
    if args.tiny:
        cells = grid(
            args.sets or SETS[:2], args.concurrency or (2, 3), args.modes or MODES,
            repetitions=args.repetitions or 2, requests=args.requests or 5,
            warmup=2 if args.warmup is None else args.warmup,
            output_cap=args.output_cap or 12, temperature=args.temperature or 0.0,
        )  # fmt: skip
    elif args.grid is not None or all(getattr(args, n) is None for n in (*SIZES, *WHICH)):
        wanted = {
            "set": args.sets,
            "concurrency": args.concurrency,
            "case": args.modes,
            "temperature": None if args.temperature is None else [args.temperature],
            "repetition": None if args.repetitions is None else range(args.repetitions),
        }
        cells = [
            cell
            for cell in GRIDS[args.grid or "committed"]()
            if all(some is None or getattr(cell, name) in some for name, some in wanted.items())
        ]
    else:
        cells = grid(
            args.sets or SETS, args.concurrency or (8, 16, 32), args.modes or MODES,
            repetitions=args.repetitions or 3, requests=args.requests or 128,
            temperature=args.temperature or 0.0,
            warmup=WARM_UP if args.warmup is None else args.warmup,
            output_cap=args.output_cap or 2048,
        )  # fmt: skip
    return shard(cells, args.shard)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prompts", type=Path, help="folder with the sets' prompt files; default: 16 of each set"
    )
    parser.add_argument(
        "--grid", choices=list(GRIDS),
        help='cells by name ("committed" where nothing else is asked for); --sets, --concurrency, '
        "--modes, --repetitions and --temperature leave some of them out",
    )  # fmt: skip
    parser.add_argument("--full", action="store_const", dest="grid", const="full")
    parser.add_argument("--sets", nargs="+", help="sets, manifests or Hub data sets")
    parser.add_argument("--concurrency", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=list(all_cases()))
    parser.add_argument("--requests", type=int, help="measured ones of a cell")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--output-cap", type=int)
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--shard", default="0/1", help="i/n: this process's part of the sets")
    parser.add_argument("--drafter", type=Path, help="default: the one shipped")
    parser.add_argument("--predictor", type=Path, help="default: the shipped drafter's")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prefix-cache", action="store_true", help="prompts come twice each")
    parser.add_argument("--eager-prefill", dest="compile_prefill", action="store_false")
    parser.add_argument("--again", action="store_true", help="measure known cells anew")
    parser.add_argument(
        "--seconds", type=float, default=1e9,
        help="start no cell so long after the first one; loading and compiling come on top",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="toy models, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args(arguments)
    sizes = [name for name in SIZES if getattr(args, name) is not None]
    if args.grid is not None and (sizes or args.tiny):
        parser.error(f"--grid: expected without --tiny and --requests and the like, got {sizes}")
    if args.tiny or not torch.cuda.is_available():
        args.out = aside(args.out)
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device: times say nothing but ratios of one run", flush=True)
    return args


if __name__ == "__main__":
    main()

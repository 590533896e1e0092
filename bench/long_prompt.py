"""How long running requests wait when a long prompt arrives among them, with its prefill in chunks
and at once.

`python -m bench.long_prompt` (SmolLM2) and `--model 8b` (Qwen3-8B shape, random weights), on a
GPU. Rows go to bench/results/long_prompt.json as they are measured. `--tiny` does it at toy size
on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

import dscale
from bench.result_files import ResultFile
from bench.rows import RESULTS, aside, environment, machine
from bench.shapes import SHAPES, build
from dscale.config import EngineConfig
from dscale.engine import Engine
from dscale.request import Request

DATA = Path(__file__).parent / "data" / "identity.jsonl"
BEFORE, AFTER = 60, 24
"""Tokens every running request has when the long prompt is submitted, and tokens of that one."""


@dataclasses.dataclass(slots=True)
class Arrivals:
    """When each running request's tokens reached their consumer: (seconds, how many)."""

    at: list[list[tuple[float, int]]]

    def take(self, index: int, tokens: list[int]) -> None:
        """Called at the consumer, once per commit."""
        self.at[index].append((time.perf_counter(), len(tokens)))

    def gaps(self, first: float, last: float) -> list[float]:
        """Seconds between commits of one request that overlap the time from `first` to `last`."""
        return [
            b - a
            for moments in self.at
            for (a, _), (b, _) in pairwise(moments)
            if b > first and a < last
        ]

    def rate(self, first: float, last: float) -> float:
        """Tokens per second of all of them in that time."""
        tokens = sum(count for moments in self.at for t, count in moments if first < t <= last)
        return tokens / (last - first)


def pair(args: argparse.Namespace) -> tuple[Engine, list[int]]:
    """An engine and the text that prompts are cut from."""
    pool = 128 * -(-(args.running * (args.room + 256) + args.prompt + 1024) // 128)
    settings: dict[str, Any] = {"mode": "dscale", "budget": "half", "pool_tokens": pool}
    settings |= {"max_concurrency": args.running + 1, "prefix_cache": False}
    # The longest, so that the warm-up captures prompts of every size.
    settings["prefill_chunk"] = max(args.chunks)
    settings["compile_prefill"] = None if args.compile_prefill else False
    if args.model == "smollm2":
        model, tokenizer = dscale.demo.load(torch.bfloat16)
        predictor = dscale.demo.predictor()
        spec = dscale.attach(model, dscale.demo.drafter(), predictor=predictor, **settings)
        lines = [json.loads(line)["prompt"] for line in DATA.read_text().splitlines()]
        text = [token for line in lines for token in tokenizer.encode(line)]
        return spec.engine, text * (1 + args.prompt // len(text))
    models = build(SHAPES[args.model], args.device, args.dtype)
    engine = Engine(models.target, models.drafter, EngineConfig(**settings), models.predictor)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(SHAPES[args.model].vocab, (2 * args.prompt,), generator=generator)
    return engine, text.tolist()


def running_requests(text: list[int], args: argparse.Namespace) -> list[Request]:
    """Requests that decode for long, with different prompts."""
    step = 97
    return [
        Request(prompt=text[i * step : i * step + 64 + i], max_new_tokens=args.room)
        for i in range(args.running)
    ]


def measure(engine: Engine, text: list[int], args: argparse.Namespace) -> dict[str, float]:
    """One arrival; times in milliseconds."""
    running = running_requests(text, args)
    arrivals = Arrivals([[] for _ in running])
    failed: list[BaseException] = []

    def run() -> None:
        try:
            engine.generate(running, arrivals.take)
        except RuntimeError as error:
            if any(r.finish_reason != "cancelled" for r in running):
                failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        deadline = time.perf_counter() + 120
        while min(len(r.tokens) for r in running) < BEFORE and not failed:
            if time.perf_counter() > deadline:
                raise TimeoutError("the running requests do not decode")
            time.sleep(0.001)
        calm = time.perf_counter()
        time.sleep(args.calm)
        long = Request(prompt=text[: args.prompt], max_new_tokens=AFTER)
        came: list[float] = []
        asked = time.perf_counter()
        engine.generate([long], lambda _, tokens: came.append(time.perf_counter()))
        if any(r.finished for r in running):
            raise ValueError("room: expected running requests to outlast the long one")
    finally:
        engine.cancel(running)
        thread.join()
    if failed:
        raise failed[0]
    during, before = arrivals.gaps(asked, came[0]), arrivals.gaps(calm, asked)
    return {
        "longest_gap_ms": 1e3 * max(during),
        "median_gap_ms": 1e3 * median(during),
        "longest_gap_before_ms": 1e3 * max(before),
        "median_gap_before_ms": 1e3 * median(before),
        "first_token_ms": 1e3 * (came[0] - asked),
        "running_tokens_per_s": arrivals.rate(asked, came[0]),
        "running_tokens_per_s_before": arrivals.rate(calm, asked),
    }


def main() -> None:
    args = parse()
    began = time.perf_counter()
    base = environment(args.commit) | {
        "model": "SmolLM2-135M-Instruct" if args.model == "smollm2" else SHAPES[args.model].name,
        "dtype": str(args.dtype).removeprefix("torch."),
        "mode": "dscale",
        "budget": "half",
        "compile_prefill": args.compile_prefill,
        "predictor": True,
        "random_weights": args.model != "smollm2",
    }
    keys = ("model", "mode", "budget", "running", "prompt", "prefill_chunk", "compile_prefill")
    file = ResultFile(args.out / "long_prompt.json", keys, base)
    with torch.no_grad():
        engine, text = pair(args)
        longest = Request(prompt=text[: args.prompt], max_new_tokens=AFTER)
        engine.warm_up([*running_requests(text, args), longest])
        print({"warm_up_s": round(time.perf_counter() - began, 1)}, flush=True)
        core = engine.batcher.core
        for chunk in tqdm(args.chunks, desc="prefill_chunk"):
            # What was compiled and captured serves the shorter ones as well.
            core.config = dataclasses.replace(core.config, prefill_chunk=chunk)
            measure(engine, text, args)  # its shapes' first time
            runs = [measure(engine, text, args) for _ in range(args.repeats)]
            row: dict[str, Any] = {
                "running": args.running,
                "prompt": args.prompt,
                "prefill_chunk": chunk,
                "chunked": chunk < args.prompt,
                "repeats": args.repeats,
                "tokens_per_pass": round(engine.stats.tokens_per_pass, 3),
            }
            for name in runs[0]:
                pick = max if name.startswith("longest") else median
                row[name] = round(pick(run[name] for run in runs), 2)
            file.put(row)
            tqdm.write(str({k: v for k, v in row.items() if k not in base}))
            engine.stats.reset()
        engine.close()
    print({"seconds": round(time.perf_counter() - began, 1)}, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "8b", "4b", "tiny"))
    parser.add_argument("--running", type=int, default=8, help="requests that decode")
    parser.add_argument("--prompt", type=int, default=7900, help="tokens of the long prompt")
    parser.add_argument("--room", type=int, default=12000, help="new tokens of a running request")
    parser.add_argument("--calm", type=float, default=0.3, help="seconds before it arrives")
    parser.add_argument("--chunks", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--eager-prefill", dest="compile_prefill", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    if args.tiny:
        args.out = aside(args.out)
        args.model, args.running, args.prompt, args.repeats = "tiny", 3, 900, 2
        args.chunks, args.room = [128, 1024], 3000
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs it at toy size on a CPU")
    args.device, args.dtype = machine(args.tiny)
    return args


if __name__ == "__main__":
    main()

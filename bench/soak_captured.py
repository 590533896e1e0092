"""A soak of the captured engine: thousands of requests of every kind through one engine, finish
reasons, pages, memory and recompiles checked, tokens/s on the way.

`python -m bench.soak_captured` (SmolLM2, bf16, on a GPU); the row goes to
bench/results/soak.json. `--tiny` does it with a tiny random model on a CPU, uncaptured.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import dscale
from bench.rows import RESULTS, aside, environment, write_rows
from bench.soak_load import Bad, Case, Plan, all_back, drive, malformed
from dscale.doctor import tiny_pair
from dscale.handle import Result
from dscale.request import Request

DATA = Path(__file__).parent / "data" / "identity.jsonl"
STOP_STRING = "\n\n"


@dataclass(slots=True)
class Load:
    """Random requests over a text's tokens. `text`: token ids that prompts are cut from.
    `longest`, `most_new`: limits of a prompt and of its continuation. `eos`: the model's stop id,
    or one that random text contains. `tokenizer`: None without stop strings."""

    text: list[int]
    longest: int
    most_new: int
    eos: int
    tokenizer: Any
    results: list[Result] = field(default_factory=list)

    def draw(self, rng: random.Random) -> Plan:
        """One request: half of the prompts short, every tenth with a beginning that others have
        too."""
        length = rng.randint(1, self.longest if rng.random() < 0.5 else self.longest // 8)
        start = rng.randrange(len(self.text) - length)
        if rng.random() < 0.1:
            start, length = 0, max(length, self.longest // 3)
        settings: dict[str, Any] = {
            "max_new_tokens": rng.choice((1, 4, rng.randint(1, self.most_new), self.most_new)),
            "eos_token_id": self.eos,
            "pad_token_id": self.eos,
        }
        if rng.random() < 0.4:
            settings |= {"do_sample": True, "temperature": rng.choice((0.3, 0.8, 1.0))}
            settings |= {"top_k": rng.choice((5, 20, 50)), "top_p": rng.choice((0.9, 1.0))}
            settings |= {"seed": rng.randrange(1 << 30)}
        if rng.random() < 0.2:
            settings |= {"repetition_penalty": rng.choice((1.1, 1.3))}
        if self.tokenizer is not None and rng.random() < 0.05:
            settings |= {"stop_strings": STOP_STRING, "tokenizer": self.tokenizer}
        return Plan(self.text[start : start + length], settings)

    def check(self, case: Case, result: Result) -> None:
        """Assert that a result ended for the reason it gives, and no other one came before it."""
        got, settings, reason = result.generated_tokens, case.plan.settings, result.finish_reason
        most, stops = settings["max_new_tokens"], "stop_strings" in settings
        assert result.error is None, result
        assert self.eos not in got[:-1], result
        assert len(got) <= most, result
        ended = bool(got) and got[-1] == self.eos
        found = stops and STOP_STRING in self.tokenizer.decode(got)
        if stops and len(got) > 1:
            assert STOP_STRING not in self.tokenizer.decode(got[:-1]), result
        if reason == "length":
            assert len(got) == most, result
            assert not ended, result
        elif reason != "cancelled":
            assert {"eos": ended, "stop": found}.get(reason), result
        self.results.append(result)


class Compiles:
    """What torch has compiled, recorded and skipped so far."""

    def __init__(self) -> None:
        self.before = self._now()

    def _now(self) -> dict[str, int]:
        counters: Any = torch._dynamo.utils.counters
        return {
            "compiled": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
        }

    def since(self) -> dict[str, int]:
        """Since this object was made."""
        return {name: value - self.before[name] for name, value in self._now().items()}

    def latest(self, count: int) -> list[str]:
        """What the last compilations were, and why."""
        found = torch._dynamo.utils.get_compilation_metrics()[-count:] if count else []
        return [f"{m.co_name} {m.co_filename}: {m.recompile_reason}" for m in found]


def memory() -> dict[str, int]:
    """MiB of the device."""
    if not torch.cuda.is_available():
        return {"allocated_mib": 0, "reserved_mib": 0}
    torch.cuda.synchronize()
    return {
        "allocated_mib": torch.cuda.memory_allocated() >> 20,
        "reserved_mib": torch.cuda.memory_reserved() >> 20,
    }


def load(args: argparse.Namespace) -> tuple[dscale.Attachment, Load]:
    """The attached model and its requests."""
    pool = None if args.pool_tokens == 0 else args.pool_tokens
    settings: dict[str, Any] = {"max_concurrency": args.concurrency, "pool_tokens": pool}
    settings |= {"mode": "dscale", "budget": args.budget}
    settings["compile_prefill"] = None if args.compile_prefill else False
    if args.tiny:
        model, drafter = tiny_pair(torch.device("cpu"))
        text = random.Random(1).choices(range(model.config.vocab_size), k=2000)
        spec = dscale.attach(model, drafter, **settings)
        return spec, Load(text, longest=200, most_new=24, eos=7, tokenizer=None)
    model, tokenizer = dscale.demo.load(torch.bfloat16)
    lines = [json.loads(line)["prompt"] for line in DATA.read_text().splitlines()]
    text = [token for line in lines for token in tokenizer.encode(line)]
    predictor = dscale.demo.predictor()
    spec = dscale.attach(model, dscale.demo.drafter(), predictor=predictor, **settings)
    eos = model.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    return spec, Load(text, longest=1500, most_new=160, eos=eos, tokenizer=tokenizer)


def warm_up(spec: dscale.Attachment, load: Load, args: argparse.Namespace) -> None:
    """Compile and capture all that is asked for later, then see what real requests still need."""
    how = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}
    like = [
        Request(prompt=[0] * 16, max_new_tokens=16, **how)  # type: ignore[arg-type]
        for _ in range(args.concurrency)
    ]
    spec.engine.warm_up(like)
    rng, bad = random.Random(args.seed + 1), bad_ones(spec, args)
    drive(
        spec.engine, args.first, rng, load.draw, load.check, bad, outstanding=2 * args.concurrency
    )
    load.results.clear()
    spec.stats.reset()


def bad_ones(spec: dscale.Attachment, args: argparse.Namespace) -> list[Bad]:
    """The malformed requests; a pool on a CPU grows unless it is fixed."""
    grows = args.tiny and args.pool_tokens == 0
    vocab = spec.engine.target.config.vocab_size
    return malformed(spec.engine, vocab, None if grows else 10_000_000)


def soak(spec: dscale.Attachment, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """The measured requests; returns the result row."""
    engine, batcher = spec.engine, spec.engine.batcher
    compiles, before, began = Compiles(), memory(), time.perf_counter()
    peak, bar = [0], tqdm(total=args.requests, unit="request", desc="soak", mininterval=2)

    def watch() -> None:
        bar.update()
        workspace = batcher.core.workspace
        assert workspace is not None
        peak[0] = max(peak[0], workspace.num_pages - 1 - batcher.num_free_pages)

    ends = drive(
        engine, args.requests, random.Random(args.seed), load.draw, load.check,
        bad_ones(spec, args),
        outstanding=2 * args.concurrency, watch=watch,
    )  # fmt: skip
    seconds, after, new = time.perf_counter() - began, memory(), compiles.since()
    bar.close()
    all_back(engine)
    assert ends.total() == args.requests, ends
    workspace = batcher.core.workspace
    assert workspace is not None
    tokens = sum(len(r.generated_tokens) for r in load.results)
    waits = sorted(
        r.first_token_at - r.queued_at for r in load.results if r.first_token_at and r.queued_at
    )
    return {
        "requests": args.requests,
        "reasons": dict(sorted(ends.items())),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_pass": round(spec.stats.tokens_per_pass, 3),
        "seconds": round(seconds, 1),
        "prefill_seconds": round(spec.stats.prefill_seconds, 1),
        "decode_seconds": round(spec.stats.decode_seconds, 1),
        "prompt_tokens": spec.stats.prompt_tokens,
        "prefix_hits": spec.stats.prefix_hits,
        "median_first_token_s": round(waits[len(waits) // 2], 4),
        "pool_pages": workspace.num_pages - 1,
        "peak_pages": peak[0],
        "pages_left": workspace.num_pages - 1 - batcher.num_free_pages,
        "recompiles": new["compiled"],
        "graph_breaks": new["graph_breaks"],
        "cudagraph_skips": new["cudagraph_skips"],
        "recompiled": compiles.latest(new["compiled"]),
        "memory_before": before,
        "memory_after": after,
    }


def main() -> None:
    args = parse()
    base = environment(args.commit) | {
        "model": "toy shape" if args.tiny else "SmolLM2-135M-Instruct",
        "dtype": "float32" if args.tiny else "bfloat16",
        "mode": "dscale",
        "budget": args.budget,
        "compile_prefill": args.compile_prefill,
        "concurrency": args.concurrency,
        "captured": not args.tiny,
        "predictor": not args.tiny,
    }
    spec, load_ = load(args)
    with spec:
        compiles, began = Compiles(), time.perf_counter()
        warm_up(spec, load_, args)
        base["warm_up_s"] = round(time.perf_counter() - began, 1)
        base["warm_up_compiled"] = compiles.since()["compiled"]
        print({"warm_up_s": base["warm_up_s"], **compiles.since(), **memory()}, flush=True)
        row = base | soak(spec, load_, args)
    print(json.dumps(row, indent=1), flush=True)
    write_rows(args.out / "soak.json", [row])
    bad = {n: row[n] for n in ("recompiles", "graph_breaks", "cudagraph_skips") if row[n]}
    if bad and not args.tiny:
        raise SystemExit(f"expected none after the warm-up, got {bad}: {row['recompiled']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--first", type=int, default=150, help="uncounted requests before them")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--budget", default="half", choices=("half", "auto"))
    parser.add_argument(
        "--pool-tokens", type=int, default=48 * 1024, help="0: chosen from free memory"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, on a CPU")
    parser.add_argument("--eager-prefill", dest="compile_prefill", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    if args.tiny:
        args.out = aside(args.out)
        args.requests, args.first = min(args.requests, 200), min(args.first, 20)
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs it at toy size on a CPU")
    return args


if __name__ == "__main__":
    main()

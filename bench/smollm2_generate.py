"""SmolLM2 on one device: tokens/s of DScale against `generate()`, and how many bf16 outputs agree.

Run on a GPU: `python -m bench.smollm2_generate --prompts gsm8k.jsonl math500.jsonl ...`. Rows go
to bench/results/smollm2_generate.json, identity to bench/results/smollm2_identity.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import dscale
from bench.rows import RESULTS, environment, write_rows
from dscale.text import read_prompts

# Arguments of attach; a budget on the command line goes to the methods that have None.
ATTACHED: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "dflash": {"mode": "dflash", "budget": None},
    "+tiles": {"mode": "+tiles", "budget": None},
    "half": {"mode": "dscale", "budget": "half"},
    "auto": {"mode": "dscale", "budget": "auto"},
}
METHODS = ("generate_eager", "generate_static", *ATTACHED)


def main() -> None:
    args = parse()
    model, tokenizer = dscale.demo.load(dtype=getattr(torch, args.dtype))
    tokenizer.padding_side = "left"
    prompts = [
        row["prompt"] for file in args.prompts for row in read_prompts(file)[: args.per_set]
    ]
    # One prompt of each set in turn, so that every batch size sees all sets.
    prompts = [p for i in range(args.per_set) for p in prompts[i :: args.per_set]]
    base = environment(args.commit) | {"model": "SmolLM2-135M-Instruct", "dtype": args.dtype}
    if not args.skip_identity:
        write_rows(
            args.out / "smollm2_identity.json", identity(model, tokenizer, prompts, args, base)
        )
    rows = []
    for batch in () if args.skip_speed else args.batches:
        inputs = encode(tokenizer, prompts[:batch], model.device)
        for method in tqdm(args.methods, desc=f"batch {batch}"):
            rows.append(base | measure(model, inputs, method, batch, args))
            print({k: v for k, v in rows[-1].items() if k not in base}, flush=True)
            write_rows(args.out / "smollm2_generate.json", rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--per-set", type=int, default=32)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafter", type=Path, default=None, help="default: the one shipped")
    parser.add_argument("--predictor", type=Path, default=None, help="default: running product")
    parser.add_argument("--budget", type=int, default=None, help="of dflash and +tiles")
    parser.add_argument("--eager-prefill", dest="compile_prefill", action="store_false")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--skip-identity", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    args = parser.parse_args()
    args.drafter = args.drafter or dscale.demo.drafter()
    return args


def encode(tokenizer: Any, prompts: list[str], device: torch.device) -> dict[str, Tensor]:
    """Chat-templated, left-padded ids and mask `[batch, length]`."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def new_tokens(sequences: Tensor, length: int, stop: int) -> int:
    """Tokens generated in all rows, the stop id counted and nothing after it."""
    generated = sequences[:, length:]
    before_stop = ((generated == stop).cumsum(1) - (generated == stop).long()) == 0
    return int(before_stop.sum())


def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Result and wall seconds of a call, the device idle before and after."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else nullcontext
    synchronize()
    began = time.perf_counter()
    result = call()
    synchronize()
    return result, time.perf_counter() - began


def measure(
    model: Any, inputs: dict[str, Tensor], method: str, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Median tokens/s of a whole `generate` call (prefill included), after two warm-up calls."""
    settings: dict[str, Any] = {"max_new_tokens": args.new_tokens, "do_sample": False}
    spec = None
    if method == "generate_static":
        settings["cache_implementation"] = "static"
    elif method in ATTACHED:
        options = dict(ATTACHED[method])
        if "budget" in options and options["budget"] is None:
            options["budget"] = args.budget
        if options["mode"] == "dscale":
            options["predictor"] = args.predictor
        options["compile_prefill"] = None if args.compile_prefill else False
        spec = dscale.attach(model, None if method == "ar" else args.drafter, **options)
    try:
        began = time.perf_counter()
        for _ in range(2):
            model.generate(**inputs, **settings)
        warm_up = time.perf_counter() - began
        if spec is not None:
            spec.stats.reset()
        runs = [timed(lambda: model.generate(**inputs, **settings)) for _ in range(args.repeats)]
        stats = spec.stats if spec is not None else None
    finally:
        if spec is not None:
            spec.detach()
        torch._dynamo.reset()
    stop = model.generation_config.eos_token_id
    tokens = new_tokens(runs[0][0], inputs["input_ids"].shape[1], stop)
    rates = sorted(tokens / seconds for _, seconds in runs)
    return {
        "method": method,
        "batch": batch,
        "tokens": tokens,
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_min": round(rates[0], 1),
        "tokens_per_s_max": round(rates[-1], 1),
        "tokens_per_pass": round(stats.tokens_per_pass, 3) if stats else 1.0,
        "step_ms": round(1e3 * stats.decode_seconds / stats.steps, 3) if stats else None,
        "compile_prefill": args.compile_prefill if stats else None,
        "rows_per_pass": round(1 + stats.drafted / stats.passes, 2) if stats else None,
        "warm_up_s": round(warm_up, 1),
    }


def identity(
    model: Any, tokenizer: Any, prompts: list[str], args: argparse.Namespace, base: dict[str, Any]
) -> list[dict[str, Any]]:
    """Compare dflash with plain `generate` prompt by prompt, and the top-2 gap where they part."""
    settings: dict[str, Any] = {"max_new_tokens": args.new_tokens, "do_sample": False}
    size = max(args.batches)
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    encoded = [encode(tokenizer, batch, model.device) for batch in batches]
    plain = [model.generate(**inputs, **settings) for inputs in encoded]
    with dscale.attach(model, args.drafter) as spec:
        ours = [model.generate(**inputs, **settings) for inputs in encoded]
        per_pass = spec.stats.tokens_per_pass
    # Plain generate() against itself in other batches: what rounding alone does.
    small = max(1, size // 4)
    parts = [
        {k: v[i : i + small] for k, v in inputs.items()}
        for inputs in encoded
        for i in range(0, inputs["input_ids"].shape[0], small)
    ]
    again = [row for part in parts for row in model.generate(**part, **settings)]
    control = sum(
        first_difference(left, right) is None
        for left, right in zip((row for batch in plain for row in batch), again, strict=True)
    )
    gaps = []
    for inputs, left, right in zip(encoded, plain, ours, strict=True):
        for row in range(left.shape[0]):
            gap = first_gap(model, inputs, left, right, row)
            if gap is not None:
                gaps.append(gap)
    summary = base | {
        "prompts": len(prompts),
        "identical": len(prompts) - len(gaps),
        "plain_in_batches": [size, small],
        "plain_identical_to_itself": control,
        "new_tokens": args.new_tokens,
        "tokens_per_pass": round(per_pass, 3),
        "gaps_at_first_divergence": sorted(round(gap, 4) for gap in gaps),
    }
    print(summary, flush=True)
    return [summary]


def first_difference(left: Tensor, right: Tensor) -> int | None:
    """Index where two rows first differ, as far as both go, else None."""
    width = min(len(left), len(right))
    differs = (left[:width] != right[:width]).nonzero()
    return int(differs[0]) if len(differs) else None


def first_gap(
    model: Any, inputs: dict[str, Tensor], plain: Tensor, ours: Tensor, row: int
) -> float | None:
    """Top-2 logit gap of the target where two outputs of a row first differ, else None."""
    at = first_difference(plain[row], ours[row])
    if at is None:
        return None
    keep = inputs["attention_mask"][row].bool()
    length = keep.shape[0]
    prefix = torch.cat((plain[row, :length][keep], plain[row, length:at]))
    with torch.no_grad():
        top = model(prefix[None], logits_to_keep=1).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


if __name__ == "__main__":
    main()

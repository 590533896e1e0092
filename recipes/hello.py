"""Answers a few prompts with the embedded pair, live, and compares with plain `generate()`."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer
from transformers.utils.logging import disable_progress_bar

import dscale
import dscale.demo
from dscale.text import read_prompts

# Against plain generate() in the same process, one thread, these prompts: 1.73 x at 6 rows, 1.72 x
# at 8, 1.61 x at 10; with two threads 1.57 x at 8. More rows cost more than they bring on a CPU.
CPU_BUDGET = 8
PROMPTS = Path(__file__).parents[1] / "bench" / "data" / "demo.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One timed call: the new tokens, and the seconds from call to return, prefill included."""

    ids: list[int]
    seconds: float


def timed(generate: Callable[..., torch.Tensor], inputs: Any, **options: Any) -> Run:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = generate(**inputs, do_sample=False, **options)
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()  # waits for the device
    return Run(ids=ids, seconds=time.perf_counter() - start)


def encode(tokenizer: Any, prompt: str, device: torch.device) -> Any:
    turn = [{"role": "user", "content": prompt}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template(turn, **options).to(device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="a prompt file (.jsonl)")
    parser.add_argument("--drafter", help="a drafter folder or Hub id; default: the shipped one")
    parser.add_argument(
        "--budget",
        type=int,
        help="verified rows per request, 1 to 16; default: 8 on a CPU, else chosen",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    return parser.parse_args()


def main() -> int:
    args = parse()
    disable_progress_bar()
    prompts = read_prompts(args.prompts)
    model, tokenizer = dscale.demo.load(torch.float32)
    device = model.device
    options = {"max_new_tokens": args.max_new_tokens}
    requests = [encode(tokenizer, row["prompt"], device) for row in prompts]
    print(f"SmolLM2-135M-Instruct, float32, {device}, {torch.get_num_threads()} threads, greedy")

    plain_generate = model.generate
    on_cpu = device.type == "cpu"
    budget = args.budget or (CPU_BUDGET if on_cpu else None)
    settings: dict[str, Any] = {"mode": "dflash", "budget": budget} if budget else {}
    spec = dscale.attach(
        model, args.drafter or dscale.demo.drafter(), pack_weights=on_cpu, **settings
    )
    rows = f"{budget} rows verified per request and pass" if budget else "rows chosen by the step"
    packed = ", weights packed for the CPU" if on_cpu else ""
    print(f"DScale: blocks of 16, {rows}{packed}")
    for generate in (plain_generate, model.generate):
        timed(generate, requests[0], max_new_tokens=8)  # warm-up, not counted
    plain: list[Run] = []
    fast: list[Run] = []
    passes, committed = 0, 0
    for row, request in zip(prompts, requests, strict=True):
        print(f"\n--- {row['prompt']}\n")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        before = (spec.stats.passes, spec.stats.tokens)
        fast.append(timed(model.generate, request, streamer=streamer, **options))
        num_passes, num_tokens = spec.stats.passes - before[0], spec.stats.tokens - before[1]
        plain.append(timed(plain_generate, request, **options))
        report("this answer", plain[-1:], fast[-1:], num_tokens / max(num_passes, 1))
        passes, committed = passes + num_passes, committed + num_tokens
    spec.detach()
    print()
    return 0 if report("all answers", plain, fast, committed / max(passes, 1)) else 1


def report(name: str, plain: list[Run], fast: list[Run], tokens_per_pass: float) -> bool:
    """Print one line of figures; return whether every token is the same."""
    identical = [run.ids for run in plain] == [run.ids for run in fast]
    rates = [
        sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs)
        for runs in (plain, fast)
    ]
    print(
        f"[{name}: {tokens_per_pass:.2f} tokens per pass, {rates[1]:.1f} tokens/s against "
        f"{rates[0]:.1f} of plain generate(), {rates[1] / rates[0]:.2f} x, "
        f"identical: {'yes' if identical else 'no'}]"
    )
    return identical


if __name__ == "__main__":
    raise SystemExit(main())

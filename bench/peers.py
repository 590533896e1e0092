"""What a transformers user would pick instead, on the same model and prompts in one process.

`python -m bench.peers --prompts FOLDER` runs SmolLM2 through `generate()` as it comes and with a
compiled static cache, transformers' `generate_batch`, prompt lookup and assisted generation,
z-lab's `dflash` package, and DScale, greedily; rows go to bench/results/peers.json. `--tiny` is a
short run on a CPU, to see that each method works.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import dscale
from bench.result_files import ResultFile
from bench.rows import RESULTS, aside, environment
from bench.workload import SETS, load_workload

KEYS = ("model", "method", "budget", "batch", "set", "new_tokens")

OURS: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "dflash": {"mode": "dflash"},
    "dscale": {"mode": "dscale", "budget": "auto"},
}
ALONE = ("prompt_lookup", "assisted", "zlab_dflash")
"""Methods that take one prompt at a time."""

METHODS = ("generate_eager", "generate_static", "generate_batch", *ALONE, *OURS)
LOOKUP_TOKENS = 10
"""Candidates of prompt lookup per pass, as transformers' documentation has it."""


@dataclass(slots=True)
class Peer:
    """A method, made ready once. `run`: prompts to the lengths of their answers. `close`: puts the
    model back. `passes`: tokens per pass so far, None where the method does not say."""

    run: Callable[[list[list[int]]], list[int]]
    close: Callable[[], None] = lambda: None
    passes: Callable[[], float | None] = lambda: None
    note: str | None = None


@dataclass(slots=True)
class Setup:
    """A model and what every method is asked for."""

    model: Any
    tokenizer: Any
    new_tokens: int
    drafter: Path
    predictor: Path | None
    stop_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        stop = self.model.generation_config.eos_token_id
        self.stop_ids = [stop] if isinstance(stop, int) else list(stop)

    def ids(self, prompt: str) -> list[int]:
        """A user turn's prompt ids."""
        chat = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def padded(self, prompts: list[list[int]]) -> dict[str, Tensor]:
        """Left-padded ids and mask on the model's device."""
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = [[pad] * (width - len(p)) + p for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        device = self.model.device
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }

    def generate(self, prompts: list[list[int]], **settings: Any) -> list[int]:
        """`model.generate`, whatever that is now: the answers' lengths."""
        inputs = self.padded(prompts)
        out = self.model.generate(
            **inputs, max_new_tokens=self.new_tokens, do_sample=False, **settings
        )
        answers = out[:, inputs["input_ids"].shape[1] :].tolist()
        return [self.length(answer) for answer in answers]

    def length(self, answer: Sequence[int]) -> int:
        """Tokens up to the first stop id, itself counted."""
        ends = [at for at, token in enumerate(answer) if token in self.stop_ids]
        return min(ends) + 1 if ends else len(answer)


def make(setup: Setup, method: str) -> Peer:
    """Make a method ready."""
    if method in OURS:
        return _ours(setup, method)
    if method == "zlab_dflash":
        return _zlab(setup)
    if method == "generate_batch":
        return Peer(lambda prompts: _batched(setup, prompts))
    settings: dict[str, Any] = {}
    note = None
    if method == "generate_static":
        settings["cache_implementation"] = "static"
    elif method == "prompt_lookup":
        settings["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    elif method == "assisted":
        # No smaller model shares SmolLM2's tokenizer: its own first layers assist.
        settings["assistant_early_exit"] = setup.model.config.num_hidden_layers // 3
        note = f"assisted by the model's first {settings['assistant_early_exit']} layers"
    return Peer(lambda prompts: setup.generate(prompts, **settings), note=note)


def _ours(setup: Setup, method: str) -> Peer:
    options = dict(OURS[method])
    if options["mode"] == "dscale":
        options["predictor"] = setup.predictor
    drafter = None if options["mode"] == "ar" else setup.drafter
    spec = dscale.attach(setup.model, drafter, **options)

    def run(prompts: list[list[int]]) -> list[int]:
        spec.stats.reset()
        return setup.generate(prompts)

    return Peer(run, spec.detach, lambda: spec.stats.tokens_per_pass)


def _batched(setup: Setup, prompts: list[list[int]]) -> list[int]:
    config = setup.model.generation_config.__class__(
        max_new_tokens=setup.new_tokens,
        do_sample=False,
        eos_token_id=setup.stop_ids[0],
        pad_token_id=setup.tokenizer.pad_token_id,
    )
    out = setup.model.generate_batch(inputs=prompts, generation_config=config)
    answers = [result.generated_tokens for result in out.values()]
    if len(answers) != len(prompts) or not all(answers):
        raise RuntimeError(f"generate_batch answered {len(answers)} of {len(prompts)} prompts")
    return [setup.length(answer) for answer in answers]


def _zlab(setup: Setup) -> Peer:
    from dflash.model import DFlashDraftModel, dflash_generate

    model = setup.model
    draft = DFlashDraftModel.from_pretrained(setup.drafter, dtype=model.dtype).to(model.device)
    draft.eval()
    accepted: list[int] = []
    timed = torch.cuda.is_available()  # its statistics wait for a GPU

    def run(prompts: list[list[int]]) -> list[int]:
        accepted.clear()
        lengths = []
        for ids in prompts:
            out = dflash_generate(
                draft,
                model,
                torch.tensor([ids], device=model.device),
                setup.new_tokens,
                setup.stop_ids,
                return_stats=timed,
            )
            if timed:
                accepted.extend(out.acceptance_lengths)
            answer = (out.output_ids if timed else out)[0, len(ids) :].tolist()
            lengths.append(setup.length(answer))
        return lengths

    return Peer(run, passes=lambda: sum(accepted) / len(accepted) if accepted else None)


def measure(
    setup: Setup, peer: Peer, prompts: list[list[int]], batch: int, repeats: int
) -> dict[str, Any]:
    """Tokens/s of whole calls, prefill included: all prompts, `batch` at a time, after a first
    round that does not count."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    began = time.perf_counter()
    for group in groups:
        peer.run(group)
    first = time.perf_counter() - began
    rates, per_pass, tokens = [], [], 0
    for _ in range(repeats):
        began, tokens = time.perf_counter(), 0
        for group in groups:
            tokens += sum(peer.run(group))
            per_pass.append(peer.passes())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rates.append(tokens / (time.perf_counter() - began))
    known = [value for value in per_pass if value is not None]
    return {
        "tokens_per_s": round(median(rates), 1),
        "tokens_per_s_min": round(min(rates), 1),
        "tokens_per_s_max": round(max(rates), 1),
        "tokens": tokens,
        "tokens_per_pass": round(sum(known) / len(known), 3) if known else None,
        "warm_up_s": round(first, 1),
        "note": peer.note,
        "error": None,
    }


def run(setup: Setup, args: argparse.Namespace, file: ResultFile) -> list[str]:
    """Every method at every batch; returns the methods that failed, each of which has its row."""
    texts = [load_workload(name, args.prompts).measured for name in SETS]
    mixed = [setup.ids(texts[i % len(SETS)][i // len(SETS)]) for i in range(max(*args.batches, 4))]
    failed = []
    for method in tqdm(args.methods, desc="methods"):
        batches = [b for b in args.batches if b == 1 or method not in ALONE]
        peer = None
        for batch in batches:
            prompts = mixed[: max(batch, args.alone)] if batch == 1 else mixed[:batch]
            keys = {"method": method, "batch": batch, "set": "mixed"}
            keys |= {"new_tokens": setup.new_tokens}
            keys |= {"budget": OURS.get(method, {}).get("budget")}
            try:
                peer = peer or make(setup, method)
                row = file.put(keys | measure(setup, peer, prompts, batch, args.repeats))
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{method} {batch}")
                row = file.put(keys | {"tokens_per_s": None, "error": str(error)[:200]})
            tqdm.write(str({k: row.get(k) for k in ("method", "batch", "tokens_per_s", "error")}))
        if peer is not None:
            peer.close()
        torch._dynamo.reset()
    return failed


def main() -> None:
    args = parse()
    model, tokenizer = dscale.demo.load(dtype=getattr(torch, args.dtype))
    predictor = args.predictor
    if predictor is None and args.drafter is None:
        predictor = dscale.demo.predictor()
    drafter = args.drafter or dscale.demo.drafter()
    setup = Setup(model, tokenizer, args.new_tokens, drafter, predictor)
    base = environment(args.commit) | {"model": "SmolLM2-135M-Instruct", "dtype": args.dtype}
    failed = run(setup, args, ResultFile(args.out / "peers.json", KEYS, base))
    if failed:
        raise SystemExit(f"failed: {failed}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="folder with the sets; default: 16 of each")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--alone", type=int, default=4, help="prompts at batch 1")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--drafter", type=Path, help="default: the one shipped")
    parser.add_argument("--predictor", type=Path, help="default: the shipped drafter's")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tiny", action="store_true", help="a few tokens, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.out = aside(args.out)
        args.batches, args.alone, args.new_tokens, args.repeats = [1, 2], 1, 6, 1
        args.dtype = "float32"
    return args


if __name__ == "__main__":
    main()

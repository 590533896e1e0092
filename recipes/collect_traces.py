"""Collect traces to train a predictor on: full-width verification of training prompts.

    python recipes/collect_traces.py --out runs/traces --prompts train_prompts.jsonl.gz

Writes .npz files of at most 15 MB for recipes/train_predictor.py, which can also collect by
itself, without a file in between.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drafter_data as data
import numpy as np
import torch
from drafter_data import Prompt
from drafter_generate import pad_left, responses_of, stop_ids
from predictor_traces import Recorder, Traces, save_traces, task_of
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import dscale
import dscale.demo
from dscale.core import Core

ON_GPU = torch.cuda.is_available()
# Questions with short answers, unlike what is measured: a few of each are enough.
MOST = {"opentriviaqa": 150, "t0": 150, "oasst": 150, "awesome_prompts": 100}


class GatheredCore(Core):
    """A core that gathers pages for attention on a GPU too: slower, but nothing to compile."""

    __slots__ = ()
    flex = property(lambda self: False)  # type: ignore[assignment]


def add_arguments(add: Any) -> None:
    """The options of a collection, for an `ArgumentParser.add_argument`."""
    add("--model", default="smollm2", help="'smollm2' (embedded), or a folder or Hub id")
    add("--drafter", type=Path, default=None, help="a drafter folder; default: the shipped one")
    add("--dtype", default="bfloat16" if ON_GPU else "float32", choices=["bfloat16", "float32"])
    add("--prompts", type=Path, nargs="+", default=[], help=".jsonl(.gz): id, source, prompt")
    add("--num-prompts", type=int, default=3000, help="drawn from all the files")
    add("--most", type=json.loads, default=MOST, help="JSON: at most so many of a source")
    add("--unseen-of", type=Path, default=None, help="train_drafter's --out: those prompts last")
    add("--max-prompt", type=int, default=256, help="tokens, template included")
    add("--max-new", type=int, default=256)
    add("--batch", type=int, default=256 if ON_GPU else 16, help="requests at a time")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--max-passes", type=int, default=1_000_000, help="stop after the call that reaches it")
    add("--seconds", type=float, default=600.0, help="start no further call after this time")
    add("--dims", type=int, default=8, help="axes of drafter hidden states kept; 0: all")
    add("--seed", type=int, default=0)


def load_pair(args: argparse.Namespace) -> tuple[Any, Any]:
    """The target and its tokenizer, on the GPU where there is one."""
    dtype = getattr(torch, args.dtype)
    if args.model == "smollm2":
        return dscale.demo.load(dtype=dtype)
    device = "cuda:0" if ON_GPU else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, device_map=device)
    return model.eval(), AutoTokenizer.from_pretrained(args.model)


def draw_prompts(tokenizer: Any, args: argparse.Namespace) -> list[Prompt]:
    """`args.num_prompts` prompts of the files in random order, without repeats, at most
    `args.most[source]` of a source.

    With `args.unseen_of`, a corpus of train_drafter, its own prompts count too, and prompts it has
    no training response to go first: on the others the drafter does better than it will in use.
    """
    if not args.prompts:
        raise ValueError("prompts: expected at least one .jsonl(.gz) file, got none")
    found = data.load_prompts(tokenizer, args.prompts, split="train", max_tokens=args.max_prompt)
    seen: set[tuple[str, str]] = set()
    if args.unseen_of is not None:
        corpus = data.load_corpus(args.unseen_of)
        answered = set(corpus.prompt_of)
        seen = {task_of(p.source, p.id) for i, p in enumerate(corpus.prompts)
                if i in answered and p.split == "train"}  # fmt: skip
        found += [p for p in corpus.prompts if p.split != "eval"]
    unique = list({(p.source, p.id): p for p in found}.values())
    order = np.random.default_rng([args.seed, 3]).permutation(len(unique))
    left, drawn = dict(args.most), []
    for prompt in sorted(
        (unique[i] for i in order), key=lambda p: task_of(p.source, p.id) in seen
    ):
        left[prompt.source] = left.get(prompt.source, len(unique)) - 1
        if left[prompt.source] >= 0 and len(drawn) < args.num_prompts:
            drawn.append(prompt)
    fresh = sum(task_of(p.source, p.id) not in seen for p in drawn)
    counts = Counter(p.source for p in drawn)
    print(json.dumps({"prompts": len(drawn), "unseen": fresh, "sources": counts}), flush=True)
    # Once more at random, so that the steps the axes are fitted on see every kind.
    return [drawn[i] for i in np.random.default_rng([args.seed, 5]).permutation(len(drawn))]


def collect(
    model: Any,
    drafter: Any,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    max_new: int,
    temperature: float = 0.0,
    seed: int = 0,
    dims: int = 8,
    like: Traces | None = None,
    fit_steps: int = 48,
    max_passes: int = 1_000_000,
    seconds: float = 600.0,
) -> Traces:
    """Answer prompts, `batch` at a time, at full width, and record every verification pass.

    `drafter`: a folder, a Hub id or a loaded Drafter. `like`: traces whose projection is used (for
    measured prompts); otherwise the first `fit_steps` steps fit one to `dims` axes (0: all).
    Temperature 0 is greedy; above it, request i samples with seed + i. Stops early after
    `max_passes` passes or `seconds`, always at the end of a call."""
    recorder = Recorder(dims, fit_steps)
    if like is not None:
        recorder.projection = like.projection.to(model.device)
        recorder.hidden_mean = like.hidden_mean.to(model.device)
    spec = dscale.attach(model, drafter=drafter, mode="dflash", capture=False)
    used: list[tuple[str, str]] = []
    began, passes = time.monotonic(), 0
    try:
        spec.engine.batcher.core.__class__ = GatheredCore
        own = spec.engine.drafter
        about = {"drafter": own.fingerprint or "", "block_size": own.config.block_size}
        bar = tqdm(range(0, len(prompts), batch), desc="collect traces", unit="call")
        for start in bar:
            if passes >= max_passes or time.monotonic() - began > seconds:
                break
            part = prompts[start : start + batch]
            how = {"seed": seed + start} if temperature > 0 else {}
            with recorder.recording():
                answers = answer(model, part, max_new, temperature, **how)
            looped = [data.loop_start(tokens) is not None for tokens in answers]
            progress = spec.stats.last_progress
            lengths = [len(p.tokens) for p in part]
            indices = range(start, start + len(part))
            passes += recorder.finish(indices, lengths, progress, looped)
            used += [(p.source, p.id) for p in part]
            bar.set_postfix(passes=passes)
    finally:
        spec.detach()
    if not passes:
        raise ValueError(f"prompts: expected answers of two tokens or more, got {len(used)} short")
    return recorder.traces(used, temperature=temperature, max_new=max_new, **about)


def answer(
    model: Any, prompts: Sequence[Prompt], max_new: int, temperature: float, seed: int = 0
) -> list[data.Tokens]:
    """The new tokens of every prompt, stop token included."""
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        seeds = list(range(seed, seed + len(prompts)))
        how = {"do_sample": True, "temperature": temperature, "seed": seeds}
        how |= {"top_k": 0, "top_p": 1.0}
    pad = model.generation_config.pad_token_id or 0
    ids, mask = pad_left([p.tokens for p in prompts], pad, model.device)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new, **how)
    return responses_of(out[:, ids.shape[1] :], stop_ids(model))


def collect_from(args: argparse.Namespace, model: Any, tokenizer: Any) -> Traces:
    """What the command line asks for."""
    prompts = draw_prompts(tokenizer, args)
    return collect(
        model,
        args.drafter or dscale.demo.drafter(),
        prompts,
        batch=args.batch,
        max_new=args.max_new,
        temperature=args.temperature,
        seed=args.seed,
        dims=args.dims,
        max_passes=args.max_passes,
        seconds=args.seconds,
    )


def collect_measured(args: argparse.Namespace, model: Any, tokenizer: Any, like: Traces) -> Traces:
    """Traces of the first prompts of each file in `args.measured`, projected as `like` is."""
    prompts = data.load_prompts(
        tokenizer,
        args.measured,
        split="eval",
        max_tokens=args.measured_max_prompt,
        limit=args.measured_prompts,
    )
    return collect(
        model,
        args.drafter or dscale.demo.drafter(),
        prompts,
        batch=args.batch,
        max_new=args.max_new,
        temperature=args.temperature,
        seed=args.seed + 1_000_000,
        like=like,
        seconds=args.seconds,
    )


def summary(traces: Traces) -> dict[str, Any]:
    """Counts for the log and the report; tokens per pass leave out the last pass of an answer."""
    whole = traces.accepted[~traces.cut].float()
    plain = traces.accepted[~traces.cut & ~traces.looped].float()
    return {
        "prompts": len(traces.prompts),
        "passes": len(traces),
        "temperature": traces.temperature,
        "max_new": traces.max_new,
        "looping_share": round(float(traces.looped.float().mean()), 4),
        "tokens_per_pass": round(1 + float(whole.mean()), 4) if len(whole) else None,
        "tokens_per_pass_no_loops": round(1 + float(plain.mean()), 4) if len(plain) else None,
    }


def main(argv: list[str] | None = None) -> None:
    """Collect and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    add_arguments(parser.add_argument)
    args = parser.parse_args(argv)
    model, tokenizer = load_pair(args)
    began = time.monotonic()
    traces = collect_from(args, model, tokenizer)
    files = save_traces(traces, args.out)
    took = round(time.monotonic() - began, 1)
    print(json.dumps({**summary(traces), "files": len(files), "seconds": took}))


if __name__ == "__main__":
    main()

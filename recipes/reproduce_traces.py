"""Collect what Figs. 2, 4 and 10 are computed from: full-width passes of the real pair.

    python recipes/reproduce_traces.py --prompts DATA --prompts-per-set 128

The prompts are the first different ones of each data set's manifest. The passes go to .npz files
in `--traces`, with what the predictor sees of the hidden states; the conditions go to about.json
beside them. reproduce_progress, reproduce_gap and reproduce_retention read that folder.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import collect_traces as collecting
import drafter_data as data
import torch
from drafter_data import Prompt
from predictor_traces import Traces, save_traces
from reproduced_traces import ABOUT, TRACES
from torch import Tensor

import dscale.demo
from dscale.compiled.predictor import Predictor
from dscale.drafter_files import load_drafter
from dscale.load import target_config
from dscale.predictor_files import load_predictor

sys.path.append(str(Path(__file__).parents[1]))
from bench.rows import environment
from bench.workload import SETS, load_workload


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--sets", nargs="+", default=list(SETS), help="as bench.workload knows them")
    add("--prompts", type=Path, default=None, help="prompt files' folder; else 16 shipped a set")
    add("--prompts-per-set", type=int, default=16)
    add("--max-new", type=int, default=128)
    add("--batch", type=int, default=256 if on_gpu else 16, help="requests at a time")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seconds", type=float, default=540.0, help="start no further call after this time")
    add("--model", default="smollm2", help="'smollm2' (embedded), or a folder or Hub id")
    add("--model-name", default="SmolLM2-135M-Instruct", help="what result rows call it")
    add("--drafter", type=Path, default=None, help="a drafter folder; default: the shipped one")
    add("--predictor", type=Path, default=None, help="a folder; default: that of the drafter")
    add("--dtype", default="bfloat16" if on_gpu else "float32", choices=["bfloat16", "float32"])
    add("--traces", type=Path, default=TRACES, help="the folder to write")
    add("--commit", default=None, help="for the result rows; default: the checked-out one")
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True)
class Axes:
    """`projection`: orthonormal axes [D, J] that span what a predictor sees of hidden states;
    `hidden_mean`: its mean of them [D]."""

    projection: Tensor
    hidden_mean: Tensor


def axes_of(predictor: Predictor) -> Axes:
    """What to keep of hidden states, so that this predictor's scores can be computed later."""
    axes, _ = torch.linalg.qr(predictor.projection.double())
    return Axes(axes.float().contiguous(), predictor.hidden_mean)


def prompts_of(tokenizer: Any, args: argparse.Namespace) -> list[Prompt]:
    """The first different prompts of every set; a set that has fewer gives all."""
    found = []
    for name in args.sets:
        sent = load_workload(name, args.prompts).measured
        texts = list(dict.fromkeys(sent))[: args.prompts_per_set]
        tokens = data.tokenize(tokenizer, [data.chat_prefix(tokenizer, text) for text in texts])
        found += [
            Prompt(id=f"{name}/{i}", source=name, split="eval", text=text, tokens=ids)
            for i, (text, ids) in enumerate(zip(texts, tokens, strict=True))
        ]
    return found


def collect(args: argparse.Namespace) -> Traces:
    """Answer the prompts at full width and keep every pass."""
    model, tokenizer = collecting.load_pair(args)
    prompts = prompts_of(tokenizer, args)
    drafter = load_drafter(
        args.drafter or dscale.demo.drafter(),
        target_config(model),
        dtype=getattr(torch, args.dtype),
        device=model.device,
    )
    like: Any = None
    folder = args.predictor or (None if args.drafter else dscale.demo.predictor())
    if folder is not None:
        like = axes_of(load_predictor(folder, drafter.config, drafter.fingerprint, model.device))
    return collecting.collect(
        model,
        drafter,
        prompts,
        batch=args.batch,
        max_new=args.max_new,
        temperature=args.temperature,
        seed=1_000_000,
        like=like,
        seconds=args.seconds,
    )


def main(argv: list[str] | None = None) -> None:
    """Collect and write."""
    args = arguments(argv)
    began = time.monotonic()
    traces = collect(args)
    save_traces(traces, args.traces)
    about = environment(args.commit) | {
        "model": args.model_name,
        "acceptance": "real",
        "dtype": args.dtype,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new,
        "batch": args.batch,
        "drafter": traces.drafter[:12],
        "seconds": round(time.monotonic() - began, 1),
    }
    (args.traces / ABOUT).write_text(json.dumps(about) + "\n")
    print(json.dumps(about | collecting.summary(traces)))


if __name__ == "__main__":
    main()

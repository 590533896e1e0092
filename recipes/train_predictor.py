"""Train an acceptance predictor for a target and its drafter, and measure it.

    python recipes/train_predictor.py --out runs/predictor --prompts train_prompts.jsonl.gz \
        --measured gsm8k_test.jsonl math500.jsonl humaneval.jsonl mbpp.jsonl

Collects traces (or reads those of collect_traces.py with `--traces`), trains, writes the
predictor's folder with its model card, `report.json`, and result rows of retention.
"""

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import collect_traces as collecting
import predictor_report as reporting
import predictor_training as training
import torch
from predictor_card import model_card
from predictor_traces import Traces, load_traces, save_traces
from predictor_training import TrainOptions

from dscale.compiled.predictor import Predictor
from dscale.predictor_files import save_predictor

sys.path.append(str(Path(__file__).parents[1]))
from bench.rows import environment, write_rows

# Tried in turn; the one with the lowest loss on held-out prompts is kept.
TRIALS = [
    {"projection_lr": 0.0, "dropout": 0.1},
    {"projection_lr": 0.0, "dropout": 0.3},
    {"projection_lr": 1.0, "dropout": 0.1},
    {"projection_lr": 1.0, "dropout": 0.3},
    {"projection_lr": 1.0, "dropout": 0.3, "projection_decay": 10.0},
    {"hidden": 0, "dropout": 0.1},
]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="gets predictor/, report.json and predictor.json")
    add("--traces", type=Path, default=None, help="a folder of collect_traces.py; else collect")
    add("--measured", type=Path, nargs="*", default=[], help="prompt files to evaluate on")
    add("--measured-traces", type=Path, default=None, help="a folder of traces to evaluate on")
    add("--measured-prompts", type=int, default=128, help="first prompts of each measured file")
    add("--measured-max-prompt", type=int, default=512, help="tokens, template included")
    add("--save-traces", type=int, choices=[0, 1], default=0, help="1: keep them in --out/traces")
    add("--held-out", type=float, default=0.1, help="share of the prompts")
    add("--loops", choices=["drop", "keep"], default="drop", help="looping answers in training")
    add("--draws", type=int, default=4, help="times all passes are dealt out to cohorts")
    add("--model-name", default="SmolLM2-135M-Instruct", help="what the model card calls it")
    add("--commit", default=None, help="for the result rows; default: the checked-out one")
    add("--trials", type=json.loads, default=TRIALS, help="JSON: list of changed options")
    collecting.add_arguments(add)
    parser.set_defaults(dims=0)
    for item in fields(TrainOptions):
        if item.name != "seed":
            add("--" + item.name.replace("_", "-"), type=type(item.default), default=item.default)
    return parser.parse_args(argv)


def gather(args: argparse.Namespace) -> tuple[Traces, Traces | None, dict[str, float]]:
    """Training traces, traces of the measured sets if asked for, and the seconds they took."""
    began = time.monotonic()
    needs_model = args.traces is None or bool(args.measured)
    model, tokenizer = collecting.load_pair(args) if needs_model else (None, None)
    if args.traces is not None:
        traces = load_traces(args.traces)
    else:
        traces = collecting.collect_from(args, model, tokenizer)
    seconds = {"collect": round(time.monotonic() - began, 1)}
    if args.save_traces and args.traces is None:
        save_traces(traces, args.out / "traces")
    measured = load_traces(args.measured_traces) if args.measured_traces is not None else None
    if args.measured:
        began = time.monotonic()
        measured = collecting.collect_measured(args, model, tokenizer, traces)
        seconds["collect_measured"] = round(time.monotonic() - began, 1)
        if args.save_traces:
            save_traces(measured, args.out / "measured-traces")
    return traces, measured, seconds


def best_of(
    args: argparse.Namespace, kept: Traces, held: Traces
) -> tuple[Predictor, dict[str, Any]]:
    """Train with every trial's options; the predictor with the lowest held-out loss, its history,
    and what all trials came to."""
    train, val = (training.usable(part, args.loops) for part in (kept, held))
    common = {f.name: getattr(args, f.name) for f in fields(TrainOptions)}
    found = []
    for trial in args.trials or [{}]:
        options = TrainOptions(**(common | trial))
        predictor, history = training.train(train, val, options)
        fit = reporting.fit_of(predictor, val)
        figures = {k: fit[k] for k in ("r2", "spearman", "calibration_error")}
        found.append((predictor, history | {"options": trial} | figures))
        print(json.dumps({k: v for k, v in found[-1][1].items() if k != "history"}), flush=True)
    predictor, best = min(found, key=lambda pair: pair[1]["val_loss"])
    trials = [{k: v for k, v in row.items() if k != "history"} for _, row in found]
    return predictor, best | {"trials": trials}


def evaluate(
    predictor: Predictor, traces: Traces, name: str, draws: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures and result rows of one set of traces, all answers and those without loops."""
    fit, rows = {}, []
    for answers, loops in (("all", "keep"), ("no_loops", "drop")):
        chosen = training.usable(traces, loops)
        where = {"set": name, "answers": answers}
        fit[answers] = reporting.fit_of(predictor, chosen)
        found = {k: v for k, v in fit[answers].items() if not k.startswith("calibration")}
        rows.append(where | {"policy": "fit"} | found)
        rows += [where | row for row in reporting.retention_rows(predictor, chosen, draws=draws)]
    return fit, rows


def measure(
    args: argparse.Namespace, predictor: Predictor, sets: dict[str, Traces]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures by set, and all result rows with where they come from."""
    device = predictor.mean.device
    base = environment(args.commit)
    base |= {"model": args.model_name, "drafter": predictor.config.drafter[:12]}
    fits, rows = {}, []
    for name, part in sets.items():
        fits[name], found = evaluate(predictor, part.to(device), name, args.draws)
        rows += [base | row for row in found]
    return fits, rows


def main(argv: list[str] | None = None) -> None:
    """Collect or load, train, measure, write."""
    args = arguments(argv)
    if args.traces is None and not args.prompts:
        raise ValueError("prompts: expected prompt files to collect from, or --traces; got none")
    args.out.mkdir(parents=True, exist_ok=True)
    traces, measured, seconds = gather(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kept, held = training.split_prompts(traces.to(device), args.held_out, args.seed)
    began = time.monotonic()
    predictor, history = best_of(args, kept, held)
    seconds["train"] = round(time.monotonic() - began, 1)
    # Saved before it is measured, so that no later failure costs the training.
    save_predictor(predictor, args.out / "predictor")
    began = time.monotonic()
    sets = {"held_out": held} | ({"measured": measured} if measured is not None else {})
    fits, rows = measure(args, predictor, sets)
    seconds["evaluate"] = round(time.monotonic() - began, 1)
    write_rows(args.out / "predictor.json", rows)
    counted = {"all": traces} | sets
    report = {
        "model_name": args.model_name,
        "environment": environment(args.commit),
        "options": json.loads(json.dumps(vars(args), default=str)),
        "parameters": sum(p.numel() for p in predictor.parameters()),
        "traces": {name: collecting.summary(part) for name, part in counted.items()},
        "seconds": seconds,
        "train": history,
        "fit": fits,
        "best_seed": reporting.best_seed([r for r in rows if r["set"] == "held_out"]),
        "rows": rows,
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    save_predictor(predictor, args.out / "predictor", model_card(report))
    print(model_card(report))


if __name__ == "__main__":
    main()

"""8-bit weights beside the model's own: steps of the shapes, drafts and answers of the pair.

    python -m bench.decode_step --models 8b 4b --requests 1 8 16 32 --weights fp8-draft  # and fp8
    python recipes/measure_fp8.py --prompts DATA

The paper has no such thing: its section of docs/results.md stands apart, once there are rows.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import reproduced
from reproduced import RESULTS, TIME_STEPS, Row, Rows, Section, percent, where

from bench.arguments import folder_of
from bench.paper import SET_NAMES

WEIGHTS = ("fp8-draft", "fp8")
CELL = ("model", "mode", "budget", "tile", "sampling", "requests", "context")
TIMES = ("decide_ms", "verify_ms", "step_ms")
QUALITY = (
    "set", "weights", "prompts", "new_tokens", "tokens_per_pass_model", "tokens_per_pass",
    "same_as_model",
)  # fmt: skip
COMMANDS = (
    TIME_STEPS,
    *(f"{TIME_STEPS} --parts steps gains --weights {weights}" for weights in WEIGHTS),
    "python recipes/measure_fp8.py --prompts DATA",
)


def sections(folder: Path = RESULTS) -> list[Section]:
    """The section of the page; none while nothing of it was measured."""
    steps = {
        weights: timed(reproduced.read("decode_step.json", CELL, folder_of(folder, weights)))
        for weights in ("model", *WEIGHTS)
    }
    quality = reproduced.read("fp8_quality.json", QUALITY, folder)
    tables = [*step_tables(steps), *quality_tables(quality)]
    if not tables:
        return []
    measured = [row for weights in WEIGHTS for row in steps[weights]]
    about = {"steps": measured, "the model's own there": steps["model"] if measured else []}
    about["SmolLM2 pair"] = quality
    return [
        Section(
            "8-bit weights",
            "",
            ours=[f"{k}: {reproduced.conditions(rows)}" for k, rows in about.items() if rows],
            caption='With `weights="fp8-draft"` drafts alone read 8-bit weights, and answers are '
            "the model's. With `weights=\"fp8\"` the target's layers do, too: its answers are "
            "another model's, near to it. Neither is the default, and no other figure of this "
            "page has it. Steps of different commits are of different GPUs of the kind: compare "
            "decide with decide where verify is the same.",
            tables=tables,
            commands=COMMANDS,
        )
    ]


def timed(rows: Rows) -> Rows:
    """Rows of greedy steps on the shapes, not of dry runs or profiles alone."""
    return [
        row for row in where(rows, sampling="greedy")
        if reproduced.kind_of(row["model"]) and all(name in row for name in TIMES)
    ]  # fmt: skip


def step_tables(steps: dict[str, Rows]) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """Times of a step by weights, of every case that has any of the 8-bit ones."""
    cells = dict.fromkeys(tuple(row[k] for k in CELL) for w in WEIGHTS for row in steps[w])
    head = ("step, ms: decide + verify, whole (weights random)", "requests", "context")
    found = []
    for cell in cells:
        named = dict(zip(CELL, cell, strict=True))
        of = [where(steps[w], **named) for w in ("model", *WEIGHTS)]
        about = [str(named[k]) for k in ("model", "mode", "budget") if named[k]]
        numbers = (str(named["requests"]), str(named["context"]))
        found.append((", ".join(about), *numbers, *(step_text(some) for some in of)))
    return [((*head, "the model's", *WEIGHTS), found)] if found else []


def step_text(rows: Rows) -> str:
    """The last measurement's times, "-" without one."""
    if not rows:
        return "-"
    decide, verify, step = (rows[-1][name] for name in TIMES)
    return f"{decide:.2f} + {verify:.2f}, {step:.2f}"


def quality_tables(rows: Rows) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """Drafts and answers of the pair, one line a set; statistics of "fp8" in a table of their
    own."""
    head = ("SmolLM2 pair", "weights", "tokens per pass", "the model's", "same answers")
    drafts = [
        (SET_NAMES[row["set"]], row["weights"], f"{row['tokens_per_pass']:.2f}",
         f"{row['tokens_per_pass_model']:.2f}", percent(row["same_as_model"]))
        for weights in WEIGHTS for row in where(rows, weights=weights)
    ]  # fmt: skip
    about = ("against the model's own answers", "weights and rows in 8 bits", "weights alone")
    both = [(f"{SET_NAMES[row['set']]}: {name}", show(row, key), show(row, f"weights_only_{key}"))
            for row in where(rows, weights="fp8")
            for key, name in (("equal_argmax", "same likeliest token"), ("mean_kl", "mean KL"),
                              ("perplexity_ratio", "perplexity over the model's"))]  # fmt: skip
    ar = [(f"{SET_NAMES[row['set']]}: answers that are those of `ar` with such weights",
           percent(row["same_as_ar"]), "-") for row in where(rows, weights="fp8")]  # fmt: skip
    tables = [(head, drafts), (about, both + ar)]
    return [(titles, lines) for titles, lines in tables if lines]


def show(row: Row, key: str) -> str:
    """A statistic as the page has it."""
    return percent(row[key]) if key.endswith("argmax") else f"{row[key]:.4f}"


def main(argv: list[str] | None = None) -> None:
    """Print what the page says of it."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    for section in sections():
        print("\n".join(section.text))


if __name__ == "__main__":
    main()

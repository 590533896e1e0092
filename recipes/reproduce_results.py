"""Write docs/results.md: every figure and table of the paper, our number beside it.

    python recipes/reproduce_results.py

First computes anew what comes from other result files (sweeps, ablation, steps, widths, peers),
with their plots where matplotlib is installed; then writes the page from bench/results alone.
"""

import argparse
from pathlib import Path

import reproduce_ablation
import reproduce_fp8
import reproduce_gap
import reproduce_peers
import reproduce_progress
import reproduce_retention
import reproduce_steps
import reproduce_throughput
import reproduce_width
import reproduced
from reproduced import KINDS, NOT_MEASURED, NOT_RUN, RESULTS, Experiment, Line, Section, percent
from reproduced_throughput import gain, gain_rows

from bench.paper import CAPABILITIES, PAPER, SETUP, SGLANG

EXPERIMENTS: tuple[Experiment, ...] = (
    reproduce_progress.EXPERIMENT,
    reproduce_width.EXPERIMENT,
    reproduce_gap.EXPERIMENT,
    reproduce_throughput.EXPERIMENT,
    reproduce_ablation.EXPERIMENT,
    reproduce_retention.EXPERIMENT,
    reproduce_steps.EXPERIMENT,
    reproduce_peers.EXPERIMENT,
)
"""In the order of the page."""

PAGE = Path(__file__).parents[1] / "docs" / "results.md"

REMARKS = Path(__file__).parents[1] / "docs" / "results_remarks.md"
"""What people wrote about the numbers: why they fall short, what to read into them."""


def page(folder: Path = RESULTS) -> str:
    """The page, from the result files of a folder. Raises ValueError for one of another schema."""
    sections = [each.part(folder) for each in EXPERIMENTS]
    lines = [line for section in sections for line in section.every]
    out = [
        "# Results",
        "",
        "Every figure and table of the DScale paper that can be measured here, our number beside "
        "the paper's. This page is written by `python recipes/reproduce_results.py` from "
        "`bench/results`; do not edit it.",
        "",
        f"The paper: {SETUP}. Here: one H200 where nothing else is said. At the shapes of its "
        "targets the weights are random and acceptance is **simulated**: a trace with the "
        "paper's published statistics decides what is accepted, while every kernel runs and is "
        "timed. Acceptance is real with the SmolLM2 pair, SmolLM2-135M-Instruct and the drafter "
        "that ships with DScale: a small, weak pair, for which numbers of the paper's targets are "
        "no expectation.",
        "",
        f'"{NOT_MEASURED}" means that the file of that measurement is not in `bench/results`; the '
        "command that makes it stands below. DATA in a command is a folder with the prompt files "
        "of the data sets (bench/data/README.md says where they come from). All commands run in "
        "the repository's root.",
        "",
        *headline(folder).text,
        *shortfalls(lines),
    ]
    if REMARKS.is_file() and folder == RESULTS:
        out += [REMARKS.read_text(encoding="utf-8").strip(), ""]
    for section in (*sections, *reproduce_fp8.sections(folder)):
        out += section.text
    return "\n".join([*out, *capabilities().text]).rstrip() + "\n"


def headline(folder: Path) -> Section:
    """Gains over the control and over SGLang: what the other sections come to."""
    sweeps = reproduce_throughput.EXPERIMENT.read(folder)
    peers = reproduce_peers.EXPERIMENT.read(folder)
    pairs = []
    for kind, title in KINDS.items():
        rows = [gain(gain_rows(sweeps, kind), budget) for budget in ("half", "auto")]
        about = next((row for row in rows if row), None)
        at = f"concurrency {', '.join(map(str, about['concurrencies']))}" if about else ""
        at += ", replayed times" if about and about["source"] == "replayed" else ""
        half, auto = (
            Line(f"throughput over the DFlash control, {title}", row and row["gain"],
                 PAPER["gain_dflash"].value.get(kind), percent, at, 1, kind != "pair")
            for row in rows
        )  # fmt: skip
        pairs.append((half, auto))
    for kind in SGLANG:
        half, auto = (
            Line(
                f"decode rate over SGLang's DFlash, {KINDS[kind]}",
                None if mean is None else mean - 1,
                None,
                conditions="concurrency 8, 16, 32" if mean else "",
                simulated=True,
            )
            for budget in ("half", "auto")
            for mean in [reproduce_peers.mean_over_sglang(peers, kind, ("dscale", budget))]
        )
        pairs.append((half, auto))
    caption = "Geometric means. The control is this engine's `dflash` mode: a step of 16 rows a "
    caption += "request in captured graphs; its steps beside SGLang's are under "
    caption += '"Against other engines".'
    return Section("In short", "", pairs=pairs, caption=caption)


def shortfalls(lines: list[Line]) -> list[str]:
    """The lines where ours is worse than the paper's, and what was not measured."""
    short = [line for line in lines if line.falls_short]
    missing = sum(line.ours is None for line in lines)
    out = ["## Where we fall short of the paper", ""]
    if short:
        head = ("", "ours", "paper", "our conditions")
        out += reproduced.table(head, [line.cells for line in short])
    else:
        comparable = sum(line.is_comparable for line in lines)
        out += [f"Nowhere among the {comparable} lines that are measured and comparable.", ""]
    not_run = sum(line.ours == NOT_RUN for line in lines)
    return [
        *out,
        f'Of {len(lines)} lines below, {missing} say "{NOT_MEASURED.split(":")[0]}" and '
        f'{not_run} "{NOT_RUN}" (DSpark, Domino, two GPUs: this engine has none of them yet).',
        "",
    ]


def capabilities() -> Section:
    """Table I."""
    head = ("capability", "DFlash", "DSpark", "Domino", "DScale, paper", "here")
    return Section(
        "Capabilities (Table I)",
        "Table I; its cells are given as far as the paper's text states them",
        tables=((head, CAPABILITIES),),
    )


def main(argv: list[str] | None = None) -> None:
    """Compute what can be computed, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    for experiment in EXPERIMENTS:
        experiment.refresh(plots=reproduced.can_plot())
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(PAGE.read_text().splitlines())} lines")


if __name__ == "__main__":
    main()

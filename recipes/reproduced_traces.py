"""The passes that reproduce_traces.py collected, as the recipes of Figs. 2, 4 and 10 read them."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from predictor_traces import Traces, load_traces
from predictor_training import usable
from reproduced import Experiment, Row, Rows, conditions, where
from torch import Tensor

from bench.rows import environment
from bench.simulated import SETTINGS, draw

TRACES = Path(__file__).parents[1] / "runs" / "reproduce" / "traces"
ABOUT = "about.json"
COLLECT = "python recipes/reproduce_traces.py --prompts DATA --prompts-per-set 128"


@dataclass(frozen=True, slots=True)
class Collection:
    """`traces`: passes whose label is known, looping answers included; `about`: what result rows
    computed from them carry (environment and conditions of the collection)."""

    traces: Traces
    about: dict[str, Any]

    def by_set(self) -> dict[str, Traces]:
        """The passes of all sets together ("all"), then of each; sets without passes are left
        out."""
        sources = [source for source, _ in self.traces.prompts]
        found = {"all": self.traces}
        for name in dict.fromkeys(sources):
            of_set_Q = torch.tensor([source == name for source in sources])
            part = self.traces.select(of_set_Q[self.traces.prompt.long()])
            if len(part):
                found[name] = part
        return found

    def row(self, name: str, part: Traces) -> Row:
        """Fields that begin every result row about the passes of one set."""
        prompts = int(part.prompt.unique().numel())
        return self.about | {"set": name, "prompts": prompts, "passes": len(part)}


def read(folder: Path) -> Collection:
    """Raises ValueError when reproduce_traces.py has left nothing there, or no complete pass."""
    if not (folder / ABOUT).is_file():
        raise ValueError(
            f"traces: expected {ABOUT} and passes in {folder}, found none; "
            "recipes/reproduce_traces.py writes them"
        )
    traces = usable(load_traces(folder), "keep")
    if not len(traces):
        raise ValueError(f"traces: expected passes before an answer's last, got none in {folder}")
    return Collection(traces, json.loads((folder / ABOUT).read_text()))


def described(rows: Rows) -> list[str]:
    """The conditions that rows about the pair's passes share."""
    pair = where(rows, acceptance="real")
    if not pair:
        return []
    temperature = f"temperature {pair[0]['temperature']:g}"
    cap = f"at most {pair[0]['max_new_tokens']} new tokens"
    return [f"{pair[0]['model']} with its drafter, {conditions(pair[:1], temperature, cap)}"]


def without_loops(traces: Traces) -> Traces:
    """The passes of answers that do not loop; all of them where every answer loops."""
    return usable(traces, "drop")


def simulated_trace() -> tuple[Row, Tensor, Tensor]:
    """The trace that simulated measurements replay: the fields that begin its rows, scores
    [P, 15] and accepted counts [P]."""
    score_TSC, accepted_TS = draw(SETTINGS["paper"], 1024, 33)
    score_PC, accepted_P = score_TSC.flatten(0, 1), accepted_TS.flatten()
    about = environment() | {"model": "none: a drawn trace", "acceptance": "simulated"}
    about |= {"gpu": "none (CPU)", "dtype": "float32", "set": "trace", "prompts": 0}
    return about | {"passes": len(accepted_P)}, score_PC, accepted_P


def run(
    experiment: Experiment, compute: Callable[[Collection], Rows], argv: list[str] | None
) -> None:
    """The command line of a recipe whose rows come from the collected passes."""
    parser = argparse.ArgumentParser(description=f"Rows and plot of {experiment.name}.")
    parser.add_argument("--traces", type=Path, default=TRACES, help="of reproduce_traces.py")
    experiment.run(compute(read(parser.parse_args(argv).traces)))

"""Fig. 2: how many tokens a request gains in a pass at full width, as a histogram.

    python recipes/reproduce_traces.py
    python recipes/reproduce_progress.py

The first collects the passes, which Figs. 4 and 10 are computed from too.
"""

import reproduced
import torch
from predictor_traces import Traces
from reproduced import Experiment, Line, Row, Rows, Section, number
from reproduced_plots import BLUE, ORANGE, PAPER, figure
from reproduced_traces import COLLECT, Collection, described, run, simulated_trace, without_loops

from bench.paper import PAPER as PUBLISHED
from bench.paper import SET_NAMES


def progress_of(accepted: torch.Tensor) -> Row:
    """Mean progress, the share of whole blocks, and counts of progress 1 to 16."""
    histogram = torch.bincount(accepted.long(), minlength=16).tolist()
    return {
        "mean": round(1 + float(accepted.double().mean()), 4),
        "share_16": round(histogram[15] / len(accepted), 4),
        "histogram": histogram,
    }


def compute(collection: Collection) -> Rows:
    """A row for all sets together, for each, and for the simulated trace."""

    def row(name: str, part: Traces) -> Row:
        plain = progress_of(without_loops(part).accepted)
        return (
            collection.row(name, part)
            | progress_of(part.accepted)
            | {"mean_no_loops": plain["mean"]}
        )

    rows = [row(name, part) for name, part in collection.by_set().items()]
    about, _, accepted_P = simulated_trace()
    return [*rows, about | progress_of(accepted_P)]


def section(rows: Rows) -> Section:
    """Fig. 2 on the page."""
    paper = PUBLISHED["progress_mean"]
    show = number(2, "tokens")
    lines = []
    for row in rows:
        name = SET_NAMES.get(row["set"], row["set"])
        if row["acceptance"] == "simulated":
            lines.append(
                Line("mean progress, simulated trace", row["mean"], paper.value, show,
                     "the trace that simulated measurements replay", simulated=True)
            )  # fmt: skip
            continue
        about = f"{row['prompts']} prompts, {row['passes']:,} passes"
        if row["set"] == "all":
            name = "data sets mixed"
            lines.append(Line(f"mean progress, {name}", row["mean"], paper.value, show, about))
            lines.append(
                Line("the same without looping answers", row["mean_no_loops"], None, show)
            )
            lines.append(Line("passes that keep the whole block", row["share_16"], None))
            continue
        lines.append(Line(f"mean progress, {name}", row["mean"], None, show, about))
    if not rows:
        lines = [Line("mean progress, data sets mixed", None, paper.value, show)]
    return Section(
        "Progress of a pass (Fig. 2)",
        f"{paper.where}, Qwen3-8B; the tail reaches 16",
        lines,
        commands=(COLLECT, "python recipes/reproduce_progress.py"),
        plots=("progress.png",),
        ours=described(rows),
        caption="A 135M target with a 12M drafter accepts less than Qwen3-8B with a 1B drafter. "
        "Progress is accepted + 1. The last pass of an answer, which a stop may cut, is left out.",
    )


def draw(rows: Rows) -> None:
    """Histogram of the real pair beside that of the simulated trace, and both means."""
    pair = next(row for row in rows if row["set"] == "all")
    trace = next(row for row in rows if row["acceptance"] == "simulated")
    caption = (
        f"{pair['model']}, {pair['prompts']} prompts of {len(rows) - 2} data sets, "
        f"{pair['passes']:,} passes, temperature {pair['temperature']:g}, "
        f"{reproduced.conditions([pair])}. Trace: simulated, fitted to the paper's figures."
    )
    with figure("progress.png", caption) as axes:
        ax = axes[0, 0]
        for row, colour, shift, label in (
            (pair, BLUE, -0.2, "SmolLM2 pair"),
            (trace, ORANGE, 0.2, "simulated trace"),
        ):
            share = [100 * count / row["passes"] for count in row["histogram"]]
            at = [x + shift for x in range(1, 17)]
            label = f"{label}: mean {row['mean']:.2f}"
            ax.bar(at, share, width=0.4, color=colour, label=label)
            ax.axvline(row["mean"], color=colour, linewidth=1, linestyle=":")
        mean = PUBLISHED["progress_mean"].value
        ax.axvline(mean, **PAPER | {"marker": ""}, label=f"paper's mean {mean:.2f}")
        ax.set(xlabel="progress, tokens a request gains in a pass", ylabel="share of passes, %")
        ax.set(title="Progress at full width", xticks=range(1, 17))
        ax.legend()


FIELDS = ("set", "acceptance", "passes", "prompts", "mean", "histogram")
EXPERIMENT = Experiment("progress", FIELDS, section, draw)


def main(argv: list[str] | None = None) -> None:
    """Compute, write, draw."""
    run(EXPERIMENT, compute, argv)


if __name__ == "__main__":
    main()

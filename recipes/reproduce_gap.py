"""Fig. 4: the drafter's mean Top1-Top2 logit gap against how many drafts are accepted.

    python recipes/reproduce_traces.py
    python recipes/reproduce_gap.py

The first collects the passes, which Figs. 2 and 10 are computed from too.
"""

import predictor_report as reporting
import reproduced
import torch
from predictor_traces import Traces
from reproduced import Experiment, Line, Row, Rows, Section, number
from reproduced_plots import BLUE, ORANGE, figure
from reproduced_traces import COLLECT, Collection, described, run

from bench.paper import PAPER, SET_NAMES

POINTS = 600


def signals(traces: Traces) -> Row:
    """Rank correlations with the accepted count: of the gap's mean over the 15 positions, of the
    first position's gap, of the summed running product of top-1 probabilities."""
    gap = traces.feature[..., 1]
    found = {
        "spearman_mean_gap": gap.mean(1),
        "spearman_first_gap": gap[:, 0],
        "spearman_running_product": reporting.product_scores(traces).sum(1),
    }
    return {k: round(reporting.spearman(v, traces.accepted), 4) for k, v in found.items()}


def compute(collection: Collection) -> Rows:
    """A row for all sets together, with some passes drawn as points, and one for each set."""
    rows = [
        collection.row(name, part) | signals(part) for name, part in collection.by_set().items()
    ]
    traces = collection.traces
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(traces), generator=generator)[:POINTS]
    gap = traces.feature[drawn, :, 1].mean(1)
    points = zip(gap.tolist(), traces.accepted[drawn].tolist(), strict=True)
    rows[0]["points"] = [[round(x, 2), y] for x, y in points]
    return rows


def section(rows: Rows) -> Section:
    """Fig. 4 on the page."""
    show = number(3)
    paper = PAPER["gap_spearman"]
    lines = []
    for row in rows:
        about = f"{row['prompts']} prompts, {row['passes']:,} passes"
        name = SET_NAMES.get(row["set"], "data sets mixed")
        target = paper.value["8b"] if row["set"] == "all" else None
        lines.append(
            Line(f"Spearman, mean gap, {name}", row["spearman_mean_gap"], target, show, about)
        )
    for row in rows[:1]:
        lines += [
            Line("Spearman, gap of the first position", row["spearman_first_gap"], None, show),
            Line("Spearman, running product of top-1 probabilities",
                 row["spearman_running_product"], None, show, "what scores without a predictor"),
        ]  # fmt: skip
    return Section(
        "Drafter's confidence against accepted drafts (Fig. 4)",
        f"{paper.where}: 0.741 on Qwen3-8B, 0.722 on Qwen3-4B",
        lines or [Line("Spearman, mean gap", None, paper.value["8b"], show)],
        commands=(COLLECT, "python recipes/reproduce_gap.py"),
        plots=("gap.png",),
        ours=described(rows),
    )


def draw(rows: Rows) -> None:
    """Points of single passes, and the mean accepted count in ten bins of the gap."""
    row = rows[0]
    generator = torch.Generator().manual_seed(1)
    gap, accepted = torch.tensor(row["points"]).T
    jitter = torch.rand(len(accepted), generator=generator) * 0.6 - 0.3
    order = gap.argsort().tensor_split(10)
    caption = (
        f"{row['model']}, {row['prompts']} prompts of {len(rows) - 1} data sets, {len(gap)} of "
        f"{row['passes']:,} passes shown, counts spread by up to 0.3, temperature "
        f"{row['temperature']:g}, {reproduced.conditions([row])}."
    )
    with figure("gap.png", caption, height=3.3) as axes:
        ax = axes[0, 0]
        label = f"passes: Spearman {row['spearman_mean_gap']:.3f} (paper 0.741 and 0.722)"
        ax.scatter(gap, accepted + jitter, s=7, color=BLUE, alpha=0.45, linewidths=0, label=label)
        means = [(float(gap[i].mean()), float(accepted[i].mean())) for i in order]
        ax.plot(*zip(*means, strict=True), color=ORANGE, marker="s", label="mean of each tenth")
        ax.set(xlabel="Top1-Top2 logit gap, mean over 15 draft positions")
        ax.set(ylabel="accepted drafts", yticks=range(0, 16, 3), title="Gap against acceptance")
        ax.legend(loc="upper left")


FIELDS = ("set", "acceptance", "passes", "prompts", "spearman_mean_gap")
EXPERIMENT = Experiment("gap", FIELDS, section, draw)


def main(argv: list[str] | None = None) -> None:
    """Compute, write, draw."""
    run(EXPERIMENT, compute, argv)


if __name__ == "__main__":
    main()

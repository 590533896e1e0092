"""Fig. 10: accepted tokens kept by the predictor's windows, before and after the budget's
adjustment.

    python recipes/reproduce_traces.py   # once, for Figs. 2, 4 and 10
    python recipes/reproduce_retention.py

Where no predictor ships, the running product of top-1 probabilities scores, as it does in use.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import predictor_report as reporting
import predictor_retention as retaining
import predictor_training as training
import torch
from predictor_traces import Traces
from reproduced import Experiment, Line, Row, Rows, Section, conditions, number, percent, where
from reproduced_plots import BLUE, ORANGE, figure, series
from reproduced_traces import COLLECT, TRACES, Collection, read, simulated_trace
from reproduced_traces import described as about_pair
from torch import Tensor

import dscale.demo
from bench.paper import PAPER as PUBLISHED
from dscale.compiled.predictor import Predictor
from dscale.predictor_files import load_predictor

COHORT, BUDGETS = 16, (4, 6, 8)
"""Requests that share a budget; rows a request."""

DRAWN = 8192
"""Passes of the simulated trace that count."""

KEPT = {("raw", "paper"), ("predictor", "paper"), ("predictor", "none"), ("fixed", None),
        ("running_product", "none"), ("oracle", None)}  # fmt: skip
"""Policies and seeds that are reported; the runtime's default seed is "none"."""


def predictor_for(traces: Traces, folder: Path) -> Predictor:
    """Load a predictor. Raises ValueError for one of another drafter, and for traces that keep
    less of the hidden states than it sees."""
    drafter: Any = SimpleNamespace(
        hidden_size=traces.projection.shape[0], block_size=traces.block_size
    )
    predictor = load_predictor(folder, drafter, traces.drafter or None, "cpu")
    kept = traces.projection @ training.reduction_of(predictor, traces)
    if not torch.allclose(kept, predictor.projection, atol=1e-4):
        raise ValueError(
            "traces: expected those of reproduce_traces.py --predictor with this folder, got some "
            "that lack what it sees of the hidden states"
        )
    return predictor


def scores_of(traces: Traces, predictor: Predictor | None, budget: int) -> Tensor:
    """Scores [P, 15] of every pass at a budget."""
    if predictor is None:
        return reporting.product_scores(traces)
    context = training.fixed_context(traces, COHORT, float(budget))
    return training.scores(predictor, traces, context)


def retained(
    about: Row, scores: dict[int, Tensor], product: Tensor, accepted: Tensor, prompt: Tensor
) -> Rows:
    """Rows of every budget and policy, with 95 % intervals over prompts; `scores` by budget and
    `product` [P, 15], `accepted` and `prompt` [P]. None where the passes fill no cohort."""
    if len(accepted) < COHORT:
        return []
    index = retaining.cohorts_of(len(accepted), COHORT, 4, 0)
    _, prompt = prompt.unique(return_inverse=True)
    num_prompts = int(prompt.max()) + 1
    weight = retaining.resamples(num_prompts, 1000 if num_prompts < 1000 else 100, 0)
    rows: Rows = []
    for budget, score in scores.items():
        total, found = retaining.tallies(accepted, prompt, score, product, index, budget)
        r2 = round(reporting.r_squared(score.sum(1), accepted), 4)
        rank = round(reporting.spearman(score.sum(1), accepted), 4)
        for row in retaining.policy_rows(budget, COHORT, total, found, weight):
            if (row["policy"], row["seed"]) in KEPT:
                rows.append(about | row | {"r2": r2, "spearman": rank})
    return rows


def compute(collection: Collection, folder: Path | None) -> Rows:
    """Rows of all sets together, and of the simulated trace."""
    traces = collection.traces
    predictor = None if folder is None else predictor_for(traces, folder)
    about = collection.row("all", traces)
    about["scores"] = "running product" if predictor is None else "predictor"
    scores = {budget: scores_of(traces, predictor, budget) for budget in BUDGETS}
    product = reporting.product_scores(traces)
    rows = retained(about, scores, product, traces.accepted, traces.prompt)
    about, score, accepted = simulated_trace()
    score, accepted = score[:DRAWN], accepted[:DRAWN]
    about |= {"scores": "drawn", "passes": DRAWN}
    alike = torch.arange(DRAWN)
    return rows + retained(about, dict.fromkeys(BUDGETS, score), score, accepted, alike)


def section(rows: Rows) -> Section:
    """Fig. 10 on the page."""
    return Section(
        "Accepted tokens kept, before and after adjustment (Fig. 10)",
        f"{PUBLISHED['retention_adjusted'].where}; Qwen3-4B: 70.5 % and 91.6 %, R^2 0.68",
        lines_of(rows, "all") + lines_of(rows, "trace"),
        commands=(COLLECT, "python recipes/reproduce_retention.py"),
        plots=("retention.png",),
        ours=about_pair(rows),
        caption="Single steps at full width, logged histories. A weaker drafter makes 8 rows a "
        "request ample: what it accepts is mostly kept, and smaller budgets tell more.",
    )


def lines_of(rows: Rows, name: str) -> list[Line]:
    """Figures of the pair's passes ("all") or of the simulated trace ("trace")."""
    paper = {
        key: PUBLISHED[key].value["8b"]
        for key in ("retention_raw", "retention_adjusted", "raw_window", "predictor_r2")
    }
    wanted = (
        ("raw windows keep", 8, "raw", "paper", "retention", "retention_raw", percent),
        ("raw window, rows", 8, "raw", "paper", "rows_per_request", "raw_window", number(2)),
        ("adjusted to 8N", 8, "predictor", "paper", "retention", "retention_adjusted", percent),
        ("adjusted to 8N, our seed", 8, "predictor", "none", "retention", "", percent),
        ("adjusted to 4N, our seed", 4, "predictor", "none", "retention", "", percent),
        ("fixed width of 8", 8, "fixed", None, "retention", "", percent),
        ("fixed width of 4", 4, "fixed", None, "retention", "", percent),
        ("oracle at 4N", 4, "oracle", None, "retention", "", percent),
        ("R^2 of the summed scores", 8, "raw", "paper", "r2", "predictor_r2", number(2)),
    )
    simulated = name == "trace"
    lines = []
    for what, budget, policy, seed, field, key, show in wanted:
        some = where(rows, set=name, budget_per_request=budget, policy=policy, seed=seed)
        lines.append(
            Line(
                what + (", simulated trace" if simulated else ""),
                some[0][field] if some else None,
                paper.get(key),
                show,
                described(some[0]) if some and not lines else "",
                int(policy == "predictor" and not simulated),
                simulated,
            )
        )
    return lines


def described(row: Row) -> str:
    """Whose scores, over how many prompts and passes."""
    scores = {
        "predictor": "scores of the predictor",
        "running product": "scores: running product, no predictor",
        "drawn": "drawn scores",
    }[row["scores"]]
    prompts = f"{row['prompts']} prompts, " if row["prompts"] else ""
    return f"{scores}; {prompts}{row['passes']:,} passes, cohorts of {row['cohort']}"


def draw(rows: Rows) -> None:
    """Bars at 8N for the pair and the trace, the paper's beside them; then budgets of the pair."""
    pair, trace = where(rows, set="all"), where(rows, set="trace")
    about = (pair or trace)[0]
    caption = (
        f"Left: 8 rows a request. {about['model']}: {described(about)}, {conditions([about])}; "
        "bars of the pair with 95 % intervals over prompts. Trace: simulated, fitted to the "
        "paper's figures."
    )
    with figure("retention.png", caption, columns=2, height=3.2) as axes:
        bars(axes[0, 0], pair, trace)
        budgets(axes[0, 1], pair)


def bars(ax: Any, pair: Rows, trace: Rows) -> None:
    """Retention of raw and adjusted windows."""
    paper = [100 * PUBLISHED[f"retention_{k}"].value["8b"] for k in ("raw", "adjusted")]
    for shift, colour, label, rows in ((-0.25, BLUE, "SmolLM2 pair", pair),
                                       (0, ORANGE, "simulated trace", trace)):  # fmt: skip
        some = where(rows, budget_per_request=8, seed="paper")
        found = [next(iter(where(some, policy=p)), None) for p in ("raw", "predictor")]
        value = [100 * row["retention"] if row else 0.0 for row in found]
        ax.bar([shift, 1 + shift], value, 0.25, color=colour, label=label)
        for x, (row, y) in enumerate(zip(found, value, strict=True)):
            if row and rows is pair:
                ends = [[y - 100 * row["low"]], [100 * row["high"] - y]]
                ax.errorbar(x + shift, y, ends, color="black", linewidth=0.8, capsize=2)
            ax.text(
                x + shift,
                (100 * row["high"] if row else y) + 2,
                f"{y:.1f}",
                ha="center",
                fontsize=7,
            )
    ax.bar([0.25, 1.25], paper, 0.25, color="white", edgecolor="black", hatch="//",
           label="paper, Qwen3-8B")  # fmt: skip
    for x, y in enumerate(paper):
        ax.text(x + 0.25, y + 2, f"{y:.1f}", ha="center", fontsize=7)
    ax.set(xticks=[0, 1], xticklabels=["raw windows", "adjusted to 8N"], ylim=(0, 125))
    ax.set(ylabel="accepted tokens kept, %", title="Before and after adjustment")
    ax.legend(loc="upper left", ncols=2)


def budgets(ax: Any, pair: Rows) -> None:
    """Retention of the pair by budget and policy."""
    kinds = (("oracle", None, "oracle"), ("predictor", "none", "scored"), ("fixed", None, "fixed"))
    for index, (policy, seed, label) in enumerate(kinds):
        some = where(pair, policy=policy, seed=seed)
        x = [row["budget_per_request"] for row in some]
        ax.plot(x, [100 * row["retention"] for row in some], label=label, **series(index))
    ax.set(xlabel="rows a request, on average", xticks=BUDGETS, title="SmolLM2 pair, by budget")
    ax.set(ylabel="accepted tokens kept, %")
    ax.legend(loc="lower right")


FIELDS = ("set", "acceptance", "budget_per_request", "policy", "seed", "retention", "scores")
EXPERIMENT = Experiment("retention", FIELDS, section, draw)


def main(argv: list[str] | None = None) -> None:
    """Compute, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES, help="of reproduce_traces.py")
    parser.add_argument("--predictor", type=Path, help="a folder; default: the shipped one")
    args = parser.parse_args(argv)
    EXPERIMENT.run(compute(read(args.traces), args.predictor or dscale.demo.predictor()))


if __name__ == "__main__":
    main()

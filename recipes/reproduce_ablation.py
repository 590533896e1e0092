"""Fig. 9: what each mechanism adds: tiles, then the shared budget, then graphs without a host
read, at every concurrency.

    python -m bench.decode_step --models 8b --parts gains    # the paper's targets, simulated
    python -m bench.closed_loop --prompts DATA               # the SmolLM2 pair
    python recipes/reproduce_ablation.py
"""

from collections.abc import Iterator
from pathlib import Path

import reproduced
from reproduced import KINDS, TIME_STEPS, Experiment, Line, Row, Rows, Section, kind_of, where
from reproduced_loops import read_loops
from reproduced_plots import figure, legend, series

from bench.aggregate import geometric_mean, medians
from bench.paper import PAPER

STEPS = ("dflash", "+tiles, per head", "+tiles", "+budget", "dscale half", "dscale auto")
"""As the plot orders them; "+tiles, per head" is the paper's tile, "+tiles" ours, which all query
heads of a group share."""

LEAST = 8
"""The paper's lowest concurrency."""

COLOURS = {"+tiles, per head": 4, "+tiles": 1, "+budget": 3, "dscale half": 2, "dscale auto": 0}
PAPERS = {"+tiles, per head": "tiles", "+budget": "budget_all", "dscale half": "graph_all"}
"""Colours of the steps, and the paper's figures over the control."""

GAINS = (
    ("tiles, per head as in the paper, over the control", "+tiles, per head", "dflash", "tiles"),
    ("tiles shared by query heads over the control", "+tiles", "dflash", "tiles"),
    ("budget over tiles", "+budget", "+tiles", "budget"),
    ("graphs without a host read over budget", "dscale half", "+budget", "graph"),
    ("tiles and budget over the control", "+budget", "dflash", "budget_all"),
    ("all three over the control", "dscale half", "dflash", "graph_all"),
    ("all three and `auto` over the control", "dscale auto", "dflash", "graph_all"),
)
"""What, a step, over which, and the paper's figure."""

GAIN_FIELDS = ("model", "mode", "budget", "tile", "sampling", "requests", "prompt", "trace",
               "decode_tokens_per_s")  # fmt: skip


def step_of(row: Row) -> str:
    """The step of the ablation that a row measures, "" for others."""
    name = str(row["mode"])
    if name == "dscale":
        name += f" {row['budget']}"
    if name == "+tiles" and str(row.get("tile", "")).startswith("per head"):
        name += ", per head"
    return name if name in STEPS and not (name == "dflash" and row["budget"]) else ""


def compute(folder: Path) -> Rows:
    """One row per step and concurrency of every series that has the control and another step, each
    of one commit: decode rates of simulated acceptance at the shortest prompt, and the pair's
    closed loops on GSM8K."""
    rows = reproduced.read("mode_gains.json", GAIN_FIELDS, folder)
    rates = [
        row | {"concurrency": row["requests"], "rate": row["decode_tokens_per_s"],
               "of": f"decoding, prompt {row['prompt']}, trace {row['trace']}",
               "acceptance": "simulated"}
        for row in reproduced.one_trace(where(rows, sampling="greedy"))
        if row["prompt"] == min(r["prompt"] for r in where(rows, model=row["model"]))
    ]  # fmt: skip
    rates += [
        row
        | {"rate": row["tokens_per_s"], "of": f"closed loop, GSM8K, {row['requests']} requests"}
        for row in medians(
            where(reproduced.on_gpu(read_loops(folder)), set="gsm8k", temperature=0.0)
        )
    ]
    found = []
    for key in dict.fromkeys((row["model"], row["of"]) for row in rates):
        some = of_one_commit([r for r in rates if (r["model"], r["of"]) == key and step_of(r)])
        if len({step_of(row) for row in some} | {"dflash"}) > 2 and kind_of(key[0]):
            found += [of_step(row) for row in some]
    return reproduced.on_gpu(found)


def of_one_commit(rows: Rows) -> Rows:
    """The rows of the commit that has most steps, the last in the file of those that do."""
    each = [where(rows, commit=name) for name in dict.fromkeys(row["commit"] for row in rows)]
    return max(reversed(each), key=lambda some: len({step_of(row) for row in some}), default=[])


def of_step(row: Row) -> Row:
    """A result row of this recipe."""
    keys = ("gpu", "torch", "commit", "date", "dtype", "model", "acceptance", "of", "concurrency")
    return {key: row[key] for key in keys} | {"step": step_of(row), "tokens_per_s": row["rate"]}


def series_of(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """The series of every model: the one with the most rows."""
    for kind in KINDS:
        some = [row for row in rows if kind_of(row["model"]) == kind]
        each = [where(some, of=name) for name in dict.fromkeys(row["of"] for row in some)]
        yield kind, max(each, key=len, default=[])


def gain(rows: Rows, step: str, over: str) -> float | None:
    """Geometric mean of the ratios over concurrencies that have both, of at least 8 as in the
    paper where there are any, less one. A ratio is of rows of one commit."""
    rate = {(r["step"], r["concurrency"], r["commit"]): r["tokens_per_s"] for r in rows}
    both = [key for key in rate if key[0] == step and (over, *key[1:]) in rate]
    least = min(LEAST, max((c for _, c, _ in both), default=LEAST))
    ratios = [rate[key] / rate[over, *key[1:]] for key in both if key[1] >= least]
    return geometric_mean(ratios) - 1 if ratios else None


def section(rows: Rows) -> Section:
    """Fig. 9 on the page."""
    lines = []
    for kind, some in series_of(rows):
        for what, step, over, key in GAINS:
            paper = PAPER[f"ablation_{key}"].value.get(kind)
            value = gain(some, step, over)
            if value is not None or paper is not None:
                what = f"{what}, {KINDS[kind]}"
                lines.append(Line(what, value, paper, better=1, simulated=kind != "pair"))
    return Section(
        "What each mechanism adds (Fig. 9)",
        "IV-D: GSM8K, geometric means over seven concurrencies, medians of five",
        lines,
        commands=(
            TIME_STEPS,
            "python -m bench.closed_loop --prompts DATA",
            "python recipes/reproduce_ablation.py",
        ),
        plots=("ablation.png",),
        ours=[f"{KINDS[kind]}: {described(some)}" for kind, some in series_of(rows) if some],
        caption="The control runs captured graphs too, and `+budget` reads lengths on the host, "
        "as in the paper.",
    )


def described(rows: Rows) -> str:
    """Under which conditions a series was measured."""
    kind = "simulated acceptance, " if rows[0]["acceptance"] == "simulated" else ""
    at = ", ".join(str(c) for c in sorted({row["concurrency"] for row in rows}))
    return f"{kind}{rows[0]['of']}, concurrency {at}, {reproduced.conditions(rows)}"


def draw(rows: Rows) -> None:
    """Throughput over the control's by concurrency, and the paper's geometric means beside it."""
    shown = [(kind, some) for kind, some in series_of(rows) if some]
    about = "; ".join(f"{KINDS[kind]}: {described(some)}" for kind, some in shown)
    about += ". Dashes at the right: the paper's geometric means over concurrencies 8 to 32."
    with figure("ablation.png", about, columns=len(shown), height=3.2) as axes:
        for ax, (kind, some) in zip(axes[0], shown, strict=True):
            at = sorted({row["concurrency"] for row in some})
            for step, index in COLOURS.items():
                y = [gain(where(some, concurrency=c), step, "dflash") for c in at]
                points = [(c, 100 * v) for c, v in zip(at, y, strict=True) if v is not None]
                if points:
                    ax.plot(*zip(*points, strict=True), label=step, **series(index))
            for step, key in PAPERS.items():
                paper = PAPER[f"ablation_{key}"].value.get(kind)
                if paper is not None:
                    style = series(COLOURS[step]) | {"marker": "", "linestyle": "--"}
                    ax.plot([at[-1] + 1, at[-1] + 4], [100 * paper] * 2, **style)
                    word = {"budget_all": "budget", "graph_all": "graphs"}.get(key, key)
                    ax.text(at[-1] + 4.5, 100 * paper, word, fontsize=6, va="center")
                    ax.set_xlim(right=at[-1] + 9)
            ax.axhline(0, color="black", linewidth=0.8)
            word = " (simulated)" if kind != "pair" else ""
            ax.set(title=KINDS[kind] + word, xlabel="concurrency", xticks=at)
            ax.set(ylabel="throughput over the control, %")
            legend(ax)


FIELDS = ("model", "acceptance", "of", "concurrency", "step", "tokens_per_s")
EXPERIMENT = Experiment("ablation", FIELDS, section, draw, compute)

if __name__ == "__main__":
    EXPERIMENT.command(__doc__)

"""How a step's parts are shown: the page's section on Fig. 11 and section II, and their plot."""

from collections.abc import Sequence
from typing import Any

import reproduced
from reproduced import KINDS, NOT_RUN, TIME_STEPS, Line, Row, Rows, Section, number, percent, where
from reproduced import kind_of as kind
from reproduced_plots import BLUE, GREEN, ORANGE, SKY, figure, legend

from bench.paper import MODELS, PAPER, SYSTEMS

COMMANDS = (
    TIME_STEPS,
    "python -m bench.graphs --from-steps bench/results/decode_step.json",
    "python recipes/reproduce_steps.py",
)
CONCURRENCIES = (8, 16, 32)
KINDS_OF = {"interval": "intervals", "stages": "shares", "sampling": "sampling", "pool": "memory",
            "floor": "graphs"}  # fmt: skip
MODES = (
    ("dflash", None, "DFlash control", ORANGE),
    ("dscale", "half", "DScale, half", GREEN),
    ("dscale", "auto", "DScale, auto", BLUE),
)


def two_digits(share: float) -> str:
    """0.0308 as "3.08 %"."""
    return f"{100 * share:.2f} %"


def first(rows: Rows, name: str, **wanted: Any) -> Row | None:
    """The first row of a model with these fields."""
    return next((row for row in where(rows, **wanted) if kind(row["model"]) == name), None)


def reduction(rows: Rows, name: str, requests: int, budget: str) -> float | None:
    """By how much a step's interval is shorter than the control's of the same commit."""
    wanted = {"kind": "interval", "requests": requests}
    control = first(rows, name, mode="dflash", budget=None, **wanted)
    wanted["commit"] = control and control["commit"]
    ours = first(rows, name, mode="dscale", budget=budget, **wanted)
    return 1 - ours["step_ms"] / control["step_ms"] if ours and control else None


def interval_pairs(rows: Rows) -> list[tuple[Line, Line]]:
    """Reductions at every concurrency, of both budgets."""
    pairs = []
    for name, title in KINDS.items():
        paper = PAPER["interval_reduction"].value if name != "pair" else None
        for c in CONCURRENCIES:
            half, auto = (
                Line(
                    f"step interval shorter by, concurrency {c}, {title}",
                    reduction(rows, name, c, budget),
                    paper,
                    better=1,
                    simulated=name != "pair",
                )
                for budget in ("half", "auto")
            )
            if paper is not None or half.ours is not None or auto.ours is not None:
                pairs.append((half, auto))
    return pairs


def described(rows: Rows, name: str, of: str) -> str:
    """Under which conditions the rows of one kind were measured."""
    some = [row for row in where(rows, kind=of) if kind(row["model"]) == name]
    if not some:
        return ""
    at = f"context {some[0]['context']}" if of == "stages" else some[0].get("of", "")
    word = "simulated acceptance" if name != "pair" else "real acceptance"
    return ", ".join(part for part in (word, at, reproduced.conditions(some)) if part)


def share_lines(rows: Rows) -> list[Line]:
    """GPU time of draft and verify, the allocator's share, masked rows, memory."""
    paper = PAPER["gpu_time"].value
    control = first(rows, "8b", kind="stages", mode="dflash", budget=None, requests=16)
    titles = {"draft": "draft graph", "verify": "verify graph", "outside": "outside the graphs"}
    lines = [
        Line(f"share of a control step: {titles[key]}, Qwen3-8B shapes, concurrency 16",
             control and control[key], paper[key], simulated=True)
        for key in titles
    ]  # fmt: skip
    wanted = {"kind": "interval", "requests": 16}
    for mode, budget, text in (
        ("dflash", None, "control's 128-row tile"),
        ("+tiles", None, "16-row tile"),
        ("dscale", "half", "16-row tile, `half`"),
    ):
        row = first(rows, "8b", mode=mode, budget=budget, **wanted)
        value = row.get("masked_rows") if row else None
        target = PAPER["masked_rows"].value if mode == "dflash" else None
        lines.append(Line(f"masked tile rows, {text}", value, target, simulated=True))
    for name in MODELS:
        row = first(rows, name, kind="stages", mode="dscale", budget="half", requests=8)
        lines.append(
            Line(f"predictor, budget and packing, of a step at concurrency 8, {KINDS[name]}",
                 row and row["allocator"], PAPER["allocator_share"].value[name],
                 two_digits, better=-1, simulated=True)
        )  # fmt: skip
    for row in where(rows, kind="sampling"):
        what = f"{row['sampling']}: step longer than greedy, {KINDS[kind(row['model']) or 'pair']}"
        about = f"{row['requests']} requests, context {row['context']}"
        lines.append(Line(what, row["over_greedy"] - 1, None, percent, about, simulated=True))
    return lines + memory_lines(rows)


def memory_lines(rows: Rows) -> list[Line]:
    """Graph pools, and what runs on two GPUs in the paper."""
    show = number(0, "MiB")
    lines = []
    for name in MODELS:
        row = first(rows, name, kind="pool", mode="dscale")
        lines.append(
            Line(f"graph pool, every bucket to 32 requests, {KINDS[name]}",
                 row and row["graph_pool_mib"], PAPER["graph_pool_mib"].value[name], show,
                 better=-1, simulated=True)
        )  # fmt: skip
    for name, title in MODELS.items():
        below = PAPER["graph_pool_below"].value[name]
        for system, share in below.items():
            pool = PAPER["graph_pool_mib"].value[name] / (1 - share)
            about = f"from the paper's DScale figure, {percent(share)} below"
            what = f"graph pool of {SYSTEMS[system]}, {title}"
            lines.append(Line(what, NOT_RUN, pool, show, about))
        two = PAPER["interval_two_gpus"].value[name]
        what = f"interval shorter by on two GPUs, concurrency 32, {title}"
        lines.append(Line(what, NOT_RUN, two))
    return lines


def floors(rows: Rows) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """Graph times beside the times that memory traffic or arithmetic alone would take."""
    head = ("graph (weights random)", "requests", "rows", "context", "ms", "floor, ms", "ratio")
    found = [
        (", ".join(str(row[key]) for key in ("model", "graph", "mode", "tile") if row[key]),
         str(row["requests"]), str(row["rows"]), str(row["context"]), f"{row['ms']:.2f}",
         f"{row['floor_ms']:.2f}", f"{row['over_floor']:.2f}")
        for row in where(rows, kind="floor")
    ]  # fmt: skip
    return [(head, found)] if found else []


def section(rows: Rows) -> Section:
    """Fig. 11 and section II's profile on the page."""
    return Section(
        "Parts of a step and memory (Fig. 11, section II)",
        "GSM8K, Nsight intervals of 700 steps; shares are summed kernel times of the native "
        "profile; memory with at most 32 requests",
        share_lines(rows),
        interval_pairs(rows),
        COMMANDS,
        ("steps.png",),
        tables=floors(rows),
        ours=[
            f"{what}, {KINDS[name]}: {described(rows, name, of)}"
            for of, what in KINDS_OF.items()
            for name in KINDS
            if described(rows, name, of)
        ],
        caption="Our shares are the stages' times on the GPU's clock between the start of decide "
        "and the end of verify, at the longest context measured; the allocator's is of the time "
        "in which kernels run. With `half`, 8 of 16 rows a request are used on average, so half "
        "of the 16-row tile is masked in attention; the dense layers see no masked row.",
    )


def draw(rows: Rows) -> None:
    """Intervals by concurrency of every model; the allocator's share; the graph pool."""
    names = [n for n in KINDS if any(kind(r["model"]) == n for r in where(rows, kind="interval"))]
    about = "; ".join(f"{KINDS[n]}: {described(rows, n, 'interval')}" for n in names)
    about += ". Percentages: change from the control (paper, with half: -30.8 % to -52.5 %)."
    pools = [text for text in (described(rows, n, "pool") for n in KINDS) if text]
    about += f" Pool: {'; '.join(pools)}." if pools else ""
    with figure("steps.png", about, rows=2, columns=3) as axes:
        for ax, name in zip(axes[0], names, strict=False):
            intervals(ax, rows, name)
            legend(ax)
        for ax in axes[0, len(names) :]:
            ax.axis("off")
        control = first(rows, "8b", kind="stages", mode="dflash", budget=None, requests=16)
        paper = PAPER["gpu_time"].value
        compared(
            axes[1, 0],
            {k: (control and 100 * control[k], 100 * share) for k, share in paper.items()},
        )
        axes[1, 0].set(title="A control step, 8B, concurrency 16", ylabel="share of time, %")
        half = {name: first(rows, name, kind="stages", mode="dscale", budget="half", requests=8)
                for name in MODELS}  # fmt: skip
        share = {name: row and row["allocator"] for name, row in half.items()}
        compared(
            axes[1, 1],
            {
                MODELS[k]: (own and 100 * own, 100 * PAPER["allocator_share"].value[k])
                for k, own in share.items()
            },
        )
        axes[1, 1].set(title="Predictor, budget, packing", ylabel="share of a step, %")
        pool = {name: first(rows, name, kind="pool", mode="dscale") for name in MODELS}
        compared(
            axes[1, 2],
            {
                MODELS[k]: (row and row["graph_pool_mib"], PAPER["graph_pool_mib"].value[k])
                for k, row in pool.items()
            },
        )
        axes[1, 2].set(title="Graph pool, 32 requests", ylabel="MiB")


def intervals(ax: Any, rows: Rows, name: str) -> None:
    """Bars of one model: the control and both budgets at every concurrency."""
    for shift, (mode, budget, label, colour) in zip((-0.27, 0, 0.27), MODES, strict=True):
        for x, c in enumerate(CONCURRENCIES):
            row = first(rows, name, kind="interval", mode=mode, budget=budget, requests=c)
            if row is None:
                continue
            own = label if x == 0 else None
            ax.bar(x + shift, row["step_ms"], 0.27, color=colour, label=own)
            shorter = reduction(rows, name, c, budget) if budget else None
            if shorter is not None:
                text = f"{-100 * shorter:+.0f}%"
                ax.text(x + shift, row["step_ms"], text, ha="center", va="bottom", fontsize=6)
    word = " (simulated)" if name != "pair" else ""
    ax.set(xticks=range(3), xticklabels=CONCURRENCIES, xlabel="concurrency")
    ax.set(ylabel="step interval, ms", title=KINDS[name] + word)


def compared(ax: Any, values: dict[str, tuple[float | None, float]]) -> None:
    """Ours beside the paper's, by name."""
    for x, (ours, paper) in enumerate(values.values()):
        own, theirs = ("ours (simulated)", "paper") if x == 0 else (None, None)
        ax.bar(x - 0.2, ours or 0.0, 0.4, color=SKY, label=own)
        ax.bar(x + 0.2, paper, 0.4, color="white", edgecolor="black", hatch="//", label=theirs)
        for at, value in ((x - 0.2, ours), (x + 0.2, paper)):
            text = "not yet" if value is None else f"{value:.3g}"
            ax.text(at, value or 0.0, text, ha="center", va="bottom", fontsize=7)
    ax.set(xticks=range(len(values)), xticklabels=list(values))
    legend(ax)

"""Fig. 3: every request verified at the same fixed width, 4 to 14 rows, against the full 16.

    python -m bench.closed_loop --grid widths --prompts DATA --out bench/results/widths
    python recipes/reproduce_width.py

A small run on a CPU, under bench/results/cpu, stands in for progress until a GPU has measured it.
"""

from pathlib import Path

import reproduced
from reproduced import Experiment, Line, Row, Rows, Section, number, percent, where
from reproduced_loops import FILES, loops, read_loops
from reproduced_plots import PAPER, figure, series

from bench.aggregate import CELL, medians
from bench.paper import PAPER as PUBLISHED
from bench.paper import SET_NAMES

OWN = "widths/closed_loop.json"
"""A file apart: its full width may be of another commit than that of other loops."""

KEPT = ("gpu", "torch", "commit", "date", "dtype", *CELL, "repetitions")
COMMANDS = (
    "python -m bench.closed_loop --grid widths --prompts DATA --out bench/results/widths",
    "python recipes/reproduce_width.py",
)
CPU_COMMAND = (
    "python -m bench.closed_loop --sets gsm8k --concurrency 8 --modes dflash-4 dflash-6 dflash-8 "
    "dflash-10 dflash-12 dflash-14 dflash --requests 24 --warmup 2 --output-cap 48 "
    "--repetitions 1 --dtype float32 --out bench/results/cpu"
)


def compute(folder: Path) -> Rows:
    """One row per width of every cell that has the full width and another; those of the CPU only
    while no GPU has any."""
    read = [where(read_loops(folder, files), mode="dflash") for files in ((OWN,), FILES)]
    by_gpu = [
        where(rows, gpu=gpu) for rows in read for gpu in dict.fromkeys(row["gpu"] for row in rows)
    ]
    found = reproduced.on_gpu([row for some in by_gpu for row in widths_of(medians(some))])
    return sorted(found, key=lambda row: (row["acceptance"], row["width"]))


def widths_of(rows: Rows) -> Rows:
    """The rows of cells that have the full width and another."""
    found: Rows = []
    for cell in dict.fromkeys(tuple(row[key] for key in CELL) for row in rows):
        some = [row for row in rows if tuple(row[key] for key in CELL) == cell]
        full = next((row for row in some if row["budget"] is None), None)
        if full is not None and len(some) > 1:
            found += [of_width(row, full) for row in some]
    return found


def of_width(row: Row, full: Row) -> Row:
    """Progress at one width; throughput over that of the full one, None on a CPU that others use
    too, where times are noise."""
    ratio = None if row["gpu"] == reproduced.CPU else row["tokens_per_s"] / full["tokens_per_s"]
    return {key: row[key] for key in KEPT} | {
        "width": int(row["budget"] or 16),
        "tokens_per_step": row["tokens_per_step"],
        "tokens_per_s": row["tokens_per_s"],
        "of_full": ratio and round(ratio, 4),
    }


def series_of(rows: Rows) -> list[tuple[str, Rows]]:
    """The rows of every cell, with a name."""
    names = ("model", "set", "acceptance", "concurrency", "commit")
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return [
        (
            f"{model}, {SET_NAMES.get(name, name)}"
            + (", simulated" if acceptance == "simulated" else ""),
            where(rows, **dict(zip(names, key, strict=True))),
        )
        for key in keys
        for model, name, acceptance in [key[:3]]
    ]


def section(rows: Rows) -> Section:
    """Fig. 3 on the page."""
    progress, loss = PUBLISHED["width_progress"].value, PUBLISHED["width_throughput_loss"].value
    show, lines = number(2, "tokens"), []
    for _, some in series_of(rows) or [("", [])]:
        simulated = bool(some) and some[0]["acceptance"] == "simulated"
        by_width = {row["width"]: row for row in some}
        for width in sorted(by_width) or progress:
            row = by_width.get(width)
            value = row and row["tokens_per_step"]
            what = f"progress at width {width}"
            lines.append(Line(what, value, progress.get(width), show, "", 0, simulated))
        for width in (w for w in sorted(by_width) or loss if w < 16):
            row = by_width.get(width)
            value = row and row["of_full"] and row["of_full"] - 1
            paper = -loss[width] if width in loss else None
            what = f"throughput at width {width} against full width"
            lines.append(Line(what, value, paper, percent, "", 0, simulated))
    commands = (*COMMANDS, CPU_COMMAND) if all(r["gpu"] == reproduced.CPU for r in rows) else ()
    return Section(
        "Fixed width against full width (Fig. 3)",
        f"{PUBLISHED['width_progress'].where}, Qwen3-8B; every width below 16 lowers throughput",
        lines,
        commands=commands or COMMANDS,
        plots=("width.png",),
        ours=[f"{name}: {loops(some)}" for name, some in series_of(rows)],
    )


def draw(rows: Rows) -> None:
    """Progress and throughput by width."""
    progress, loss = PUBLISHED["width_progress"].value, PUBLISHED["width_throughput_loss"].value
    caption = "; ".join(f"{name}: {loops(some)}" for name, some in series_of(rows))
    with figure("width.png", f"{caption}. Paper: Qwen3-8B, A100.", columns=2) as axes:
        left, right = axes[0]
        for index, (name, some) in enumerate(series_of(rows)):
            width = [row["width"] for row in some]
            tokens = [row["tokens_per_step"] for row in some]
            left.plot(width, tokens, label=name, **series(index))
            points = [(row["width"], 100 * row["of_full"]) for row in some if row["of_full"]]
            if points:
                right.plot(*zip(*points, strict=True), label=name, **series(index))
        if not any(row["of_full"] for row in rows):
            right.text(4.5, 23, "ours: not measured on a GPU yet", fontsize=8)
        left.plot(list(progress), list(progress.values()), **PAPER, label="paper, Qwen3-8B")
        points = [(w, 100 * (1 - share)) for w, share in (loss | {16: 0.0}).items()]
        right.plot(*zip(*points, strict=True), **PAPER | {"linestyle": ""}, label="paper")
        left.set(ylabel="progress, tokens", title="Tokens a pass", ylim=(0, None))
        right.set(ylabel="throughput, % of full width", title="Throughput", ylim=(0, 125))
        for ax in (left, right):
            ax.set(xlabel="rows verified per request", xticks=range(4, 17, 2), xlim=(3, 17))
            ax.legend(loc="lower right")


FIELDS = (*CELL, "width", "tokens_per_step", "of_full")
EXPERIMENT = Experiment("width", FIELDS, section, draw, compute)

if __name__ == "__main__":
    EXPERIMENT.command(__doc__)

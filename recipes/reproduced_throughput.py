"""How throughput and latency are shown: the page's section on Figs. 7 and 8, and their plots."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import reproduced
from reproduced import KINDS, NOT_RUN, Line, Row, Rows, Section, kind_of, percent, where
from reproduced_plots import PAPER, figure, legend, series

from bench.paper import CONCURRENCIES, MODELS, SET_NAMES, SYSTEMS
from bench.paper import PAPER as PUBLISHED

SAMPLED = "--temperature 1 --traces paper --modes dflash dscale-half dscale-auto"

COMMANDS = (
    "python -m bench.closed_loop --prompts DATA",
    "python -m bench.closed_loop_simulated --models 8b 4b",
    "python -m bench.closed_loop_simulated --models 8b 4b --parts replay",
    f"python -m bench.closed_loop_simulated --models 8b 4b {SAMPLED}",
    f"python -m bench.closed_loop_simulated --models 8b 4b {SAMPLED} --parts replay",
    "python recipes/reproduce_throughput.py",
)
BUDGETS = ("half", "auto")


def titled(kind: str) -> str:
    """What is measured, with a word where acceptance is simulated."""
    return KINDS[kind] + ("" if kind == "pair" else " (simulated)")


def gain_rows(rows: Rows, kind: str, temperature: float = 0.0) -> Rows:
    """Gains of the group with the most cells that measures this model at this temperature, in the
    setting that resembles the paper's; none where there is none."""
    some = [
        row
        for row in where(rows, kind="gain", temperature=temperature)
        if kind_of(row["model"]) == kind and row["trace"] in ("paper", None)
    ]
    whole = where(some, by="all")
    if not whole:
        return []
    best = max(whole, key=lambda row: (row["cells"], row["source"] == "measured"))
    keys = ("model", "acceptance", "source", "trace", "protocol", "output_cap")
    return where(some, **{key: best[key] for key in keys})


def gain(rows: Rows, budget: str, by: str = "all", at: object = None) -> Row | None:
    """One of these gains."""
    return next(iter(where(rows, budget=budget, by=by, at=at)), None)


def described(row: Row) -> str:
    """Under which conditions a gain was measured."""
    kind = f"simulated acceptance, trace {row['trace']}, " if row["trace"] else "real acceptance, "
    kind += "replayed bucket times, " if row["source"] == "replayed" else ""
    return (
        f"{kind}{', '.join(SET_NAMES.get(s, s) for s in row['sets'])}, concurrency "
        f"{', '.join(map(str, row['concurrencies']))}, {row['protocol']} of at most "
        f"{row['output_cap']} tokens, medians of {row['repetitions']}, "
        f"{reproduced.conditions([row])}"
    )


Pairs = list[tuple[Line, Line]]


def pair_of(what: str, kind: str, rows: Rows, value: Callable[[Row], float], paper: Any) -> Pairs:
    """A line for each budget of one model; `paper`: by model. None where nothing is known."""
    paper = paper.get(kind)
    found = [gain(rows, budget) for budget in BUDGETS]
    if not any(found) and paper is None:
        return []
    half, auto = (
        Line(f"{what}, {KINDS[kind]}", value(row) if row else None, paper, percent, "", 1,
             kind != "pair")
        for row in found
    )  # fmt: skip
    return [(half, auto)]


def pairs_of(rows: Rows) -> Pairs:
    """Gains over the control at both temperatures, and reductions of latency."""
    found: Pairs = []
    for what, key, temperature in (
        ("throughput over DFlash", "gain_dflash", 0.0),
        ("the same at temperature 1", "gain_sampled", 1.0),
    ):
        for kind in KINDS:
            some = gain_rows(rows, kind, temperature)
            found += pair_of(what, kind, some, lambda row: row["gain"], PUBLISHED[key].value)
    for kind in KINDS:
        for at in ("mean", "p95", "p99"):
            paper = {k: v[at] for k, v in PUBLISHED["latency_dflash"].value.items()}
            found += pair_of(
                f"{at} latency lower by", kind, gain_rows(rows, kind),
                lambda row, at=at: row["latency"][at], paper,
            )  # fmt: skip
    return found


Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def breakdown(
    rows: Rows, by: str, keys: Sequence[Any], papers: str, kinds: Sequence[str]
) -> Table:
    """A table of gains by concurrency or data set: ours of every model, then the paper's."""
    head = ["gain over DFlash by " + {"set": "data set"}.get(by, by)]
    head += [f"{titled(kind)}, `{budget}`" for kind in kinds for budget in BUDGETS]
    head += [f"paper, {name}" for name in MODELS.values()]
    cells = []
    for key in keys:
        ours = [
            gain(gain_rows(rows, kind), budget, by, key) for kind in kinds for budget in BUDGETS
        ]
        paper = [PUBLISHED[papers].value[kind].get(key) for kind in MODELS]
        cells.append(
            [str(SET_NAMES.get(key, key))]
            + [percent(row["gain"]) if row else "-" for row in ours]
            + [percent(value) if value is not None else "-" for value in paper]
        )
    return head, cells


def others() -> Table:
    """What the paper measures against systems that do not run here, and on two GPUs."""
    cells = []
    for kind, name in MODELS.items():
        for system in ("dspark", "domino"):
            low = PUBLISHED[f"latency_{system}"].value[kind]
            at = PUBLISHED[f"gain_at_{system}"].value[kind]
            of = PUBLISHED[f"gain_of_{system}"].value[kind]
            cells.append([
                f"DScale over {SYSTEMS[system]}, {name}", NOT_RUN,
                percent(PUBLISHED[f"gain_{system}"].value[kind]),
                ", ".join(f"{c}: {percent(x)}" for c, x in at.items()),
                ", ".join(f"{SET_NAMES[s]}: {percent(x)}" for s, x in of.items()),
                ", ".join(f"{k}: {percent(x)}" for k, x in low.items()),
            ])  # fmt: skip
    ends = " to ".join(map(percent, PUBLISHED["gain_two_gpus"].value))
    cells.append(["DScale over DFlash on two GPUs, both targets", NOT_RUN, ends, "-", "-", "-"])
    return ["", "ours", "paper, gain", "by concurrency", "by data set", "latency lower by"], cells


def section(rows: Rows) -> Section:
    """Figs. 7 and 8 on the page."""
    return Section(
        "Throughput and latency (Figs. 7 and 8)",
        f"{PUBLISHED['gain_dflash'].where} and {PUBLISHED['latency_dflash'].where}: geometric "
        "means over four data sets and seven concurrencies, half the rows; 32 warm-up and 512 "
        "measured requests of at most 2,048 tokens, medians of five; p99 latency of a data set "
        f"lower by {' to '.join(map(percent, PUBLISHED['p99_of_sets'].value))}",
        lines=[
            Line(
                f"replay against loops, largest difference, {row['model']}",
                row["worst"],
                None,
                conditions=row["protocol"],
                simulated=True,
            )
            for row in where(rows, kind="replay")
        ],
        pairs=pairs_of(rows),
        commands=COMMANDS,
        plots=("throughput.png", "latency.png"),
        ours=[
            f"{KINDS[kind]}{word}: {described(some[0])}"
            for temperature, word in ((0.0, ""), (1.0, " at temperature 1"))
            for kind in KINDS
            for some in [gain_rows(rows, kind, temperature)]
            if some
        ],
        caption="`half` is the paper's budget of 8 rows a request; `auto` chooses the rows of "
        "each step by measured bucket times. The control is this engine's `dflash` mode. Latency "
        "is the time from submission to the last token. At temperature 1 the shapes follow the "
        "same trace: the cost of sampling is measured there, not what it does to acceptance.",
        tables=(
            breakdown(rows, "concurrency", CONCURRENCIES, "gain_at_dflash", list(KINDS)),
            breakdown(rows, "set", list(SET_NAMES), "gain_of_dflash", ["pair"]),
            others(),
        ),
    )


STYLES = {
    ("ar", None): ("ar", 3),
    ("dflash", None): ("DFlash control", 1),
    ("dscale", "half"): ("DScale, half", 2),
    ("dscale", "auto"): ("DScale, auto", 0),
}
"""Label and colour of each mode and budget."""


def curves(rows: Rows, kind: str) -> Rows:
    """The curves behind the gains of one model at temperature 0."""
    some = gain_rows(rows, kind)
    if not some:
        return []
    keys = ("model", "acceptance", "source", "trace", "temperature", "protocol", "output_cap")
    return where(rows, kind="curve", **{key: some[0][key] for key in keys})


def draw(rows: Rows) -> None:
    """Throughput by concurrency of every model and data set; latency of every model."""
    shown = [(kind, curves(rows, kind)) for kind in KINDS if curves(rows, kind)]
    panels = [(kind, name, where(found, set=name)) for kind, found in shown
              for name in dict.fromkeys(row["set"] for row in found)]  # fmt: skip
    about = "; ".join(
        f"{titled(kind)}: {described(gain_rows(rows, kind)[0])}" for kind, _ in shown
    )
    black = ". Black: the control's throughput raised by the paper's gains (half the rows)."
    columns = min(3, len(panels))
    deep = -(-len(panels) // columns)
    with figure("throughput.png", about + black, rows=deep, columns=columns) as axes:
        for ax, (kind, name, found) in zip(axes.flat, panels, strict=False):
            lines(ax, found, lambda row: row["tokens_per_s"])
            if kind != "pair":
                raised(ax, found, PUBLISHED["gain_at_dflash"].value[kind])
            title = titled(kind) + (f", {SET_NAMES[name]}" if name in SET_NAMES else "")
            ax.set(title=title, ylabel="output tokens/s", xlabel="concurrency", ylim=(0, None))
        for ax in axes.flat[len(panels) :]:
            ax.axis("off")
        for kind in dict.fromkeys(kind for kind, _, _ in panels):
            legend(axes.flat[[name for name, _, _ in panels].index(kind)])
    about += ". Medians over data sets; black: the control's values lowered as in the paper (8B, "
    about += "4B: geometric means over all cells)."
    with figure("latency.png", about, rows=len(shown), columns=3) as axes:
        for (kind, found), row_axes in zip(shown, axes, strict=True):
            for ax, at in zip(row_axes, ("mean", "p95", "p99"), strict=True):
                lines(ax, found, lambda row, at=at: row["latency_ms"][at] / 1e3)
                if kind != "pair":
                    lowered(ax, found, at, PUBLISHED["latency_dflash"].value[kind][at])
                title = f"{titled(kind)}, {at}"
                ax.set(title=title, ylabel="latency, s", xlabel="concurrency", ylim=(0, None))
            legend(row_axes[0])


def lines(ax: Any, rows: Rows, value: Any) -> None:
    """A line for each mode: medians over data sets by concurrency."""
    for (mode, budget), (label, index) in STYLES.items():
        some = where(rows, mode=mode, budget=budget)
        x = sorted({row["concurrency"] for row in some})
        y = [median(value(row) for row in where(some, concurrency=c)) for c in x]
        if x:
            ax.plot(x, y, label=label, **series(index))
    ax.set_xticks(sorted({row["concurrency"] for row in rows}))


def raised(ax: Any, rows: Rows, gains: dict[int, float]) -> None:
    """The control's throughput with the paper's gains at the concurrencies it names."""
    some = {row["concurrency"]: row["tokens_per_s"] for row in where(rows, mode="dflash")}
    points = [(c, (1 + share) * some[c]) for c, share in gains.items() if c in some]
    if points:
        ax.plot(*zip(*points, strict=True), **PAPER, label="paper's gain")


def lowered(ax: Any, rows: Rows, at: str, share: float) -> None:
    """The control's latency less the paper's reduction."""
    some = where(rows, mode="dflash")
    x = sorted({row["concurrency"] for row in some})
    y = [median(row["latency_ms"][at] / 1e3 for row in where(some, concurrency=c)) for c in x]
    ax.plot(x, [(1 - share) * value for value in y], **PAPER, label="paper's reduction")

"""What the reproduce_* recipes share: result files, lines that hold our number beside the paper's,
and the sections of docs/results.md they make."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from bench.aggregate import GAIN_CELL, read_rows
from bench.rows import RESULTS, write_rows

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
CPU = "none (CPU)"
NOT_RUN = "not run here"
NOT_MEASURED = "not measured yet: command below"
TIME_STEPS = "python -m bench.decode_step --models 8b 4b --requests 1 8 16 32"
"""Measures all that the page says of single steps and of decode rates."""

Row = dict[str, Any]
Rows = list[Row]
Show = Callable[[float], str]


KINDS = {"8b": "Qwen3-8B shapes", "4b": "Qwen3-4B shapes", "pair": "SmolLM2 pair"}
"""What is measured; the first two with random weights and simulated acceptance."""


def percent(share: float) -> str:
    """0.4393 as "43.9 %"."""
    return f"{100 * share:.1f} %"


def number(digits: int, unit: str = "") -> Show:
    """Shows numbers with so many digits and a unit."""
    return lambda value: f"{value:,.{digits}f}{unit and ' '}{unit}"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: `ours` and the paper's (a number, a range, or None for none), how both are
    written, and under which of our conditions. `ours` None: not measured yet.

    `better`: 1 where more is better, -1 where less is, 0 where neither. `simulated`: our number
    comes from simulated acceptance, and the page says so beside it."""

    what: str
    ours: float | str | None
    paper: float | tuple[float, float] | None
    show: Show = percent
    conditions: str = ""
    better: int = 0
    simulated: bool = False

    @property
    def cells(self) -> list[str]:
        """As the page's table has them."""
        if self.ours is None:
            ours = NOT_MEASURED
        else:
            ours = self.ours if isinstance(self.ours, str) else self.show(self.ours)
            ours += " (simulated)" if self.simulated else ""
        return [self.what, ours, self.paper_text, self.conditions]

    @property
    def paper_text(self) -> str:
        """The paper's figure or range."""
        if self.paper is None:
            return "-"
        if isinstance(self.paper, tuple):
            return " to ".join(map(self.show, self.paper))
        return self.show(self.paper)

    @property
    def is_comparable(self) -> bool:
        """Whether both figures are known and one can be better."""
        return isinstance(self.ours, float | int) and self.paper is not None and self.better != 0

    @property
    def falls_short(self) -> bool:
        """Whether ours is worse than the paper's (than the end of its range that is easier to
        reach)."""
        if not self.is_comparable or isinstance(self.ours, str | None) or self.paper is None:
            return False
        ends = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        return self.ours < ends[0] if self.better > 0 else self.ours > ends[1]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. `paper`: the paper's conditions; `ours`: those that all of our numbers
    share, of each model where they differ; `commands`: what measures it anew;
    `pairs`: lines of budgets "half" and "auto" side by side; `plots`: files of docs/plots;
    `tables`: further ones, (head, rows)."""

    title: str
    paper: str
    lines: Sequence[Line] = ()
    pairs: Sequence[tuple[Line, Line]] = ()
    commands: Sequence[str] = ()
    plots: Sequence[str] = ()
    caption: str = ""
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]] = ()
    ours: Sequence[str] = ()

    @property
    def every(self) -> list[Line]:
        """All lines, those of pairs with their budget."""
        named = [
            replace(line, what=f"{line.what}, `{budget}`")
            for pair in self.pairs
            for line, budget in zip(pair, ("half", "auto"), strict=True)
        ]
        return [*self.lines, *named]

    @property
    def text(self) -> list[str]:
        """Lines of Markdown."""
        out = [f"## {self.title}", ""]
        if self.paper:
            out += [f"- Paper: {self.paper}."]
        out += [f"- Ours: {text}." for text in self.ours]
        out += [""] if self.paper or self.ours else []
        for plot in self.plots:
            if (PLOTS / plot).is_file():
                out += [f"![{self.title}](plots/{plot})", ""]
        if self.caption:
            out += [self.caption, ""]
        if self.lines:
            out += table(
                ("", "ours", "paper", "our conditions"), [line.cells for line in self.lines]
            )
        if self.pairs:
            heads = ("", "ours, `half`", "ours, `auto`", "paper", "our conditions")
            both = [(half.cells, auto.cells[1]) for half, auto in self.pairs]
            out += table(heads, [(c[0], c[1], auto, *c[2:]) for c, auto in both])
        for titles, rows in self.tables:
            out += table(titles, rows)
        if self.commands:
            out += ["Measured by:", "", "```bash", *self.commands, "```", ""]
        return out


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line; without its last column where that is empty."""
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return [
        "| " + " | ".join(head) + " |",
        "| --- |" + " --- |" * (len(head) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def read(name: str, fields: Sequence[str], folder: Path = RESULTS) -> Rows:
    """Rows of a result file, none where it does not exist yet. Raises ValueError for a file of
    another schema."""
    path = folder / name
    return read_rows(path, fields) if path.is_file() else []


def on_gpu(rows: Rows) -> Rows:
    """The rows that a GPU measured; all of them where none did."""
    return [row for row in rows if row["gpu"] != CPU] or rows


def where(rows: Iterable[Row], **wanted: Any) -> Rows:
    """The rows whose fields have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def one_trace(rows: Rows) -> Rows:
    """Of every model the rows of one simulated trace: of "six", mean progress 6.0, where there are
    any, else of "paper", 6.09."""
    found: Rows = []
    for model in dict.fromkeys(row["model"] for row in rows):
        some = where(rows, model=model)
        found += where(some, trace="six") or where(some, trace="paper")
    return found


def newest(rows: Rows) -> Rows:
    """Of the rows that differ in nothing but when they were measured the last one in the file."""
    return list({tuple(row.get(key) for key in GAIN_CELL): row for row in rows}.values())


def conditions(rows: Iterable[Row], *more: str) -> str:
    """Machine, number format, versions, commits and dates of rows, and what else is said."""
    rows = list(rows)

    def of(key: str, form: str = "{}") -> str:
        values = dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None)
        return " and ".join(form.format(value) for value in values)

    gpu = of("gpu").replace(CPU, "CPU")
    parts = [gpu, of("dtype"), *more, of("torch", "torch {}"), of("commit", "commit {}")]
    return ", ".join(part for part in (*parts, of("date")) if part)


def environment_of(rows: Sequence[Row]) -> Row:
    """What a row computed from others takes over: their machine, versions, commits and dates."""
    keys = ("gpu", "torch", "triton", "transformers", "commit", "date", "dtype")
    joined = {key: dict.fromkeys(str(row.get(key)) for row in rows) for key in keys}
    return {key: " and ".join(values) for key, values in joined.items()}


def kind_of(model: str) -> str | None:
    """ "8b" or "4b" for the shapes of the paper's targets, "pair" for the SmolLM2 pair, None for
    other models (dry runs)."""
    kinds = {"Qwen3-8B": "8b", "Qwen3-4B": "4b", "SmolLM2": "pair"}
    return next((kind for start, kind in kinds.items() if model.startswith(start)), None)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True, slots=True)
class Experiment:
    """A recipe: its rows in bench/results/reproduce_{name}.json, its plot, its part of the page.

    `fields`: what a row must have. `compute`: makes the rows from other result files alone; None
    where they come from passes of the pair."""

    name: str
    fields: Sequence[str]
    section: Callable[[Rows], Section]
    draw: Callable[[Rows], None]
    compute: Callable[[Path], Rows] | None = None

    @property
    def file(self) -> str:
        """Name of its result file."""
        return f"reproduce_{self.name}.json"

    def read(self, folder: Path = RESULTS) -> Rows:
        """Its rows; none where it was not run."""
        return read(self.file, self.fields, folder)

    def part(self, folder: Path = RESULTS) -> Section:
        """Its section of the page, with its plots once there is anything to plot."""
        rows = self.read(folder)
        section = self.section(rows)
        return section if rows else replace(section, plots=())

    def refresh(self, plots: bool = True) -> Rows:
        """Compute rows anew where they come from other files, write them, plot; returns them."""
        rows = self.read() if self.compute is None else self.compute(RESULTS)
        if rows and self.compute is not None:
            write_rows(RESULTS / self.file, rows)
        if rows and plots:
            self.draw(rows)
        return rows

    def command(self, about: str | None, argv: list[str] | None = None) -> None:
        """The command line of a recipe that takes no options."""
        argparse.ArgumentParser(description=about).parse_args(argv)
        self.run()

    def run(self, rows: Rows | None = None) -> None:
        """Write rows, plot them and print their section; None: those computed from other files."""
        plots = can_plot()
        if rows is None:
            rows = self.refresh(plots)
        else:
            write_rows(RESULTS / self.file, rows)
            if plots:
                self.draw(rows)
        if not plots:
            print("no plot: it needs matplotlib (the extra `plots`)")
        print("\n".join(self.section(rows).text))

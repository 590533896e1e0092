"""The one style of all plots: ours in colours that every eye tells apart, the paper in black."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reproduced import PLOTS

BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY)
MARKERS = ("o", "s", "^", "D", "v")
PAPER: dict[str, Any] = {"color": "black", "linestyle": "--", "marker": "x", "linewidth": 1.2}

STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4.5,
    "svg.hashsalt": "dscale",
}


def series(index: int) -> dict[str, Any]:
    """Colour and marker of our series number `index`."""
    return {"color": COLOURS[index % 5], "marker": MARKERS[index % 5], "linewidth": 1.5}


@contextmanager
def figure(
    name: str, caption: str, *, rows: int = 1, columns: int = 1, height: float = 2.9
) -> Iterator[Any]:
    """Axes [rows, columns] to draw in; the plot is then written to docs/plots with its caption.

    Raises ImportError when matplotlib is not installed (the extra `plots`)."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'dscale[plots]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        width = max(6.0, 3.6 * columns)
        text = textwrap.fill(caption, int(width * 17.5))
        foot = 0.2 + 0.125 * (text.count("\n") + 1)
        size = (width, height * rows + foot)
        drawn, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        yield axes
        drawn.tight_layout(rect=(0, foot / size[1], 1, 1))
        drawn.text(0.01, 0.05 / size[1], text, fontsize=7, color="#555555")
        PLOTS.mkdir(parents=True, exist_ok=True)
        # No version or date in the file: the same numbers give the same bytes.
        drawn.savefig(PLOTS / name, dpi=130, metadata={"Software": None})
        pyplot.close(drawn)


def legend(ax: Any, room: float = 1.35, columns: int = 2) -> None:
    """A legend above what is drawn."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, low + room * (high - low))
    ax.legend(loc="upper left", ncols=columns, fontsize=7)

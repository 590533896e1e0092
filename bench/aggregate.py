"""Result rows read back: medians over repetitions, ratios per cell, geometric means over cells."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
Cell = tuple[Any, ...]

CELL = (
    "model", "acceptance", "source", "trace", "set", "concurrency", "temperature", "requests",
    "output_cap",
)  # fmt: skip
"""What tells one closed-loop configuration from another, mode and repetition aside."""

GAIN_CELL = ("model", "mode", "budget", "tile", "sampling", "requests", "prompt", "trace")
"""The same of a row of mode_gains.json, whose rows of every commit are kept."""

METHOD = ("mode", "budget")
LOOP_KEYS = (*CELL, *METHOD, "repetition")
LOOP_FIELDS = (*LOOP_KEYS, "tokens_per_s", "latency_ms", "ttft_ms")
"""What rows of closed_loop.json must have."""


def read_rows(path: Path, fields: Iterable[str]) -> list[Row]:
    """The rows of a result file. Raises ValueError, naming the file, unless it is a JSON list of
    objects that all have `fields`."""
    try:
        rows = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: expected a result file, got {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON rows, got {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got a {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number}: expected an object, got {row!r}")
        missing = [name for name in fields if name not in row]
        if missing:
            raise ValueError(
                f"{path}: row {number}: expected a field {missing[0]!r}, got {[*row]}"
            )
    return rows


def medians(rows: Iterable[Row]) -> list[Row]:
    """One row per cell and method: the median of every number over its repetitions, which
    `repetitions` counts; objects of numbers too. Other fields are the first repetition's."""
    groups: dict[Cell, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in (*CELL, *METHOD))].append(row)
    return [_median(group) | {"repetitions": len(group)} for group in groups.values()]


def _median(group: list[Row]) -> Row:
    first = group[0]
    return {
        name: value if name in CELL else _middle([row.get(name) for row in group], value)
        for name, value in first.items()
        if name != "repetition"
    }


def _middle(values: list[Any], first: Any) -> Any:
    if all(isinstance(v, dict) for v in values):
        return {name: _middle([v.get(name) for v in values], first[name]) for name in first}
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return median(values)
    return first


def gains(
    rows: Iterable[Row],
    of: tuple[str, str | None],
    over: tuple[str, str | None],
    field: str = "tokens_per_s",
) -> dict[Cell, float]:
    """Per cell that has both (mode, budget) `of` and `over`: the ratio of their medians in
    `field`, where "latency_ms.p95" means that number of an object."""
    value: dict[tuple[str, str | None], dict[Cell, float]] = defaultdict(dict)
    for row in medians(rows):
        found: Any = row
        for name in field.split("."):
            found = found[name]
        value[row["mode"], row["budget"]][tuple(row[name] for name in CELL)] = found
    return {
        cell: value[of][cell] / base for cell, base in value[over].items() if cell in value[of]
    }


def geometric_mean(values: Iterable[float]) -> float:
    """Raises ValueError without values, or for one that is not above 0."""
    found = list(values)
    if not found or min(found) <= 0:
        raise ValueError(f"values: expected positive numbers, got {found}")
    return math.exp(sum(map(math.log, found)) / len(found))


def reduction(
    rows: Sequence[Row], of: tuple[str, str | None], over: tuple[str, str | None], field: str
) -> float:
    """One minus the geometric mean of the cells' ratios, as the paper reports latency (IV-C)."""
    return 1 - geometric_mean(gains(rows, of, over, field).values())

"""Result rows: what every row of bench/results carries, and how the files are written."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"
ASIDE = Path(__file__).parents[1] / "runs" / "bench"
"""Where rows go that are no results: of toy sizes, and of the real pair without a GPU."""


def environment(commit: str | None = None, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """GPU (or CPU), versions, commit and date, as every row of bench/results carries them, and
    where one is given the dtype."""
    cuda = torch.cuda.is_available()
    try:
        import triton

        triton_version: str | None = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "gpu": torch.cuda.get_device_name(0) if cuda else "none (CPU)",
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
        "commit": commit or head_commit(),
        "date": datetime.date.today().isoformat(),
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
    }


def aside(out: Path) -> Path:
    """The folder for rows that are no results: ASIDE, unless another than RESULTS is asked for."""
    return ASIDE if out == RESULTS else out


def machine(tiny: bool) -> tuple[torch.device, torch.dtype]:
    """Where a bench runs, and in which numbers: the first GPU, or at toy size a CPU."""
    if tiny:
        return torch.device("cpu"), torch.float32
    return torch.device("cuda:0"), torch.bfloat16


def head_commit() -> str:
    """The checked-out commit, "unknown" outside a git checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as a JSON list, one row a line, so that a diff shows which result changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")

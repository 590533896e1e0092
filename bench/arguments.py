"""Options of the benches that measure parts of a model at its shapes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.rows import RESULTS
from bench.shapes import SHAPES


def shape_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what they have in common: models, toy size, output folder, commit."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    return parser


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, tiny: Mapping[str, Any]
) -> argparse.Namespace:
    """The arguments, at toy size with `tiny` in their place. Exits with an error where they need a
    GPU and there is none."""
    args = parser.parse_args(arguments)
    if args.tiny:
        vars(args).update(tiny)
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs everything at toy size on a CPU")
    return args

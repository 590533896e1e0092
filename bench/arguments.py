"""Options of the benches that measure parts of a model at its shapes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from bench.rows import RESULTS, aside
from bench.shapes import SHAPES
from dscale.config import WeightFormat


def shape_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with what they have in common: models, toy size, output folder, commit."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b"])
    parser.add_argument("--tiny", action="store_true", help="toy size, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    return parser


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add `--weights`, as the engine's setting."""
    parser.add_argument(
        "--weights", choices=get_args(WeightFormat), default="model",
        help="as the engine's setting; rows of 8-bit ones go to folders of that name in --out",
    )  # fmt: skip


def numbers_of(args: argparse.Namespace) -> str:
    """The field `weights` of the rows of a run: "fp8", "fp8-draft", or the dtype, "bf16" for
    short."""
    return short(args.dtype) if args.weights == "model" else str(args.weights)


def short(dtype: str) -> str:
    """A dtype's name in the field `weights`."""
    return "bf16" if dtype == "bfloat16" else dtype


def folder_of(out: Path, weights: str) -> Path:
    """Where rows go: those of 8-bit weights have files of their own, so that nobody who reads the
    others' takes them for one."""
    return out / weights if weights.startswith("fp8") else out


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, tiny: Mapping[str, Any]
) -> argparse.Namespace:
    """The arguments, at toy size with `tiny` in their place. Exits with an error where they need a
    GPU and there is none."""
    args = parser.parse_args(arguments)
    if args.tiny:
        vars(args).update(tiny, out=aside(args.out))
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --tiny runs everything at toy size on a CPU")
    return args

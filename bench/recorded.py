"""A trace recorded from the real pair: scores and accepted counts of full-width passes, to be
replayed by `bench.closed_loop_simulated --recorded` at other shapes.

`python -m bench.recorded --prompts FOLDER --file trace.npz` serves the first requests of each set
with all 16 rows and keeps what every pass scored and accepted; the last pass of an answer, which
its end may have cut, is left out. Shapes: P passes, T steps, S slots, C = 15 candidates."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench import closed_loop as real
from bench.client import closed_loop
from bench.loop_cells import Cell
from bench.step_cases import Case
from bench.workload import SETS, load_workload
from dscale.compiled.flow import COUNT, SCORES
from dscale.decode import Decoding
from dscale.request import Request

FULL = Case("dscale", 16)
CANDIDATES = 15
ARRAYS = {"score": np.float16, "accepted": np.uint8, "request": np.int32}


@dataclass(slots=True)
class Recorder:
    """Passes by request, in order: scores [C] and accepted count."""

    passes: dict[Request, list[tuple[NDArray[np.float32], int]]] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts, keep every drafted pass of every engine."""
        original: Any = Decoding._learn

        def learn(decoding: Decoding, live: list[Request], result_NX: NDArray[np.int32]) -> None:
            scores = np.ascontiguousarray(result_NX[:, SCORES]).view(np.float32)
            for request, score, row in zip(live, scores, result_NX, strict=True):
                if row[COUNT]:
                    found = self.passes.setdefault(request, [])
                    found.append((score[:CANDIDATES].copy(), int(row[COUNT]) - 1))
            original(decoding, live, result_NX)

        owner: Any = Decoding
        owner._learn = learn
        try:
            yield
        finally:
            owner._learn = original

    def save(self, path: Path) -> int:
        """Write the passes but each request's last; returns how many."""
        rows = [
            (score, accepted, number)
            for number, passes in enumerate(self.passes.values())
            for score, accepted in passes[:-1]
        ]
        columns: Sequence[Any] = list(zip(*rows, strict=True))
        kinds = zip(ARRAYS.items(), columns, strict=True)
        arrays: dict[str, Any] = {name: np.array(c, kind) for (name, kind), c in kinds}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)
        return len(rows)


def load(path: Path, steps: int, slots: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(score float32 [T, S, C], accepted int32 [T, S]): in each slot one recorded request after
    the other, in random order, again and again. Raises ValueError for a file of other arrays."""
    try:
        with np.load(path) as found:
            arrays = {name: found[name] for name in ARRAYS}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: expected a recorded trace (.npz), got {error}") from None
    score, accepted, request = arrays.values()
    count = len(accepted)
    if score.shape != (count, CANDIDATES) or request.shape != (count,) or not count:
        shapes = {name: array.shape for name, array in arrays.items()}
        raise ValueError(f"{path}: expected passes of {CANDIDATES} candidates, got {shapes}")
    random = np.random.default_rng(seed)
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    parts = np.split(np.arange(count), starts[1:])
    index = np.stack([_column(parts, steps, random) for _ in range(slots)], 1)
    return torch.from_numpy(score[index]).float(), torch.from_numpy(accepted[index]).int()


def _column(
    parts: Sequence[NDArray[np.intp]], steps: int, random: np.random.Generator
) -> NDArray[np.intp]:
    """Passes of whole requests in random order, `steps` of them."""
    chosen: list[NDArray[np.intp]] = []
    while sum(map(len, chosen)) < steps:
        chosen += [parts[i] for i in random.permutation(len(parts))]
    return np.concatenate(chosen)[:steps]


def record(pair: real.Pair, args: argparse.Namespace) -> Recorder:
    """Serve the requests and keep their passes."""
    recorder = Recorder()
    sets = [load_workload(name, args.prompts) for name in args.sets]
    texts = [text for workload in sets for text in workload.measured[: args.requests]]
    requests = [
        Request(prompt=pair.encode(text), max_new_tokens=args.output_cap, stop_ids=pair.stop_ids)
        for text in texts
    ]
    largest = max(requests, key=lambda request: len(request.prompt))
    pair.engine.use(FULL, [largest] * args.concurrency)
    with recorder.recording():
        closed_loop(pair.engine.submit, requests, args.concurrency)
        pair.engine.forget()
    return recorder


def main() -> None:
    args = parse()
    # What the loader of the pair asks for: one cell of the largest concurrency.
    args.cells = [Cell(args.sets[0], args.concurrency, 0.0, "dscale-half", 0, 1)]
    pair = real.toy(args) if args.tiny else real.smollm2(args)
    try:
        recorder = record(pair, args)
    finally:
        pair.engine.close()
    count = recorder.save(args.file)
    kept = [accepted for passes in recorder.passes.values() for _, accepted in passes[:-1]]
    print(f"{args.file}: {count} passes, mean progress {1 + sum(kept) / max(count, 1):.3f}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--prompts", type=Path, help="folder with the sets; default: 16 of each")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--requests", type=int, default=64, help="of each set")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--output-cap", type=int, default=256)
    parser.add_argument("--drafter", type=Path, help="default: the one shipped")
    parser.add_argument("--predictor", type=Path, help="default: the shipped drafter's")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tiny", action="store_true", help="toy models, on a CPU")
    args = parser.parse_args(arguments)
    args.prefix_cache, args.compile_prefill, args.ride_prompts = False, True, True
    if args.tiny:
        args.concurrency, args.requests, args.output_cap = 3, 2, 20
    return args


if __name__ == "__main__":
    main()

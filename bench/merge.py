"""Rows of several runs into one result file: `python -m bench.merge part/closed_loop.json ...
--into bench/results/closed_loop.json`. A later file's row takes the place of an earlier one's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.aggregate import LOOP_KEYS, read_rows
from bench.graphs import DECIDE_KEYS, VERIFY_KEYS
from bench.operators import KEYS as OPERATOR_KEYS
from bench.peers import KEYS as PEER_KEYS
from bench.result_files import ResultFile
from bench.serving_times import PREFILL_KEYS, STEP_KEYS

FILES = {
    "closed_loop.json": LOOP_KEYS,
    "bucket_times.json": STEP_KEYS,
    "prefill.json": PREFILL_KEYS,
    "verify_graph.json": VERIFY_KEYS,
    "decide_graph.json": DECIDE_KEYS,
    "operators.json": OPERATOR_KEYS,
    "peers.json": PEER_KEYS,
}
"""What tells the rows of each file apart."""


def merge(parts: Sequence[Path], into: Path) -> int:
    """Add the parts' rows to a file, which need not exist; returns how many it has then. Raises
    ValueError for a file that is not one of FILES or has rows of another schema."""
    if into.name not in FILES:
        raise ValueError(f"into: expected one of {[*FILES]}, got {into.name!r}")
    keys = FILES[into.name]
    rows = [row for part in parts for row in read_rows(part, keys)]
    file = ResultFile(into, keys, {})
    for row in rows:
        file.put(row)
    return len(file.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    print(f"{args.into}: {merge(args.parts, args.into)} rows")


if __name__ == "__main__":
    main()

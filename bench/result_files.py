"""Result files that grow while a bench runs: one row per case, replaced when it is measured
anew."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.rows import write_rows


class ResultFile:
    """Rows of one file under `bench/results`, told apart by the fields `keys`.

    Rows of an earlier run that are in the file already stay, but for those measured again. Every
    `put` writes the file, so that a run may be cut off at any time."""

    def __init__(self, path: Path, keys: tuple[str, ...], base: dict[str, Any]) -> None:
        """`base`: fields every new row carries. Raises ValueError for a file of other rows."""
        self.path, self.keys, self.base = path, keys, base
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._mine: set[tuple[Any, ...]] = set()
        for row in json.loads(path.read_text()) if path.exists() else []:
            missing = [key for key in keys if key not in row]
            if missing:
                raise ValueError(f"{path}: expected rows with {keys}, got one without {missing}")
            self.rows[self._key(row)] = row

    def put(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add fields to this run's row of the same keys, or begin it; returns the whole row."""
        key = self._key(self.base | row)
        old = self.rows[key] if key in self._mine else {}
        self._mine.add(key)
        self.rows[key] = self.base | old | row
        write_rows(self.path, list(self.rows.values()))
        return self.rows[key]

    def keep(self, rows: Iterable[dict[str, Any]], label: str) -> None:
        """Put rows as they are measured, each said aloud beside a progress bar."""
        for row in tqdm(rows, desc=label, unit="row"):
            tqdm.write(str(row))
            self.put(row)

    def find(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row in the file with these keys and the base's, of any run."""
        return self.rows.get(self._key(self.base | row))

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self.keys)

"""Prompt files: one JSON object a line, `.jsonl` or `.jsonl.gz`, read whole and checked."""

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any


def read_prompts(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the rows of a prompt file, in file order.

    Each row is a JSON object with the strings `id`, unique in the file, and `prompt` (a user turn
    without a chat template); further keys are kept as they are. Blank lines are skipped.
    Raises ValueError that names the file, the line, what was expected and what came.
    """
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"path: expected a .jsonl or .jsonl.gz file, got {path}")
    rows: list[dict[str, Any]] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = _row(line)
            first = line_of_id.setdefault(row["id"], number)
            if first != number:
                raise ValueError(f"expected a new id, got {row['id']!r} again (line {first})")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: expected at least one prompt, got an empty file")
    return rows


def _lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a whole gzip file, got: {error}") from None
    return data.split(b"\n")


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise ValueError(f"expected one JSON object, got {_short(line)} ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected one JSON object, got {_short(line)}")
    for key in ("id", "prompt"):
        value = row.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key}: expected a string with text, got {_short(value)}")
    return row


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."

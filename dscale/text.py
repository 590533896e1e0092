"""Prompt files: one JSON object a line, `.jsonl` or `.jsonl.gz`, read whole and checked; and
prompts a line."""

import gzip
import json
import os
import zlib
from collections.abc import Iterable
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


def read_lines(lines: Iterable[str]) -> list[str]:
    """The lines that are not blank, without their ends. Raises ValueError where there are none, or
    one is no text."""
    prompts = [line.rstrip("\r\n") for line in lines if line.strip()]
    for prompt in prompts:
        check_text(prompt)
    if not prompts:
        raise ValueError("prompt: expected at least one line of text, got none")
    return prompts


def numbered_rows(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Rows as `read_prompts` gives them, of a prompt a line, numbered. Raises as `read_lines`."""
    prompts = read_lines(lines)
    return [{"id": str(number), "prompt": text.strip()} for number, text in enumerate(prompts)]


def check_text(prompt: str) -> None:
    """Raise ValueError for a string that no tokenizer takes: with half a character of UTF-16, as
    JSON may have, or with bytes that are not UTF-8, as a shell may hand over."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        shown = _short(prompt)
        raise ValueError(f"prompt: expected Unicode text, got {shown} ({error})") from None


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
    check_text(row["prompt"])
    return row


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."

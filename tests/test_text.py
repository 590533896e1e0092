"""Prompt files: what is read, and what a bad line is answered with."""

import gzip
from pathlib import Path

import pytest

from dscale.text import read_prompts

DATA = Path(__file__).parents[1] / "bench" / "data"
GOOD = '{"id": "a", "prompt": "one"}\n\n{"id": "b", "prompt": "z\u00e9ro\u2028", "set": "s"}\n'


def test_plain_and_gzip_agree(tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    plain.write_text(GOOD, encoding="utf-8")
    packed.write_bytes(gzip.compress(GOOD.encode()))
    rows = read_prompts(plain)
    assert rows == [
        {"id": "a", "prompt": "one"},
        {"id": "b", "prompt": "z\u00e9ro\u2028", "set": "s"},
    ]
    assert read_prompts(packed) == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{not json", "line 3: expected one JSON object"),
        (b'["a"]', "line 3: expected one JSON object"),
        (b'{"id": "c", "prompt": "\xff"}', "line 3: expected one JSON object"),
        (b'{"id": 7, "prompt": "x"}', "line 3: id: expected a string with text, got 7"),
        (b'{"id": "c"}', "line 3: prompt: expected a string with text, got None"),
        (b'{"id": "c", "prompt": " "}', "line 3: prompt: expected a string with text, got ' '"),
        (rb'{"id": "c", "prompt": "\ud83d"}', "line 3: prompt: expected Unicode text"),
        (b'{"id": "a", "prompt": "x"}', r"line 3: expected a new id, got 'a' again \(line 1\)"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"id": "a", "prompt": "x"}\n\n' + line)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.txt", b"", r"expected a \.jsonl or \.jsonl\.gz file"),
        ("p.jsonl", b"\n", "expected at least one prompt"),
        ("p.jsonl.gz", b"no gzip", "expected a whole gzip file"),
        ("p.jsonl.gz", gzip.compress(GOOD.encode(), mtime=0)[:-9], "expected a whole gzip file"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_shipped_prompts() -> None:
    rows = read_prompts(DATA / "identity.jsonl")
    counts = {name: 0 for name in ("gsm8k", "math500", "humaneval", "mbpp")}
    for row in rows:
        counts[row["set"]] += 1
    assert counts == dict.fromkeys(counts, 16)
    assert len({row["prompt"] for row in rows}) == 64
    assert len(read_prompts(DATA / "demo.jsonl")) == 3

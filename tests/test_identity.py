"""The real pair on real prompts: the same tokens as plain `generate()`, in fewer passes.

`make test` runs 16 of the 64 prompts in batches of 8 under a shared budget of six rows a request,
and two one by one at full width. With DSCALE_IDENTITY=full both batch sizes run all prompts at
full width, and batches of one are compared with plain calls of their own (a quarter of an hour on
two cores).
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import left_padded, plain

import dscale
import dscale.demo
from dscale.text import read_prompts

FULL = os.environ.get("DSCALE_IDENTITY") == "full"
PROMPTS = Path(__file__).parents[1] / "bench" / "data" / "identity.jsonl"
NEW, BATCH = 128, 8


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """All cores: among the processes of `make test` this file is the last to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(smollm: tuple[Any, Any]) -> list[list[int]]:
    """Token ids of the 64 prompts; eight that follow one another are two of each set."""
    rows = read_prompts(PROMPTS)
    rows = [row for start in range(BATCH) for row in rows[start::BATCH]]
    assert len(rows) == 64
    rows = rows if FULL else rows[:16]
    assert len({row["set"] for row in rows[:BATCH]}) == 4
    return [
        smollm[1].apply_chat_template(
            [{"role": "user", "content": row["prompt"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for row in rows
    ]


def answers(
    generate: Callable[..., torch.Tensor], prompts: list[list[int]], batch: int, eos: int
) -> list[list[int]]:
    """New tokens of every prompt up to its eos, generated in batches."""
    found = []
    for start in range(0, len(prompts), batch):
        inputs = left_padded(prompts[start : start + batch], pad=eos)
        out = generate(**inputs, max_new_tokens=NEW, do_sample=False)
        for row in out[:, inputs["input_ids"].shape[1] :].tolist():
            end = row.index(eos) + 1 if eos in row else len(row)
            assert set(row[end:]) <= {eos}
            found.append(row[:end])
    return found


@pytest.fixture(scope="module")
def expected(smollm: tuple[Any, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Answers of plain `generate()` to batches of 8."""
    model, tokenizer = smollm
    assert "generate" not in vars(model)
    tokens = answers(model.generate, prompts, BATCH, tokenizer.eos_token_id)
    assert sum(map(len, tokens)) > 60 * len(tokens)
    return tokens


def check(
    smollm: tuple[Any, Any], prompts: list[list[int]], want: list[list[int]], batch: int,
    **settings: Any,
) -> None:  # fmt: skip
    """All answers of the real pair are the wanted ones, in less than half as many passes."""
    model, tokenizer = smollm
    with dscale.attach(model, dscale.demo.drafter(), **settings) as spec:
        got = answers(model.generate, prompts, batch, tokenizer.eos_token_id)
        stats = spec.stats
    assert [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b] == []
    assert stats.requests == len(prompts)
    assert stats.tokens == sum(map(len, want)) - len(prompts)
    assert stats.tokens_per_pass > 2
    print(f"{len(prompts)} of {len(prompts)} identical, {stats.tokens_per_pass:.2f} per pass")


def test_batches_of_eight(
    smollm: tuple[Any, Any], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    settings: dict[str, Any] = {"mode": "dflash"}
    if not FULL:
        settings = {"mode": "dscale", "budget": 6, "pack_weights": True}
    check(smollm, prompts, expected, BATCH, **settings)


def test_batches_of_one(
    smollm: tuple[Any, Any], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    model, tokenizer = smollm
    if FULL:
        alone = answers(
            lambda **inputs: plain(model, **inputs), prompts, 1, tokenizer.eos_token_id
        )
        assert alone == expected
    chosen = slice(None, None, 1 if FULL else BATCH + 1)  # two of different sets
    check(smollm, prompts[chosen], expected[chosen], 1, mode="dflash")

"""What the acceptance tests of generate's contract share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import (
    VOCAB,
    always_wrong,
    left_padded,
    oracle,
    prompt,
    ragged,
    tiny_drafter,
    tiny_model,
)
from torch import Tensor

import dscale
from dscale import Attachment

ROWS = [prompt(9), prompt(130), prompt(1), prompt(70)]
"""The prompts of a ragged batch."""

BATCH = left_padded(ROWS, pad=VOCAB - 1)
IDS = torch.tensor([prompt(9)])
ONE = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
DRAFTERS = [oracle, always_wrong, ragged, None]
"""Drafts that are all accepted, that never are, that partly are; and the random drafter's."""


def attached(folder: Path) -> Iterator[Attachment]:
    """A model attached with a random drafter."""
    model = tiny_model()
    with dscale.attach(model, tiny_drafter(folder, model)) as spec:
        yield spec


def same(ours: Any, want: Any) -> bool:
    """Equal tensors of one dtype."""
    return ours.dtype == want.dtype and torch.equal(ours, want)


def check(want: Any, ours: Any, length: int, eos: Any = ()) -> None:
    """Equal ids, and the numbers of every token up to its row's end."""
    ended = torch.isin(want.sequences, torch.tensor(eos))
    assert torch.equal(ours.sequences, want.sequences)
    assert list(ours) == [name for name in want if name in ("sequences", "scores", "logits")]
    steps = want.sequences.shape[1] - length
    for name in ("scores", "logits"):
        a, b = getattr(want, name), getattr(ours, name)
        assert type(b) is tuple
        assert len(a) == len(b) == steps
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            assert (y.shape, y.dtype, y.device) == (x.shape, torch.float32, x.device)
            alive = ~ended[:, length : length + step].any(1)
            torch.testing.assert_close(y[alive], x[alive], rtol=1e-4, atol=2e-4)


class Letters:
    """A tokenizer of words of four letters, one for every id."""

    def __init__(self) -> None:
        self.words = [_word(i) for i in range(VOCAB)]

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        if isinstance(ids, list):
            return [self.convert_ids_to_tokens(i) for i in ids]
        return self.words[ids] if ids >= 0 else self.unknown

    _convert_id_to_token = convert_ids_to_tokens

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def decode(self, tokens: list[int] | Tensor, **kwargs: Any) -> str:
        return "".join(self.words[int(t)] for t in tokens)

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        # transformers asks for one text, of no words, to see what a token adds to it.
        self.unknown = text
        return {"input_ids": [-1]}


def _word(number: int) -> str:
    letters = "abcdefghijklmnopqrst"
    a, b, c = number % 20, number // 20 % 20, number // 400
    return letters[a] + letters[b] + letters[c] + letters[(a + b) % 20]

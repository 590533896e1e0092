"""When a call's rows stop: transformers' stopping criteria, judged step by step on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria


class Judge:
    """Calls stopping criteria as plain `generate` does: once per step, with every row's ids.

    Rows commit their tokens at their own pace; a step is judged once every row that still counts
    has a token for it. A row stopped at a step is cut there. When a criterion knows an
    `eos_token_id`, finished rows are padded; without one they go on until all have finished."""

    def __init__(self, input_ids: Tensor, criteria: list[Any], pad: Tensor | None) -> None:
        """`input_ids` int64 [rows, length], padding included; `criteria`: the prepared list;
        `pad`: the pad id. Raises ValueError when finished rows need a pad id and there is none."""
        self.criteria, self.input_ids = criteria, input_ids
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        if self.pads:
            check_pad(pad)
        self.pad = 0 if pad is None else int(pad)
        self.steps = 0
        self.lengths: list[int | None] = [None] * input_ids.shape[0]
        self._tokens: list[list[int]] = [[] for _ in self.lengths]
        self._unfinished = torch.ones(len(self.lengths), dtype=torch.bool, device=input_ids.device)

    @property
    def done(self) -> bool:
        """Whether every row has stopped."""
        return None not in self.lengths

    def take(self, row: int, tokens: list[int]) -> None:
        """Note a row's newly committed tokens."""
        self._tokens[row] += tokens

    def ready(self) -> bool:
        """Whether the next step can be judged."""
        return not self.done and all(
            len(tokens) > self.steps
            for tokens, length in zip(self._tokens, self.lengths, strict=True)
            if length is None or not self.pads
        )

    def judge(self, scores: tuple[Tensor, ...] | None) -> tuple[Tensor, list[int]]:
        """Judge the next step. Returns its token of each row, int64 [rows], and the rows that
        stopped with it. `scores`: one [rows, vocab] per step so far, where they were asked for."""
        step = self.steps
        column = [
            self.pad if self.pads and length is not None else tokens[step]
            for tokens, length in zip(self._tokens, self.lengths, strict=True)
        ]
        token_N = torch.tensor(column, device=self.input_ids.device)
        self.input_ids = torch.cat((self.input_ids, token_N[:, None]), 1)
        self.steps += 1
        stop_N = torch.zeros_like(self._unfinished)
        for criterion in self.criteria:
            stop_N = stop_N | criterion(self.input_ids, scores)
        stopped = torch.nonzero(stop_N & self._unfinished).flatten().tolist()
        self._unfinished = self._unfinished & ~stop_N
        for row in stopped:
            self.lengths[row] = self.steps
        return token_N, stopped


def check_pad(pad: Tensor | None) -> None:
    """Raise ValueError where finished rows need a pad id and there is none."""
    if pad is None:
        raise ValueError(
            "pad_token_id: expected an id when a stopping criterion has an eos_token_id, got None"
        )


def stop_ids(criteria: list[Any]) -> tuple[int, ...]:
    """Ids at which a request ends by itself: those of transformers' own eos criterion."""
    own = [c for c in criteria if type(c) is EosTokenCriteria]
    return tuple(int(i) for c in own for i in torch.as_tensor(c.eos_token_id).flatten().tolist())


def length_limit(criteria: list[Any], config_limit: int, length: int) -> int:
    """New tokens that transformers' own length criterion allows, at least the first one."""
    own = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    return max(1, int(own[0] if own else config_limit) - length)


def needs_judge(criteria: list[Any]) -> bool:
    """Whether any criterion is more than stop ids and a length."""
    kinds = [type(c) for c in criteria]
    return any(k not in (EosTokenCriteria, MaxLengthCriteria) for k in kinds) or (
        MaxLengthCriteria not in kinds
    )


def add_stop_strings(criteria: list[Any], stop_strings: Any, tokenizer: Any) -> None:
    """Put the criterion for stop strings where transformers has it; the caller's own goes first.

    In front of the eos criterion, behind length and time."""
    if stop_strings is None or any(type(c) is StopStringCriteria for c in criteria):
        return
    places = [i for i, c in enumerate(criteria) if type(c) is EosTokenCriteria]
    made = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
    criteria.insert(places[0] if places else len(criteria), made)

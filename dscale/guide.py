"""What chooses a request's tokens on the host: transformers' own logits processors, row by row."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from dscale.errors import not_finite
from dscale.kernels.reference import position_gumbel

ON_DEVICE = (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
)
"""Processors that the stages have themselves."""

OF_ROWS = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Processors of transformers that know which row is which, when a caller made them."""


@dataclass(slots=True, eq=False)
class Guide:
    """Chooses one request's tokens from its logits, one after the other.

    `processors` are called once per position, in order, with a batch of one: `ids` int64
    [1, length], what transformers would show them, padding included, and float32 logits. `sample`:
    draw by noise of `seed` and the position, else take the largest. `scores` and `logits`, one
    [1, vocab] per chosen token, are kept where asked for (see `keep`)."""

    processors: Any
    ids: Tensor
    sample: bool
    seed: int
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def choose(self, logit_1V: Tensor, position: int) -> int:
        """Choose the token at absolute `position`, padding not counted. Raises what a processor
        raises, ArithmeticError for logits that are not finite and that no processor mended, and
        ValueError for scores that no sample can be drawn from."""
        given = logit_1V
        logit_1V = logit_1V.to(device=self.ids.device, dtype=torch.float32, copy=True)
        score_1V: Tensor = self.processors(self.ids, logit_1V)
        if self.keep_scores:
            self.scores.append(score_1V)
        if self.keep_logits:
            self.logits.append(logit_1V)
        noisy_V = score_1V[0]
        if not bool(noisy_V.max().isfinite()):
            if not bool(given.max().isfinite()):
                raise not_finite(position)
            if self.sample:
                raise ValueError(
                    "logits_processor: expected scores with a finite maximum to sample from, got "
                    f"{noisy_V.max()} at position {position}"
                )
        if self.sample:
            noisy_V = noisy_V + self._noise(position, noisy_V)
        token_11 = noisy_V.argmax().view(1, 1)
        self.ids = torch.cat((self.ids, token_11), 1)
        return int(token_11)

    def _noise(self, position: int, score_V: Tensor) -> Tensor:
        token_V = torch.arange(score_V.shape[0], device=score_V.device)
        seed = torch.full_like(token_V[:1], self.seed)
        return position_gumbel(seed, torch.full_like(seed, position), token_V)


@dataclass(slots=True)
class Processors:
    """The logits processors of a call: as transformers prepared them, and what they came from."""

    model: Any
    prepared: Any
    own: list[Any]
    allowed_tokens: Any = None

    def needed(self, generation_config: Any) -> bool:
        """Whether the host must choose: for processors the stages do not have, or outputs."""
        kinds = [type(p) for p in self.prepared]
        return (
            bool(self.own)
            or any(k not in ON_DEVICE for k in kinds)
            or any(_outputs(generation_config))
        )

    def guides(
        self, input_ids: Tensor, mask: Tensor | None, generation_config: Any, seeds: list[int]
    ) -> list[Guide]:
        """One guide per row. Raises ValueError, for more than one row, when a caller's processor
        is not transformers' own or belongs to rows."""
        rows = input_ids.shape[0]
        keep_scores, keep_logits = _outputs(generation_config)
        made = []
        for row, seed in enumerate(seeds):
            ids = input_ids[row : row + 1]
            row_mask = None if mask is None else mask[row : row + 1]
            processors = (
                self.prepared
                if rows == 1
                else self._of_row(row, rows, ids, row_mask, generation_config)
            )
            sample = bool(generation_config.do_sample)
            made.append(Guide(processors, ids, sample, seed, keep_scores, keep_logits))
        return made

    def _of_row(
        self, row: int, rows: int, ids: Tensor, mask: Tensor | None, generation_config: Any
    ) -> Any:
        """What transformers prepares for one row alone."""
        config = copy.copy(generation_config)
        copies = config.num_return_sequences or 1
        config.num_return_sequences = 1
        prompt, allowed = row // copies, self.allowed_tokens
        arguments: dict[str, Any] = {
            "generation_config": config,
            "input_ids_seq_length": ids.shape[1],
            "encoder_input_ids": ids,
            "prefix_allowed_tokens_fn": (
                None if allowed is None else lambda _, prefix: allowed(prompt, prefix)
            ),
            "logits_processor": LogitsProcessorList(_copy(p, row, rows) for p in self.own),
            "device": ids.device,
            "model_kwargs": {"attention_mask": mask},
        }
        make = self.model._get_logits_processor
        known = inspect.signature(make).parameters
        return make(**{k: v for k, v in arguments.items() if k in known})


def _outputs(generation_config: Any) -> tuple[bool, bool]:
    """Whether scores and logits are wanted, which takes a dictionary to return."""
    if not generation_config.return_dict_in_generate:
        return False, False
    return bool(generation_config.output_scores), bool(generation_config.output_logits)


def _copy(processor: Any, row: int, rows: int) -> Any:
    """A row's own copy of a caller's processor, which keeps state, or the shape of the batch."""
    kind = type(processor)
    if not kind.__module__.startswith("transformers.") or kind in OF_ROWS:
        raise ValueError(
            f"logits_processor: expected one row, or processors that transformers defines and "
            f"that do not belong to rows, got {kind.__name__} with a batch of {rows}"
        )
    try:
        own = copy.deepcopy(processor)
    except Exception as error:
        raise ValueError(
            f"logits_processor: expected one row, or processors that can be copied, got "
            f"{kind.__name__} with a batch of {rows} ({error})"
        ) from error
    ignored = getattr(own, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor) and ignored.numel() == rows:
        own.prompt_ignore_length = ignored.view(-1)[row : row + 1]
    return own

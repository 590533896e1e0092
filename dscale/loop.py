"""The decoding loop behind an attached model's `generate`, called by transformers with everything
prepared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, PreTrainedModel, RepetitionPenaltyLogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput

from dscale.engine import Engine
from dscale.guide import Guide, Processors
from dscale.request import Request
from dscale.sampling import refuse_unsupported, request_settings, row_seeds
from dscale.stopping import (
    Judge,
    add_stop_strings,
    check_pad,
    length_limit,
    needs_judge,
    stop_ids,
)


@dataclass(slots=True)
class Call:
    """What a call of `generate` has that transformers does not hand to a decoding loop.
    `elsewhere`: its inputs are not on the model's device."""

    streamer: Any = None
    seed: int | list[int] | None = None
    stop_strings: Any = None
    tokenizer: Any = None
    processors: list[Any] = field(default_factory=list)
    allowed_tokens: Any = None
    elsewhere: bool = False


@dataclass(slots=True)
class Prepared:
    """The requests of a call, one per row, and who judges their steps, if anybody must."""

    requests: list[Request]
    judge: Judge | None
    criteria: list[Any] = field(default_factory=list)


class Loop:
    """The decoding loop transformers calls: ids, mask, processors, criteria, merged config."""

    def __init__(self, engine: Engine, call: Call) -> None:
        self.engine, self.call = engine, call

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode all rows; returns what `Attachment.generate` returns. `input_ids` int64 [rows,
        length], already repeated for `num_return_sequences`."""
        made = self.prepare(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        self.engine.generate(made.requests, self._watcher(made))
        sequences = assemble(input_ids, made.requests, made.judge, generation_config)
        for criterion in made.criteria if made.judge is None else ():
            if type(criterion) is MaxLengthCriteria:  # warns of a text longer than the model's
                criterion(sequences[:, :-1], None)
        if not generation_config.return_dict_in_generate:
            return sequences
        steps = range(sequences.shape[1] - input_ids.shape[1])
        guides = [r.guide for r in made.requests if r.guide is not None]
        kept: dict[str, Any] = {"scores": None, "logits": None}
        for name in kept:
            if guides and getattr(guides[0], f"keep_{name}"):
                kept[name] = tuple(of_step([getattr(g, name) for g in guides], i) for i in steps)
        return GenerateDecoderOnlyOutput(sequences=sequences, **kept)

    def prepare(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Prepared:
        """One request per row, everything about it checked that needs no compute."""
        call, mask = self.call, model_kwargs.get("attention_mask")
        processors = Processors(model, logits_processor, call.processors, call.allowed_tokens)
        refuse_unsupported(vars(generation_config))
        criteria = list(stopping_criteria or [])
        add_stop_strings(criteria, call.stop_strings, call.tokenizer)
        requests = self.requests(input_ids, mask, criteria, processors, generation_config)
        if mask is not None and requests[0].guide is None:
            seen = seen_padding(input_ids, mask, processors.prepared)
            for request, ids in zip(requests, seen, strict=True):
                # What the model cannot say needs no penalty.
                vocab = self.engine.target.config.vocab_size
                request.also_seen = [i for i in ids if 0 <= i < vocab]
        judge = None
        if needs_judge(criteria) or (call.streamer is not None and len(requests) > 1):
            judge = Judge(input_ids, criteria, generation_config._pad_token_tensor)
        elif len(requests) > 1 and requests[0].stop_ids:
            check_pad(generation_config._pad_token_tensor)
        return Prepared(requests, judge, criteria)

    def requests(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        criteria: list[Any],
        processors: Processors,
        generation_config: Any,
    ) -> list[Request]:
        """One request per row, its padding dropped."""
        settings = request_settings(generation_config)
        sampled = settings.get("temperature", 0.0) > 0
        if self.call.seed is not None and not sampled:
            raise ValueError(f"seed: has no effect without do_sample=True, got {self.call.seed!r}")
        num_rows, length = input_ids.shape
        seeds = row_seeds(self.call.seed, num_rows) if sampled else [0] * num_rows
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask: expected left padding, got a row that ends in padding"
            )
        guides: list[Guide | None] = [None] * num_rows
        if processors.needed(generation_config):
            settings = {}
            guides = list(processors.guides(input_ids, mask, generation_config, seeds))
        kept = (
            [row[m] for row, m in zip(input_ids, mask.bool(), strict=True)]
            if mask is not None
            else input_ids
        )
        return [
            Request(
                prompt=ids.tolist(),
                max_new_tokens=length_limit(criteria, generation_config.max_length, length),
                stop_ids=stop_ids(criteria),
                seed=seed,
                guide=guide,
                **settings,
            )
            for ids, seed, guide in zip(kept, seeds, guides, strict=True)
        ]

    def _watcher(self, made: Prepared) -> Callable[[int, list[int]], None] | None:
        """Who sees tokens as they come."""
        if made.judge is None:
            return None if self.call.streamer is None else self._put_row
        judge = made.judge
        guides = [r.guide for r in made.requests if r.guide is not None and r.guide.keep_scores]
        scores: list[Tensor] = []

        def watch(index: int, tokens: list[int]) -> None:
            judge.take(index, tokens)
            while judge.ready():
                if guides:
                    scores.append(of_step([g.scores for g in guides], judge.steps))
                token_N, stopped = judge.judge(tuple(scores) if guides else None)
                if self.call.streamer is not None:
                    self.call.streamer.put(token_N.cpu())
                for row in stopped if judge.pads else ():
                    self.engine.stop(made.requests[row], judge.steps)
                for request in made.requests if judge.done and not judge.pads else ():
                    self.engine.stop(request, judge.steps)

        return watch

    def _put_row(self, index: int, tokens: list[int]) -> None:
        """Stream committed tokens, one per call as transformers' own loop does."""
        for token in tokens:
            self.call.streamer.put(torch.tensor([token]))


class NeedsDevice(Exception):
    """A prompt that was prepared elsewhere must be on the model's device."""


class Preparation(Loop):
    """Stops where the loop would begin: what transformers makes of the settings of one prompt.
    Raises NeedsDevice for ids elsewhere than on the model's device, where its logits processors
    run: before anything is drawn or built."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        call = self.call
        processors = Processors(model, logits_processor, call.processors, call.allowed_tokens)
        if call.elsewhere and processors.needed(generation_config):
            raise NeedsDevice
        return self.prepare(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )


def of_step(kept: list[list[Tensor]], step: int) -> Tensor:
    """What the rows' guides kept at a step, [rows, vocab]; 0 for rows that had ended."""
    there = next(row[step] for row in kept if len(row) > step)
    return torch.cat([row[step] if len(row) > step else torch.zeros_like(there) for row in kept])


def seen_padding(input_ids: Tensor, mask: Tensor, processors: list[Any]) -> list[list[int]]:
    """Masked ids of each row that transformers' repetition penalty counts as seen.

    Its processor says which: all of them, or none of the leading ones (newer releases)."""
    kind = RepetitionPenaltyLogitsProcessor
    penalty = next((p for p in processors if isinstance(p, kind)), None)
    if penalty is None:
        return [[] for _ in input_ids]
    ignored = penalty.prompt_ignore_length
    first = torch.as_tensor(0 if ignored is None else ignored, device=mask.device)
    column = torch.arange(mask.shape[1], device=mask.device)
    counted = ~mask.bool() & (column >= first.view(-1, 1))
    return [row[c].tolist() for row, c in zip(input_ids, counted, strict=True)]


def assemble(
    input_ids: Tensor, requests: list[Request], judge: Judge | None, generation_config: Any
) -> Tensor:
    """Prompts as given, new tokens to their right, pads after the shorter rows."""
    if judge is not None:
        return judge.input_ids
    pad = generation_config._pad_token_tensor
    longest = max(len(r.tokens) for r in requests)
    fill = int(pad) if pad is not None else 0
    new = torch.tensor([r.tokens + [fill] * (longest - len(r.tokens)) for r in requests])
    return torch.cat((input_ids, new.to(input_ids.device)), 1)

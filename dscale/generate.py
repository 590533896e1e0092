"""The drop-in: an attached model, and the decoding loop behind its `generate`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation import GenerateDecoderOnlyOutput

from dscale.arguments import INPUTS, check_arguments
from dscale.compiled.drafter import Drafter
from dscale.compiled.predictor import Predictor
from dscale.config import EngineConfig
from dscale.engine import Engine
from dscale.load import build_target, unfuse
from dscale.request import Request
from dscale.sampling import KNOWN, refuse_unsupported, request_settings, row_seeds
from dscale.stats import Stats


class Attachment:
    """A model whose `generate` runs on DScale. Made by `attach`; `detach` puts everything back."""

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | None,
        predictor: Predictor | None,
        config: EngineConfig,
    ) -> None:
        taps = drafter.config.taps if drafter is not None else ()
        self.model: Any = model
        target = build_target(model, taps)
        if config.pack_weights:
            target.pack()
            if drafter is not None:
                drafter.pack()
        self.engine = Engine(target, drafter, config, predictor, self._request)
        self.stats: Stats = self.engine.stats
        self._weights = _weights(model, config.pack_weights)
        self._replaced = model.__dict__.get("generate")
        model.__dict__["generate"] = _Generate(self)
        model.__dict__["_dscale"] = self

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not attached: see _Generate.
        return type(None), ()

    @torch.inference_mode(False)
    def detach(self) -> None:
        """Give `model.generate` and each parameter's own storage back, and free the engine with
        its caches; `stats` stays. Calling twice is fine."""
        if self.model.__dict__.get("_dscale") is not self:
            return
        del self.model.__dict__["_dscale"], self.model.__dict__["generate"]
        if self._replaced is not None:
            self.model.__dict__["generate"] = self._replaced
        self.engine.close()
        del self.engine
        unfuse(self.model)

    def _request(
        self,
        input_ids: list[int],
        generation_config: GenerationConfig | None,
        seed: int | None,
        kwargs: dict[str, Any],
    ) -> Request:
        """The request that `generate` would make of one prompt without padding."""
        if self.model.__dict__.get("_dscale") is not self:
            raise ValueError("model: detached meanwhile; attach again")
        if not input_ids or not all(isinstance(token, int) for token in input_ids):
            raise ValueError(f"input_ids: expected a list of token ids, got {input_ids!r}")
        # A mask of ones: without it a pad id in the prompt would be taken for padding.
        ids = torch.tensor([input_ids], device=self.model.device)
        check_arguments(ids, generation_config, self.model.generation_config, kwargs)
        self._check_weights()
        kwargs = {k: v for k, v in kwargs.items() if k in KNOWN}
        made: Any = GenerationMixin.generate(
            self.model,
            ids,
            generation_config,
            attention_mask=torch.ones_like(ids),
            custom_generate=_Preparation(self.engine, None, seed),
            **kwargs,
        )
        if len(made) != 1:
            raise ValueError(
                f"num_return_sequences: expected 1 of a submitted prompt, got {len(made)}"
            )
        request: Request = made[0]
        return request

    def _check_weights(self) -> None:
        packed = self.engine.config.pack_weights
        if _weights(self.model, packed) != self._weights:
            which = "moved or replaced" + (" or, with pack_weights, written to" if packed else "")
            raise ValueError(
                f"model: its weights were {which} after attach; detach and attach again"
            )

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: Any = None,
        seed: int | list[int] | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """`GenerationMixin.generate` on DScale: the same arguments, the same result.

        `inputs` or `input_ids`: int64 [batch, length], left-padded with `attention_mask` [batch,
        length]. The config is merged as transformers merges it; `dscale.sampling.SUPPORTED` lists
        the fields that work and every other argument raises ValueError naming it, before any
        compute. `seed`: sampling seed per row (see `row_seeds`); a row's sample depends on its
        seed and its prompt only. `streamer`: batch 1; committed tokens are put one by one, and
        `end` is called once, also after an error.

        Returns int64 [batch * num_return_sequences, length + new] with the prompt included and
        `pad_token_id` after a stop id, or a GenerateDecoderOnlyOutput when
        `return_dict_in_generate`."""
        if self.model.__dict__.get("_dscale") is not self:
            raise ValueError("model: detached meanwhile; attach again")
        for name in ("put", "end") if streamer is not None else ():
            if not callable(getattr(streamer, name, None)):
                raise ValueError(f"streamer: expected put() and end(), got {streamer!r}")
        try:
            check_arguments(inputs, generation_config, self.model.generation_config, kwargs)
            kwargs = {k: v for k, v in kwargs.items() if k in KNOWN | INPUTS}
            if streamer is not None:
                kwargs["streamer"] = streamer
            self._check_weights()
            loop = _Loop(self.engine, streamer, seed)
            return GenerationMixin.generate(
                self.model, inputs, generation_config, custom_generate=loop, **kwargs
            )
        finally:
            if streamer is not None:
                streamer.end()


class _Generate:
    """`model.generate` while attached. A deep or pickled copy of the model gets a plain one."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        functools.update_wrapper(self, attachment.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | GenerateDecoderOnlyOutput:
        return self.attachment.generate(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        model = self.attachment.model
        return functools.partial, (type(model).generate, model)


class _Loop:
    """The decoding loop transformers calls with everything prepared: ids, mask, merged config."""

    def __init__(self, engine: Engine, streamer: Any, seed: int | list[int] | None) -> None:
        self.engine, self.streamer, self.seed = engine, streamer, seed

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        mask = model_kwargs.get("attention_mask")
        requests = self.prepare(input_ids, mask, logits_processor, generation_config)
        self.engine.generate(requests, self.put if self.streamer is not None else None)
        sequences = assemble(input_ids, requests, generation_config._pad_token_tensor)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def prepare(
        self, input_ids: Tensor, mask: Tensor | None, processors: Any, generation_config: Any
    ) -> list[Request]:
        """One request per row, everything about it checked that needs no compute."""
        refuse_unsupported(vars(generation_config))
        if self.streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"streamer: expected one row, got a batch of {input_ids.shape[0]}")
        requests = self.requests(input_ids, mask, generation_config)
        if mask is not None:
            seen = seen_padding(input_ids, mask, processors or [])
            for request, ids in zip(requests, seen, strict=True):
                # What the model cannot say needs no penalty.
                vocab = self.engine.target.config.vocab_size
                request.also_seen = [i for i in ids if 0 <= i < vocab]
        return requests

    def requests(
        self, input_ids: Tensor, mask: Tensor | None, generation_config: Any
    ) -> list[Request]:
        """One request per row, its padding dropped."""
        settings = request_settings(generation_config)
        sampled = settings.get("temperature", 0.0) > 0
        if self.seed is not None and not sampled:
            raise ValueError(f"seed: has no effect without do_sample=True, got {self.seed!r}")
        num_rows, length = input_ids.shape
        seeds = row_seeds(self.seed, num_rows) if sampled else [0] * num_rows
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask: expected left padding, got a row that ends in padding"
            )
        kept = (
            [row[m] for row, m in zip(input_ids, mask.bool(), strict=True)]
            if mask is not None
            else input_ids
        )
        return [
            Request(
                prompt=ids.tolist(),
                max_new_tokens=int(generation_config.max_length) - length,
                seed=seed,
                **settings,
            )
            for ids, seed in zip(kept, seeds, strict=True)
        ]

    def put(self, index: int, tokens: list[int]) -> None:
        """Stream committed tokens, one per call as transformers' own loop does."""
        for token in tokens:
            self.streamer.put(torch.tensor([token]))


class _Preparation(_Loop):
    """Stops where the loop would begin: what transformers makes of the settings of one prompt."""

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> list[Request]:
        mask = model_kwargs.get("attention_mask")
        return self.prepare(input_ids, mask, logits_processor, generation_config)


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


def assemble(input_ids: Tensor, requests: list[Request], pad: Tensor | None) -> Tensor:
    """Prompts as given, new tokens to their right, pads after the shorter rows."""
    longest = max(len(r.tokens) for r in requests)
    if any(len(r.tokens) < longest for r in requests) and pad is None:
        raise ValueError(
            "pad_token_id: expected an id when rows stop at different lengths, got None"
        )
    fill = int(pad) if pad is not None else 0
    new = torch.tensor([r.tokens + [fill] * (longest - len(r.tokens)) for r in requests])
    return torch.cat((input_ids, new.to(input_ids.device)), 1)


def _weights(model: PreTrainedModel, versions: bool) -> list[tuple[object, ...]]:
    """Module, name and address of every parameter, and with `versions` how often it was written
    to."""
    return [
        (module, name, p.data_ptr(), p._version if versions else 0)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]

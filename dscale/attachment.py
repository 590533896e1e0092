"""The drop-in: an attachment, and the `generate` it gives a model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from dscale.arguments import INPUTS, OBJECTS, check_arguments, stop_strings_of
from dscale.checks import check_hooks
from dscale.compiled.drafter import Drafter
from dscale.compiled.predictor import Predictor
from dscale.config import EngineConfig
from dscale.engine import Engine
from dscale.errors import ClosedError
from dscale.load import build_target, unfuse
from dscale.loop import Call, Loop, NeedsDevice, Preparation, Prepared
from dscale.request import Request
from dscale.sampling import KNOWN
from dscale.stages import set_weights
from dscale.stats import Stats
from dscale.weights import WeightWatch


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
        try:
            used = set_weights(target, drafter, config.weights)
            if config.pack_weights:
                target.pack()
                if used is not None:
                    used.pack()
            self.engine = Engine(target, used, config, predictor, self._request)
        except BaseException:  # say, no memory for the copies
            unfuse(model)
            raise
        self.stats: Stats = self.engine.stats
        # Packed and 8-bit copies do not follow a write to what they were made from.
        self._copied = config.pack_weights or config.weights != "model"
        self._parameters, _ = _parameters(model, self._copied)
        self._watches = {"model": WeightWatch(target)}
        if used is not None:
            self._watches["drafter"] = WeightWatch(used)
        self._stale: str | None = None
        if self._copied:
            self._look()
            self._stale = None  # a first look finds everything new
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
        del self.engine, self._watches
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
            raise ClosedError("model: detached meanwhile; attach again")
        if not input_ids or not all(isinstance(token, int) for token in input_ids):
            raise ValueError(f"input_ids: expected a list of token ids, got {input_ids!r}")
        made = self._prepared(input_ids, generation_config, seed, kwargs)
        if len(made.requests) != 1:
            raise ValueError(
                f"num_return_sequences: expected 1 of a submitted prompt, got {len(made.requests)}"
            )
        request: Request = made.requests[0]
        if request.guide is not None and (request.guide.keep_scores or request.guide.keep_logits):
            raise ValueError(
                "output_scores, output_logits: expected False of a submitted prompt, got True"
            )
        request.judge = made.judge
        return request

    def _prepared(
        self,
        input_ids: list[int],
        generation_config: GenerationConfig | None,
        seed: int | None,
        kwargs: dict[str, Any],
    ) -> Prepared:
        """What transformers makes of one prompt: on the CPU, as far as nothing of it must be on
        the model's device. There each of a dozen reads would wait for the step under way."""
        own = ("logits_processor", "stopping_criteria", "attention_mask")
        given = any(kwargs.get(name) is not None for name in own)
        if self.model.device.type != "cpu" and not given:
            try:
                return self._on(torch.device("cpu"), input_ids, generation_config, seed, kwargs)
            except NeedsDevice:
                pass
        return self._on(self.model.device, input_ids, generation_config, seed, kwargs)

    def _on(
        self,
        device: torch.device,
        input_ids: list[int],
        generation_config: GenerationConfig | None,
        seed: int | None,
        kwargs: dict[str, Any],
    ) -> Prepared:
        """One prompt prepared on a device. Raises NeedsDevice where it must be the model's."""
        ids = torch.tensor([input_ids], device=device)
        # A mask of ones: without it a pad id in the prompt would be taken for padding.
        arguments = {"attention_mask": torch.ones_like(ids), **kwargs}
        made: Prepared = self._run(Preparation, ids, generation_config, arguments, seed=seed)
        return made

    def _run(
        self,
        loop: type[Loop],
        inputs: Tensor | None,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
        *,
        seed: Any,
        streamer: Any = None,
    ) -> Any:
        """Check the arguments, let transformers prepare everything, and run the loop."""
        of_model = self.model.generation_config
        check_arguments(inputs, generation_config, of_model, kwargs)
        self._check_weights()
        call = Call(
            streamer,
            seed,
            tokenizer=kwargs.get("tokenizer"),
            processors=list(kwargs.get("logits_processor") or []),
            allowed_tokens=kwargs.get("prefix_allowed_tokens_fn"),
        )
        call.stop_strings = stop_strings_of(generation_config, of_model, kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k in KNOWN | INPUTS | OBJECTS}
        kwargs.pop("tokenizer", None)
        if call.stop_strings is not None:
            # transformers would look for the tokenizer, which it drops for a decoding loop.
            kwargs["stop_strings"] = None
        if streamer is not None:
            kwargs["streamer"] = streamer
        model = self.model
        if loop is Preparation and inputs is not None:
            call.elsewhere = inputs.device != model.device
            model = _Elsewhere(model, inputs.device) if call.elsewhere else model
        made = loop(self.engine, call)
        return GenerationMixin.generate(
            model, inputs, generation_config, custom_generate=made, **kwargs
        )

    def _look(self) -> None:
        """Note in `_stale` whose weights were written to since the last look. It stays noted: the
        copies are never made anew."""
        for name, watch in self._watches.items():
            if not watch.same():
                self._stale = self._stale or name

    def _check_weights(self) -> None:
        """Raise ValueError where the engine no longer computes with the model's weights, or where
        forward hooks were added."""
        # Looking waits for the device. Weights may only change while no request runs.
        if self._copied and not self.engine.num_open:
            self._look()
        parameters, hooked = _parameters(self.model, self._copied)
        if hooked:
            check_hooks(self.model)
        stale = self._stale if parameters == self._parameters else "model"
        if stale is not None:
            config = self.engine.config
            setting = "pack_weights" if config.pack_weights else f"weights={config.weights!r}"
            which = "moved or replaced" + (
                f" or, with {setting}, written to" if self._copied else ""
            )
            raise ValueError(
                f"{stale}: its weights were {which} after attach; detach and attach again"
            )

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        *,
        streamer: Any = None,
        seed: int | list[int] | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """`GenerationMixin.generate` on DScale: the same arguments, the same result.

        `inputs` or `input_ids`: int64 [batch, length], left-padded with `attention_mask` [batch,
        length]. The config is merged as transformers merges it; `dscale.sampling.SUPPORTED` lists
        the fields that work and every other argument raises ValueError naming it, before any
        compute. `stopping_criteria` see every step of the whole batch, as there. `seed`: of the
        samples, one per returned row, or a number `s` for `s`, `s + 1`, ...; None draws them from
        torch's global generator. A row's sample depends on its seed and its prompt only.
        `streamer`: committed tokens are put step by step, and `end` is called once, also after an
        error.

        Returns int64 [batch * num_return_sequences, length + new] with the prompt included and
        `pad_token_id` after a stop id, or a GenerateDecoderOnlyOutput when
        `return_dict_in_generate`."""
        if self.model.__dict__.get("_dscale") is not self:
            raise ValueError("model: detached meanwhile; attach again")
        for name in ("put", "end") if streamer is not None else ():
            if not callable(getattr(streamer, name, None)):
                raise ValueError(f"streamer: expected put() and end(), got {streamer!r}")
        kwargs |= {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        }
        try:
            out: Tensor | GenerateDecoderOnlyOutput = self._run(
                Loop, inputs, generation_config, kwargs, seed=seed, streamer=streamer
            )
            return out
        finally:
            if streamer is not None:
                streamer.end()


class _Elsewhere:
    """A model that says it is on another device: what transformers prepares for it is there, too,
    and it does not warn of inputs that are not on the model's."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model, self.device = model, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


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


def _parameters(model: PreTrainedModel, versions: bool) -> tuple[list[tuple[object, ...]], bool]:
    """Module, name and address of every parameter, and with `versions` how often it was written
    to; and whether any module has a forward hook."""
    parameters: list[tuple[object, ...]] = []
    hooked = False
    for module in model.modules():
        hooked = hooked or bool(module._forward_hooks or module._forward_pre_hooks)
        for name, p in module._parameters.items():
            if p is not None:
                parameters.append((module, name, p.data_ptr(), p._version if versions else 0))
    return parameters, hooked

"""Whether the code that a model's forward runs is the one the target decoder was written after."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CALLED = re.compile(
    r"|lm_head|model(\.(embed_tokens|norm|rotary_emb|layers\.\d+"
    r"(\.(\w+_layernorm|(self_attn|mlp)(\.(\w+_proj|[qk]_norm|act_fn))?))?))?"
)
"""Names of the modules that a supported model's forward calls."""

OWN = ("transformers.", "torch.", "accelerate.")
"""Packages whose code around a forward leaves what it computes as it is."""

HELPERS = ("apply_rotary_pos_emb", "create_causal_mask")
"""Functions that the forwards of a family look up in its module."""


def check_forwards(model: PreTrainedModel) -> None:
    """Refuse a `forward` that a subclass, an instance or a patched class has in place of the one
    the target decoder was written after: nobody would call it. Those that only wrap it may stay:
    accelerate's hooks, `torch.compile`, and hub kernels that transformers was asked for."""
    config: Any = model.config
    family = f"transformers.models.{config.model_type}."
    for name, module in model.named_modules():
        replaced = "forward" in vars(module) and hasattr(type(module), "kernel_layer_name")
        called = CALLED.fullmatch(name.replace("._orig_mod", ""))
        if not called or (replaced and model.use_kernels):
            continue
        for home in _homes(module):
            other = home.startswith("transformers.models.") and not home.startswith(family)
            if other or not home.startswith(OWN):
                raise _refusal(config, f"{type(module).__name__}'s from {home!r}", name)
        if not (isinstance(module, OptimizedModule) or _is_own(module)):
            raise _refusal(config, "one of another module or class", name)


def _refusal(config: Any, got: str, name: str) -> ValueError:
    return ValueError(
        f"model: expected the forward that transformers has for {config.model_type}, "
        f"got {got} on {name or 'it'!r}, which no pass would call; attach to a model without it"
    )


def _homes(module: nn.Module) -> Iterator[str]:
    """The Python modules that the code of a module's call is from, wrappers first."""
    hooks = [getattr(module, "_hf_hook", None)]  # accelerate's wrapper calls it
    while hooks:
        hook = hooks.pop()
        hooks += getattr(hook, "hooks", ())
        if hook is not None:
            yield type(hook).__module__
    for outermost in (type(module).__call__, module._compiled_call_impl, module.forward):
        for function in _layers(outermost):
            yield _home(function)


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it wraps, from the outermost to the innermost."""
    while function is not None:
        yield function
        inner = function.func if isinstance(function, partial) else None
        function = getattr(function, "__wrapped__", inner)


def _home(function: Any) -> str:
    code = function.func if isinstance(function, partial) else function
    code = getattr(code, "__func__", code)
    home: str = getattr(code, "__globals__", {}).get("__name__") or type(code).__module__
    return home


def _is_own(module: nn.Module) -> bool:
    """Whether a module's forward ends in its class's, called on the module itself."""
    layers = list(_layers(module.forward))
    selves = [getattr(layer, "__self__", module) for layer in layers]
    innermost = getattr(layers[-1], "__func__", layers[-1])
    return innermost is inspect.unwrap(type(module).forward) and all(
        one is module for one in selves if isinstance(one, nn.Module)
    )


def check_functions(model: PreTrainedModel) -> None:
    """Refuse an attention that somebody registered, or another function in place of one that the
    forwards call: nobody would call it. Hub kernels, whose names have a slash, may stay."""
    config: Any = model.config
    attention = (config._attn_implementation or "eager").removeprefix("paged|")
    kind = config.model_type
    family = vars(sys.modules[f"transformers.models.{kind}.modeling_{kind}"])
    used = {name: family.get(name) for name in HELPERS}
    if "/" not in attention:
        used[attention] = ALL_ATTENTION_FUNCTIONS.get(
            attention, family.get("eager_attention_forward")
        )
    for name, function in used.items():
        for layer in _layers(function):
            if not _home(layer).startswith(OWN):
                raise ValueError(
                    f"model: expected transformers' own {name}, got one from {_home(layer)!r}, "
                    "which no pass would call"
                )

"""A soak of the continuous batcher: random requests, cancellations and malformed ones through one
small engine, each compared with its single run. `make soak` runs it at length."""

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tiny import VOCAB, continuation, plain, prompt, tiny_drafter, tiny_model

import dscale
from bench.soak_load import Case, Plan, all_back, drive, malformed
from dscale.engine import Engine
from dscale.handle import Result

LENGTHS = (1, 3, 9, 17, 40, 127, 128, 129, 260)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 1},
    {"max_new_tokens": 12},
    {"max_new_tokens": 40},
    {"max_new_tokens": 60, "eos_token_id": list(range(0, VOCAB, 25)), "pad_token_id": 0},
    {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "seed": 3},
    {"max_new_tokens": 30, "do_sample": True, "top_k": 9, "top_p": 0.9, "seed": 11},
    {"max_new_tokens": 16, "repetition_penalty": 1.3},
)
GUIDED: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 16, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 9, "min_new_tokens": 4, "eos_token_id": list(range(0, VOCAB, 9)),
     "pad_token_id": 0},
)  # fmt: skip
"""Settings of the host path, in the long soak."""
LONGEST = 200


def text(length: int, alike: bool) -> list[int]:
    """A prompt: one of its own, or the beginning of a long one."""
    return prompt(max(LENGTHS))[:length] if alike else prompt(length)


@dataclass
class References:
    """What each prompt gives with each setting, alone: greedy by transformers, sampled by plain
    decoding of one request, each computed once."""

    model: Any = field(default_factory=tiny_model)
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __call__(self, length: int, setting: int, alike: bool = False) -> list[int]:
        """The new tokens."""
        if (length, setting, alike) not in self.known:
            ids = torch.tensor([text(length, alike)])
            kwargs = (*SETTINGS, *GUIDED)[setting]
            if "seed" in kwargs:
                with dscale.attach(self.model, mode="ar"):
                    out = self.model.generate(ids, **kwargs)
            else:
                out = plain(self.model, ids, **kwargs)
            self.known[length, setting, alike] = out[0, length:].tolist()
        return self.known[length, setting, alike]

    def text(self, length: int) -> list[int]:
        """The longest greedy continuation of a prompt, of LONGEST tokens."""
        if (length, -1) not in self.known:
            tokens = continuation(self.model, prompt(length), LONGEST)
            self.known[length, -1] = tokens[length:]
        return self.known[length, -1]


def check(case: Case, result: Result) -> None:
    """Compare one result with its single run."""
    got, want = result.generated_tokens, case.plan.want
    if result.finish_reason == "cancelled":
        assert got == want[: len(got)]
    else:
        assert got == want, (result, want)
        assert result.finish_reason in ("eos", "length")
    assert result.error is None


def soak(
    engine: Engine,
    references: References,
    count: int,
    seed: int,
    outstanding: int = 24,
    *,
    everything: bool = False,
) -> Counter[str]:
    """Run `count` random requests, at most `outstanding` at once, and count how they ended.
    `everything`: guided ones too, and prompts that begin alike."""
    settings = (*SETTINGS, *(GUIDED if everything else ()))

    def draw(rng: random.Random) -> Plan:
        length, setting = rng.choice(LENGTHS), rng.randrange(len(settings))
        alike = everything and rng.random() < 0.4
        want = references(length, setting, alike)
        return Plan(text(length, alike), settings[setting], want)

    too_long = None if engine.config.pool_tokens is None else 100_000
    bad = malformed(engine, VOCAB, too_long)
    return drive(engine, count, random.Random(seed), draw, check, bad, outstanding=outstanding)


def main() -> None:
    """Soak at the length asked for, in every mode."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    references = References()
    model = tiny_model()
    with TemporaryDirectory() as folder:
        drafter = tiny_drafter(Path(folder), model)
    modes: tuple[Any, ...] = ("dscale", "ar", "dflash", "+tiles", "+budget")
    fixed = {"pool_tokens": 24 * 128, "max_concurrency": 8, "prefill_chunk": 128}
    for number, mode in enumerate(modes):
        for settings in (fixed, {}):
            spec = dscale.attach(model, None if mode == "ar" else drafter, mode=mode, **settings)
            with spec:
                began, engine = time.perf_counter(), spec.engine
                each = options.requests // (2 * len(modes))
                seed = options.seed + number
                ends = soak(engine, references, each, seed, everything=True)
                all_back(engine)
                took = f"{time.perf_counter() - began:.1f} s"
                hits = f"{spec.stats.prefix_hits} tokens shared"
                print(f"{mode} {settings}: {took}, {dict(ends)}, {hits}", flush=True)


if __name__ == "__main__":
    main()

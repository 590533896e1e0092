"""Responses from the target for a drafter's training: the two generators and the run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import drafter_data as data
import numpy as np
import torch
from drafter_data import Corpus, Job, Prompt, Tokens
from tqdm import tqdm

import dscale

# (prompts, temperature, a seed for each, max_new_tokens) -> responses, stop token included
Generator = Callable[[Sequence[Tokens], float, Sequence[int], int], list[Tokens]]
PAGE, RESERVE = 128, 32  # what the engine reserves for a request: whole pages, two blocks more


@contextmanager
def dscale_generator(model: Any, *, rows: int, longest: int, warm: Tokens) -> Iterator[Generator]:
    """Generate with this project's own engine in mode `ar`, attached for the duration.

    The engine sizes its cache by the largest call so far and compiles anew when it grows, so the
    first call asks for `rows` requests of `longest` tokens: copies of the prompt `warm`, whose
    answer should be short.
    """
    pages = -(-(longest + RESERVE) // PAGE)
    spec = dscale.attach(model, mode="ar", pool_tokens=rows * pages * PAGE, max_concurrency=rows)

    def generate(
        prompts: Sequence[Tokens], temperature: float, seeds: Sequence[int], max_new: int
    ) -> list[Tokens]:
        ids, mask = pad_left(prompts, model.generation_config.pad_token_id or 0, model.device)
        how: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            how = {"do_sample": True, "temperature": temperature, "seed": list(seeds)}
            how |= {"top_k": 0, "top_p": 1.0}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new, **how)
        return responses_of(out[:, ids.shape[1] :], stop_ids(model))

    try:
        generate([warm] * rows, 0.0, [0] * rows, pages * PAGE - RESERVE - len(warm))
        yield generate
    finally:
        spec.detach()


@contextmanager
def transformers_generator(model: Any, *, rows: int, longest: int) -> Iterator[Generator]:
    """Generate with transformers alone: a static cache, one batch shape, so one compilation."""

    def generate(
        prompts: Sequence[Tokens], temperature: float, seeds: Sequence[int], max_new: int
    ) -> list[Tokens]:
        filled = [*prompts, *[prompts[-1]] * (rows - len(prompts))]
        pad = model.generation_config.pad_token_id or 0
        ids, mask = pad_left(filled, pad, model.device, longest)
        how: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            torch.manual_seed(seeds[0])
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max_new,
                cache_implementation="static",
                **how,
            )
        return responses_of(out[: len(prompts), ids.shape[1] :], stop_ids(model))

    yield generate


def pad_left(
    prompts: Sequence[Tokens], pad: int, device: Any, length: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack prompts to int64 `[rows, longest]` with their mask, padding on the left."""
    length = max(length, *(len(p) for p in prompts))
    ids = np.full((len(prompts), length), pad, np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def stop_ids(model: Any) -> list[int]:
    """The stop tokens of the model's generation config."""
    stop = model.generation_config.eos_token_id
    return [stop] if isinstance(stop, int) else list(stop or [])


def responses_of(new_tokens: torch.Tensor, stops: list[int]) -> list[Tokens]:
    """Cut each row of `[rows, new]` after its first stop token."""
    rows = new_tokens.cpu().numpy()
    ends = np.isin(rows, stops)
    lengths = np.where(ends.any(1), ends.argmax(1) + 1, rows.shape[1])
    return [row[:n].copy() for row, n in zip(rows, lengths, strict=True)]


def batches_of(
    jobs: Sequence[Job], prompts: Sequence[Prompt], rows: int, seed: int
) -> list[list[Job]]:
    """Cut jobs into batches of one temperature and similar prompt lengths, in random order.

    Jobs of held-out and measured prompts come first, and the batch with the longest prompt before
    everything, since an engine sizes its cache by the first call.
    """

    def cut(part: list[Job], window: int) -> list[list[Job]]:
        out = []
        for start in range(0, len(part), window):
            some = sorted(
                part[start : start + window], key=lambda j: -len(prompts[j.prompt].tokens)
            )
            out += [some[i : i + rows] for i in range(0, len(some), rows)]
        return out

    first = [j for j in jobs if prompts[j.prompt].split != "train"]
    rest = [j for j in jobs if prompts[j.prompt].split == "train"]
    greedy = [j for j in rest if j.temperature == 0]
    fill = greedy[len(greedy) - min(len(greedy), -len(first) % rows) :]
    batches = cut(first + fill, len(first) + len(fill) + 1)
    filled = set(fill)
    rest = [j for j in rest if j not in filled]
    later = []
    for warm in sorted({j.temperature for j in rest}):
        later += cut([j for j in rest if j.temperature == warm], rows * 8)
    order = np.random.default_rng([seed, 2]).permutation(len(later))
    return batches + [later[i] for i in order]


def run_jobs(
    corpus: Corpus,
    batches: Sequence[Sequence[Job]],
    generate: Generator,
    *,
    max_new: int,
    seconds: float,
    loops: str,
    save: Callable[[], None],
) -> dict[str, Any]:
    """Generate batch after batch into `corpus` until all are done or `seconds` are over.

    Continues after `corpus.done_batches`. Training responses pass the loop rule; others stay as
    they are. `save` is called every 90 seconds and at the end.
    """
    began = saved = time.monotonic()
    took, tokens, dropped, kept = 0.0, 0, 0, 0
    todo = list(batches[corpus.done_batches :])
    bar = tqdm(todo, desc="generate", unit="batch")
    for batch in bar:
        start = time.monotonic()
        if start - began + took > seconds:
            break
        prompts = [corpus.prompts[j.prompt] for j in batch]
        out = generate(
            [p.tokens for p in prompts], batch[0].temperature, [j.seed for j in batch], max_new
        )
        for job, prompt, response in zip(batch, prompts, out, strict=True):
            tokens += len(response)
            looped = data.loop_start(response) is not None
            item = (
                data.keep_response(response, loops=loops)
                if prompt.split == "train"
                else (response, looped)
            )
            if item is None:
                dropped += 1
                continue
            kept += 1
            corpus.responses.append(item[0])
            corpus.looped.append(item[1])
            corpus.prompt_of.append(job.prompt)
            corpus.temperature.append(job.temperature)
        corpus.done_batches += 1
        took = time.monotonic() - start
        bar.set_postfix(
            kept=kept, dropped=dropped, tok_s=round(tokens / (time.monotonic() - began))
        )
        if time.monotonic() - saved > 90:
            save()
            saved = time.monotonic()
    save()
    spent = time.monotonic() - began
    return {
        "seconds": round(spent, 1),
        "batches": corpus.done_batches,
        "of_batches": len(batches),
        "kept": kept,
        "dropped": dropped,
        "tokens_per_second": round(tokens / max(spent, 1e-9)),
    }

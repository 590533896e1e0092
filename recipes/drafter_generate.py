"""Responses from the target for a drafter's training: the two generators, self-made prompts, the run."""

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

MATHS_OPENERS = (
    "Find the value of", "What is the", "How many", "Let $f(x) =", "Simplify", "Evaluate $",
    "Compute", "Solve for $x$:", "In triangle $ABC$,", "Find all", "The polynomial", "A circle",
    "What is the greatest", "What is the smallest positive integer", "Express", "Suppose that",
    "Factor", "The sum of", "Find the number of", "If $x +", "Let $a$ and $b$ be",
    "What is the area of", "The graph of", "For how many integers", "A rectangle", "Convert",
    "Find the remainder when", "What is the probability that", "Two fair dice", "The function",
    "Given that", "The sequence", "Determine", "Let $z$ be a complex number", "What is the sum of",
    "A bag contains", "The vectors", "Calculate", "Points $A$ and $B$", "What is the distance",
)  # fmt: skip
CODE_OPENERS = (
    "Write a function to", "Write a python function to", "Write a function that", "Implement a",
    "Write a Python program to", "Create a function that takes", "Given a list of integers,",
    "Given a string,", "Write a function to find", "Write a function to check",
    "Write a python function to count", "Write a function to remove", "Write a function to sort",
)  # fmt: skip
STUB_OPENERS = ("def ", "from typing import List\n\n\ndef ", "def is_", "def count_", "def find_")


@contextmanager
def dscale_generator(model: Any, pool_tokens: int | None) -> Iterator[Generator]:
    """Generate with this project's own engine in mode `ar`, attached for the duration."""
    spec = dscale.attach(model, mode="ar", pool_tokens=pool_tokens)

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


def pool_tokens_for(lengths: Sequence[int], rows: int, max_new: int) -> int:
    """Tokens of paged cache that the `rows` longest of these prompts need at once."""
    longest = sorted(lengths, reverse=True)[:rows]
    return sum(-(-(n + max_new + RESERVE) // PAGE) * PAGE for n in longest)


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

    Continues after `corpus.done_batches`. Training responses pass the loop rule; others are kept as
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


def seeds_for_prompts(
    prompts: Sequence[Prompt], count: int, seed: int
) -> list[tuple[str, str, str]]:
    """Draw (source, user turn so far, text put behind it) for `count` self-made prompts.

    Half are maths: an opener, or the first words of a training question. A quarter are plain code
    requests, a quarter function stubs.
    """
    rng = np.random.default_rng([seed, 3])
    train = [p for p in prompts if p.split == "train"]
    maths = [p.text for p in train if p.source.startswith("gsm8k")]
    code = [p.text for p in train if p.source == "mbpp_train"]
    out = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.5:
            from_train = bool(maths) and rng.random() < 0.3
            text = _head(maths, rng) if from_train else str(rng.choice(MATHS_OPENERS))
            out.append(("self_maths", text, data.MATHS_SUFFIX))
        elif kind < 0.75:
            from_train = bool(code) and rng.random() < 0.5
            text = _head(code, rng) if from_train else str(rng.choice(CODE_OPENERS))
            out.append(("self_code", text, ""))
        else:
            text = data.CODE_PREFIX + "```python\n" + str(rng.choice(STUB_OPENERS))
            out.append(("self_code", text, ""))
    return out


def _head(texts: Sequence[str], rng: np.random.Generator) -> str:
    words = texts[rng.integers(len(texts))].split()
    return " ".join(words[: rng.integers(3, 8)])


def make_prompts(
    corpus: Corpus,
    tokenizer: Any,
    generate: Generator,
    *,
    count: int,
    rows: int,
    max_tokens: int,
    seconds: float,
    excluded: set[tuple[str, ...]],
    stops: list[int],
    seed: int,
) -> dict[str, int]:
    """Let the target write user turns and add the good ones to `corpus.prompts`.

    Dropped: a turn without an end, one that loops or is shorter than 5 words, one with a control
    token, a repeat, and one that shares 13 words in a row with `excluded`.
    """
    mark = "@@turn@@"
    head = data.chat_prefix(tokenizer, mark).split(mark)[0]
    wanted = seeds_for_prompts(corpus.prompts, count, seed)
    ids = data.tokenize(tokenizer, [head + text.rstrip(" ") for _, text, _ in wanted])
    fate = {"asked": 0, "kept": 0, "malformed": 0, "excluded": 0}
    seen, began, took = {p.text for p in corpus.prompts}, time.monotonic(), 0.0
    special = set(tokenizer.all_special_ids)
    for start in tqdm(range(0, len(wanted), rows), desc="self-made prompts", unit="batch"):
        now = time.monotonic()
        if now - began + took > seconds:
            break
        part = slice(start, start + rows)
        seeds = range(10**6 + start, 10**6 + start + len(ids[part]))
        out = generate(ids[part], 0.8, list(seeds), 96)
        took = time.monotonic() - now
        for number, ((source, text, tail), tokens) in enumerate(
            zip(wanted[part], out, strict=True)
        ):
            fate["asked"] += 1
            turn = _finish(tokenizer, text.rstrip(" "), tokens, stops, special)
            full = None if turn is None else data.chat_prefix(tokenizer, turn + tail)
            row = None if full is None else data.tokenize(tokenizer, [full])[0]
            if turn is None or row is None or len(row) > max_tokens or turn + tail in seen:
                fate["malformed"] += 1
            elif data.word_grams(turn) & excluded:
                fate["excluded"] += 1
            else:
                fate["kept"] += 1
                seen.add(turn + tail)
                name = f"{source}/{start + number}"
                corpus.prompts.append(
                    Prompt(id=name, source=source, split="train", text=turn + tail, tokens=row)
                )
    return fate


def _finish(
    tokenizer: Any, seed_text: str, tokens: Tokens, stops: list[int], special: set[int]
) -> str | None:
    body = tokens[:-1]
    if len(tokens) == 0 or tokens[-1] not in stops or special & set(body.tolist()):
        return None
    turn = seed_text + str(tokenizer.decode(body.tolist()))
    turn = turn.rstrip()
    if "```" in seed_text and turn.count("```") % 2:
        turn += "\n\n```"
    short = len(turn.removeprefix(data.CODE_PREFIX).split()) < 5
    return None if short or data.loop_start(tokens) is not None else turn

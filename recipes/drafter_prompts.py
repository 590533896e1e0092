"""Prompts that the target writes itself, in the style of the training prompts."""

import time
from collections.abc import Sequence
from typing import Any

import drafter_data as data
import numpy as np
from drafter_data import Corpus, Prompt, Tokens
from drafter_generate import Generator
from tqdm import tqdm

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
    words = texts[int(rng.integers(len(texts)))].split()
    return " ".join(words[: int(rng.integers(3, 8))])


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
    seen, began, took = {p.text for p in corpus.prompts}, time.monotonic(), seconds
    special = set(tokenizer.all_special_ids)
    for start in tqdm(range(0, len(wanted), rows), desc="self-made prompts", unit="batch"):
        now = time.monotonic()
        if start and now - began + took > seconds:
            break
        part = slice(start, start + rows)
        seeds = range(10**6 + start, 10**6 + start + len(ids[part]))
        out = generate(ids[part], 0.8, list(seeds), 96)
        # The shortest so far, since the first batch also compiles.
        took = min(took, time.monotonic() - now)
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

"""A drafter's training text: prompts, the responses to ask for, loops, and its files."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dscale.text import read_prompts

Tokens = NDArray[np.integer[Any]]
MATHS_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE_PREFIX = "Write a solution to the following problem and make sure that it passes the tests:\n"
# Responses for each prompt of a source; a fraction is the share of prompts that get one.
SHARES = {
    "gsm8k_train": 6.0,
    "mbpp_train": 24.0,
    "mbpp_train_stub": 24.0,
    "exercism": 16.0,
    "self_maths": 3.0,
    "self_code": 3.0,
}
OTHER_SHARE = 1.0
MAX_FILE_BYTES = 15 * 2**20


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A user turn. `split` is train, val (held out of training) or eval (a measured set)."""

    id: str
    source: str
    split: str
    text: str
    tokens: Tokens


@dataclass(slots=True, kw_only=True)
class Corpus:
    """Prompts and the target's responses to them.

    A response is the index of its prompt, its temperature (0 for greedy), its tokens with the stop
    token last where it has one, and whether it was cut off where it began to loop.
    """

    prompts: list[Prompt] = field(default_factory=list)
    prompt_of: list[int] = field(default_factory=list)
    temperature: list[float] = field(default_factory=list)
    looped: list[bool] = field(default_factory=list)
    responses: list[Tokens] = field(default_factory=list)
    done_batches: int = 0

    def select(self, split: str, *, greedy: bool = False) -> list[int]:
        """Indices of the responses of one split, only greedy and unlooped ones if asked."""
        return [
            i
            for i, p in enumerate(self.prompt_of)
            if self.prompts[p].split == split
            and not (greedy and (self.temperature[i] > 0 or self.looped[i]))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One response to generate: greedy at temperature 0, else sampled with its own seed."""

    prompt: int
    temperature: float
    seed: int


def chat_prefix(tokenizer: Any, text: str) -> str:
    """The chat template around one user turn, up to where the answer begins."""
    turn = [{"role": "user", "content": text}]
    out: str = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return out


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[Tokens]:
    """Token ids of already templated texts, without further special tokens."""
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    return [np.asarray(row, dtype=np.int64) for row in rows]


def load_prompts(
    tokenizer: Any, paths: Iterable[Path], *, split: str, max_tokens: int, limit: int | None = None
) -> list[Prompt]:
    """Read prompt files; the source is a row's `source`, or the file's name without suffixes.

    Prompts longer than `max_tokens` with their template are left out; `limit` is for each file.
    """
    out = []
    for path in paths:
        rows = read_prompts(path)
        ids = tokenize(tokenizer, [chat_prefix(tokenizer, row["prompt"]) for row in rows])
        kept = [
            Prompt(
                id=row["id"],
                source=row.get("source", path.name.split(".")[0]),
                split=split,
                text=row["prompt"],
                tokens=tokens,
            )
            for row, tokens in zip(rows, ids, strict=True)
            if len(tokens) <= max_tokens
        ]
        out += kept[:limit]
    return out


def quota(prompts: Sequence[Prompt], known: dict[str, int]) -> dict[str, int]:
    """Prompts of each source to hold out: `known` where it knows one of them, else a tenth, 1 to
    64. Raises ValueError where none would be left to train on."""
    found = Counter(p.source for p in prompts if p.split == "train")
    if not found or known.keys() & found.keys():
        return known
    chosen = {source: min(64, max(1, count // 10)) for source, count in found.items()}
    if chosen == found:
        raise ValueError(f"prompts: expected two or more of a source, got {dict(found)}")
    return chosen


def hold_out(prompts: list[Prompt], quota: dict[str, int]) -> None:
    """Move the first `quota[source]` training prompts of each source to the split `val`.

    Rows of related sources that share the last part of their id (one task in two wordings) move
    together, so that no task is on both sides.
    """
    left, moved = dict(quota), set()
    for prompt in prompts:
        if prompt.split == "train" and left.get(prompt.source, 0) > 0:
            left[prompt.source] -= 1
            moved.add(_task(prompt))
    for prompt in prompts:
        if prompt.split == "train" and _task(prompt) in moved:
            prompt.split = "val"


def _task(prompt: Prompt) -> tuple[str, str]:
    return prompt.source.removesuffix("_stub"), prompt.id.rsplit("/", 1)[-1]


def plan_jobs(
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    shares: dict[str, float],
    seed: int,
) -> list[Job]:
    """List what to generate: held-out and measured prompts greedily first, then a fair mixture.

    The first response of a training prompt is greedy, the others take `temperatures` in turn. The
    training jobs are shuffled, so wherever time runs out, what is there has the asked proportions.
    """
    rng = np.random.default_rng([seed, 1])
    fixed = [
        Job(prompt=i, temperature=0.0, seed=i) for i, p in enumerate(prompts) if p.split != "train"
    ]
    jobs = []
    for index, prompt in enumerate(prompts):
        if prompt.split != "train":
            continue
        share = shares.get(prompt.source, OTHER_SHARE)
        count = int(share) + int(rng.random() < share % 1)
        for turn in range(count):
            warm = temperatures[(turn - 1) % len(temperatures)] if turn and temperatures else 0.0
            if turn == 0 or warm > 0:
                jobs.append(Job(prompt=index, temperature=warm, seed=index * 64 + turn))
    order = rng.permutation(len(jobs))
    return fixed + [jobs[i] for i in order]


def loop_start(tokens: Tokens, *, width: int = 8, limit: int = 4) -> int | None:
    """Where a response begins to loop: the end of the first copy of a `width`-gram seen more than
    `limit` times, the earliest of these; None for a response that does not loop."""
    if len(tokens) < width + limit:
        return None
    grams = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), width)
    _, first, count = np.unique(grams, axis=0, return_index=True, return_counts=True)
    many = first[count > limit]
    return int(many.min()) + width if len(many) else None


def keep_response(tokens: Tokens, *, loops: str, shortest: int = 3) -> tuple[Tokens, bool] | None:
    """Apply the loop rule `drop` or `cut` to a training response; None when nothing is left.

    A cut response keeps its text up to the first copy of the repeated part, at least 16 tokens.
    """
    start = loop_start(tokens)
    if start is None:
        return (tokens, False) if len(tokens) >= shortest else None
    return (tokens[:start], True) if loops == "cut" and start >= 16 else None


def word_grams(text: str, width: int = 13) -> set[tuple[str, ...]]:
    """The runs of `width` words of a text, in lower case, without our two wrappers."""
    text = text.replace(MATHS_SUFFIX.strip(), " ").replace(CODE_PREFIX.strip(), " ")
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + width]) for i in range(len(words) - width + 1)}


def excluded_grams(paths: Iterable[Path]) -> set[tuple[str, ...]]:
    """The word runs of every prompt and human solution in the given measured files."""
    out: set[tuple[str, ...]] = set()
    for path in paths:
        for row in read_prompts(path):
            out |= word_grams(row["prompt"]) | word_grams(str(row.get("solution", "")))
    return out


def save_corpus(corpus: Corpus, folder: Path, *, vocab_size: int) -> list[Path]:
    """Write `corpus-0.npz` (prompts) and one to four `corpus-N.npz` (responses), <= 15 MiB.

    Raises ValueError, before it writes, when the responses need more files than that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    meta = [[p.id, p.source, p.split, p.text] for p in corpus.prompts]
    head: dict[str, Any] = {
        "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
        "done_batches": np.asarray(corpus.done_batches),
        **_flat([p.tokens for p in corpus.prompts], kind),
    }
    total = sum(len(r) for r in corpus.responses) * np.dtype(kind).itemsize
    # Stored tokens deflate to about 0.7 of their size; 0.9 leaves room.
    parts = max(1, -(-int(total * 0.9) // MAX_FILE_BYTES))
    if parts > 4:
        raise ValueError(f"corpus: expected at most {4 * MAX_FILE_BYTES} bytes, got {total}")
    files = [folder / f"corpus-{i}.npz" for i in range(parts + 1)]
    np.savez_compressed(files[0], **head)
    for index, rows in enumerate(np.array_split(np.arange(len(corpus.responses)), parts)):
        np.savez_compressed(
            files[index + 1],
            prompt_of=np.asarray([corpus.prompt_of[i] for i in rows], np.uint32),
            temperature=np.asarray([corpus.temperature[i] for i in rows], np.float32),
            looped=np.asarray([corpus.looped[i] for i in rows], bool),
            **_flat([corpus.responses[i] for i in rows], kind),
        )
    for stale in set(folder.glob("corpus-*.npz")) - set(files):
        stale.unlink()
    return files


def load_corpus(folder: Path) -> Corpus:
    """Read what `save_corpus` wrote. Raises FileNotFoundError when there is none."""
    corpus = Corpus()
    with np.load(folder / "corpus-0.npz") as head:
        meta = json.loads(head["meta"].tobytes())
        corpus.done_batches = int(head["done_batches"])
        for row, tokens in zip(meta, _split(head), strict=True):
            text = dict(zip(("id", "source", "split", "text"), row, strict=True))
            corpus.prompts.append(Prompt(**text, tokens=tokens))
    files = sorted(folder.glob("corpus-*.npz"))[1:]
    for path in files:
        with np.load(path) as part:
            corpus.prompt_of += part["prompt_of"].tolist()
            corpus.temperature += [round(t, 4) for t in part["temperature"].tolist()]
            corpus.looped += part["looped"].tolist()
            corpus.responses += _split(part)
    return corpus


def _flat(rows: Sequence[Tokens], kind: Any) -> dict[str, NDArray[Any]]:
    flat = np.concatenate(rows) if rows else np.zeros(0)
    return {"tokens": flat.astype(kind), "lengths": np.asarray([len(r) for r in rows], np.uint32)}


def _split(part: Any) -> list[Tokens]:
    ends = np.cumsum(part["lengths"])[:-1]
    return (
        [r.astype(np.int64) for r in np.split(part["tokens"], ends)]
        if len(part["lengths"])
        else []
    )


def summary(corpus: Corpus) -> dict[str, Any]:
    """Counts of a corpus for the log, the report and the model card."""
    sources: dict[str, list[int]] = {}
    for index in corpus.select("train"):
        row = sources.setdefault(corpus.prompts[corpus.prompt_of[index]].source, [0, 0])
        row[0] += 1
        row[1] += len(corpus.responses[index])
    greedy = sum(corpus.temperature[i] == 0 for i in corpus.select("train"))
    return {
        "prompts": len(corpus.prompts),
        "train_responses": sum(row[0] for row in sources.values()),
        "train_tokens": sum(row[1] for row in sources.values()),
        "greedy": greedy,
        "cut_loops": sum(corpus.looped[i] for i in corpus.select("train")),
        "val_responses": len(corpus.select("val", greedy=True)),
        "by_source": {k: {"responses": v[0], "tokens": v[1]} for k, v in sorted(sources.items())},
    }

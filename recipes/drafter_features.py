"""The target's features and labels of a corpus, kept on the device for a drafter's training.

All features are made once and stay on the device: a cached row is read in the time of its 6 KB,
while the target's pass over the same tokens would cost as much as the drafter's own step. Prompt
rows are stored once however many responses share them.

Shapes: N cached rows, T response tokens, B sequences, A anchors, W block size, S context
positions, R loss rows, K label tokens, D hidden, F = taps * D.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from drafter_data import Corpus
from drafter_model import DrafterShape
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class FeatureCache:
    """Sequences (prompt + response) of one split, in one array each.

    Device: `feature_NF`; `token_TK`, `mass_TK`: the target's most likely tokens at each response
    position and their probabilities, renormalised, most likely first. Host: `start`, `length` of
    the prompt and the response of each sequence (`prompt_start` and `response_start` count rows of
    `feature_NF`, `label_start` those of `token_TK`), `token_T`, and `agree_T`: the response's
    token is the target's first choice. `label_T`: the column of the response's own token.
    """

    shape: DrafterShape
    feature_NF: Tensor
    token_TK: Tensor
    mass_TK: Tensor
    prompt_start: Ints
    prompt_length: Ints
    response_start: Ints
    response_length: Ints
    label_start: Ints
    token_T: Ints
    agree_T: NDArray[np.bool_]
    label_T: Ints
    num_prompt_rows: int

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_start)

    @property
    def length(self) -> Ints:
        """Tokens of each sequence."""
        return self.prompt_length + self.response_length


@torch.no_grad()
def build_cache(
    model: Any,
    corpus: Corpus,
    chosen: Sequence[int],
    shape: DrafterShape,
    *,
    num_labels: int,
    max_bytes: float,
    pass_tokens: int,
    name: str,
) -> FeatureCache:
    """Run the frozen target over the chosen responses and keep its taps and likeliest tokens.

    Responses past `max_bytes` of device memory are left out, the last first, and said so.
    """
    row_bytes = len(shape.taps) * shape.hidden_size * model.dtype.itemsize
    chosen = _fitting(corpus, chosen, max_bytes / (row_bytes + 6 * num_labels), name)
    cache = _empty_cache(model, corpus, chosen, shape, num_labels)
    order = np.argsort(cache.length, kind="stable")
    bar = tqdm(total=len(order), desc=f"target features, {name}", unit="response")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * cache.length[order[stop]] <= pass_tokens:
            stop += 1
        _fill(cache, model, corpus, chosen, order[start:stop])
        bar.update(stop - start)
        start = stop
    bar.close()
    cache.agree_T = (cache.token_TK[:, 0].cpu().numpy() == cache.token_T).astype(bool)
    _place_own_tokens(cache)
    return cache


def _fitting(corpus: Corpus, chosen: Sequence[int], max_rows: float, name: str) -> list[int]:
    if not chosen:
        raise ValueError(
            f"{name}: expected at least one response (held-out ones: that does not loop), got "
            "none; give more prompts or more --gen-seconds, in a new --out"
        )
    seen: set[int] = set()
    total = 0
    kept: list[int] = []
    for index in chosen:
        prompt = corpus.prompt_of[index]
        total += len(corpus.responses[index])
        if prompt not in seen:
            seen.add(prompt)
            total += len(corpus.prompts[prompt].tokens)
        if total > max_rows:
            print(
                f"{name}: {len(chosen) - len(kept)} of {len(chosen)} responses left out (memory)"
            )
            break
        kept.append(index)
    if not kept:
        raise ValueError(f"{name}: expected at least one response that fits, got none")
    return kept


def _empty_cache(
    model: Any, corpus: Corpus, chosen: Sequence[int], shape: DrafterShape, num_labels: int
) -> FeatureCache:
    prompts = sorted({corpus.prompt_of[i] for i in chosen})
    sizes = np.asarray([len(corpus.prompts[p].tokens) for p in prompts], np.int64)
    begins = dict(zip(prompts, np.cumsum(sizes) - sizes, strict=True))
    lengths = np.asarray([len(corpus.responses[i]) for i in chosen], np.int64)
    label_start = np.cumsum(lengths) - lengths
    rows, tokens = int(sizes.sum()), int(lengths.sum())
    device, width = model.device, len(shape.taps) * shape.hidden_size
    return FeatureCache(
        shape=shape,
        feature_NF=torch.empty(rows + tokens, width, dtype=model.dtype, device=device),
        token_TK=torch.empty(tokens, num_labels, dtype=torch.int32, device=device),
        mass_TK=torch.empty(tokens, num_labels, dtype=torch.float16, device=device),
        prompt_start=np.asarray([begins[corpus.prompt_of[i]] for i in chosen], np.int64),
        prompt_length=np.asarray(
            [len(corpus.prompts[corpus.prompt_of[i]].tokens) for i in chosen], np.int64
        ),
        response_start=rows + label_start,
        response_length=lengths,
        label_start=label_start,
        token_T=np.concatenate([corpus.responses[i] for i in chosen]).astype(np.int64),
        agree_T=np.zeros(tokens, bool),
        label_T=np.zeros(tokens, np.int64),
        num_prompt_rows=rows,
    )


def _fill(
    cache: FeatureCache, model: Any, corpus: Corpus, chosen: Sequence[int], part: Ints
) -> None:
    device, longest = model.device, int(cache.length[part].max())
    ids = np.zeros((len(part), longest), np.int64)
    for row, index in enumerate(part):
        response = chosen[index]
        prompt = corpus.prompts[corpus.prompt_of[response]].tokens
        ids[row, : cache.length[index]] = np.concatenate((prompt, corpus.responses[response]))
    # Right padding: no row looks at what comes after it, so no mask is needed.
    out = model.get_decoder()(
        torch.from_numpy(ids).to(device), output_hidden_states=True, use_cache=False
    )
    where, real = positions(cache, part, longest, device)
    where, real = where.reshape(-1), real.reshape(-1)
    size = cache.shape.hidden_size
    for column, tap in enumerate(cache.shape.taps):
        values = out.hidden_states[tap + 1].reshape(-1, size)[real]
        cache.feature_NF[where[real], column * size : (column + 1) * size] = values
    # Position i of the sequence predicts token i + 1: rows prompt - 1 .. length - 2.
    column_S = np.arange(longest)
    first, last = cache.prompt_length[part] - 1, cache.length[part] - 1
    predicts = (column_S >= first[:, None]) & (column_S < last[:, None])
    label = (cache.label_start[part] - first)[:, None] + column_S
    source = torch.from_numpy(np.flatnonzero(predicts)).to(device)
    target = torch.from_numpy(label[predicts]).to(device)
    hidden = out.last_hidden_state.reshape(-1, size)[source]
    head = model.get_output_embeddings().weight
    labels = cache.token_TK.shape[1]
    for start in range(0, len(source), 8192):
        rows = slice(start, start + 8192)
        value, token = (hidden[rows] @ head.T).topk(labels, -1)
        cache.token_TK[target[rows]] = token.int()
        cache.mass_TK[target[rows]] = value.float().softmax(-1).half()


def positions(cache: FeatureCache, part: Ints, width: int, device: Any) -> tuple[Tensor, Tensor]:
    """Rows of `feature_NF` `[B, width]` for the positions of some sequences, and which are real.

    Positions past the end repeat the last row.
    """
    starts = np.stack(
        (cache.prompt_start, cache.prompt_length, cache.response_start, cache.response_length)
    )
    starts_4B = send(starts[:, part], device)
    prompt, size, response, count = starts_4B.unbind(0)
    column = torch.arange(width, device=device)
    offset = torch.minimum(column - size[:, None], count[:, None] - 1)
    row = torch.where(offset < 0, prompt[:, None] + column, response[:, None] + offset)
    return row, column < (size + count)[:, None]


def send(array: NDArray[Any], device: Any) -> Tensor:
    """Copy a host array to the device without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _place_own_tokens(cache: FeatureCache) -> None:
    """Find the column of each response's own token; where it is in none, it takes the last."""
    own = torch.from_numpy(cache.token_T).to(cache.token_TK.device).int()
    for start in range(0, len(own), 1 << 20):
        rows = slice(start, start + (1 << 20))
        same = cache.token_TK[rows] == own[rows, None]
        missing = ~same.any(1)
        cache.token_TK[rows][missing, -1] = own[rows][missing]
        mass = cache.mass_TK[rows].float()
        mass[missing, -1] = 0
        cache.mass_TK[rows] = (mass / mass.sum(1, keepdim=True)).half()
        same[missing, -1] = True
        cache.label_T[rows] = same.int().argmax(1).cpu().numpy()


def feature_scale(cache: FeatureCache, *, sample: int = 100_000) -> Tensor:
    """One over the root mean square of each feature dimension, `[F]`.

    The first token of a sequence is left out: its activations are hundreds of times the others'.
    """
    keep = np.ones(cache.feature_NF.shape[0], bool)
    keep[cache.prompt_start] = False
    rows = np.flatnonzero(keep)
    rows = rows[:: max(1, len(rows) // sample)]
    total = torch.zeros(cache.feature_NF.shape[1], device=cache.feature_NF.device)
    for part in np.array_split(rows, max(1, len(rows) // 10_000)):
        total += cache.feature_NF[torch.from_numpy(part).to(total.device)].float().pow(2).sum(0)
    return (total / len(rows)).clamp_min(1e-6).rsqrt()

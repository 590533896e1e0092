"""One training step's input: which sequences, which anchors, which rows have which label.

All of it is decided on the host, from lengths and flags, so a step never waits for the device.

Shapes: T response tokens, B sequences, A anchors, S context positions, R loss rows, K label
tokens, F = taps * D.
"""

from dataclasses import dataclass

import numpy as np
from drafter_features import FeatureCache, Ints, positions, send
from torch import Tensor, full_like


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's input on the device; rows of padding carry weight 0."""

    feature_BSF: Tensor
    anchor_token_BA: Tensor
    anchor_BA: Tensor
    row_R: Tensor
    token_RK: Tensor
    mass_RK: Tensor
    weight_R: Tensor
    weight_sum: float
    num_rows: int


def draw_anchors(cache: FeatureCache, part: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Draw `count` different response offsets of each sequence `[B, count]`, -1 past its last.

    Offset o of a response of n tokens can be an anchor when o <= n - 2: something follows it.
    """
    choices = cache.response_length[part] - 1
    width = max(int(choices.max()), count)
    score = rng.random((len(part), width), np.float32)
    score[np.arange(width) >= choices[:, None]] = 2.0
    offset = np.argpartition(score, count - 1, axis=1)[:, :count]
    drawn = np.take_along_axis(score, offset, 1) < 2.0
    return np.where(drawn, offset, -1).astype(np.int64)


def reach(cache: FeatureCache, *, greedy: bool) -> Ints:
    """How many rows of a block anchored at each response token have a label, `[T]`.

    Row k is labelled when token k after the anchor exists; with `greedy`, when moreover the tokens
    between are the target's own first choices, so that every label is what greedy decoding says.
    """
    left = np.repeat(np.cumsum(cache.response_length), cache.response_length)
    left = left - 1 - np.arange(len(cache.token_T))
    if not greedy:
        return np.minimum(left, cache.shape.block_size - 1)
    wrong = np.append(np.flatnonzero(~cache.agree_T), len(cache.token_T))
    index = np.arange(len(cache.token_T))
    following = wrong[np.searchsorted(wrong, index, side="right")]
    return np.minimum(np.minimum(following - index, left), cache.shape.block_size - 1)


def plan(
    cache: FeatureCache,
    part: Ints,
    offset_BA: Ints,
    reach_T: Ints,
    *,
    gamma: float,
    kl: float,
    greedy: bool,
    pad_length: int,
    pad_rows: int,
) -> Batch:
    """Turn chosen sequences and anchors into one step's input without a wait on the device.

    Labels are (1 - kl) on one token, the target's first choice if `greedy` else the response's
    own, and kl on the target's distribution; row k weighs exp(-(k - 1) / gamma).
    """
    device, block = cache.feature_NF.device, cache.shape.block_size
    valid = offset_BA >= 0
    offset = np.maximum(offset_BA, 0)
    token = cache.label_start[part][:, None] + offset
    anchor = cache.prompt_length[part][:, None] + offset
    count = np.where(valid, reach_T[token], 0)
    slot = np.arange(1, block)
    active = slot <= count[:, :, None]
    block_row = np.arange(offset.size).reshape(offset.shape)[:, :, None] * block + slot
    row, label = block_row[active], (token[:, :, None] + slot)[active]
    weight = np.broadcast_to(np.exp(-(slot - 1) / gamma), active.shape)[active]
    extra = -len(row) % pad_rows if len(row) else pad_rows
    device_rows = send(np.stack((np.pad(row, (0, extra)), np.pad(label, (0, extra)))), device)
    weight_R = send(np.pad(weight.astype(np.float32), (0, extra)), device)
    row_R, label_R = device_rows.unbind(0)
    mass = cache.mass_TK[label_R].float() * kl
    if greedy:
        mass[:, 0] += 1 - kl
    else:
        own = send(np.pad(cache.label_T[label], (0, extra)), device)
        mass.scatter_add_(1, own[:, None], full_like(mass[:, :1], 1 - kl))
    width = -(-int(cache.length[part].max()) // pad_length) * pad_length
    where, _ = positions(cache, part, width, device)
    anchors = send(np.stack((anchor, cache.token_T[token])), device)
    return Batch(
        feature_BSF=cache.feature_NF[where],
        anchor_token_BA=anchors[1],
        anchor_BA=anchors[0],
        row_R=row_R,
        token_RK=cache.token_TK[label_R].long(),
        mass_RK=mass,
        weight_R=weight_R,
        weight_sum=float(weight.sum()),
        num_rows=len(row),
    )


def epoch_order(cache: FeatureCache, batch: int, seed: int, epoch: int) -> list[Ints]:
    """Batches of an epoch: alike lengths together, in an order that `seed` and `epoch` fix."""
    rng = np.random.default_rng([seed, 4, epoch])
    order = rng.permutation(cache.num_sequences)
    whole = len(order) // batch * batch
    out: list[Ints] = []
    for start in range(0, whole, batch * 64):
        some = order[start : min(start + batch * 64, whole)]
        some = some[np.argsort(cache.length[some], kind="stable")]
        out += [some[i : i + batch] for i in range(0, len(some), batch)]
    return [out[i] for i in rng.permutation(len(out))]

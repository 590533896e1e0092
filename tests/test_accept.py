"""Acceptance against a loop; its law against enumeration and the paper's two-draw rule."""

import itertools

import pytest
import torch
from chisquare import p_value
from torch import Tensor

from dscale.kernels.reference import accept_prefix, position_gumbel


def loop(candidate: list[int], length: int, choice: list[int]) -> tuple[int, int]:
    """Acceptance of one request, spelt out."""
    accepted = 0
    while accepted < length - 1 and candidate[accepted] == choice[accepted]:
        accepted += 1
    return accepted, choice[accepted]


@pytest.mark.parametrize("width", [1, 2, 5, 16])
@pytest.mark.parametrize("vocab", [2, 3, 50_000])
def test_accept_prefix_equals_the_loop(width: int, vocab: int) -> None:
    lanes = 997
    generator = torch.Generator().manual_seed(width)
    choice = torch.randint(vocab, (lanes, width), generator=generator)
    candidate = choice[:, :-1].clone()
    wrong = torch.rand(candidate.shape, generator=generator) < 0.2
    candidate[wrong] = (candidate[wrong] + 1) % vocab
    length = torch.randint(0, width + 1, (lanes,), generator=generator)
    before = candidate.clone(), length.clone(), choice.clone()
    accepted, successor = accept_prefix(candidate, length, choice)
    want = [
        loop(*row)
        for row in zip(candidate.tolist(), length.tolist(), choice.tolist(), strict=True)
    ]
    assert list(zip(accepted.tolist(), successor.tolist(), strict=True)) == want
    assert accepted.dtype == successor.dtype == torch.int64
    assert all(map(torch.equal, before, (candidate, length, choice)))
    assert ((accepted < length) | (length == 0)).all()


@pytest.mark.parametrize("length", range(17))
def test_every_length_stops_every_match(length: int) -> None:
    choice = torch.arange(16).expand(17, 16)
    candidate = choice[:, :-1].clone()
    for lane in range(15):  # lane 15 and 16: all right
        candidate[lane, lane] = -1
    accepted, successor = accept_prefix(candidate, torch.full((17,), length), choice)
    limit = max(length - 1, 0)
    assert accepted.tolist() == [min(lane, limit, 15) for lane in range(17)]
    assert successor.tolist() == accepted.tolist()


def test_no_lanes() -> None:
    empty = torch.zeros(0, 16, dtype=torch.int64)
    accepted, successor = accept_prefix(empty[:, 1:], torch.zeros(0, dtype=torch.int64), empty)
    assert accepted.shape == successor.shape == (0,)


VOCAB, WIDTH, LANES = 6, 4, 40_000


def table() -> Tensor:
    """P(next | position in the block, last token) `[W, V, V]`, with tokens that never come."""
    generator = torch.Generator().manual_seed(5)
    logits = 1.5 * torch.randn(WIDTH, VOCAB, VOCAB, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    logits[..., 0] = 1.0
    return torch.softmax(logits, -1)


CANDIDATE = [2, 0, 4]
ANCHOR = 1


def exact() -> Tensor:
    """P(progress, tokens) of one block `[W + 1, V ** W]`: the text is a chain of `table`, and
    candidates are kept as long as it says the same. Tokens after the successor count as 0."""
    law = torch.zeros(WIDTH + 1, VOCAB**WIDTH, dtype=torch.float64)
    for tokens in itertools.product(range(VOCAB), repeat=WIDTH):
        matches = [a == b for a, b in zip(tokens, CANDIDATE, strict=False)]
        progress = (matches.index(False) if False in matches else WIDTH - 1) + 1
        if any(tokens[progress:]):
            continue
        chance, last = 1.0, ANCHOR
        for position, token in enumerate(tokens[:progress]):
            chance *= float(table()[position, last, token])
            last = token
        law[progress, index_of(torch.tensor(tokens))] = chance
    return law


def index_of(tokens: Tensor) -> Tensor:
    return (tokens * VOCAB ** torch.arange(WIDTH - 1, -1, -1)).sum(-1)


def counts(accepted: Tensor, tokens_NW: Tensor) -> Tensor:
    """How often each (progress, tokens) came, `[W + 1, V ** W]`."""
    progress = accepted + 1
    kept = torch.where(torch.arange(WIDTH) < progress[:, None], tokens_NW, 0)
    cell = progress * VOCAB**WIDTH + index_of(kept)
    size = (WIDTH + 1) * VOCAB**WIDTH
    return torch.bincount(cell, minlength=size).view(WIDTH + 1, -1)


def rows() -> Tensor:
    """The target's distribution in each row of the block `[W, V]`: after anchor, candidates."""
    return torch.stack([table()[j, t] for j, t in enumerate([ANCHOR, *CANDIDATE])])


def test_gumbel_choices_have_the_law_of_the_text() -> None:
    score = rows().log()[None]  # the same for every lane
    seed = torch.arange(LANES)[:, None, None]
    position = torch.arange(WIDTH)[None, :, None] + 100
    choice = (score + position_gumbel(seed, position, torch.arange(VOCAB))).argmax(-1)
    candidate = torch.tensor(CANDIDATE).expand(LANES, -1)
    accepted, successor = accept_prefix(candidate, torch.full((LANES,), WIDTH), choice)
    assert torch.equal(successor, choice[torch.arange(LANES), accepted])
    assert accepted.unique().numel() == WIDTH
    assert p_value(counts(accepted, choice), exact()) > 1e-3


def test_the_papers_two_draws_have_the_same_law() -> None:
    """Keep candidate x with chance P(x), else draw from P without x (section III-D)."""
    generator = torch.Generator().manual_seed(11)
    score, candidate = rows(), torch.tensor([*CANDIDATE, -1])
    kept = (
        torch.rand(LANES, WIDTH - 1, generator=generator)
        < score[torch.arange(WIDTH - 1), candidate[:-1]]
    )
    accepted = kept.long().cumprod(1).sum(1)
    tokens = torch.zeros(LANES, WIDTH, dtype=torch.int64)
    tokens[:, :-1] = candidate[:-1]
    for lanes, row in ((accepted == a, a) for a in range(WIDTH)):
        without = score[row].clone()
        if row < WIDTH - 1:
            without[candidate[row]] = 0
        draws = torch.multinomial(without, int(lanes.sum()), True, generator=generator)
        tokens[lanes, row] = draws
    assert p_value(counts(accepted, tokens), exact()) > 1e-3
    # The test sees the usual mistake: a successor drawn from P with the refused token in it.
    first = accepted == 0
    tokens[first, 0] = torch.multinomial(score[0], int(first.sum()), True, generator=generator)
    assert p_value(counts(accepted, tokens), exact()) < 1e-6

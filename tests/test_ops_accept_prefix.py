"""accept_prefix over packed rows against a loop per request."""

import pytest
import torch
from ops_runs import RUNS, assert_same, runner
from torch import Tensor


def loop(
    candidate: list[list[int]], length: list[int], offset: list[int], choice: list[int]
) -> tuple[Tensor, Tensor]:
    accepted, successor = [], []
    for drafted, count, first in zip(candidate, length, offset, strict=True):
        kept = 0
        while kept < count - 1 and drafted[kept] == choice[first + kept]:
            kept += 1
        accepted.append(kept if count else 0)
        successor.append(choice[first + kept] if count else 0)
    return torch.tensor(accepted), torch.tensor(successor)


def offsets(length: Tensor) -> Tensor:
    """First rows; the number of used rows for lanes that have none."""
    before = length.long().cumsum(0) - length
    return torch.where(length > 0, before, length.sum())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("lanes", [1, 7, 32, 33, 251, 256])
@pytest.mark.parametrize("vocab", [1, 2, 150_000])
def test_equals_the_loop(run: str, lanes: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(lanes)
    for candidates in (15, 6, 1):
        length = torch.randint(0, candidates + 2, (lanes,), generator=generator).int()
        length[0] = candidates + 1
        offset = offsets(length)
        for tail in (0, 5):  # without a tail the offset of an inactive lane is past the end
            choice = torch.randint(vocab, (int(length.sum()) + tail,), generator=generator)
            candidate = torch.randint(vocab, (lanes, candidates), generator=generator)
            row = (offset[:, None] + torch.arange(candidates)).clamp(max=choice.shape[0] - 1)
            right = torch.rand(candidate.shape, generator=generator) < 0.8
            candidate = torch.where(right, choice[row], candidate)
            got = runner("accept_prefix", run)(candidate, length, offset, choice)
            args = candidate.tolist(), length.tolist(), offset.tolist(), choice.tolist()
            assert_same(got, loop(*args))
            assert ((got[0] < length) | (length == 0)).all()


@pytest.mark.parametrize("run", RUNS)
def test_every_length_stops_every_match(run: str) -> None:
    """Lane n's candidates are right but for number n; rows past its length would match too."""
    choice = torch.arange(16).repeat(16)
    candidate = torch.arange(15).repeat(16, 1)
    candidate[torch.arange(15), torch.arange(15)] = -1
    offset = torch.arange(16) * 16
    for count in range(17):
        length = torch.full((16,), count, dtype=torch.int32)
        accepted, successor = runner("accept_prefix", run)(candidate, length, offset, choice)
        assert accepted.tolist() == [min(n, max(count - 1, 0)) for n in range(16)]
        assert successor.tolist() == accepted.tolist()


@pytest.mark.parametrize("run", RUNS)
def test_greedy_choices_from_logits(run: str) -> None:
    """The choice of a greedy row is its argmax, as row_statistics also finds it."""
    generator = torch.Generator().manual_seed(5)
    logit = torch.randn(20, 50, generator=generator)
    length = torch.tensor([5, 0, 1, 14], dtype=torch.int32)
    choice = runner("row_statistics", run)(logit)[1]
    candidate = torch.zeros(4, 15, dtype=torch.int64)
    best = logit.argmax(1)
    candidate[0, :4], candidate[3, :6] = best[:4], best[6:12]
    candidate[3, 5] += 1
    got = runner("accept_prefix", run)(candidate, length, offsets(length), choice)
    assert got[0].tolist() == [4, 0, 0, 5]
    assert got[1].tolist() == [int(best[4]), 0, int(best[5]), int(best[11])]


@pytest.mark.parametrize("run", RUNS)
def test_nobody_is_live(run: str) -> None:
    length = torch.zeros(3, dtype=torch.int32)
    candidate, offset = torch.ones(3, 15, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    got = runner("accept_prefix", run)(candidate, length, offset, torch.ones(9).long())
    assert [x.tolist() for x in got] == [[0] * 3] * 2

"""share_pages against what it promises, spelt out lane by lane."""

from itertools import chain
from random import Random

import pytest
import torch
from ops_runs import RUNS, assert_same, runner
from torch import Tensor

from dscale.kernels import ops, reference_shares

PARTS, MOST = 16, 70


def pages_of_lanes() -> list[list[int]]:
    """Pages of up to 20 lanes, drawn."""
    random = Random(0)
    drawn = [[random.randint(1, MOST) for _ in range(random.randint(1, 20))] for _ in range(40)]
    return [*drawn, [1], [70], [1] * 16, [70, 1], [8] * 4, [8] * 8, [1, 1, 1, 70]]


def shared(used: list[int], run: str, parts: int = PARTS) -> list[list[int]]:
    """The shares, with a row for each lane."""
    used_N = torch.tensor(used, dtype=torch.int32)
    out = runner("share_pages", run)(used_N, torch.arange(len(used)), parts, MOST)
    assert {x.dtype for x in out} == {torch.int64}
    return [x.tolist() for x in out]


@pytest.mark.parametrize("run", RUNS)
def test_shares_hold_every_page_once_and_are_as_small_as_can_be(run: str) -> None:
    for used in pages_of_lanes():
        parts = max(PARTS, len(used))
        lane, first, held, starts, counts = shared(used, run)
        assert len(lane) == len(first) == len(held) == parts
        for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
            mine = range(start, start + count)
            assert [lane[x] for x in mine] == [index] * count
            pages = chain(*(range(first[x], first[x] + held[x]) for x in mine))
            assert list(pages) == list(range(used[index])), used
        assert sum(held) == sum(used)
        # What no share may exceed: the smallest size with which there are enough sub-lanes.
        size = next(p for p in range(1, 71) if sum(-(-n // p) for n in used) <= parts)
        assert max(held) == size or max(held) < size == max(-(-n // size) for n in used), used


@pytest.mark.parametrize("run", RUNS)
def test_a_long_lane_takes_the_sub_lanes_that_short_ones_leave(run: str) -> None:
    assert shared([8, 1], run)[4] == [8, 1]
    assert shared([70, 1], run)[4] == [14, 1]
    assert shared([8] * 8, run)[4] == [2] * 8
    assert shared([1] * 7 + [36], run)[4] == [1] * 7 + [9]
    assert shared([9, 5], run, parts=3)[4] == [2, 1]
    assert shared([9], run, parts=1)[4] == [1]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("lanes", [16, 17, 40, 130])
def test_sub_lanes_are_the_lanes_where_those_are_enough(lanes: int, run: str) -> None:
    used = [Random(lanes).randint(1, MOST) for _ in range(lanes)]
    own = list(range(lanes))
    assert shared(used, run) == [own, [0] * lanes, used, own, [1] * lanes]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rows", [0, 3, 200])
@pytest.mark.parametrize("lanes", [1, 5, 16, 33])
def test_rows_are_their_lanes_in_any_order(lanes: int, rows: int, run: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    used_N = torch.randint(1, MOST + 1, (lanes,), generator=generator).int()
    lane_R = torch.randint(lanes, (rows,), generator=generator)
    got = runner("share_pages", run)(used_N, lane_R, PARTS, MOST)
    assert_same(tuple(got), reference_shares.share_pages(used_N, lane_R, PARTS, MOST))
    *_, start_N, count_N = shared(used_N.tolist(), "op")
    assert got[3].tolist() == [start_N[lane] for lane in lane_R.tolist()]
    assert got[4].tolist() == [count_N[lane] for lane in lane_R.tolist()]


def test_one_graph_serves_all_lanes() -> None:
    torch._dynamo.reset()
    graphs: list[object] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: object, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def run(used_N: Tensor, lane_R: Tensor) -> tuple[Tensor, ...]:
        return tuple(x + 0 for x in ops.share_pages(used_N, lane_R, PARTS, MOST))

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for lanes in (3, 17, 2, 16, 32):
        args = torch.arange(1, lanes + 1).int(), torch.arange(lanes)
        for moving in args:
            torch._dynamo.mark_dynamic(moving, 0)
        assert_same(compiled(*args), run(*args))
    assert len(graphs) == 1
    torch._dynamo.reset()

"""pack_rows against a loop that lays out one row after the other."""

import pytest
import torch
from ops_runs import RUNS, assert_same, runner
from torch import Tensor

PAGE = 128


def loop(
    length: list[int], candidate: Tensor, anchor: Tensor, context: Tensor, pages: Tensor, rows: int
) -> list[Tensor]:
    used, lanes = sum(length), len(length)
    columns: dict[str, list[int]] = {n: [] for n in ("token", "position", "slot", "lane", "row")}
    offset, cells = [], []
    for lane, count in enumerate(length):
        first = len(columns["token"])
        offset.append(first if count else used)
        cells.append([min(offset[-1] + min(t, max(count - 1, 0)), rows - 1) for t in range(16)])
        for j in range(count):
            position = int(context[lane]) + j
            page = int(pages[lane][min(position // PAGE, pages.shape[1] - 1)])
            columns["token"].append(int(candidate[lane][j - 1]) if j else int(anchor[lane]))
            columns["position"].append(position)
            columns["slot"].append(page * PAGE + position % PAGE)
            columns["lane"].append(lane)
            columns["row"].append(j)
    for column in columns.values():
        column += [0] * (rows - used)
    row_NT = torch.tensor(cells).reshape(lanes, 16)
    return [torch.tensor(offset), *map(torch.tensor, columns.values()), row_NT]


def check(run: str, length: list[int], rows: int, candidates: int = 15) -> None:
    lanes = len(length)
    generator = torch.Generator().manual_seed(lanes)
    candidate = torch.randint(1, 2**40, (lanes, candidates), generator=generator)
    anchor = torch.randint(1, 2**40, (lanes,), generator=generator)
    context = torch.randint(0, 5 * PAGE, (lanes,), generator=generator, dtype=torch.int32)
    pages = torch.randint(1, 20_000_000, (lanes, 5), generator=generator, dtype=torch.int32)
    length_N = torch.tensor(length, dtype=torch.int32)
    got = runner("pack_rows", run)(length_N, candidate, anchor, context, pages, rows, PAGE)
    assert_same(got, loop(length, candidate, anchor, context, pages, rows))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("lanes", [1, 2, 7, 31, 65, 256])
def test_equals_the_loop(run: str, lanes: int) -> None:
    generator = torch.Generator().manual_seed(lanes)
    length = torch.randint(0, 17, (lanes,), generator=generator).tolist()
    used = sum(length)
    for rows in (max(used, lanes), max(used, lanes) + 1, 16 * lanes):
        check(run, length, rows)


@pytest.mark.parametrize("run", RUNS)
def test_inactive_lanes(run: str) -> None:
    check(run, [0], 1)
    check(run, [0, 0, 0], 48)
    check(run, [16], 16)
    # All rows used while lanes are inactive: their offset is M itself.
    check(run, [0, 4, 0, 4, 0, 0], 8)
    check(run, [8, 0, 0, 0], 8)
    check(run, [0, 0, 0, 8], 8)


@pytest.mark.parametrize("run", RUNS)
def test_shorter_blocks(run: str) -> None:
    check(run, [3, 1, 0, 8, 2], 24, candidates=7)
    check(run, [2, 1, 0, 2], 8, candidates=1)


@pytest.mark.parametrize("run", RUNS)
def test_cells_and_rows_are_inverse(run: str) -> None:
    length = torch.tensor([3, 0, 16, 1, 5], dtype=torch.int32)
    args = torch.ones(5, 15, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    context = torch.full((5,), 120, dtype=torch.int32)
    pages = torch.arange(1, 11, dtype=torch.int32).view(5, 2)
    out = runner("pack_rows", run)(length, *args, context, pages, 40, PAGE)
    _, _, _, slot, lane, tile_row, row = out
    used = int(length.sum())
    assert row[lane[:used], tile_row[:used]].tolist() == list(range(used))
    assert slot[:used].unique().numel() == used
    assert slot[:used].min() >= PAGE
    assert (slot[used:] == 0).all()
    filled = torch.arange(16) < length[:, None]
    assert (row[filled] < used).all()
    assert ((row >= 0) & (row < 40)).all()

"""merge_shares against attention over all keys at once, in float64."""

from math import inf, nan

import pytest
import torch
from ops_runs import RUNS, runner
from torch import Tensor

from dscale.kernels import ops, reference_shares

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]
COUNTS = [[1], [2, 1, 4], [16], [0, 3], [20, 1]]
KEYS = 37


def arguments(
    counts: list[int], group: int, head_dim: int, height: int = 16, tiles: int = 2
) -> tuple[Arguments, Tensor]:
    """Attention over each share of random keys, float32, and over a lane's shares together, for
    rows of all lanes in no order."""
    generator = torch.Generator().manual_seed(sum(counts) + group)
    parts, queries = sum(counts) + 1, group * height

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    score, value = 4 * random(parts, tiles, queries, KEYS), random(parts, tiles, KEYS, head_dim)
    score[1::3] = -inf  # shares without a key
    score[2::3, :, ::5] = -inf  # and rows
    best = score.logsumexp(-1)
    weight = torch.exp(score - torch.where(best == -inf, 0.0, best)[..., None])
    out = (weight @ value).float()
    first = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    lane_R = torch.arange(5 * len(counts)) % len(counts)
    tile_row_R = torch.randint(height, lane_R.shape, generator=generator)
    lse = (best / torch.tensor(2.0).log()).float()
    args = (out, lse, first[lane_R], torch.tensor(counts)[lane_R], tile_row_R, height)
    rows = []
    for start, count, row in zip(*(x.tolist() for x in args[2:5]), strict=True):  # type: ignore[union-attr]
        mine = slice(start, start + count)
        at = torch.arange(group) * height + row
        logit = score[mine, :, at].permute(1, 2, 0, 3).flatten(2)
        values = value[mine].transpose(0, 1).flatten(1, 2)
        rows.append((torch.softmax(logit, -1).nan_to_num() @ values).flatten())
    return args, torch.stack(rows)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("group", "head_dim"), [(4, 16), (3, 24), (1, 128)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_shares_together_are_attention_over_all_keys(
    counts: list[int], group: int, head_dim: int, run: str
) -> None:
    args, want = arguments(counts, group, head_dim)
    got = runner("merge_shares", run)(*args)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), atol=2e-6, rtol=1e-5)
    for shift in (-3000.0, 3000.0):  # powers of these are 0 and inf
        moved = runner("merge_shares", run)(args[0], args[1] + shift, *args[2:])
        torch.testing.assert_close(moved, got, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_results_are_rounded_once(dtype: torch.dtype, run: str) -> None:
    args, _ = arguments([4, 2], 4, 32)
    out = args[0].to(dtype)
    got = runner("merge_shares", run)(out, *args[1:])
    want = runner("merge_shares", run)(out.float(), *args[1:])
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype), atol=0, rtol=2**-7)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("held", [0.0, 1e30, nan, inf])
def test_what_a_share_without_keys_holds_does_not_matter(held: float, run: str) -> None:
    args, want = arguments([5, 2], 3, 16)
    out = torch.where(args[1][..., None] == -inf, held, args[0])
    got = runner("merge_shares", run)(out, *args[1:])
    torch.testing.assert_close(got, want.float(), atol=2e-6, rtol=1e-5)
    lse = torch.full_like(args[1], -inf)
    assert torch.equal(runner("merge_shares", run)(out, lse, *args[2:]), torch.zeros_like(got))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "lse"), [(torch.bfloat16, nan), (torch.float32, -inf)])
def test_the_row_of_an_only_sub_lane_is_copied(dtype: torch.dtype, lse: float, run: str) -> None:
    args, _ = arguments([1] * 19, 3, 24)
    out, (first_R, _, tile_row_R) = args[0].to(dtype), args[2:5]
    out[3:5, 1] = nan
    got = runner("merge_shares", run)(out, torch.full_like(args[1], lse), *args[2:])
    want = out.view(20, 2, 3, 16, 24)[first_R, :, :, tile_row_R].flatten(1)
    assert want.isnan().any()
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("run", RUNS)
def test_what_is_not_finite_is_not_hidden(run: str) -> None:
    args, want = arguments([3, 1], 1, 16, tiles=1)
    lse, out = args[1].clone(), args[0].clone()
    lse[0], out[3] = nan, nan
    got = runner("merge_shares", run)(out, lse, *args[2:])
    # Lane 1 has the fourth share, of which some rows have no key.
    seen = lse[args[2], 0, args[4]] != -inf
    assert torch.equal(got.isnan().all(1), seen)
    assert torch.equal(got.isnan().any(1), seen)
    assert not want.isnan().any()


def test_no_rows_give_none() -> None:
    args, _ = arguments([2], 3, 16)
    empty = [x[:0] for x in args[2:5]]  # type: ignore[index]
    assert ops.merge_shares(*args[:2], *empty, 16).shape == (0, 2 * 3 * 16)


def test_compiled_it_is_the_reference() -> None:
    args, want = arguments([2, 3], 4, 16)
    torch._dynamo.reset()
    compiled = torch.compile(ops.merge_shares, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args), reference_shares.merge_shares(*args))
    torch.testing.assert_close(compiled(*args), want.float(), atol=2e-6, rtol=1e-5)
    torch._dynamo.reset()

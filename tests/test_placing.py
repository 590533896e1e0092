"""A request's state on its way to the device."""

import torch

from dscale.compiled.flow import Requests
from dscale.placing import Staging, write_state
from dscale.request import Request


def idle() -> Requests:
    def one(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full((1, *shape), 1, dtype=dtype)

    whole, half, real = torch.int64, torch.int32, torch.float32
    return Requests(
        context_S=one(half), remaining_S=one(half), anchor_S=one(whole), live_S=one(torch.bool),
        seed_S=one(whole), temperature_S=one(real), top_k_S=one(whole), top_p_S=one(real),
        min_p_S=one(real), page_SL=one(half, 5), logical_SP=one(half, 9), stop_SZ=one(whole, 3),
        recent_SK=one(half, 3), penalty_S=one(real), seen_SV=one(torch.bool, 7),
    )  # fmt: skip


def test_what_is_written_arrives_and_is_idle_after_a_reset() -> None:
    staging = Staging(idle(), 4, torch.device("cpu"))
    request = Request(
        prompt=[2, 5], max_new_tokens=11, seed=-7, temperature=0.5, top_k=3, stop_ids=(4, 6),
        repetition_penalty=1.5, pages=[3, 8],
    )  # fmt: skip
    write_state(staging.reset(2), 1, request)
    slots, moved = staging.send([6, 2])
    assert slots.tolist() == [6, 2]
    for name, came, went in zip(Requests._fields, moved, idle(), strict=True):
        assert came.dtype == went.dtype, name
        assert torch.equal(came[:1], went), name
    assert (int(moved.remaining_S[1]), int(moved.seed_S[1])) == (11, -7)
    assert (float(moved.temperature_S[1]), float(moved.penalty_S[1])) == (0.5, 1.5)
    assert moved.stop_SZ[1].tolist() == [4, 6, 1]
    assert moved.page_SL[1].tolist() == [3, 8, 1, 1, 1]
    assert moved.logical_SP[1].tolist() == [-1, -1, -1, 0, -1, -1, -1, -1, 1]
    assert moved.seen_SV[1].tolist() == [True] * 7

    staging.reset(2)
    assert moved.stop_SZ[1].tolist() == [4, 6, 1], "what was sent stays as it was"
    _, moved = staging.send([0, 1])
    for came, want in zip(moved, idle(), strict=True):
        assert len(came) == 2
        assert torch.equal(came[1:], want)

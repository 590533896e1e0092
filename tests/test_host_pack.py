"""Rows packed on the host equal those the operation packs."""

import pytest
import torch
from tiny import tiny_drafter, tiny_model

import dscale
from dscale.compiled.kv import PAGE
from dscale.host_pack import pack_on_host
from dscale.kernels import ops
from dscale.request import Request


@pytest.mark.parametrize(
    "length", [[16, 0, 3, 1], [0, 0, 0, 0], [8, 8, 8, 8], [1, 1, 1, 1], [0, 5, 0, 16]], ids=str
)
def test_equals_the_operation(length: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    model, lanes = tiny_model(), len(length)
    with dscale.attach(model, tiny_drafter(tmp_path_factory.mktemp("drafter"), model)) as spec:
        workspace = spec.engine.batcher.core.make_room(
            [Request(prompt=[0] * 300, max_new_tokens=20) for _ in range(lanes)]
        )
        requests, slots = workspace.requests, [2, 0, 3, 1]
        requests.context_S[:lanes] = torch.tensor([5, 127, 300, 128], dtype=torch.int32)
        requests.anchor_S[:lanes] = torch.tensor([7, 8, 9, 10])
        pages = requests.page_SL.shape[1]
        requests.page_SL[:lanes] = torch.arange(1, 1 + lanes * pages).view(lanes, pages).int()
        step = workspace.assign(slots)
        step.candidate_NC.copy_(torch.arange(lanes * 15).view(lanes, 15) + 100)
        step.length_N.copy_(torch.tensor(length))
        packed = workspace.packed(lanes, 16 * lanes)
        for buffer in packed:
            buffer.fill_(-7)
        pack_on_host(requests, step, packed)
        want = ops.pack_rows(
            step.length_N,
            step.candidate_NC,
            requests.anchor_S[step.slot_N],
            requests.context_S[step.slot_N],
            requests.page_SL[step.slot_N],
            16 * lanes,
            PAGE,
        )
        assert torch.equal(step.offset_N, want.offset_N)
        for buffer, column in zip(packed, want[1:], strict=True):
            assert torch.equal(buffer, column)

"""A request's state on its way to the device."""

import torch

from dscale.workspace import moved_to


def test_tensors_of_any_kind_travel_together() -> None:
    sent = [
        torch.tensor([3, -1]),
        torch.tensor([[True, False, True]]),
        torch.zeros(2, 0, dtype=torch.int32),
        torch.rand(3, 5)[:, 1:3],
        torch.arange(7, dtype=torch.int32).view(7, 1),
        torch.tensor(2.5),
    ]
    for came, went in zip(moved_to(torch.device("cpu"), sent), sent, strict=True):
        assert came.dtype == went.dtype
        assert torch.equal(came, went)

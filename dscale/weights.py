"""Noticing writes to a model's weights, which make cached prompts and copied weights stale."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

SAMPLES = 16
"""Elements of each tensor that are compared."""


class WeightWatch:
    """Notices writes to the tensors of some modules: by PyTorch's count of writes to each and,
    because one through `.data` is not counted, by a few elements."""

    def __init__(self, *modules: nn.Module | None) -> None:
        self._modules = [module for module in modules if module is not None]
        self._tensors: list[Tensor] = []
        self._samples: list[Tensor] = []
        self._known: tuple[list[int], bytes] | None = None

    def same(self) -> bool:
        """Whether nothing was written since the last call; False at the first one."""
        if not self._tensors:
            self._tensors = [
                t for m in self._modules for t in chain(m.parameters(), m.buffers()) if t.numel()
            ]
            self._samples = [_sample(tensor) for tensor in self._tensors]
        counts = [0 if t.is_inference() else t._version for t in self._tensors]
        # By their bits: a NaN is not equal to itself.
        samples = torch.cat(self._samples).view(torch.uint8).cpu().numpy().tobytes()
        known, self._known = self._known, (counts, samples)
        return known == self._known


def _sample(tensor: Tensor) -> Tensor:
    """A view of a few elements."""
    step = max(1, tensor.numel() // SAMPLES)
    return tensor.detach().view(-1)[::step][:SAMPLES]

"""A step's results on their way to the host, and what a prefill's say: first tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dscale.compiled.flow import COUNT, FAILED, LIVE, TOKENS
from dscale.errors import not_finite
from dscale.request import Request


def mark(device: torch.device, *, timed: bool = True) -> Any:
    """An event at this point of the GPU's work, None on other devices. `timed`: with its time, so
    that `elapsed_time` works."""
    if device.type != "cuda":
        return None
    make: Any = torch.cuda.Event
    event = make(enable_timing=timed)
    event.record()
    return event


@dataclass(slots=True)
class Results:
    """Results of N lanes, int32 `[N, X]`, as `compiled.flow` lays them out. `began`: a mark from
    before the step."""

    host_NX: Tensor
    arrived: Any = None
    began: Any = None

    @classmethod
    def of(cls, result_NX: Tensor, *, late: bool, began: Any = None) -> Results:
        """Send a step's results to the host, and wait for them unless they may come `late`."""
        if not late or result_NX.device.type != "cuda":
            return cls(result_NX.to("cpu", copy=True))
        host_NX = torch.empty(result_NX.shape, dtype=torch.int32, pin_memory=True)
        host_NX.copy_(result_NX, non_blocking=True)
        return cls(host_NX, mark(result_NX.device, timed=began is not None), began)

    def read(self) -> NDArray[np.int32]:
        """The results, once their copy has arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        array: NDArray[np.int32] = self.host_NX.numpy()
        return array

    @property
    def milliseconds(self) -> float | None:
        """GPU time from the mark to their arrival; only once they are read. None without a
        mark."""
        return None if self.began is None else float(self.began.elapsed_time(self.arrived))


@dataclass(slots=True)
class FirstTokens:
    """A prefill under way: `lanes` are those of its requests whose prompt ends in it."""

    requests: list[Request]
    lanes: list[int]
    results: Results

    def finish(self) -> list[Request]:
        """Give each its first token; returns the requests that end with it."""
        ended = []
        for request, row in zip(self.requests, self.results.read()[self.lanes], strict=True):
            if request.finished:
                continue  # cancelled meanwhile
            request.error = not_finite(request.num_tokens) if row[FAILED] else request.error
            if request.error is None:
                request.give(row[TOKENS][: row[COUNT]].tolist())
            if request.error is not None or request.stopped or not row[LIVE]:
                ended.append(request)
        return ended

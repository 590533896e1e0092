"""The decoding loop of one call: launch a step, read the results of the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.capture import begin_step
from dscale.compiled.flow import COUNT, LENGTH, LIVE, SCORES, TOKENS, Packed, Step
from dscale.compiled.kv import PAGE
from dscale.kernels import reference_rows
from dscale.policy import Choice, Floats, Policy
from dscale.request import Request
from dscale.stages import Stages
from dscale.stats import Stats
from dscale.workspace import Workspace, bucket_of

OnTokens = Callable[[int, list[int]], None]


@dataclass(slots=True)
class Launch:
    """A step under way: its live requests, and where its results arrive on the host."""

    live: list[int]
    choice: Choice | None
    result_NX: Tensor
    arrived: Any = None

    def read(self) -> NDArray[np.int32]:
        """Results, int32 [N, X], waiting for their copy to arrive."""
        if self.arrived is not None:
            self.arrived.synchronize()
        array: NDArray[np.int32] = self.result_NX.numpy()
        return array


@dataclass(slots=True)
class Decoding:
    """Decodes the placed requests of one call to their ends.

    `policy` None: uniform rows (`rows` each). `late`: results are read one step later, while the
    next step runs, so a finished request takes part in one more step, in which its lane is dead.
    `padded`: lanes come in buckets. `host_lengths`: mode "+budget"."""

    workspace: Workspace
    stages: Stages
    requests: list[Request]
    emit: OnTokens
    stats: Stats
    rows: int
    policy: Policy | None
    late: bool
    padded: bool
    host_lengths: bool
    _score_NC: Floats = field(init=False)
    _placed: dict[int, list[int]] = field(default_factory=dict)
    _rooms: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        candidates = self.workspace.block - 1
        self._score_NC = np.full((len(self.requests), candidates), np.nan, np.float32)

    def run(self, live: list[int]) -> None:
        """Decode requests `live` (indices) until none goes on."""
        pending: Launch | None = None
        while live or pending is not None:
            launched = self.launch(live) if live else None
            if self.late:
                launched, pending = pending, launched
            if launched is not None:
                live = self.finish(launched, live)

    def launch(self, live: list[int]) -> Launch:
        """Start one step of the live requests."""
        lanes = bucket_of(len(live)) if self.padded else len(live)
        step, requests = self.workspace.step(lanes), self.workspace.requests
        slots = live + [self.workspace.max_requests] * (lanes - len(live))
        if self._placed.get(lanes) != slots:
            self._send(step.slot_N, slots)
            self._placed[lanes] = slots
        choice = self._choose(lanes, live)
        begin_step()
        if choice is not None:
            self._adaptive(step, lanes, choice)
        else:
            if self.stages.decide is not None:
                self.stages.decide(requests, step)
            self.stages.verify(requests, step)
        return self._collect(live, choice, step)

    def _choose(self, lanes: int, live: list[int]) -> Choice | None:
        if self.policy is None:
            return None
        context = sum(r.context for r in map(self.requests.__getitem__, live))
        choice = self.policy.choose(lanes, self._score_NC[live], context)
        if self.padded or not choice.draft:
            return choice
        # Without buckets there are exactly the rows that will be used.
        left = (r.max_new_tokens - len(r.tokens) for r in map(self.requests.__getitem__, live))
        most = sum(min(self.workspace.block, n) for n in left)
        return Choice(min(choice.rows, choice.average * len(live), most), choice.average)

    def _adaptive(self, step: Step, lanes: int, choice: Choice) -> None:
        workspace = self.workspace
        decide = self.stages.decide if choice.draft else self.stages.anchors
        assert decide is not None
        room = (choice.rows, choice.average)
        if self._rooms.get(lanes) != room:
            self._send(step.room, list(room))
            self._rooms[lanes] = room
        packed = workspace.packed(lanes, lanes * VERIFY_TILE)
        if self.host_lengths and choice.draft:
            decide(workspace.requests, step)
            self._pack_on_host(step, packed)
        else:
            decide(workspace.requests, step, packed)
        self.stages.verify(workspace.requests, step, workspace.packed(lanes, choice.rows))

    def _pack_on_host(self, step: Step, packed: Packed) -> None:
        """Read the lengths back and build the rows here: what mode "dscale" does on the device."""
        requests, slot_N = self.workspace.requests, step.slot_N
        offset_N, *columns = reference_rows.pack_rows(
            step.length_N.cpu(),
            step.candidate_NC.cpu(),
            requests.anchor_S[slot_N].cpu(),
            requests.context_S[slot_N].cpu(),
            requests.page_SL[slot_N].cpu(),
            packed.token_M.shape[0],
            PAGE,
        )
        step.offset_N.copy_(offset_N)
        for buffer, column in zip(packed, columns, strict=True):
            buffer.copy_(column)

    def _send(self, buffer: Tensor, values: list[int]) -> None:
        """Values to a device buffer; from pinned memory, so that the host does not wait."""
        pinned = buffer.device.type == "cuda"
        host = torch.tensor(values, dtype=buffer.dtype, pin_memory=pinned)
        buffer.copy_(host, non_blocking=True)

    def _collect(self, live: list[int], choice: Choice | None, step: Step) -> Launch:
        """Send the results to the host, waiting only when they are read at once anyway."""
        if not self.late or step.result_NX.device.type != "cuda":
            return Launch(live, choice, step.result_NX.to("cpu", copy=True))
        host_NX = torch.empty(step.result_NX.shape, dtype=torch.int32, pin_memory=True)
        host_NX.copy_(step.result_NX, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return Launch(live, choice, host_NX, arrived)

    def finish(self, launch: Launch, live: list[int]) -> list[int]:
        """Hand out a step's tokens; returns those of `live` that go on."""
        result_NX = launch.read()[: len(launch.live)]
        count_N = result_NX[:, COUNT]
        self.stats.steps += bool(count_N.any())
        drafted = launch.choice is not None and launch.choice.draft
        if drafted:
            self._learn(launch.live, result_NX)
        ended = set()
        for lane, index in enumerate(launch.live):
            count = int(count_N[lane])
            if count == 0:  # its late step
                continue
            request, row = self.requests[index], result_NX[lane]
            tokens = row[TOKENS][:count].tolist()
            request.tokens += tokens
            request.progress.append(count)
            rows = self.rows if launch.choice is None else int(row[LENGTH])
            self.stats.add_pass(count, rows)
            if not row[LIVE]:
                ended.add(index)
            self.emit(index, tokens)
        return [index for index in live if index not in ended]

    def _learn(self, live: list[int], result_NX: NDArray[np.int32]) -> None:
        """Keep the scores for the next choice and tell the policy what came of them."""
        assert self.policy is not None
        score_NC = np.ascontiguousarray(result_NX[:, SCORES]).view(np.float32)
        score_NC = score_NC[:, : self._score_NC.shape[1]]
        took_part = result_NX[:, COUNT] > 0
        self._score_NC[np.asarray(live)[took_part]] = score_NC[took_part]
        length_N = result_NX[took_part, LENGTH].astype(np.float32)
        accepted_N = result_NX[took_part, COUNT].astype(np.float32) - 1
        if took_part.any():
            self.policy.observe(score_NC[took_part], length_N, accepted_N)

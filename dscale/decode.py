"""Decode steps of placed requests: launched, their results read at once or a step later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.capture import begin_step
from dscale.compiled.flow import COUNT, FAILED, LENGTH, LIVE, SCORES, TOKENS, Step
from dscale.errors import not_finite
from dscale.host_pack import pack_on_host
from dscale.policy import Choice, Floats, Observer, Policy
from dscale.request import Request
from dscale.results import Results, mark
from dscale.stages import Stages
from dscale.stats import Stats
from dscale.workspace import Workspace, bucket_of


@dataclass(slots=True)
class Launch:
    """A step under way. `live`: the requests of its first lanes, in order; `choice`: its rows,
    None where they are uniform; `lanes`: how many, idle ones included; `context`: committed tokens
    of its requests together, as the host knew them."""

    live: list[Request]
    choice: Choice | None
    results: Results
    lanes: int
    context: int


@dataclass(slots=True)
class Decoding:
    """Decode steps for one way of choosing tokens.

    `policy` None: uniform rows (`rows` each). `late`: results are read one step later, while the
    next step runs, so a finished request takes part in one more step, in which its lane is dead.
    `padded`: lanes come in buckets. `times` hears how long steps took, where a GPU's results are
    late."""

    workspace: Workspace
    stages: Stages
    stats: Stats
    rows: int
    policy: Policy | None
    late: bool
    padded: bool
    times: Observer | None = None

    def launch(self, live: list[Request], *, timed: bool = True) -> Launch:
        """Start one step of placed requests. `timed`: `times` shall hear how long it took."""
        lanes = bucket_of(len(live)) if self.padded else len(live)
        idle = self.workspace.max_requests
        context = sum(r.num_tokens for r in live)
        choice = self._choose(lanes, live, context)
        timed = timed and self.late and self.times is not None
        began = mark(self.workspace.device) if timed else None
        step = self.workspace.assign([r.slot for r in live] + [idle] * (lanes - len(live)))
        run_stages(self.workspace, self.stages, step, lanes, choice)
        results = Results.of(step.result_NX, late=self.late, began=began)
        return Launch(live, choice, results, lanes, context)

    def run(self, live: list[Request]) -> None:
        """Decode placed requests until all have ended, without a batcher that takes others in."""
        pending: Launch | None = None
        while live or pending is not None:
            launched = self.launch(live) if live else None
            if self.late:
                launched, pending = pending, launched
            if launched is not None:
                ended = self.finish(launched)
                live = [request for request in live if request not in ended]

    def _choose(self, lanes: int, live: list[Request], context: int) -> Choice | None:
        if self.policy is None:
            return None
        unknown = np.full(self.workspace.block - 1, np.nan, np.float32)
        score_NC = np.stack([unknown if r.scores is None else r.scores for r in live])
        choice = self.policy.choose(lanes, score_NC, context)
        if self.padded or not choice.draft:
            return choice
        # Without buckets there are exactly the rows that will be used.
        most = sum(min(self.workspace.block, r.max_new_tokens - len(r.tokens)) for r in live)
        return Choice(min(choice.rows, choice.average * len(live), most), choice.average)

    def finish(self, launch: Launch) -> list[Request]:
        """Hand out a step's tokens; returns the requests that end with it."""
        result_NX = launch.results.read()[: len(launch.live)]
        counts = result_NX[:, COUNT].tolist()
        taking = zip(launch.live, counts, strict=True)
        if any(count and not request.finished for request, count in taking):
            self.stats.steps += 1
            self._observe(launch)  # without a live lane a step may be faster
        if launch.choice is not None and launch.choice.draft:
            self._learn(launch.live, result_NX)
        ended = []
        for request, row, count in zip(launch.live, result_NX, counts, strict=True):
            if request.finished or not (count or row[FAILED]):
                continue  # it ended in the step before, or was cancelled meanwhile
            if row[FAILED]:
                request.error = not_finite(request.num_tokens)
            if count == 0:
                ended.append(request)
                continue
            rows = self.rows if launch.choice is None else int(row[LENGTH])
            self.stats.add_pass(count, rows)
            request.progress.append(count)
            self.stats.take_back(*request.give(row[TOKENS][:count].tolist()))
            if request.stopped or not row[LIVE]:
                ended.append(request)
        return ended

    def _observe(self, launch: Launch) -> None:
        """Say how long a step took whose results have been read."""
        milliseconds = launch.results.milliseconds
        if self.times is not None and milliseconds is not None:
            choice = launch.choice
            rows = None if choice is None else choice.rows if choice.draft else 0
            self.times.observe(launch.lanes, rows, launch.context, milliseconds)

    def _learn(self, live: list[Request], result_NX: NDArray[np.int32]) -> None:
        """Keep the scores for the next choice and tell the policy what came of them."""
        assert self.policy is not None
        score_NC: Floats = np.ascontiguousarray(result_NX[:, SCORES]).view(np.float32)
        score_NC = score_NC[:, : self.workspace.block - 1]
        took_part = result_NX[:, COUNT] > 0
        for request, score_C, real in zip(live, score_NC, took_part, strict=True):
            if real:
                request.scores = score_C
        if took_part.any():
            length_N = result_NX[took_part, LENGTH].astype(np.float32)
            accepted_N = result_NX[took_part, COUNT].astype(np.float32) - 1
            self.policy.observe(score_NC[took_part], length_N, accepted_N)


def run_stages(
    workspace: Workspace, stages: Stages, step: Step, lanes: int, choice: Choice | None
) -> None:
    """Run a step of `lanes` lanes: decide, or anchors where nothing is drafted, and verify.
    `choice` None: uniform rows."""
    requests = workspace.requests
    begin_step()
    if choice is None:
        if stages.decide is not None:
            stages.decide(requests, step)
        stages.verify(requests, step)
        return
    decide = stages.decide if choice.draft else stages.anchors
    assert decide is not None
    workspace.set_room(step, choice.rows, choice.average)
    packed = workspace.packed(lanes, lanes * VERIFY_TILE)
    if stages.host_lengths and choice.draft:
        decide(requests, step)
        pack_on_host(requests, step, packed)
    else:
        decide(requests, step, packed)
    stages.verify(requests, step, workspace.packed(lanes, choice.rows))

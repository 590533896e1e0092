"""Simulated acceptance: a trace of scores and accepted counts with the paper's statistics, and
stages that compute everything and then act by the trace.

Nothing here says how well a drafter drafts; every result row that used it says "simulated".
Shapes: T steps of the trace, S request slots with the idle one, N lanes, C = 15 candidates, M
rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dscale.compiled.attention import VERIFY_TILE, Rows
from dscale.compiled.capture import fixed
from dscale.compiled.decide import Decide
from dscale.compiled.flow import Packed, Requests, Step
from dscale.compiled.kv import Paging
from dscale.compiled.verify import Verify

CANDIDATES = VERIFY_TILE - 1

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """A population of drafts: two kinds, each with a gamma distribution of expected lengths, and
    lengths around the expected one by a negative binomial, cut at 15.

    `strong`: share of drafts that mostly survive whole. Per kind: `mean` and `shape` of the gamma
    distribution, `spread` of the binomial (variance mean + spread * mean^2)."""

    strong: float
    strong_mean: float = 20.0
    strong_shape: float = 30.0
    strong_spread: float = 0.10
    mean: float = 3.7
    shape: float = 2.4
    spread: float = 0.30


# Fitted to what the paper publishes of its 8B predictor (sections II-B and IV): mean progress
# 6.09, R^2 0.70, rank correlation 0.74, windows of 5.11 rows that retain 71.6 %, and 91.3 % after
# the budget's adjustment to 8 rows a request.
SETTINGS = {"paper": Setting(strong=0.145), "six": Setting(strong=0.135)}
"""Mean progress 6.09 as in the paper; and 6.0, as in public measurements of other engines."""


def draw(
    setting: Setting, steps: int, slots: int, seed: int = 0, window: int = 16
) -> tuple[Tensor, Tensor]:
    """Draw (score float32 [T, S, 15], accepted int32 [T, S]) independently per slot and step.

    A score is the true chance, given what a predictor knows, that at least so many tokens are
    kept: calibrated, and as imperfect as the paper's. The draws are then dealt out so that the
    accepted counts of every slot have nearly the same mean over each `window` steps, which leaves
    their distribution as it is and keeps short runs comparable."""
    if steps % window:
        raise ValueError(f"steps: expected a multiple of {window}, got {steps}")
    random = np.random.default_rng(seed)
    count = steps * slots
    strong = random.random(count) < setting.strong
    chance = np.where(
        strong[:, None],
        _survival(
            random.gamma(setting.strong_shape, setting.strong_mean / setting.strong_shape, count),
            setting.strong_spread,
        ),
        _survival(
            random.gamma(setting.shape, setting.mean / setting.shape, count), setting.spread
        ),
    )
    accepted = (random.random(count)[:, None] < chance).sum(1)
    order = _dealt(accepted, count // window, random)
    place = order.reshape(window, steps // window, slots).transpose(1, 0, 2).reshape(steps, slots)
    score = torch.from_numpy(chance[place]).float()
    return score, torch.from_numpy(accepted[place]).int()


def _survival(mean: Floats, spread: float) -> Floats:
    """P(at least j) for j = 1..15 of negative binomials with these means, [count, 15]."""
    k = np.arange(CANDIDATES)
    trials = 1 / spread
    stay = (mean / (trials + mean))[:, None]
    factor = np.where(k > 0, (trials + k - 1) / np.maximum(k, 1), 1.0)
    mass = np.cumprod(factor) * (1 - stay) ** trials * stay**k
    survival: Floats = np.clip(1 - np.cumsum(mass, 1), 0.0, 1.0)
    return survival


def _dealt(accepted: Floats, hands: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Indices of draws [window, hands]: each column a hand of nearly equal sum, in random
    order."""
    ranked = accepted.argsort(kind="stable").reshape(-1, hands)
    return random.permuted(random.permuted(ranked, axis=1), axis=0)


class Trace(nn.Module):
    """A trace on the device, and where each request slot stands in it; the stages advance it."""

    score_TSC: Tensor
    accepted_TS: Tensor
    at_S: Tensor

    def __init__(self, score_TSC: Tensor, accepted_TS: Tensor, device: torch.device) -> None:
        super().__init__()
        at_S = torch.zeros(accepted_TS.shape[1], dtype=torch.int64)
        for name, value in (
            ("score_TSC", score_TSC),
            ("accepted_TS", accepted_TS),
            ("at_S", at_S),
        ):
            # Fixed addresses: captured graphs read and write these in place.
            self.register_buffer(name, fixed(value.to(device, copy=True)), persistent=False)

    def load(self, score_TSC: Tensor, accepted_TS: Tensor) -> None:
        """Put another trace of the same size in place of this one, from its start."""
        self.score_TSC.copy_(score_TSC)
        self.accepted_TS.copy_(accepted_TS)
        self.rewind()

    def rewind(self) -> None:
        """Back to the first step, every slot."""
        self.at_S.zero_()

    def scores(self, slot_N: Tensor) -> Tensor:
        """Scores of the lanes' present steps, [N, 15]."""
        return self.score_TSC[self._row(slot_N), slot_N]

    def accepted(self, slot_N: Tensor) -> Tensor:
        """Counts accepted at full width in the lanes' present steps, [N]."""
        return self.accepted_TS[self._row(slot_N), slot_N]

    def advance(self, slot_N: Tensor, steps_N: Tensor | int = 1) -> None:
        """On by one step, or by so many."""
        self.at_S.index_put_((slot_N,), self.at_S[slot_N] + steps_N)

    def _row(self, slot_N: Tensor) -> Tensor:
        return self.at_S[slot_N] % self.accepted_TS.shape[0]


class SimulatedDecide(Decide):
    """Decide, its scores replaced by the trace's once they are computed."""

    trace: Trace

    def propose(self, requests: Requests, step: Step) -> Tensor | None:
        """Draft, candidates and scores as ever; returns the trace's scores."""
        score_NC = Decide.propose(self, requests, step)
        if score_NC is None:
            return None
        # Both sides of a condition on the real scores: no compiler can drop the predictor.
        return torch.where(score_NC >= 0, self.trace.scores(step.slot_N), score_NC)


class SimulatedVerify(Verify):
    """Verify, its choices replaced so that min(accepted of the trace, k - 1) candidates match."""

    trace: Trace

    def forward(self, requests: Requests, step: Step, packed: Packed | None = None) -> None:
        Verify.forward(self, requests, step, packed)
        self.trace.advance(step.slot_N, step.given_N == 0)  # prompts take none

    def choose(
        self, requests: Requests, step: Step, token_M: Tensor, rows: Rows, paging: Paging
    ) -> Tensor:
        """The candidate for as many rows as the trace accepts; the target's own choice behind
        them, moved on by one where it happens to be the candidate."""
        choice_M = Verify.choose(self, requests, step, token_M, rows, paging)
        column_M = torch.clamp(rows.tile_row_R, max=step.candidate_NC.shape[1] - 1)
        candidate_M = step.candidate_NC[rows.lane_R, column_M]
        vocab = self.target.config.vocab_size
        other_M = torch.where(choice_M == candidate_M, (choice_M + 1) % vocab, choice_M)
        accepted_M = self.trace.accepted(step.slot_N)[rows.lane_R]
        return torch.where(rows.tile_row_R < accepted_M, candidate_M, other_M)


def simulate(stage: Any, trace: Trace) -> Any:
    """Turn a Decide or Verify as the engine built it into its simulated kind, in place."""
    kinds = {Decide: SimulatedDecide, Verify: SimulatedVerify}
    if type(stage) not in kinds:
        raise ValueError(f"stage: expected Decide or Verify, got {type(stage).__name__}")
    stage.__class__ = kinds[type(stage)]
    stage.trace = trace
    return stage

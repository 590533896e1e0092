"""A simulated decoding loop: synthetic scores, given step times, tokens per millisecond.

Shapes: N requests, C = 15 candidates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dscale.policy import Choice, Cost, Costs, Floats, Policy

C = 15


class Always:
    """A policy of one multiple in every step; 0 drafts nothing."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def choose(self, lanes: int, score_NC: Floats, context: int) -> Choice:
        return Choice(max(1, self.multiple) * lanes, 16, draft=self.multiple > 0)

    def observe(self, score_NC: Floats, length_N: Floats, accepted_N: Floats) -> None:
        pass


@dataclass(frozen=True)
class Prices:
    """A draft, a pass, and what each row beyond `free` adds, in milliseconds."""

    draft: float
    verify: float
    row: float
    free: int = 0

    def of(self, lanes: int, rows: int) -> Cost:
        """As `policy.Costs` asks for it."""
        verified = self.verify + self.row * max(0, (rows or lanes) - self.free)
        return Cost(verified + (self.draft if rows else 0.0))


@dataclass(frozen=True)
class World:
    """Requests whose chance that the next candidate is kept wanders: mean `keep`, spread `spread`
    between requests and steps. `claim`: what the drafter's scores make of a chance p, p ** claim
    (1 is honest). `later`: `keep` in the second half of a run."""

    requests: int
    keep: float
    spread: float
    claim: float = 1.0
    later: float | None = None
    seed: int = 0


def simulate(world: World, costs: Costs, policy: Policy, steps: int, late: bool = True) -> float:
    """Tokens per millisecond of a policy. Results reach it one step late, as in captured runs."""
    draw = np.random.default_rng(world.seed)
    lanes, time, tokens = world.requests, 0.0, 0
    state = draw.normal(size=lanes)
    known = np.full((lanes, C), np.nan, np.float32)
    pending: Callable[[], None] | None = None
    for index in range(steps):
        keep = world.keep if world.later is None or 2 * index < steps else world.later
        easy = np.log(keep / (1 - keep))
        # The same luck for every policy: drawn whether it is used or not.
        state = 0.8 * state + 0.6 * draw.normal(size=lanes)
        each = draw.normal(size=(lanes, C))
        luck = draw.random((lanes, C))
        chance = 1 / (1 + np.exp(-(easy + world.spread * (state[:, None] + 0.7 * each))))
        score = np.cumprod(chance**world.claim, 1).astype(np.float32)
        choice = policy.choose(lanes, known, 1000 * lanes)
        time += costs.of(lanes, choice.rows if choice.draft else 0).at(1000 * lanes)
        arrive = None
        if choice.draft:
            length = 1 + share(score, choice, lanes)
            kept = np.cumprod(luck < chance, 1) * (np.arange(C) < length[:, None] - 1)
            accepted = kept.sum(1)
            arrive = _arrival(policy, known, score, length, accepted)
        else:
            accepted = np.zeros(lanes)
        tokens += lanes + int(accepted.sum())
        if late:
            arrive, pending = pending, arrive
        if arrive is not None:
            arrive()
    return tokens / time


def share(score: Floats, choice: Choice, lanes: int) -> Any:
    """[N] candidates of each request: the best scores that fit."""
    rows = min(choice.rows, choice.average * lanes) - lanes
    order = np.argsort(-score, axis=None, kind="stable")[: max(rows, 0)]
    return np.bincount(order // C, minlength=lanes)


def _arrival(
    policy: Policy, known: Floats, score: Floats, length: Any, accepted: Any
) -> Callable[[], None]:
    def arrive() -> None:
        known[:] = score
        policy.observe(score, length.astype(np.float32), accepted.astype(np.float32))

    return arrive

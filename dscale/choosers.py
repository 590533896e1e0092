"""The narrowest way of choosing tokens for a set of requests: what their stages are traced for."""

from __future__ import annotations

from collections.abc import Iterable

from dscale.compiled.sampling import Chooser
from dscale.request import Request

GREEDY = Chooser()

ALL_CANDIDATES = 1 << 62
"""Candidates of a row that filters without top-k: the whole vocabulary, sorted."""


def chooser_of(requests: list[Request]) -> Chooser:
    """The narrowest way of choosing tokens that serves all the requests."""
    penalty = any(r.repetition_penalty != 1 for r in requests)
    sampled = [r for r in requests if r.temperature > 0]
    if not sampled:
        return Chooser(penalty=penalty)
    if all(r.top_k == 0 and r.top_p >= 1 and r.min_p <= 0 for r in sampled):
        return Chooser(sample=True, penalty=penalty)
    if all(r.top_k > 0 for r in sampled):
        # Powers of two, so that similar settings share a compiled stage.
        largest = max(r.top_k for r in sampled)
        candidates = max(64, 1 << (largest - 1).bit_length())
    else:
        candidates = ALL_CANDIDATES
    return Chooser(sample=True, max_candidates=candidates, penalty=penalty)


def narrowest(needed: Chooser, among: Iterable[Chooser]) -> Chooser | None:
    """The narrowest of `among` that serves requests whose own is `needed`, None without one."""
    able = [chooser for chooser in among if _serves(chooser, needed)]
    return min(able, key=_width, default=None)


def _serves(chooser: Chooser, needed: Chooser) -> bool:
    if chooser.penalty < needed.penalty or chooser.sample < needed.sample:
        return False
    if not needed.sample:
        return True
    if not needed.max_candidates:  # unfiltered: every token may be drawn
        return chooser.max_candidates in (0, ALL_CANDIDATES)
    return chooser.max_candidates >= needed.max_candidates


def _width(chooser: Chooser) -> tuple[bool, bool, int, bool]:
    # Cheapest first: argmax, noise over the vocabulary, sorted candidates.
    return (chooser.sample, chooser.max_candidates > 0, chooser.max_candidates, chooser.penalty)

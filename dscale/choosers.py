"""The narrowest way of choosing tokens for a set of requests: what their stages are traced for."""

from __future__ import annotations

from dscale.compiled.sampling import Chooser
from dscale.request import Request

GREEDY = Chooser()


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
        candidates = 1 << 62
    return Chooser(sample=True, max_candidates=candidates, penalty=penalty)

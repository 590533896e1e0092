"""How large the workspace must be for a set of requests."""

from __future__ import annotations

from dscale.choosers import chooser_of
from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.kv import PAGE
from dscale.compiled.target import TargetConfig
from dscale.config import EngineConfig
from dscale.kernels.ops import MAX_LANES
from dscale.request import Request
from dscale.workspace import STOP_IDS, bucket_of


def sizes(config: EngineConfig, shape: TargetConfig, requests: list[Request]) -> dict[str, int]:
    """Arguments of a Workspace that these requests need, rounded up so that the next ones rarely
    need more. Raises ValueError when a fixed pool is too small for them together."""
    num_pages = 1 + sum(r.num_pages for r in requests)
    per_request = 1 << (max(r.num_pages for r in requests) - 1).bit_length()
    most = config.max_concurrency or len(requests)
    capacity = config.pool_tokens
    if capacity is None:
        num_pages = max(-(-num_pages // 16) * 16, per_request)
    else:
        limit = 1 + -(-capacity // PAGE)
        if num_pages > limit:
            raise ValueError(
                f"pool_tokens: expected at least {(num_pages - 1) * PAGE} (prompt + "
                f"max_new_tokens + {2 * VERIFY_TILE} of each of {len(requests)} requests, in "
                f"pages of {PAGE}), got {capacity}"
            )
        # Nothing grows later: any request that fits at all must find its place at any time.
        most = config.max_concurrency or min(limit - 1, MAX_LANES)
        num_pages = per_request = limit
    stop_ids = max(len(r.stop_ids) for r in requests)
    return {
        "max_requests": bucket_of(most),
        "num_pages": num_pages,
        "pages_per_request": per_request,
        "stop_ids": max(STOP_IDS, 1 << (stop_ids - 1).bit_length() if stop_ids else 0),
        "seen": shape.vocab_size if chooser_of(requests).penalty else 1,
    }

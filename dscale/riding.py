"""Which prompts ride: are run by the verification of a decode step, a tile of 16 tokens a lane."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dscale.config import EngineConfig
from dscale.kernels.ops import MAX_LANES
from dscale.policy import MULTIPLES, Choice
from dscale.prefill import PromptTile, prompt_tiles
from dscale.request import Request
from dscale.workspace import bucket_of

MOST_TILES = 16
"""Tiles of prompts in one step: 256 tokens. Beyond, a pass of their own reads the weights as fast
as it computes."""

Bucket = tuple[int, int | None]
"""Lanes and rows of a captured step, rows None for a uniform one."""

# Rows per lane of buckets that only steps with prompts have: of two requests for each lane and of
# few rows for the live ones up to full tiles everywhere.
_MULTIPLES = (6, 8, 12, 16)
_EIGHT = 8
# Drafting a lane takes as long as verifying so many rows: 55 us and 16 us each in a fit of the
# times of captured steps from 8 lanes on (Qwen3-8B shapes, H200).
_LANE = 4


def carries(config: EngineConfig, block: int, captured: bool) -> bool:
    """Whether steps may run tiles of prompts: those of modes that verify whole blocks of `block`
    (0: without a drafter) can. Where the config leaves it open, `captured` ones do."""
    wanted = captured if config.ride_prompts is None else config.ride_prompts
    return wanted and block > 0 and (config.adaptive or config.uniform_rows(block) == block)


def bucket_for(
    lanes: int, rows: int | None, captured: Collection[Bucket] | None, *, padded: bool
) -> Bucket | None:
    """The cheapest bucket that holds so many lanes and rows (None: uniform): one of `captured`, or
    where that is None, the smallest that a step may have. None where there is none."""
    if lanes > MAX_LANES:
        return None
    if captured is not None:
        able = [(n, m) for n, m in captured if n >= lanes and (m is None) == (rows is None)]
        able = [(n, m) for n, m in able if (m or 0) >= (rows or 0)]
        return min(able, key=lambda b: (_LANE * b[0] + (b[1] or 0), b[1] or 0), default=None)
    if not padded:
        return lanes, rows
    lanes = bucket_of(lanes)
    if rows is None:
        return lanes, None
    return lanes, lanes * next(m for m in MULTIPLES if m * lanes >= rows)


def riding_buckets(config: EngineConfig, lanes: Sequence[int]) -> list[Bucket]:
    """Buckets that steps with prompts need besides those of `lanes` lanes, the ones that other
    steps have: two more lane counts, for 8 and for 16 tiles, and where every request has a fixed
    number of rows, larger multiples of every eighth lane count."""
    top = -(-max(lanes) // _EIGHT) * _EIGHT
    more = [count for count in (top + _EIGHT, top + 2 * _EIGHT) if count <= MAX_LANES]
    if not config.adaptive:
        return [(count, None) for count in more]
    if config.average is None:
        return [(count, m * count) for count in more for m in _MULTIPLES]
    larger = [m for m in _MULTIPLES[1:] if m > config.average]
    counts = [*range(_EIGHT, top + 1, _EIGHT), *more]
    return [(count, m * count) for count in counts for m in larger]


def riders(
    filling: Sequence[Request], live: Sequence[Request], *, block: int, most: int
) -> list[Request]:
    """The requests of `filling` whose prompts may ride with a step of `live`, in tiles of `block`
    tokens (0: none may): all that have no leader, or none.

    None ride where one is guided, has a repetition penalty or is too long, because then there is a
    pass of their own anyway, in which the others cost little; nor more than `most` tokens."""
    group = [r for r in filling if r.leader is None]
    tokens = sum(len(r.prompt) - r.prefilled for r in group)
    alone = any(r.guide is not None or r.repetition_penalty != 1 for r in group)
    if not (block and live) or alone or tokens > most:
        return []
    return group if len(prompt_tiles(group, block)) <= MOST_TILES else []


def with_prompts(
    tiles: Sequence[PromptTile],
    live: int,
    choice: Choice | None,
    captured: Collection[Bucket] | None,
    *,
    block: int,
    padded: bool,
) -> tuple[int, Choice | None]:
    """Lanes and rows of a step that runs these tiles besides what the policy chose for so many
    live requests (None: uniform rows). There must be a bucket, see `bucket_for`."""
    lanes, rows = live + len(tiles), None
    if choice is not None:
        each = min(choice.average, block) if choice.draft else 1
        rows = min(choice.rows, each * live) + sum(tile.length for tile in tiles)
    bucket = bucket_for(lanes, rows, captured, padded=padded)
    assert bucket is not None
    lanes, rows = bucket
    if choice is None or rows is None:
        return lanes, None
    return lanes, Choice(rows, choice.average, choice.draft)

"""Engine settings: resolved once, checked once, then nobody writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dscale.compiled.attention import PREFILL_TILE, VERIFY_TILE

Mode = Literal["ar", "dflash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    `mode`: "ar" decodes one token per pass without a drafter, "dflash" drafts and verifies.
    `budget`: rows each request verifies per pass, 1 to 16, anchor included; None is full width.
    `prefill_chunk`: prompt tokens per request and prefill pass, a multiple of 128. `pool_tokens`:
    capacity of the paged cache in tokens; None grows it to what a call needs. `pack_weights`: on a
    CPU, keep a second copy of the projections in oneDNN's blocked layout, for faster
    passes of 2 to 16 rows. `capture`: compile the step and capture it in CUDA graphs; None does so
    on a GPU.

    Raises ValueError naming the setting that is out of range.
    """

    mode: Mode = "dflash"
    budget: int | None = None
    prefill_chunk: int = 512
    pool_tokens: int | None = None
    pack_weights: bool = False
    capture: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {get_args(Mode)}, got {self.mode!r}")
        if self.budget is not None and (
            not _is_int(self.budget) or not 1 <= self.budget <= VERIFY_TILE
        ):
            raise ValueError(
                f"budget: expected None or rows per request in 1..{VERIFY_TILE}, "
                f"got {self.budget!r}"
            )
        chunk, pool = self.prefill_chunk, self.pool_tokens
        if not _is_int(chunk) or chunk < 1 or chunk % PREFILL_TILE:
            raise ValueError(
                f"prefill_chunk: expected a positive multiple of {PREFILL_TILE}, got {chunk!r}"
            )
        if pool is not None and (not _is_int(pool) or pool < 1):
            raise ValueError(f"pool_tokens: expected None or a positive number, got {pool!r}")
        if not isinstance(self.pack_weights, bool):
            raise ValueError(f"pack_weights: expected True or False, got {self.pack_weights!r}")
        if self.capture not in (None, True, False):
            raise ValueError(f"capture: expected None, True or False, got {self.capture!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""Engine settings: resolved once, checked once, then nobody writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

from dscale.compiled.attention import PREFILL_TILE, VERIFY_TILE
from dscale.kernels.ops import MAX_LANES
from dscale.kernels.reference_rows import SEEDS

Budget = int | Literal["half", "auto"] | None

WeightFormat = Literal["model", "fp8-draft", "fp8"]
"""Which projections are read as 8-bit floats: none, the drafts', or the target layers' as well."""

Mode = Literal["ar", "dflash", "+tiles", "+budget", "dscale"]

ADAPTIVE: tuple[Mode, ...] = ("+budget", "dscale")
"""Modes that give each request its own number of rows."""

HALF = 8
"""Rows per live request of budget "half": half a block, as in the paper (section IV)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    `mode`: the steps of the paper's ablation. "ar" decodes one token per pass without a drafter.
    "dflash" drafts, and verifies the same number of rows for every request with the attention tile
    of the prefill; "+tiles" with the 16-row tile. "+budget" shares rows by the drafts' chances,
    the lengths read back by the host before verify; "dscale" does so without that read.

    `budget`, anchors included. In "dflash" and "+tiles": rows of every request and pass, 1 to 16,
    None for the full width. In "+budget" and "dscale": rows per live request on average, 1 to 16;
    "half" for 8; "auto" (also None in "dscale") to choose the capacity of each step by expected
    progress over measured time; None in "+budget" is "half". `budget_seed`: where Algorithm 1
    starts, one of kernels.reference_rows.SEEDS; "none" in other modes, which have no use for it.

    `prefill_chunk`: prompt tokens per request and prefill pass, a multiple of 64. `pool_tokens`:
    capacity of the paged cache in tokens; None chooses it from free memory (`dscale/sizing.py`).
    `max_concurrency`: requests that may run at once, None for 256; the others wait.
    `pack_weights`: on a CPU, keep a second copy of the projections in oneDNN's blocked layout, for
    faster passes of 2 to 16 rows. `capture`: compile the step and capture it in CUDA graphs; None
    does so on a GPU. `compile_prefill`: compile and capture the pass over prompts too; None does
    so where steps are captured, False starts sooner (docs/performance.md). `prefix_cache`:
    requests whose prompts begin alike share whole pages of it. `weights`: "fp8-draft" keeps a
    second copy in 8-bit floats of the drafter's layers and of the LM head for its drafts: what is
    drafted changes a little, answers do not. "fp8" does so for the target's layers, too, in all
    passes: a target of its own, whose answers are not the model's (docs/performance.md).

    Raises ValueError naming the setting that is out of range.
    """

    mode: Mode = "dscale"
    budget: Budget = None
    budget_seed: str = "none"
    prefill_chunk: int = 512
    pool_tokens: int | None = None
    max_concurrency: int | None = None
    pack_weights: bool = False
    capture: bool | None = None
    compile_prefill: bool | None = None
    prefix_cache: bool = True
    weights: WeightFormat = "model"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {get_args(Mode)}, got {self.mode!r}")
        words = ("half", "auto") if self.adaptive else ()
        in_range = is_int(self.budget) and 1 <= self.budget <= VERIFY_TILE
        if self.budget is not None and self.budget not in words and not in_range:
            expected = " or ".join(map(repr, (None, *words)))
            raise ValueError(
                f"budget: expected {expected} or rows per request in 1..{VERIFY_TILE} in mode "
                f"{self.mode!r}, got {self.budget!r}"
            )
        if self.budget_seed not in SEEDS:
            raise ValueError(f"budget_seed: expected one of {SEEDS}, got {self.budget_seed!r}")
        if self.budget_seed != "none" and not self.adaptive:
            raise ValueError(
                f"budget_seed: expected 'none' in mode {self.mode!r}, got {self.budget_seed!r}"
            )
        chunk, pool = self.prefill_chunk, self.pool_tokens
        if not is_int(chunk) or chunk < 1 or chunk % PREFILL_TILE:
            raise ValueError(
                f"prefill_chunk: expected a positive multiple of {PREFILL_TILE}, got {chunk!r}"
            )
        if pool is not None and (not is_int(pool) or pool < 1):
            raise ValueError(f"pool_tokens: expected None or a positive number, got {pool!r}")
        most = self.max_concurrency
        if most is not None and (
            not is_int(most) or most < 1 or (self.adaptive and most > MAX_LANES)
        ):
            limit = f" up to {MAX_LANES}" if self.adaptive else ""
            raise ValueError(
                f"max_concurrency: expected None or a positive number{limit}, got {most!r}"
            )
        for name in ("pack_weights", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name in ("capture", "compile_prefill"):
            if not (getattr(self, name) is None or isinstance(getattr(self, name), bool)):
                value = getattr(self, name)
                raise ValueError(f"{name}: expected None, True or False, got {value!r}")
        if self.weights not in get_args(WeightFormat):
            formats = get_args(WeightFormat)
            raise ValueError(f"weights: expected one of {formats}, got {self.weights!r}")
        if self.mode == "ar" and self.weights == "fp8-draft":
            raise ValueError("weights: expected 'model' or 'fp8' in mode 'ar', got 'fp8-draft'")
        if self.pack_weights and self.weights != "model":
            raise ValueError(
                f"pack_weights: expected False with weights {self.weights!r}, got True"
            )
        if self.compile_prefill and self.capture is False:
            raise ValueError("compile_prefill: expected None or False without capture, got True")

    @property
    def concurrency(self) -> int:
        """Requests that may run at once: by default as many lanes as an adaptive step can have."""
        return self.max_concurrency or MAX_LANES

    @property
    def adaptive(self) -> bool:
        """Whether requests get different numbers of rows."""
        return self.mode in ADAPTIVE

    @property
    def automatic(self) -> bool:
        """Whether each step's capacity is chosen by measured times."""
        return self.adaptive and self.average is None

    @property
    def average(self) -> int | None:
        """Fixed rows per live request of an adaptive mode; None for "auto" and in other modes."""
        if not self.adaptive:
            return None
        if self.budget == "half" or (self.budget is None and self.mode == "+budget"):
            return HALF
        return self.budget if isinstance(self.budget, int) else None

    def uniform_rows(self, block_size: int) -> int:
        """Rows every request verifies where they are all alike: 1 in mode "ar"."""
        if self.mode == "ar":
            return 1
        width = self.budget if isinstance(self.budget, int) and not self.adaptive else block_size
        return min(width, block_size)


def is_int(value: object) -> TypeGuard[int]:
    """Whether a setting is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)

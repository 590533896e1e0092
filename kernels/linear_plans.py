"""Which products the split kernel does, and in what tiles: a small table per kind of GPU, measured
by `python -m bench.linear_plans`.

Without an entry for a GPU's capability and number of multiprocessors, or for a weight's shape, the
library does the product."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).parent / "tuned" / "linear.json"
"""Rows of `python -m bench.linear_plans`: where the kernel was faster, how, and both times."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of a product. `parts`: programs that share a tile along K."""

    block_m: int
    block_n: int
    block_k: int
    parts: int
    stages: int
    warps: int

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of the result."""
        return -(-rows // self.block_m) * -(-columns // self.block_n)

    def shared_bytes(self, itemsize: int = 2) -> int:
        """Shared memory its operands of so many bytes a number take at least."""
        return itemsize * self.stages * self.block_k * (self.block_m + self.block_n)


@cache
def table(
    capability: str, processors: int, dtype: str = "bfloat16"
) -> dict[tuple[int, int], dict[int, Plan | None]]:
    """Plans by (columns, inner) of a weight of a dtype, then by the most rows they are for,
    ascending; None where the library is as fast. `capability`: as "9.0"."""
    found: dict[tuple[int, int], dict[int, Plan | None]] = {}
    for row in sorted(json.loads(FILE.read_text()), key=lambda row: row["rows"]):
        if (row["capability"], row["processors"], row["dtype"]) == (capability, processors, dtype):
            names = ("block_m", "block_n", "block_k", "parts", "stages", "warps")
            plan = Plan(*(row[name] for name in names)) if row["split"] else None
            found.setdefault((row["columns"], row["inner"]), {})[row["rows"]] = plan
    return found


def device_kind(device: torch.device) -> tuple[str, int]:
    """Capability and multiprocessors of a GPU, as the table knows them."""
    return _kind(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _kind(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.major}.{properties.minor}", properties.multi_processor_count


def plans_for(weight: Tensor) -> dict[int, Plan | None]:
    """Plans of a weight `[N, K]` by the most rows they are for; none but for a dtype and a GPU in
    the table."""
    if weight.device.type != "cuda":
        return {}
    of_device = table(*device_kind(weight.device), str(weight.dtype).removeprefix("torch."))
    return of_device.get((weight.shape[0], weight.shape[1]), {})


def plan(x: Tensor, weight: Tensor) -> Plan | None:
    """The plan for a product, None where the library does it."""
    for most, found in plans_for(weight).items():
        if x.shape[0] <= most:
            return found
    return None

"""How large the workspace is: what requests need, and the pool chosen from free memory."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dscale.choosers import chooser_of
from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.drafter import Drafter
from dscale.compiled.kv import PAGE
from dscale.compiled.target import Target, TargetConfig
from dscale.config import EngineConfig
from dscale.kernels.ops import MAX_LANES
from dscale.pages import pages_for
from dscale.request import Request
from dscale.workspace import STOP_IDS, Workspace, bucket_of

logger = logging.getLogger("dscale")

Sizes = dict[str, int]
"""Arguments of a Workspace."""

SHARE, MARGIN = 0.8, 1 << 30
"""Of a GPU's free memory but for a margin of 1 GiB, the share a serving engine's pool takes; the
rest is for captured graphs and activations. (transformers' continuous batching takes 0.8 or 0.9 of
what is free, with processors of logits 0.6.)"""

MOST_PAGES = 8192
"""Pages a chosen pool has at most: a million tokens. A step writes two block tables of int32 per
lane and page, 2 MB for 32 lanes; and every slot holds one such row (8 MB for 256 slots)."""

HOST_SHARE, HOST_PAGES = 1 / 8, 256
"""On a CPU, where a pool can grow without anything being compiled: share and pages at most."""

CALL_SHARE, CALL_PAGES, CALL_SLOTS = 1 / 8, 512, 32
"""Of a GPU, for calls of `generate` at first: of the free memory, pages and requests."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes free on `device` for pools, and bytes of a page of both of them."""

    device: torch.device
    free: int
    page: int

    @property
    def gpu(self) -> bool:
        """Whether growing costs a compilation."""
        return self.device.type != "cpu"

    @property
    def budget(self) -> int:
        """Bytes for the pool of an engine that serves."""
        if self.gpu:
            return int(SHARE * max(0, self.free - MARGIN))
        return int(HOST_SHARE * self.free)

    @property
    def most_pages(self) -> int:
        """Pages that pool has at most, however much is free."""
        return MOST_PAGES if self.gpu else HOST_PAGES

    @property
    def serving_pages(self) -> int:
        """Pages of an engine that serves."""
        return min(self.budget // self.page, self.most_pages)

    @property
    def call_pages(self) -> int:
        """Pages for the first calls of `generate`; on a CPU those that they need."""
        return min(int(CALL_SHARE * self.free) // self.page, CALL_PAGES) if self.gpu else 0


def memory_of(target: Target, drafter: Drafter | None) -> Memory:
    """What is free where the target lives, while no pool is allocated."""
    device = target.norm.device
    if device.type != "cpu":
        gc.collect()  # compiled stages of an earlier workspace refer to one another
    shapes = [target.config] + ([drafter.config] if drafter is not None else [])
    each = sum(s.num_layers * s.num_kv_heads * s.head_dim for s in shapes)
    return Memory(device, free_bytes(device), 2 * PAGE * each * target.norm.element_size())


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device, PyTorch's unused cache included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: assume a small machine
        return 8 << 30
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def needed(
    config: EngineConfig, shape: TargetConfig, requests: list[Request], capacity: int | None
) -> Sizes:
    """What these requests need. `capacity`: pages of a pool that has been chosen, in which they
    take turns; None makes room for all of them together. Raises ValueError when a fixed pool is
    too small for them together."""
    num_pages = 1 + sum(r.num_pages for r in requests)
    largest = max(r.num_pages for r in requests)
    per_request = 1 << (largest - 1).bit_length()
    most = config.max_concurrency or len(requests)
    if config.pool_tokens is not None:
        limit = 1 + -(-config.pool_tokens // PAGE)
        if num_pages > limit:
            raise ValueError(
                f"pool_tokens: expected at least {(num_pages - 1) * PAGE} (prompt + "
                f"max_new_tokens + {2 * VERIFY_TILE} of each of {len(requests)} requests, in "
                f"pages of {PAGE}), got {config.pool_tokens}"
            )
        # Nothing grows later: any request that fits at all must find its place at any time.
        most = config.max_concurrency or min(limit - 1, MAX_LANES)
        num_pages = per_request = limit
    elif capacity is not None:
        num_pages = max(1 + largest, min(num_pages, capacity))
        most = min(config.concurrency, most)
    else:
        num_pages = max(-(-num_pages // 16) * 16, per_request)
    stop_ids = max(len(r.stop_ids) for r in requests)
    return {
        "max_requests": bucket_of(most),
        "num_pages": num_pages,
        "pages_per_request": min(per_request, num_pages),
        "stop_ids": max(STOP_IDS, 1 << (stop_ids - 1).bit_length() if stop_ids else 0),
        "seen": shape.vocab_size if chooser_of(requests).penalty else 1,
    }


def check_room(request: Request, capacity: int | None) -> None:
    """Raise ValueError for a request that is larger than a pool of so many tokens."""
    if capacity is not None and request.num_pages > -(-capacity // PAGE):
        raise ValueError(
            f"pool_tokens: expected at least {request.num_pages * PAGE} (prompt + "
            f"max_new_tokens + {2 * VERIFY_TILE} of a request, in pages of {PAGE}), "
            f"got {capacity}"
        )


def check_memory(request: Request, memory: Memory, had: int) -> None:
    """Raise ValueError for a request that alone needs more than what is free, and `had` bytes that
    are let go before: it would make others wait in vain for the pool to grow."""
    _check_fits({"num_pages": 1 + request.num_pages}, replace(memory, free=memory.free + had))


def _check_fits(sizes: Sizes, memory: Memory) -> None:
    if sizes["num_pages"] * memory.page > memory.free:
        raise too_large(sizes, memory)


def roomy(
    need: Sizes,
    old: Sizes,
    config: EngineConfig,
    shape: TargetConfig,
    memory: Memory,
    serving: bool,
) -> Sizes:
    """What to allocate where `need` is needed and `old` was there (empty at first), so that it
    rarely grows: a serving engine's whole pool at once, for calls twice as much as before."""
    sizes = {name: max(value, old.get(name, 0)) for name, value in need.items()}
    if config.pool_tokens is not None or not (serving or memory.gpu or old):
        return sizes
    if serving:
        sizes["max_requests"] = bucket_of(config.concurrency)
        sizes["num_pages"] = max(need["num_pages"], memory.serving_pages)
    else:
        slots = config.max_concurrency or (CALL_SLOTS if memory.gpu else 0)
        sizes["max_requests"] = max(sizes["max_requests"], bucket_of(slots) if slots else 0)
        outgrown = bool(old) and need["num_pages"] > old["num_pages"]
        pages = 2 * old["num_pages"] if outgrown else 0
        pages = min(max(pages, memory.call_pages), int(SHARE * memory.free) // memory.page)
        sizes["num_pages"] = max(sizes["num_pages"], pages)
    if serving or memory.gpu:
        every = min(pages_for(shape.max_positions, 0), sizes["num_pages"])
        sizes["pages_per_request"] = max(sizes["pages_per_request"], every)
        sizes["seen"] = shape.vocab_size
    return sizes


def allocate(
    target: Target, drafter: Drafter | None, wanted: Sizes, need: Sizes, memory: Memory
) -> Workspace:
    """A workspace as wanted, or with as much of its pool as can be had but what is needed.

    Raises ValueError, saying what to lower, where that does not fit."""
    if not memory.gpu:
        _check_fits(need, memory)  # or the system would end the process
    sizes = dict(wanted)
    while True:
        try:
            made = Workspace(target, drafter, **sizes)
            break
        except RuntimeError as error:  # torch's out of memory, on any device
            if sizes["num_pages"] == need["num_pages"]:
                raise too_large(need, memory, error) from error
        sizes["num_pages"] = max(need["num_pages"], sizes["num_pages"] // 2)
        sizes["pages_per_request"] = min(sizes["pages_per_request"], sizes["num_pages"])
    logger.info(
        "pool of %d tokens: %.2f GiB of %.2f GiB free on %s; pool_tokens sets another size",
        (made.num_pages - 1) * PAGE, made.num_bytes / 2**30, memory.free / 2**30, memory.device,
    )  # fmt: skip
    return made


def too_large(sizes: Sizes, memory: Memory, error: object = None) -> ValueError:
    """What to say when a workspace does not fit into memory."""
    need, free = (x / 2**30 for x in (sizes["num_pages"] * memory.page, memory.free))
    detail = "" if error is None else f" ({error})"
    return ValueError(
        f"max_new_tokens: expected requests whose cache can be allocated, got a need of "
        f"{(sizes['num_pages'] - 1) * PAGE} tokens, {need:.2f} GiB of {free:.2f} GiB free on "
        f"{memory.device}; lower pool_tokens, max_concurrency or max_new_tokens{detail}"
    )


def explained(error: BaseException, num_pages: int) -> BaseException:
    """The error of a step; where memory ran out, with what to lower."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    made = ValueError(
        f"pool_tokens: expected a pool that leaves memory for the steps, got one of "
        f"{(num_pages - 1) * PAGE} tokens; lower pool_tokens, max_concurrency or prefill_chunk "
        f"({error})"
    )
    made.__cause__ = error
    return made

"""Fixed-address device buffers: the request state, the pools, and one set of step buffers per lane
bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.capture import fixed, send
from dscale.compiled.drafter import Drafter
from dscale.compiled.flow import RESULT_COLUMNS, Packed, Requests, Step
from dscale.compiled.kv import KVPool
from dscale.compiled.predictor import RECENT
from dscale.compiled.prefill import Chunk
from dscale.compiled.target import Target
from dscale.placing import Staging
from dscale.prefill import ChunkBuffers, bucket_of_tiles, tiles_of
from dscale.request import Request

STOP_IDS = 8
"""Stop ids per request the state has room for at first; more make a larger state."""

# From 2: PyTorch would compile every stage once more for a dimension of size 1, which costs half a
# minute each and gains nothing (a pass of 1 row and of 8 took 1.55 ms both, SmolLM2 on an H200).
BUCKETS = (2, 4, 8, 12, 16, 20, 24, 28, 32)


def bucket_of(lanes: int) -> int:
    """Smallest lane bucket that holds `lanes`: the paper's up to 32, then multiples of 32."""
    return next((b for b in BUCKETS if b >= lanes), -(-lanes // 32) * 32)


class Workspace:
    """Everything a step touches besides weights, for up to `max_requests` requests and `num_pages`
    pages.

    Slot `max_requests` is the idle slot: never live, all its pages are the scratch page.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        max_requests: int,
        num_pages: int,
        pages_per_request: int,
        stop_ids: int = STOP_IDS,
        seen: int = 1,
    ) -> None:
        """`seen`: columns of the bitmap of seen tokens, the vocabulary's size for calls with a
        repetition penalty."""
        device, dtype = target.norm.device, target.norm.dtype
        self.device, self.max_requests, self.norm = device, max_requests, target.norm
        self.num_pages, self.pages_per_request = num_pages, pages_per_request
        self.stop_ids, self.seen = stop_ids, seen
        c = target.config
        self.vocab_size = c.vocab_size
        self.pool = KVPool(c.num_layers, num_pages, c.num_kv_heads, c.head_dim, dtype, device)
        self.draft_pool = None
        if drafter is not None:
            d = drafter.config
            self.draft_pool = KVPool(
                d.num_layers, num_pages, d.num_kv_heads, d.head_dim, dtype, device
            )
        self.served = False
        """Whether pages were ever given to a request, some of which may be kept."""
        self._staging: dict[int, Staging] = {}
        idle, slots = self._idle(), max_requests + 1
        self.requests = Requests(
            *(fixed(x.repeat(slots, *[1] * (x.ndim - 1)).to(device)) for x in idle)
        )
        self.block = VERIFY_TILE if drafter is None else drafter.config.block_size
        self._steps: dict[int, Step] = {}
        self._packed: dict[tuple[int, int], Packed] = {}
        self._chunks: dict[int, ChunkBuffers] = {}
        self._sent: dict[int, list[int]] = {}

    def fits(
        self,
        *,
        max_requests: int,
        num_pages: int,
        pages_per_request: int,
        stop_ids: int,
        seen: int,
    ) -> bool:
        """Whether a call of this size can run in these buffers."""
        return (
            max_requests <= self.max_requests
            and num_pages <= self.num_pages
            and pages_per_request <= self.pages_per_request
            and stop_ids <= self.stop_ids
            and seen <= self.seen
        )

    def _idle(self) -> Requests:
        """The state of one idle slot, `[1, ...]` each."""

        def filled(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((1, *shape), value, dtype=dtype)

        idle = Requests(
            context_S=filled(0, torch.int32),
            remaining_S=filled(0, torch.int32),
            anchor_S=filled(0, torch.int64),
            live_S=filled(0, torch.bool),
            seed_S=filled(0, torch.int64),
            temperature_S=filled(0, torch.float32),
            top_k_S=filled(0, torch.int64),
            top_p_S=filled(1, torch.float32),
            min_p_S=filled(0, torch.float32),
            page_SL=filled(0, torch.int32, self.pages_per_request),
            logical_SP=filled(-1, torch.int32, self.num_pages),
            stop_SZ=filled(-1, torch.int64, self.stop_ids),
            recent_SK=filled(-1, torch.int32, RECENT),
            penalty_S=filled(1, torch.float32),
            seen_SV=filled(0, torch.bool, self.seen),
        )
        # An idle lane sees the scratch page, so that its softmax has something finite to sum.
        idle.logical_SP[:, 0] = 0
        return idle

    def host_requests(self, slots: int | None = None) -> Requests:
        """State of some slots (default: all) on the host, every one idle, to be filled and
        uploaded; the same buffers for the same number."""
        count = self.max_requests + 1 if slots is None else slots
        return self._staged(count).reset(count)

    def _staged(self, count: int) -> Staging:
        """Buffers for so many slots, powers of two: rows are as long as the pool has pages."""
        size = 1 << (count - 1).bit_length()
        if size not in self._staging:
            self._staging[size] = Staging(self._idle(), size, self.device)
        return self._staging[size]

    def clear(self, pages: list[int]) -> None:
        """Zero a request's pages, none to compile what does it, and scratch, in both pools.

        An earlier request may have left NaN or infinity there, which weigh in even when masked: 0
        x NaN is NaN."""
        self.served = self.served or bool(pages)
        for pool in (self.pool, self.draft_pool):
            if pool is not None:
                pool.clear([0, *pages])

    def upload(self, slots: list[int]) -> None:
        """Copy what `host_requests` gave for as many slots over the device's state of these, in
        place; the host does not wait."""
        index_N, moved = self._staged(len(slots)).send(slots)
        for ours, theirs in zip(self.requests, moved, strict=True):
            ours.index_copy_(0, index_N, theirs)

    def assign(self, slots: list[int]) -> Step:
        """The step of as many lanes, its lanes given to these slots."""
        step = self.step(len(slots))
        self._send(step.slot_N, slots)
        return step

    def set_room(self, step: Step, rows: int, average: int) -> None:
        """Tell a step how many rows it may verify, in all and per live request."""
        self._send(step.room, [rows, average])

    def _send(self, buffer: Tensor, values: list[int]) -> None:
        """Values to a device buffer unless they are there; the host does not wait."""
        if self._sent.get(id(buffer)) == values:
            return
        send(torch.tensor(values, dtype=buffer.dtype), buffer)
        self._sent[id(buffer)] = values

    def step(self, lanes: int) -> Step:
        """The buffers of a step of `lanes` lanes, always the same ones."""
        if lanes not in self._steps:
            slot = torch.full((lanes,), self.max_requests, dtype=torch.int64, device=self.device)
            step = Step(
                slot_N=slot,
                room=torch.ones(2, dtype=torch.int32, device=self.device),
                candidate_NC=slot.new_zeros(lanes, self.block - 1),
                length_N=slot.new_zeros(lanes, dtype=torch.int32),
                offset_N=slot.new_zeros(lanes),
                result_NX=slot.new_zeros(lanes, RESULT_COLUMNS, dtype=torch.int32),
            )
            for tensor in step:
                if lanes > 1 and tensor is not step.room:
                    torch._dynamo.mark_dynamic(tensor, 0)
                fixed(tensor)
            self._steps[lanes] = step
        return self._steps[lanes]

    def packed(self, lanes: int, rows: int) -> Packed:
        """The first `rows` of the packed rows of a step of `lanes` lanes, at most 16 a lane; those
        of a lane count share their memory."""
        if (lanes, rows) not in self._packed:
            most = lanes * VERIFY_TILE
            if rows == most:
                columns = [
                    torch.zeros(most, dtype=torch.int64, device=self.device) for _ in range(5)
                ]
                row_NT = columns[0].new_zeros(lanes, VERIFY_TILE)
            else:
                *columns, row_NT = self.packed(lanes, most)
            packed = Packed._make([*(column[:rows] for column in columns), row_NT.view_as(row_NT)])
            for tensor in packed[:-1]:
                if rows > 1:
                    torch._dynamo.mark_dynamic(fixed(tensor), 0)
            if lanes > 1:
                torch._dynamo.mark_dynamic(fixed(packed.row_NT), 0)
            self._packed[lanes, rows] = packed
        return self._packed[lanes, rows]

    def chunk(self, requests: list[Request], lengths: list[int], tiles: int = 1) -> Chunk:
        """The next `lengths` prompt tokens of every request, in the smallest bucket of tiles that
        holds them and is at least `tiles`."""
        tiles = bucket_of_tiles(max(tiles, sum(map(tiles_of, lengths))))
        if tiles not in self._chunks:
            self._chunks[tiles] = ChunkBuffers(tiles, self.max_requests, self.norm)
        return self._chunks[tiles].fill(requests, lengths)

    @property
    def num_bytes(self) -> int:
        """Device memory of the pools, in bytes."""
        return self.pool.num_bytes + (
            self.draft_pool.num_bytes if self.draft_pool is not None else 0
        )

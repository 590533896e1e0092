"""Attention of one layer, its keys shared out among sub-lanes or not: `tile_heads`, FlexAttention
and what brings its result back to packed rows.

`python -m bench.shared_keys --models 8b` writes bench/results/shared_keys.json; `--tiny` runs at
toy size on a CPU. Every layer reads keys and values of its own, in all so many that they come from
memory. Shapes: N lanes, R rows, E head_dim, P pages, L pages of a lane.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.arguments import parsed, shape_parser
from bench.graphs import BYTES_PER_S
from bench.operators import microseconds
from bench.result_files import ResultFile
from bench.rows import environment, machine
from bench.shapes import SHAPES, Shape
from dscale.compiled.attention import VERIFY_TILE, Rows, Tile, Visibility, attend, attention_inputs
from dscale.compiled.flow import uniform_rows
from dscale.compiled.kv import PAGE, Paging
from dscale.compiled.layers import rotary_table
from dscale.kernels.ops import tile_heads

KEYS = ("model", "requests", "context", "sub_lanes")

WIDTH = 8
"""Rows of every request."""

UNCACHED = 200 << 20
"""Bytes that all layers read together: more than a GPU's cache holds."""

POOLS, MOST_LAYERS = 16, 128
TINY: dict[str, Any] = {"models": ["tiny"], "requests": [1, 3], "contexts": [1, 200]}


class Layers:
    """Keys, values and projections of layers with the heads of a model, for so many requests of a
    context; lanes as the engine has them, so that one request has an idle one beside it."""

    def __init__(
        self, shape: Shape, requests: int, context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shape, self.requests, self.context = shape, requests, context
        held = requests * -(-(context + VERIFY_TILE) // PAGE)
        self.bytes = 2 * held * PAGE * shape.kv_heads * shape.head_dim * dtype.itemsize
        wanted = -(-UNCACHED // self.bytes) if device.type == "cuda" else 2
        self.count = max(2, min(MOST_LAYERS, wanted))
        pools = min(POOLS, self.count)
        sets = -(-self.count // pools)
        self.paging = [
            Paging(*(x.to(device) for x in _paging(requests, context, held, index, sets)))
            for index in range(sets)
        ]
        slots = (1 + held * sets) * PAGE
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        size = (slots, shape.kv_heads, shape.head_dim)
        self.pools = [(torch.randn(size, **make), torch.randn(size, **make)) for _ in range(pools)]
        rows, heads = WIDTH * max(2, requests), shape.heads + 2 * shape.kv_heads
        self.qkv_RXE = torch.randn(rows, heads, shape.head_dim, **make)
        for tensor in (self.qkv_RXE, *itertools.chain(*self.pools)):
            torch._dynamo.mark_static(tensor, [1, 2])
        self.norm_E = torch.ones(shape.head_dim, **make)
        exponent = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
        self.inv_freq = 1e6**-exponent

    def run(self, tile: Tile, layer: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
        """A call of all layers on fixed tensors."""
        group = self.shape.heads // self.shape.kv_heads
        fronts = []
        for paging in self.paging:
            rows = uniform_rows(paging, WIDTH, VERIFY_TILE)
            tables = rotary_table(rows.position_R, self.inv_freq, 1.0, self.qkv_RXE.dtype)
            fronts.append((*tables, *attention_inputs(rows, paging, tile, group)))
        each = [
            (*fronts[index // len(self.pools)], *self.pools[index % len(self.pools)])
            for index in range(self.count)
        ]
        return lambda: [layer(self.qkv_RXE, self.norm_E, *front) for front in each]


def _paging(requests: int, context: int, held: int, index: int, sets: int) -> Paging:
    """The `index`-th `held` pages of a pool of `sets` times as many, dealt out in random order;
    lanes end at different places of their last page."""
    lanes, each = max(2, requests), held // requests
    order = 1 + index * held + torch.randperm(held, generator=torch.Generator().manual_seed(index))
    page_NL = torch.zeros(lanes, each, dtype=torch.int32)
    page_NL[:requests] = order.view(requests, each).int()
    logical_NP = torch.full((lanes, 1 + sets * held), -1, dtype=torch.int32)
    logical_NP[requests:, 0] = 0
    for lane in range(requests):
        logical_NP[lane, page_NL[lane].long()] = torch.arange(each, dtype=torch.int32)
    context_N = torch.zeros(lanes, dtype=torch.int32)
    context_N[:requests] = torch.clamp(context - torch.arange(requests) % 16, min=0).int()
    return Paging(page_NL, logical_NP, context_N)


def attention(shape: Shape, tile: Tile) -> Callable[..., Tensor]:
    """A layer's attention, to packed rows `[R, H * E]`."""
    shared = tile.heads(shape.heads // shape.kv_heads)

    def layer(
        qkv_RXE: Tensor,
        norm_E: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Rows,
        paging: Paging,
        seen: Visibility,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        heads = (qkv_RXE, norm_E, norm_E, cos, sin, rows.row_NT, rows.slot_R, key, value)
        q_NXQE = tile_heads(*heads, shared=shared, eps=1e-6)
        return attend(q_NXQE, (key, value), rows, paging, tile, seen)

    return layer


def measured(
    shape: Shape,
    requests: Sequence[int],
    contexts: Sequence[int],
    sub_lanes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[dict[str, Any]]:
    """A row for each number of requests, context and number of sub-lanes, 0: none; fewer than
    lanes would be as many, and are left out."""
    tiles = {parts: Tile(height=VERIFY_TILE, parts=parts) for parts in sub_lanes}
    compiled = {parts: attention(shape, tile) for parts, tile in tiles.items()}
    if device.type == "cuda":
        for parts, layer in compiled.items():
            compiled[parts] = torch.compile(layer, fullgraph=True, dynamic=True)
    for count, context in itertools.product(requests, contexts):
        layers = Layers(shape, count, context, device, dtype)
        for parts in (n for n in sub_lanes if n == 0 or n >= max(2, count)):
            took = microseconds(layers.run(tiles[parts], compiled[parts]), device)
            yield {
                "model": shape.name,
                "requests": count,
                "context": context,
                "sub_lanes": parts,
                "layers": layers.count,
                "us": round(took / layers.count, 3),
                "keys_us": round(1e6 * layers.bytes / BYTES_PER_S, 3),
            }


def main() -> None:
    args = parse()
    device, dtype = machine(args.tiny)
    base = environment(args.commit, dtype)
    file = ResultFile(args.out / "shared_keys.json", KEYS, base)
    sizes = args.requests, args.contexts, args.sub_lanes
    with torch.no_grad():
        for name in args.models:
            rows = measured(SHAPES[name], *sizes, device, dtype)
            file.keep(rows, SHAPES[name].name)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = shape_parser(__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1000, 4000, 16000])
    parser.add_argument("--sub-lanes", nargs="+", type=int, default=[0, 16, 32])
    return parsed(parser, arguments, TINY)


if __name__ == "__main__":
    main()

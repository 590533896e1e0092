"""A decoder layer as a function of its weights, and the operator that stands for it in a stage.

A stage's graph holds one operator for each layer, with a layer's code behind all of them that is
compiled once: what a stage takes to trace and to compile does not grow with the number of layers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dscale.compiled.attention import (
    BlockTables,
    Rows,
    SharedTables,
    Tile,
    Visibility,
    attend,
)
from dscale.compiled.capture import own_forward
from dscale.compiled.dependent import compile_for
from dscale.compiled.kv import Paging
from dscale.compiled.layers import add, swiglu
from dscale.compiled.packed import linear
from dscale.kernels.ops import tile_heads
from dscale.kernels.reference_heads import rms_norm

PROJECTIONS = ("qkv", "o", "gate_up", "down")
"""Weights of a layer that products of few rows read, by their names in `Layer.aids`."""


class Weights(NamedTuple):
    """A layer's tensors; query, key and value are fused, so are gate and up. `*_aid`, `*_scale`:
    what `packed.linear` takes beside a projection's weight, None for a plain one."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    qkv_aid: Tensor | None = None
    o_aid: Tensor | None = None
    gate_up_aid: Tensor | None = None
    down_aid: Tensor | None = None
    qkv_scale: Tensor | None = None
    o_scale: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None


class Shared(NamedTuple):
    """What all layers of a pass read: `rotary_table` and `attention_inputs` of its rows."""

    cos: Tensor
    sin: Tensor
    rows: Rows
    paging: Paging
    seen: Visibility


class Form(NamedTuple):
    """What is fixed when a layer is traced: its heads and the fields of its `Tile`. All are
    integers, as an operator takes them (0 and 1 for flags, `block` 0 for None)."""

    head_dim: int
    kv_heads: int
    group: int
    height: int
    causal: int
    flex: int
    per_head: int
    block: int
    parts: int

    @property
    def tile(self) -> Tile:
        """The pass's tile."""
        flags = {name: bool(getattr(self, name)) for name in ("causal", "flex", "per_head")}
        return Tile(self.height, block=self.block or None, parts=self.parts, **flags)


def form_of(head_dim: int, kv_heads: int, group: int, tile: Tile) -> Form:
    """The form of a pass of a model with such heads."""
    flags = int(tile.causal), int(tile.flex), int(tile.per_head)
    return Form(head_dim, kv_heads, group, tile.height, *flags, tile.block or 0, tile.parts)


def run(
    x: Tensor,
    branch: Tensor,
    shared: Shared,
    w: Weights,
    pool: tuple[Tensor, Tensor],
    eps: float,
    form: Form,
) -> tuple[Tensor, Tensor]:
    """Packed rows through a layer; their keys and values go to `pool`, the layer's (key, value).

    The residual stream comes and goes as two terms `[R, D]`, x + branch: compiled code then adds
    them in the kernel of the norm that follows, in the next layer."""
    rows, tile, num_rows = shared.rows, form.tile, x.shape[0]
    x = add(x, branch)
    normed = rms_norm(x, w.input_norm, eps)
    qkv_RX = linear(normed, w.qkv, w.qkv_bias, w.qkv_aid, w.qkv_scale)
    qkv_RXE = qkv_RX.view(num_rows, -1, form.head_dim)
    q_NXQE = tile_heads(
        qkv_RXE, w.q_norm, w.k_norm, shared.cos, shared.sin, rows.row_NT, rows.slot_R, *pool,
        shared=tile.heads(form.group), eps=eps,
    )  # fmt: skip
    out = attend(q_NXQE, pool, rows, shared.paging, tile, shared.seen)
    x = add(x, linear(out, w.o, w.o_bias, w.o_aid, w.o_scale))
    normed = rms_norm(x, w.post_norm, eps)
    return x, swiglu(
        normed, w.gate_up, w.gate_up_bias, w.down, w.down_bias, w.gate_up_aid, w.down_aid,
        w.gate_up_scale, w.down_scale,
    )  # fmt: skip


torch.library.define(
    "dscale::layer",
    "(Tensor x, Tensor branch, Tensor[] shared, Tensor?[] weights, Tensor(a!) key_pool,"
    " Tensor(b!) value_pool, float eps, int[] form) -> (Tensor, Tensor)",
    # Any layout: else Inductor copies what the layers share for each of them.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
_layer: Any = torch.ops.dscale.layer.default


def layer(
    x: Tensor,
    branch: Tensor,
    shared: Shared,
    w: Weights,
    pool: tuple[Tensor, Tensor],
    eps: float,
    form: Form,
) -> tuple[Tensor, Tensor]:
    """`run`; in a graph that is being traced, one operator."""
    if not torch.compiler.is_compiling():
        return run(x, branch, shared, w, pool, eps, form)
    x, branch = _layer(x, branch, _flat(shared), list(w), *pool, eps, list(form))
    return x, branch


def _flat(shared: Shared) -> list[Tensor]:
    """`shared` as the operator takes it: cos, sin, four tensors of rows, with sub-lanes `count_R`,
    then `row_NT`, the paging and the dense mask or the four block tables."""
    counts: list[Tensor] = []
    seen = shared.seen
    if isinstance(seen, SharedTables):
        counts.append(seen.count_R)
        seen = seen.tables
    masks = [seen] if isinstance(seen, Tensor) else list(seen)
    *rows, row_NT = shared.rows
    return [shared.cos, shared.sin, *rows, *counts, row_NT, *shared.paging, *masks]


def _arguments(
    x: Tensor,
    branch: Tensor,
    shared: list[Tensor],
    weights: list[Tensor | None],
    key_pool: Tensor,
    value_pool: Tensor,
    eps: float,
    form: list[int],
) -> tuple[Any, ...]:
    """Arguments of `run` from the operator's, `shared` being as `_flat` makes it."""
    cos, sin, *rest = shared
    counts = [rest.pop(4)] if Form(*form).parts else []
    seen: Visibility = rest[8] if len(rest) == 9 else BlockTables(*rest[8:])
    if counts and isinstance(seen, BlockTables):
        seen = SharedTables(seen, *counts)
    packed = Shared(cos, sin, Rows(*rest[:5]), Paging(*rest[5:8]), seen)
    return x, branch, packed, Weights._make(weights), (key_pool, value_pool), eps, Form(*form)


def run_compiled(
    x: Tensor,
    branch: Tensor,
    shared: Shared,
    w: Weights,
    pool: tuple[Tensor, Tensor],
    eps: float,
    form: Form,
) -> tuple[Tensor, Tensor]:
    """`run`, compiled once for any number of rows, lanes, sub-lanes or tiles: the first dimensions
    of what a pass brings. Other dimensions are fixed."""
    moving = [x, branch, *_flat(shared)]
    for tensor in moving:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.mark_static(tensor, list(range(1, tensor.ndim)))
    fixed = [*pool, *(t for t in w if t is not None)]
    shapes = [*((*t.shape[1:], t.is_contiguous()) for t in moving), *(t.shape for t in fixed)]
    signature = (x.device, x.dtype, *map(tuple, shapes), *(t is None for t in w))
    # Below autograd in every call: the first one of a stage is anyway, as AOT autograd watches it,
    # and what was compiled there would be compiled anew at the next, while that is recorded.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        with _making:
            code = _compiled(signature, eps, form)
        return code(x, branch, shared, w, pool)


_making = threading.Lock()
"""Two engines' threads may ask for the same layer's code at once, and `functools.cache` would let
both make one. Both must get the one that is kept: the other would be missing later, be compiled
while a stage is recorded, and break the recording."""


class Code(nn.Module):
    """`run` with `eps` and `form` as constants. As arguments these numbers would become symbols
    once they differ between calls; a module's attributes stay constants when it is traced."""

    def __init__(self, eps: float, form: Form) -> None:
        super().__init__()
        self.eps, self.form = eps, form

    def forward(
        self, x: Tensor, branch: Tensor, shared: Shared, w: Weights, pool: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`run`."""
        return run(x, branch, shared, w, pool, self.eps, self.form)


@functools.cache
def _compiled(
    signature: tuple[torch.device, *tuple[object, ...]], eps: float, form: Form
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A layer's code for what `signature` tells apart, compiled at its first call."""
    return compile_for(own_forward(Code(eps, form)), signature[0])


def _on_cpu(*args: Any) -> tuple[Tensor, Tensor]:
    return run(*_arguments(*args))


def _on_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(args[0].device):
        return run_compiled(*_arguments(*args))


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


torch.library.impl("dscale::layer", "cpu", _on_cpu)
torch.library.impl("dscale::layer", "cuda", _on_cuda)
torch.library.register_fake("dscale::layer", _fake)

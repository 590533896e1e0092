"""The block-diffusion drafter (DFlash): one pass over `[anchor, MASK, ...]` blocks, and its cache.

It has no embedding and no LM head of its own: both are the target's. Every layer attends over the
keys and values of the committed context, which are projected once per token from the target's
taps, and over the block itself in both directions.

Shapes: N lanes, W block size, R rows, D hidden, H query heads, K KV heads, E head_dim, T layers, F
= taps * D.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscale.compiled.attention import Rows, Tile, attention_inputs
from dscale.compiled.kv import KVPool, Paging, write
from dscale.compiled.layer import PROJECTIONS, Shared, Weights, form_of, layer
from dscale.compiled.layers import add, rotary_table
from dscale.compiled.packed import is_split, linear, pack
from dscale.compiled.quantized import quantize
from dscale.compiled.target import Target
from dscale.kernels.reference_heads import rms_norm, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter.

    `taps`: 0-based target layers whose outputs `fc` fuses, in the order of its columns.
    `rope_scaling` multiplies cos and sin. `rope_parameters`: the transformers rotary settings that
    the inverse frequencies come from. `vocab_size`, `num_target_layers`: what the checkpoint says
    it was trained for, None where it does not say.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    rms_eps: float
    rope_scaling: float
    max_positions: int
    vocab_size: int | None = None
    num_target_layers: int | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)


class DrafterLayer(nn.Module):
    """Weights of one layer, but for its query, key and value projections: see `Drafter.qkv`.
    `aids`, `quantized` and `scales` are as a target's layer has them."""

    input_norm: nn.Parameter
    post_norm: nn.Parameter
    q_norm: nn.Parameter
    k_norm: nn.Parameter
    o: nn.Parameter
    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.aids: dict[str, Tensor] = {}
        self.quantized: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        c, hidden = config, config.hidden_size
        self.input_norm, self.post_norm = empty(hidden, dtype=dtype), empty(hidden, dtype=dtype)
        self.q_norm, self.k_norm = empty(c.head_dim, dtype=dtype), empty(c.head_dim, dtype=dtype)
        self.o = empty(hidden, c.num_heads * c.head_dim, dtype=dtype)
        self.gate_up = empty(2 * c.intermediate_size, hidden, dtype=dtype)
        self.down = empty(hidden, c.intermediate_size, dtype=dtype)


class Drafter(nn.Module):
    """A DFlash drafter over packed rows and a paged context cache.

    `qkv` is `[T, (H + 2K) * E, D]`, query rows first. Its key and value rows are also the
    projection of the context, for all layers in one batched product, so neither use needs a second
    copy.

    Beside the weights, None where not asked for: `turn`, for split products (see `packed.turns`);
    `head` and `context_copy`, 8-bit copies with scales of the target's LM head and of the key and
    value rows.
    """

    inv_freq: Tensor
    mask_embedding: Tensor | None
    fingerprint: str | None
    """Of the checkpoint it was loaded from, None for one that came from no checkpoint."""

    def __init__(
        self,
        config: DrafterConfig,
        inv_freq: Tensor,
        *,
        dtype: torch.dtype,
        mask_embedding: Tensor | None = None,
    ) -> None:
        """Allocate empty weights. `mask_embedding` `[D]` replaces the target's mask row."""
        super().__init__()
        c = config
        self.config = config
        self.fingerprint = None
        self.turn: Tensor | None = None
        self.head: tuple[Tensor, Tensor] | None = None
        self.context_copy: tuple[Tensor, Tensor] | None = None
        self.fc = empty(c.hidden_size, len(c.taps) * c.hidden_size, dtype=dtype)
        self.hidden_norm = empty(c.hidden_size, dtype=dtype)
        projected = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv = empty(c.num_layers, projected, c.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DrafterLayer(c, dtype) for _ in range(c.num_layers))
        self.norm = empty(c.hidden_size, dtype=dtype)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.register_buffer("mask_embedding", mask_embedding, persistent=False)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.config.num_heads // self.config.num_kv_heads

    def embed_block(self, anchor_N: Tensor, target: Target) -> Tensor:
        """Return the blocks' input `[N, W, D]`: an anchor embedding, then W - 1 mask embeddings.

        The mask embedding is the target's own row `mask_token_id`, untrained there but fixed while
        the drafter was trained, unless the checkpoint brought one.
        """
        anchor_N1D = target.embed(anchor_N)[:, None]
        mask_D = self.mask_embedding
        if mask_D is None:
            mask_D = target.embedding[self.config.mask_token_id]
        mask_NWD = mask_D.expand(anchor_N1D.shape[0], self.config.block_size - 1, -1)
        return torch.cat((anchor_N1D, mask_NWD), 1)

    def draft(
        self, block_RD: Tensor, rows: Rows, paging: Paging, pool: KVPool, tile: Tile
    ) -> Tensor:
        """Run the blocks `[R, D]` of N lanes, R = N * W; returns final-normed hidden states.

        Row j of a block predicts the token at its own position, so rows 1.. are the drafted tokens
        and row 0 is unused. Each layer leaves the block's keys and values in the pool; the next
        round overwrites them. `tile` is `Tile(height=W, causal=False)`.
        """
        c, x, branch = self.config, block_RD, torch.zeros_like(block_RD)
        cos, sin = rotary_table(rows.position_R, self.inv_freq, c.rope_scaling, x.dtype)
        shared = Shared(cos, sin, *attention_inputs(rows, paging, tile, self.group))
        form = form_of(c.head_dim, c.num_kv_heads, self.group, tile)
        for index in range(c.num_layers):
            weights = self.layer_weights(index)
            x, branch = layer(x, branch, shared, weights, pool.layer(index), c.rms_eps, form)
        return rms_norm(add(x, branch), self.norm, c.rms_eps)

    def layer_weights(self, index: int) -> Weights:
        """The tensors of layer `index`, its query, key and value projection among them."""
        own = self.layer(index)
        q = {"qkv": self.qkv[index], "o": own.o, "gate_up": own.gate_up, "down": own.down}
        q |= own.quantized
        return Weights(
            own.input_norm, q["qkv"], None, own.q_norm, own.k_norm, q["o"], None,
            own.post_norm, q["gate_up"], None, q["down"], None,
            *(own.aids.get(name) for name in PROJECTIONS),
            *(own.scales.get(name) for name in PROJECTIONS),
        )  # fmt: skip

    def logits(self, hidden_RD: Tensor, target: Target) -> Tensor:
        """Logits `[R, V]` of drafted rows: the target's LM head, or the 8-bit copy of it."""
        if self.head is None:
            return target.logits(hidden_RD)
        weight, scale = self.head
        return linear(hidden_RD, weight, None, self.turn, scale)

    def shared(self) -> Drafter:
        """A drafter over the same weights, with nothing beside them yet: for one engine, so that
        what it adds to them is no other's, and goes with it."""
        made = copy.copy(self)
        made._modules, made.turn = dict(self._modules), None
        made.head = made.context_copy = None
        made.layers = nn.ModuleList(map(copy.copy, self.layers))
        for own, _ in made.projections():
            own.aids, own.quantized, own.scales = {}, {}, {}
        return made

    def quantized(self, head: Tensor) -> Drafter:
        """A drafter over the same weights that reads copies in 8-bit floats of its layers'
        projections and, for the logits of its drafts, of the target's LM head `[V, D]`.

        `fc` stays as it is: it reads the target's residual stream, whose few huge entries would
        leave the others of a row no digits."""
        made = self.shared()
        with torch.no_grad():
            for own, projections in made.projections():
                for name, weight in projections.items():
                    own.quantized[name], own.scales[name] = quantize(weight)
            width = self.config.num_heads * self.config.head_dim
            made.context_copy = quantize(self.qkv[:, width:].flatten(0, 1))
            made.head = quantize(head)
        return made

    def pack(self) -> None:
        """Keep a copy of the layers' projections in oneDNN's blocked layout (CPU only)."""
        for own, projections in self.projections():
            for name, weight in projections.items():
                own.aids[name] = pack(weight)

    def split(self, turn: Tensor) -> None:
        """Split the layers' products along K where that is faster (`packed.turns`; GPU)."""
        self.turn = turn
        for own, projections in self.projections():
            for name, weight in projections.items():
                if is_split(own.quantized.get(name, weight)):
                    own.aids[name] = turn

    def projections(self) -> Iterator[tuple[DrafterLayer, dict[str, Tensor]]]:
        """Each layer with its projections, by their names in `DrafterLayer.aids`."""
        for index in range(self.config.num_layers):
            own = self.layer(index)
            named = {name: getattr(own, name) for name in PROJECTIONS if name != "qkv"}
            yield own, {"qkv": self.qkv[index], **named}

    def write_context(
        self, taps_RF: Tensor, position_R: Tensor, slot_R: Tensor, pool: KVPool
    ) -> None:
        """Project the taps of committed tokens into every layer's context cache, in place.

        The fused feature is normed once by `hidden_norm` and enters each layer's key and value
        projections as it is, past the layer's input norm. Padding rows carry a scratch slot.
        `position_R`, `slot_R` int64.
        """
        c = self.config
        fused_RD = rms_norm(F.linear(taps_RF, self.fc), self.hidden_norm, c.rms_eps)
        heads = (2, c.num_kv_heads, c.head_dim)
        if self.context_copy is None:
            weight_TDX = self.qkv[:, c.num_heads * c.head_dim :].transpose(1, 2)
            kv_TRX = torch.bmm(fused_RD.expand(c.num_layers, -1, -1), weight_TDX)
            kv = kv_TRX.view(c.num_layers, -1, *heads)
        else:
            weight, scale = self.context_copy
            kv_RX = linear(fused_RD, weight, None, self.turn, scale)
            kv = kv_RX.view(-1, c.num_layers, *heads).transpose(0, 1)
        cos, sin = rotary_table(position_R, self.inv_freq, c.rope_scaling, fused_RD.dtype)
        for index in range(c.num_layers):
            key = rms_norm(kv[index, :, 0], self.layer(index).k_norm, c.rms_eps)
            write(pool.layer(index), slot_R, rotate(key, cos, sin), kv[index, :, 1])

    def layer(self, index: int) -> DrafterLayer:
        """Layer `index`."""
        own = self.layers[index]
        assert isinstance(own, DrafterLayer)
        return own


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight that asks for no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

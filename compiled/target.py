"""The target decoder: one config-driven forward for Qwen3, Llama and Qwen2 over packed rows and
paged KV.

It owns no weights of its own: `dscale.load` hands it tensors that the loaded transformers model
keeps using. Shapes: R rows, D hidden, H query heads, K KV heads, E head_dim, V vocabulary, F =
taps * D."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dscale.compiled.attention import Rows, Tile, attention_inputs
from dscale.compiled.kv import KVPool, Paging
from dscale.compiled.layer import PROJECTIONS, Shared, Weights, form_of, layer
from dscale.compiled.layers import add, frozen, rotary_table
from dscale.compiled.packed import is_split, linear, pack
from dscale.compiled.quantized import quantize
from dscale.kernels.reference_heads import rms_norm

TENSORS = tuple(n for n in Weights._fields if not n.endswith(("_aid", "_scale")))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Shape of a target decoder. `rope_scaling` multiplies cos and sin (1.0 for plain rotary
    embedding)."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope_scaling: float
    max_positions: int


class Layer(nn.Module):
    """One pre-norm decoder layer; query, key and value are fused, so are gate and up. By
    projection: `aids` for faster products (see `packed.linear`), `quantized` copies and their
    `scales`; none at first."""

    def __init__(self, tensors: dict[str, Tensor | None]) -> None:
        super().__init__()
        self.aids: dict[str, Tensor] = {}
        self.quantized: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        for name in TENSORS:
            self.register_parameter(name, frozen(tensors.get(name)))

    @property
    def weights(self) -> Weights:
        """The layer's tensors as its passes read them, with their aids and scales."""
        tensors = [self.quantized.get(name, getattr(self, name)) for name in TENSORS]
        aids = [self.aids.get(name) for name in PROJECTIONS]
        return Weights(*tensors, *aids, *(self.scales.get(name) for name in PROJECTIONS))

    def pack(self) -> None:
        """Keep a copy of the projections in oneDNN's blocked layout and use it (CPU only)."""
        for name in PROJECTIONS:
            self.aids[name] = pack(getattr(self, name))

    def split(self, turn: Tensor) -> None:
        """Split the projections' products along K where that is faster (`packed.turns`; GPU)."""
        for name in PROJECTIONS:
            if is_split(self.quantized.get(name, getattr(self, name))):
                self.aids[name] = turn

    def quantize(self) -> None:
        """Keep a copy of the projections in 8-bit floats and use it."""
        for name in PROJECTIONS:
            self.quantized[name], self.scales[name] = quantize(getattr(self, name))


class Target(nn.Module):
    """A decoder over packed rows. Call `forward` for hidden states and taps, `logits` for the LM
    head."""

    inv_freq: Tensor
    embedding: Tensor
    norm: Tensor
    head: Tensor

    def __init__(
        self,
        config: TargetConfig,
        embedding: Tensor,
        layers: list[dict[str, Tensor | None]],
        norm: Tensor,
        head: Tensor,
        inv_freq: Tensor,
        taps: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.config, self.taps = config, taps
        for name, weight in (("embedding", embedding), ("norm", norm), ("head", head)):
            self.register_parameter(name, frozen(weight))
        self.layers = nn.ModuleList(map(Layer, layers))
        self.packed_head: Tensor | None = None
        self.turn: Tensor | None = None
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def pack(self) -> None:
        """Keep a second copy of projections and LM head in oneDNN's blocked layout (CPU only).

        A 16-row pass of SmolLM2-135M takes about 0.75 of the time, a 1-row pass as long as before.
        """
        for own in self.layers:
            assert isinstance(own, Layer)
            own.pack()
        self.packed_head = pack(self.head)

    def split(self, turn: Tensor) -> None:
        """Split the projections' products along K where that is faster (`packed.turns`; GPU)."""
        self.turn = turn
        for own in self.layers:
            assert isinstance(own, Layer)
            own.split(turn)

    def quantize(self) -> None:
        """Keep a second copy of the layers' projections in 8-bit floats and use it: half as many
        bytes as in bfloat16, on a CPU four bytes a number (see `quantized.quantize`)."""
        with torch.no_grad():
            for own in self.layers:
                assert isinstance(own, Layer)
                own.quantize()

    @property
    def is_quantized(self) -> bool:
        """Whether the layers read copies in 8-bit floats."""
        return any(own.quantized for own in self.layers)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.config.num_heads // self.config.num_kv_heads

    def embed(self, token: Tensor) -> Tensor:
        """Embedding rows of token ids of any shape."""
        return F.embedding(token, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """LM head: `[..., D]` to `[..., V]` in the model's dtype."""
        return linear(hidden, self.head, None, self.packed_head)

    def forward(
        self, token_R: Tensor, rows: Rows, paging: Paging, pool: KVPool, tile: Tile
    ) -> tuple[Tensor, Tensor | None]:
        """Run the decoder over packed rows, writing their keys and values to the pool.

        Returns the normed hidden states `[R, D]` and the taps `[R, F]`: the residual stream after
        each layer of `self.taps`, in that order (DFlash checkpoint convention: `hidden_states[id +
        1]`), or None without taps."""
        x = self.embed(token_R)
        cos, sin = rotary_table(rows.position_R, self.inv_freq, self.config.rope_scaling, x.dtype)
        c, branch = self.config, torch.zeros_like(x)
        shared = Shared(cos, sin, *attention_inputs(rows, paging, tile, self.group))
        form = form_of(c.head_dim, c.num_kv_heads, self.group, tile)
        tapped: dict[int, Tensor] = {}
        for index, own in enumerate(self.layers):
            assert isinstance(own, Layer)
            x, branch = layer(x, branch, shared, own.weights, pool.layer(index), c.rms_eps, form)
            if index in self.taps:
                tapped[index] = add(x, branch)
        taps = torch.cat([tapped[i] for i in self.taps], -1) if self.taps else None
        return rms_norm(add(x, branch), self.norm, c.rms_eps), taps

"""Model shapes with random weights: a target, its DFlash drafter and a predictor, made on the
device in seconds. Nothing is downloaded and no transformers model is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.drafter import Drafter, DrafterConfig
from dscale.compiled.predictor import Predictor, PredictorConfig
from dscale.compiled.target import Target, TargetConfig
from dscale.config import WeightFormat
from dscale.stages import set_weights

_STD = 0.02
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen3-like target and the drafter of the same width that goes with it. `name`: as result
    rows call it. `taps`: how many target layers the drafter reads."""

    name: str
    hidden: int
    intermediate: int
    tied: bool = False
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    draft_layers: int = 5
    taps: int = 5
    rope_theta: float = 1e6

    @property
    def tapped(self) -> tuple[int, ...]:
        """Tapped layers, spread as DFlash checkpoints spread them (36 layers: 1, 9, 17, 25,
        33)."""
        last = max(self.taps - 1, 1)
        return tuple(round(1 + i * (self.layers - 4) / last) for i in range(self.taps))

    def shallow(self, layers: int) -> Shape:
        """The same widths with `layers` target layers, at least 4."""
        return replace(self, layers=layers, name=f"{self.name}, {layers} layers")


SHAPES = {
    "8b": Shape(name="Qwen3-8B shape", hidden=4096, intermediate=12288),
    "4b": Shape(name="Qwen3-4B shape", hidden=2560, intermediate=9728, tied=True),
    "tiny": Shape(
        name="toy shape", hidden=64, intermediate=96, layers=4, heads=4, kv_heads=2, head_dim=16,
        vocab=200, draft_layers=1, taps=2,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Models:
    """What a bench runs. `shape`: what they were built from."""

    shape: Shape
    target: Target
    drafter: Drafter
    predictor: Predictor

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        parts = (self.target, self.drafter, self.predictor)
        sizes = {p.data_ptr(): p.nbytes for part in parts for p in part.parameters()}
        return sum(sizes.values())


def build(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    weights: WeightFormat = "model",
) -> Models:
    """Random models of a shape: normal weights of standard deviation 0.02, norms of ones.
    `weights`: as the engine's setting has them."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        weight = torch.empty(size, dtype=dtype, device=device)
        return weight.normal_(0, _STD, generator=generator)

    def ones(*size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    s, width = shape, shape.heads * shape.head_dim
    layers: list[dict[str, Tensor | None]] = [
        {
            "input_norm": ones(s.hidden),
            "qkv": normal(width + 2 * s.kv_heads * s.head_dim, s.hidden),
            "q_norm": ones(s.head_dim),
            "k_norm": ones(s.head_dim),
            "o": normal(s.hidden, width),
            "post_norm": ones(s.hidden),
            "gate_up": normal(2 * s.intermediate, s.hidden),
            "down": normal(s.hidden, s.intermediate),
        }
        for _ in range(s.layers)
    ]
    embedding = normal(s.vocab, s.hidden)
    exponent = torch.arange(0, s.head_dim, 2, device=device).float() / s.head_dim
    inv_freq = s.rope_theta**-exponent
    target = Target(
        _target_config(s),
        embedding=embedding,
        layers=layers,
        norm=ones(s.hidden),
        head=embedding if s.tied else normal(s.vocab, s.hidden),
        inv_freq=inv_freq,
        taps=s.tapped,
    )
    with torch.device(device):
        drafter = Drafter(_drafter_config(s), inv_freq, dtype=dtype)
        predictor = Predictor(PredictorConfig(hidden_size=s.hidden, block_size=VERIFY_TILE))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, _STD, generator=generator)
        predictor.projection.normal_(0, s.hidden**-0.5, generator=generator)
        predictor.last.weight.normal_(0, _STD, generator=generator)
    used = set_weights(target, drafter, weights)
    assert used is not None
    return Models(shape, target.eval(), used.eval(), predictor.requires_grad_(False).eval())


def _target_config(s: Shape) -> TargetConfig:
    return TargetConfig(
        family="qwen3",
        num_layers=s.layers,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocab,
        rms_eps=_EPS,
        rope_scaling=1.0,
        max_positions=40960,
    )


def _drafter_config(s: Shape) -> DrafterConfig:
    return DrafterConfig(
        num_layers=s.draft_layers,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        block_size=VERIFY_TILE,
        # The first unused row of the padded embedding, as in the published Qwen3 drafters.
        mask_token_id=151669 if s.vocab > 151669 else s.vocab - 1,
        taps=s.tapped,
        rms_eps=_EPS,
        rope_scaling=1.0,
        max_positions=40960,
        vocab_size=s.vocab,
        num_target_layers=s.layers,
    )

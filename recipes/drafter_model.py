"""The trainable DFlash drafter: z-lab's tensor names, many anchors of a sequence in one pass.

The runtime's drafter (`dscale.compiled.drafter`) works on packed rows and a paged cache; this one
works on whole sequences and keeps gradients. Both read and write the same checkpoint format.

Shapes: B sequences, A anchors of each, W block size, S context positions (padded), R rows that
enter the LM head, D hidden, H query heads, K KV heads, G = H / K, E head_dim, F = taps * D.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """Everything a drafter's tensors depend on; all but the first five fields are the target's."""

    num_layers: int
    taps: tuple[int, ...]
    mask_token_id: int
    block_size: int
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    vocab_size: int


def shape_for(
    config: Any, *, num_layers: int, taps: tuple[int, ...], mask_token_id: int, block_size: int
) -> DrafterShape:
    """Derive a drafter's shape from its target's transformers config.

    `taps` are 0-based target layers whose outputs are read; the last layer cannot be one, since
    transformers returns it already normed. Raises ValueError for a tap, mask id, block size or
    rotary type that does not fit.
    """
    depth, rope = config.num_hidden_layers, dict(getattr(config, "rope_parameters", None) or {})
    if not taps or min(taps) < 0 or max(taps) > depth - 2:
        raise ValueError(f"taps: expected layers 0..{depth - 2} of the target, got {taps}")
    if not 0 <= mask_token_id < config.vocab_size:
        raise ValueError(
            f"mask_token_id: expected 0..{config.vocab_size - 1}, got {mask_token_id}"
        )
    if block_size < 2 or num_layers < 1:
        raise ValueError(
            f"block_size, layers: expected >= 2 and >= 1, got {block_size}, {num_layers}"
        )
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"target: expected rope_type 'default', got {rope['rope_type']!r}")
    heads = config.num_attention_heads
    return DrafterShape(
        num_layers=num_layers,
        taps=tuple(taps),
        mask_token_id=mask_token_id,
        block_size=block_size,
        num_target_layers=depth,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_eps=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"] if rope else config.rope_theta),
        max_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
    )


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Block rows attend to the context before their anchor and to their own block, both ways."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        s, hidden = shape, shape.hidden_size
        self.kv_heads, self.head_dim = s.num_kv_heads, s.head_dim
        self.q_proj = nn.Linear(hidden, s.num_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, s.num_kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, s.num_kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_heads * s.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(s.head_dim, s.rms_eps), RMSNorm(s.head_dim, s.rms_eps)

    def forward(
        self, x_BAWD: Tensor, context_BSD: Tensor, anchor_BA: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Exact softmax over two key sets whose products stay apart, so no mask covers the block.

        The context enters `k_proj` and `v_proj` as it is; its keys are normed like the block's.
        """
        B, A, W, _ = x_BAWD.shape
        S, K, E = context_BSD.shape[1], self.kv_heads, self.head_dim
        position_BAW = anchor_BA[..., None] + torch.arange(W, device=x_BAWD.device)
        block_cos, block_sin = cos[position_BAW][:, :, :, None], sin[position_BAW][:, :, :, None]
        q = rotate(self.q_norm(self.q_proj(x_BAWD).view(B, A, W, -1, E)), block_cos, block_sin)
        q = q.view(B, A, W, K, -1, E).permute(0, 3, 1, 2, 4, 5).reshape(B, K, A, -1, E)
        block_k = self.k_norm(self.k_proj(x_BAWD).view(B, A, W, K, E))
        block_k = rotate(block_k, block_cos, block_sin).permute(0, 3, 1, 2, 4)
        block_v = self.v_proj(x_BAWD).view(B, A, W, K, E).permute(0, 3, 1, 2, 4)
        context_k = self.k_norm(self.k_proj(context_BSD).view(B, S, K, E))
        context_k = rotate(context_k, cos[:S, None], sin[:S, None]).transpose(1, 2)
        context_v = self.v_proj(context_BSD).view(B, S, K, E).transpose(1, 2)

        rows = q.shape[3]  # W * G query rows share a KV head
        scale = E**-0.5
        far = (q.reshape(B, K, A * rows, E) @ context_k.transpose(2, 3)).view(B, K, A, rows, S)
        near = q @ block_k.transpose(3, 4)
        hidden = torch.arange(S, device=q.device) >= anchor_BA[:, None, :, None, None]
        far = (far.float() * scale).masked_fill(hidden, float("-inf"))
        near = near.float() * scale
        top = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
        far, near = (far - top).exp(), (near - top).exp()
        total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
        out = (far.to(q.dtype).view(B, K, A * rows, S) @ context_v).view(B, K, A, rows, E)
        out = (out + near.to(q.dtype) @ block_v).float() / total
        out = out.to(q.dtype).view(B, K, A, W, -1, E).permute(0, 2, 3, 1, 4, 5)
        return self.o_proj(out.reshape(B, A, W, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm layer over block rows; `nn.Module.compile` turns it into one graph."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, context: Tensor, anchor: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchor, cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainableDrafter(nn.Module):
    """A DFlash drafter whose state dict has z-lab's names plus `feature_scale`.

    `feature_scale` `[F]` multiplies the target features before `fc`; `save` folds it into `fc`, so
    that the checkpoint reads raw features. `longest` bounds context plus block positions.
    """

    feature_scale: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DrafterShape, *, longest: int) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, len(shape.taps) * shape.hidden_size
        self.shape = shape
        self.fc = nn.Linear(width, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.rms_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(hidden, shape.rms_eps)
        self.register_buffer("feature_scale", torch.ones(width))
        power = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angle = torch.arange(longest + shape.block_size)[:, None] * shape.rope_theta**-power
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, feature_BSF: Tensor, block_BAWD: Tensor, anchor_BA: Tensor, row_R: Tensor
    ) -> Tensor:
        """Return final-normed hidden states `[R, D]` of the flattened block rows `row_R`.

        `feature_BSF`: target features of positions 0..S-1, of which a block sees those before its
        anchor. `block_BAWD`: embeddings of the anchor and of W - 1 masks. `anchor_BA`: int64
        absolute positions, at least 1 and less than S.
        """
        weight = self.fc.weight * self.feature_scale
        context = self.hidden_norm(F.linear(feature_BSF, weight.to(feature_BSF.dtype)))
        if context.shape[1] > 1:
            torch._dynamo.maybe_mark_dynamic(context, 1)
        x = block_BAWD
        for layer in self.layers:
            x = layer(x, context, anchor_BA, self.cos, self.sin)
        out: Tensor = self.norm(x.reshape(-1, x.shape[-1])[row_R])
        return out

    @torch.no_grad()
    def start_from(self, target_layers: nn.ModuleList, final_norm: Tensor, copy: bool) -> None:
        """Start the final norm from the target's; with `copy`, also each layer from one of its.

        The copied layers are the target's last ones but one for each drafter layer, q and k norms
        excepted (the target may have none).
        """
        self.norm.weight.copy_(final_norm)
        if not copy:
            return
        first = len(target_layers) - len(self.layers)
        for index, layer in enumerate(self.layers):
            source = target_layers[first + index].state_dict()
            own = layer.state_dict()
            for name in own.keys() & source.keys():
                if own[name].shape == source[name].shape:
                    own[name].copy_(source[name])

    @torch.no_grad()
    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors of z-lab's format, in bfloat16 on the CPU, with the feature scale folded."""
        state = {name: p.detach().float() for name, p in self.named_parameters()}
        state["fc.weight"] = state["fc.weight"] * self.feature_scale
        return {name: p.to(torch.bfloat16).cpu().contiguous() for name, p in state.items()}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention; `cos`, `sin` broadcast to half of `x`."""
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)

"""What a drafter computes at one anchor, transcribed from the formulas for the training tests."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_block(
    weights: dict[str, Tensor], target: Any, text: Tensor, anchor: int, shape: Any
) -> Tensor:
    """What inference computes at one anchor, from the formulas alone: `[block, hidden]`."""

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x * x).mean(-1, keepdim=True) + shape.rms_eps
        return x / scale.sqrt() * weights[name + ".weight"]

    def turn(x: Tensor, position: Tensor) -> Tensor:
        half = shape.head_dim // 2
        speed = shape.rope_theta ** (-torch.arange(half) * 2 / shape.head_dim)
        angle = position[:, None, None] * speed
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1
        )

    hidden = target.model(text[None, :anchor], output_hidden_states=True).hidden_states
    feature = torch.cat([hidden[tap + 1][0] for tap in shape.taps], -1)
    context = norm(feature @ weights["fc.weight"].T, "hidden_norm")
    ids = torch.tensor([int(text[anchor])] + [shape.mask_token_id] * (shape.block_size - 1))
    x = target.model.embed_tokens.weight[ids]
    own, old = torch.arange(anchor, anchor + shape.block_size), torch.arange(anchor)
    for index in range(shape.num_layers):
        at = f"layers.{index}."
        project = {
            n: (lambda y, n=n, at=at: y @ weights[f"{at}self_attn.{n}_proj.weight"].T)
            for n in "qkvo"
        }
        heads = lambda y: y.view(len(y), -1, shape.head_dim)  # noqa: E731
        h = norm(x, at + "input_layernorm")
        both = torch.cat((context, h))
        q = turn(norm(heads(project["q"](h)), at + "self_attn.q_norm"), own)
        k = norm(heads(project["k"](both)), at + "self_attn.k_norm")
        k, v = turn(k, torch.cat((old, own))), heads(project["v"](both))
        group = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("qhe,khe->hqk", q, k) / shape.head_dim**0.5
        out = torch.einsum("hqk,khe->qhe", score.softmax(-1), v).flatten(1)
        x = x + project["o"](out)
        h = norm(x, at + "post_attention_layernorm")
        gate, up = (
            h @ weights[at + "mlp.gate_proj.weight"].T,
            h @ weights[at + "mlp.up_proj.weight"].T,
        )
        x = x + (F.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "norm")

"""Whether each custom operator runs on a device and equals its CPU reference.

Shapes: N lanes, C = 15 candidates, T = 16 tile rows, M packed rows, L logical and P physical
pages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dscale.compiled.attention import Tile, attention_inputs
from dscale.compiled.flow import uniform_rows
from dscale.compiled.kv import PAGE, Paging
from dscale.compiled.layer import Shared, Weights, flat, form_of
from dscale.compiled.layers import rotary_table
from dscale.compiled.packed import MAX_TILES
from dscale.compiled.quantized import check_quantizable
from dscale.kernels.linear_plans import device_kind, table
from dscale.kernels.reference_scaled import E4M3

ROWS = 24
EIGHT_BITS = ("scaled_linear", "gated_rows")


def registered() -> list[str]:
    """Names of every operator `dscale::*` there is."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.removeprefix("dscale::") for n in names if n.startswith("dscale::"))


def try_operator(name: str, device: torch.device) -> tuple[bool | None, str]:
    """Whether an operator runs on the device and says there what it says on the CPU, None for one
    that the device is too old for, and a few words about it."""
    if name in EIGHT_BITS:
        try:
            check_quantizable(device, torch.bfloat16)
        except ValueError:
            return None, "not for this GPU: it has no 8-bit floats"
    try:
        operator: Any = getattr(torch.ops.dscale, name).default
        arguments = operator_arguments(device)[name]
        given = moved(arguments, device)
        want = operator(*arguments)
        got = operator(*given)
    except Exception as error:  # whatever a compiler raises is the finding
        return False, f"{type(error).__name__}: {error}"
    # Arguments, too: tile_heads and layer write to two of them.
    pairs = zip((*as_tuple(got), *given), (*as_tuple(want), *arguments), strict=True)
    tensors = [(x.cpu().double(), y.double()) for x, y in pairs if isinstance(x, Tensor)]
    same = all(torch.allclose(x, y, atol=1e-4) for x, y in tensors)
    kind = "reference" if device.type == "cpu" else "kernel"
    return same, f"{kind} runs" if same else f"{kind} differs from the reference"


def moved(x: Any, device: torch.device) -> Any:
    """Tensors, in whatever lists and tuples, on a device."""
    if isinstance(x, list | tuple):
        return type(x)(moved(item, device) for item in x)
    return x.to(device) if isinstance(x, Tensor) else x


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    """One tensor or several, as several."""
    return (out,) if isinstance(out, Tensor) else tuple(out)


def operator_arguments(device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Small arguments of every operator, on the CPU: 3 lanes, 15 candidates, 24 rows. `device`:
    where they will go; the shapes of products are such as are split there."""
    generator = torch.Generator().manual_seed(0)
    score_NC = torch.rand(3, 15, generator=generator).cumprod(1)
    limit_N = torch.tensor([40, 2, 40], dtype=torch.int32)
    candidate_NC = torch.randint(9, (3, 15), generator=generator)
    length_N = torch.tensor([12, 2, 7], dtype=torch.int32)
    page_NL = torch.arange(1, 7, dtype=torch.int32).view(3, 2)
    room = torch.tensor([ROWS, 8], dtype=torch.int32)
    offset_N = torch.tensor([0, 12, 14])
    choice_M = torch.randint(9, (ROWS,), generator=generator)
    # 8 query heads and 2 KV heads of 16 dimensions; norms, cos and sin.
    shapes = ((ROWS, 12, 16), (16,), (16,), (ROWS, 1, 8), (ROWS, 1, 8))
    heads = [torch.randn(shape, generator=generator) for shape in shapes]
    pools = torch.zeros(2, ROWS, 2, 16)
    out, lse = (torch.randn(4, 2, 64, *e, generator=generator) for e in ((16,), ()))
    cell_NT = torch.arange(48).view(3, 16) % ROWS
    return {
        "row_statistics": (torch.randn(5, 1000, generator=generator),),
        "argmax": (torch.randn(5, 1000, generator=generator),),
        "allocate_budget": (score_NC, limit_N > 0, limit_N, room, "none"),
        "pack_rows": (length_N, candidate_NC, candidate_NC[:, 0], limit_N, page_NL, ROWS, 128),
        "accept_prefix": (candidate_NC, length_N, offset_N, choice_M),
        "tile_heads": (*heads, cell_NT, torch.arange(ROWS), *pools, 4, 1e-6),
        "share_pages": (limit_N, offset_N % 3, 16, 40),
        "merge_shares": (out, lse, offset_N // 12, torch.tensor([1, 1, 3]), length_N.long(), 16),
        "linear": linear_arguments(device, generator),
        "scaled_linear": scaled_arguments(device, generator),
        "gated": (gate_and_up(generator),),
        "gated_rows": (gate_and_up(generator),),
        "layer": layer_arguments(generator),
    }


def linear_arguments(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    """Whole numbers of which every sum is exact."""
    columns, inner = product_shape(device, torch.bfloat16)
    x = torch.randint(-1, 2, (ROWS, inner), generator=generator).bfloat16()
    weight = torch.randint(-1, 2, (columns, inner), generator=generator).bfloat16()
    bias = 2 * torch.randint(-2, 3, (columns,), generator=generator).bfloat16()
    return x, weight, bias, torch.zeros(MAX_TILES, dtype=torch.int32)


def scaled_arguments(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    """The same in 8 bits, with scales that are powers of two."""
    columns, inner = product_shape(device, E4M3)
    x = torch.randint(-1, 2, (ROWS, inner), generator=generator).float().to(E4M3)
    weight = torch.randint(-1, 2, (columns, inner), generator=generator).float().to(E4M3)
    x_scale = 2.0 ** torch.randint(-1, 1, (ROWS,), generator=generator)
    weight_scale = 2.0 ** torch.randint(0, 2, (columns,), generator=generator)
    bias = 2 * torch.randint(-2, 3, (columns,), generator=generator).bfloat16()
    turn = torch.zeros(MAX_TILES, dtype=torch.int32)
    return x, x_scale, weight, weight_scale, bias, turn, torch.bfloat16


def product_shape(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Columns and inner size of the smallest weight whose product with 24 rows is split on this
    GPU, or of a small one, which the library multiplies."""
    split = []
    if device.type == "cuda":
        plans_of = table(*device_kind(device), str(dtype).removeprefix("torch."))
        for shape, plans in plans_of.items():
            if next((plan for most, plan in plans.items() if most >= ROWS), None) is not None:
                split.append(shape)
    return min(split, key=math.prod, default=(48, 32))


def gate_and_up(generator: torch.Generator) -> Tensor:
    """Rows whose largest product is 448, so that their scale is 1 and 8 bits hold the others: silu
    leaves 32 as it is and makes nothing of -100."""
    gate = torch.tensor([32.0, -100.0])[torch.randint(2, (ROWS, 48), generator=generator)]
    up = torch.randint(-14, 15, (ROWS, 48), generator=generator).float()
    gate[:, 0], up[:, 0] = 32, 14
    return torch.cat((gate, up), 1).bfloat16()


def layer_arguments(generator: torch.Generator) -> tuple[Any, ...]:
    """A float32 layer of 64 numbers, 4 query heads and 2 KV heads of 16, and a step of 3 lanes of
    16 rows in sub-lanes, as on a GPU."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    tile, group = Tile(height=16, parts=16), 2
    page_NL = torch.arange(1, 7, dtype=torch.int32).view(3, 2)
    logical_NP = torch.full((3, 7), -1, dtype=torch.int32)
    logical_NP.scatter_(1, page_NL.long(), torch.arange(2, dtype=torch.int32).expand(3, 2))
    paging = Paging(page_NL, logical_NP, torch.tensor([40, 2, 140], dtype=torch.int32))
    rows, paging, seen = attention_inputs(uniform_rows(paging, 16, 16), paging, tile, group)
    inv_freq = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    rotary = rotary_table(rows.position_R, inv_freq, 1.0, torch.float32)
    shared = Shared(*rotary, rows, paging, seen)
    weights = Weights(
        input_norm=1 + noise(64), qkv=noise(128, 64), qkv_bias=None, q_norm=None, k_norm=None,
        o=noise(64, 64), o_bias=None, post_norm=1 + noise(64), gate_up=noise(192, 64),
        gate_up_bias=None, down=noise(64, 96), down_bias=None,
    )  # fmt: skip
    pool = noise(7 * PAGE, 2, 16), noise(7 * PAGE, 2, 16)
    stream = 8 * noise(48, 64), 8 * noise(48, 64)
    return *stream, flat(shared), list(weights), *pool, 1e-6, list(form_of(16, 2, group, tile))

"""The target decoder against transformers' own forward, and how it shares a model's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paged import idle_behind, shuffled_paging
from tiny import VOCAB, left_padded, plain, prompt, tiny_model
from torch import Tensor

import dscale
from dscale.compiled.attention import Tile
from dscale.compiled.flow import uniform_rows
from dscale.compiled.kv import KVPool, Paging
from dscale.compiled.target import Target
from dscale.load import build_target, unfuse
from dscale.prefill import ChunkBuffers, bucket_of_tiles, packed_chunk, tiles_of
from dscale.request import Request

PAGES, NUM_PAGES = 3, 12
LENGTHS = [7, 131, 260]
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (32, 8)])
FAMILY = pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
PROMPTS = [prompt(n + 17) for n in LENGTHS]


def with_heads(family: str, heads: int, kv_heads: int, **changes: Any) -> Any:
    """A tiny model with these heads, of 16 dimensions each in half as wide a residual stream."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return tiny_model(family, hidden_size=8 * heads, **shape, **changes)


def pool_of(target: Target) -> KVPool:
    c = target.config
    return KVPool(
        c.num_layers, NUM_PAGES, c.num_kv_heads, c.head_dim, target.norm.dtype, target.norm.device
    )


def prefill(
    target: Target, pool: KVPool, size: int, flex: bool
) -> tuple[Paging, list[Tensor], list[Tensor]]:
    """Run the ragged prompts in chunks of `size`; each request's logits and taps, row by row."""
    paging = shuffled_paging([0] * len(LENGTHS), PAGES, NUM_PAGES)
    requests = [
        Request(prompt=tokens[:length], max_new_tokens=20, pages=pages, slot=slot)
        for slot, (tokens, length, pages) in enumerate(
            zip(PROMPTS, LENGTHS, paging.page_NL.tolist(), strict=True)
        )
    ]
    logits: list[list[Tensor]] = [[] for _ in LENGTHS]
    taps: list[list[Tensor]] = [[] for _ in LENGTHS]
    while any(r.prefilled < len(r.prompt) for r in requests):
        chosen = [i for i, r in enumerate(requests) if r.prefilled < len(r.prompt)]
        left = [len(requests[i].prompt) - requests[i].prefilled for i in chosen]
        lengths = [min(size, n) for n in left]
        some = [requests[i] for i in chosen]
        if flex:
            tiles = bucket_of_tiles(sum(map(tiles_of, lengths)))
            chunk = ChunkBuffers(tiles, len(LENGTHS), target.norm).fill(some, lengths)
        else:
            chunk = packed_chunk(some, lengths, target.norm)
        for request, length in zip(some, lengths, strict=True):
            request.prefilled += length
        slot_X = chunk.slot_X
        page_NL, logical_NP = idle_behind(paging)
        paged = Paging(page_NL[slot_X], logical_NP[slot_X], chunk.start_X.int())
        tile = Tile(height=chunk.rows.row_NT.shape[1], flex=flex)
        hidden, tapped = target(chunk.token_R, chunk.rows, paged, pool, tile)
        for index, length in zip(chosen, lengths, strict=True):
            of_lane = (slot_X[chunk.rows.lane_R] == index).nonzero()[:length, 0]
            logits[index].append(target.logits(hidden[of_lane]))
            if tapped is not None:
                taps[index].append(tapped[of_lane])
    done = paging._replace(context_N=torch.tensor(LENGTHS, dtype=torch.int32))
    return done, [torch.cat(x) for x in logits], [torch.cat(x) for x in taps if x]


def advance(
    target: Target, pool: KVPool, paging: Paging, width: int, flex: bool
) -> tuple[Tensor, Tensor, Paging]:
    """Run the next `width` tokens of every request: logits and taps `[N, width, ...]`."""
    tile = Tile(height=16 if flex else width, flex=flex)
    starts = paging.context_N.tolist()
    token = torch.tensor([p[s : s + width] for p, s in zip(PROMPTS, starts, strict=True)])
    rows = uniform_rows(paging, width, tile.height)
    hidden, taps = target(token.flatten(), rows, paging, pool, tile)
    assert taps is not None
    lanes = len(starts)
    after = paging._replace(context_N=paging.context_N + width)
    return target.logits(hidden).view(lanes, width, -1), taps.view(lanes, width, -1), after


def references(model: Any, taps: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Logits and tapped hidden states of every whole prompt by transformers."""
    outs = [model(torch.tensor([p]), output_hidden_states=True) for p in PROMPTS]
    return [
        (out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in taps], -1)) for out in outs
    ]


def check_all(model: Any, *, flex: bool, size: int = 128, atol: float = 1e-4) -> None:
    """Prefill, one 16-row block and one row give transformers' logits and hidden states."""
    taps = (0, 1)
    expected = references(model, taps)
    target = build_target(model, taps)
    pool = pool_of(target)
    paging, logits, tapped = prefill(target, pool, size, flex)
    for length, got, got_taps, (want, want_taps) in zip(
        LENGTHS, logits, tapped, expected, strict=True
    ):
        assert got.sub(want[:length]).abs().max() < atol
        assert got_taps.sub(want_taps[:length]).abs().max() < atol
    for width in (16, 1):
        starts = paging.context_N.tolist()
        got_NTV, got_NTF, paging = advance(target, pool, paging, width, flex)
        for start, got, got_taps, (want, want_taps) in zip(
            starts, got_NTV, got_NTF, expected, strict=True
        ):
            assert got.sub(want[start : start + width]).abs().max() < atol
            assert got_taps.sub(want_taps[start : start + width]).abs().max() < atol


@pytest.mark.parametrize("tied", [True, False])
@HEADS
@FAMILY
@torch.no_grad()
def test_logits_and_taps_equal_transformers(
    family: str, heads: int, kv_heads: int, tied: bool
) -> None:
    model = with_heads(family, heads, kv_heads, tied=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert (model.model.layers[0].self_attn.q_proj.bias is not None) is (family == "qwen2")
    check_all(model, flex=False)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads"), [("llama", 9, 3), ("qwen2", 14, 2), ("qwen3", 32, 8)]
)
@torch.no_grad()
def test_flex_route_equals_transformers(family: str, heads: int, kv_heads: int) -> None:
    check_all(with_heads(family, heads, kv_heads), flex=True)


@pytest.mark.parametrize(("size", "flex"), [(128, False), (256, False), (384, False), (300, True)])
@torch.no_grad()
def test_chunk_size_changes_nothing(size: int, flex: bool) -> None:
    """With FlexAttention a chunk of 260 rows is three tiles."""
    check_all(tiny_model("qwen3"), flex=flex, size=size)


@torch.no_grad()
def test_biases_everywhere() -> None:
    check_all(tiny_model("llama", attention_bias=True, mlp_bias=True), flex=False)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
}


@pytest.mark.parametrize("rope", ROPES)
@FAMILY
@torch.no_grad()
def test_static_rope_variants(family: str, rope: str) -> None:
    parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    model = tiny_model(family, rope_parameters=parameters)
    plain_angles = tiny_model(family, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    ids = torch.tensor([PROMPTS[2]])
    assert model(ids).logits.sub(plain_angles(ids).logits).abs().max() > 1e-2
    check_all(model, flex=False)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rope_that_changes_with_length_is_refused(parameters: dict[str, Any]) -> None:
    model = tiny_model("llama", rope_parameters=parameters)
    before = storages(model)
    with pytest.raises(ValueError, match=f"rope_type.*{parameters['rope_type']}"):
        dscale.attach(model)
    assert storages(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3").to(dtype)
    wide = tiny_model("qwen3")
    wide.load_state_dict(model.state_dict())
    want = references(wide, (0, 1))
    theirs = references(model, (0, 1))
    target = build_target(model, (0, 1))
    _, logits, _ = prefill(target, pool_of(target), 128, False)
    for length, got, (exact, _), (half, _) in zip(LENGTHS, logits, want, theirs, strict=True):
        ours = got.float().sub(exact[:length]).abs().max()
        assert got.dtype == dtype
        assert 0 < ours < 1.5 * half.float().sub(exact)[:length].abs().max()


def storages(model: Any) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Where each parameter lies: storage address, offset and stride."""
    return {
        name: (p.untyped_storage().data_ptr(), p.storage_offset(), p.stride())
        for name, p in model.named_parameters()
    }


def num_bytes(tensors: list[Tensor]) -> int:
    """Memory of the storages behind the tensors, each counted once."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(kept.values())


@FAMILY
def test_weights_are_shared_and_come_apart_again(family: str) -> None:
    model = tiny_model(family, tied=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    identities = {name: id(p) for name, p in model.named_parameters()}
    own = num_bytes(list(model.parameters()))
    target = build_target(model)
    assert num_bytes([*model.parameters(), *target.parameters()]) == own
    for layer, ours in zip(model.model.layers, target.layers, strict=True):
        attention = layer.self_attn
        start = ours.qkv.data_ptr()
        assert attention.q_proj.weight.data_ptr() == start
        width = attention.q_proj.weight.numel() * 4
        assert attention.k_proj.weight.data_ptr() == start + width
        assert layer.mlp.gate_proj.weight.data_ptr() == ours.gate_up.data_ptr()
        assert attention.o_proj.weight.data_ptr() == ours.o.data_ptr()
    unfuse(model)
    assert num_bytes(list(model.parameters())) == own
    separate = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(separate) == len(identities)
    for name, p in model.named_parameters():
        assert id(p) == identities[name]
        assert torch.equal(p, before[name])


@torch.no_grad()
def test_a_weight_changed_in_place_reaches_the_target() -> None:
    model = tiny_model()
    with dscale.attach(model):
        model.model.layers[1].self_attn.v_proj.weight.mul_(3.0)
        ids = torch.tensor([PROMPTS[0]])
        ours = model.generate(ids, max_new_tokens=12)
        assert torch.equal(ours, plain(model, ids, max_new_tokens=12))
        assert not torch.equal(ours, plain(tiny_model(), ids, max_new_tokens=12))


@pytest.mark.parametrize("tied", [True, False])
@FAMILY
def test_the_model_works_and_saves_while_attached_and_after(
    family: str, tied: bool, tmp_path: Path
) -> None:
    model = tiny_model(family, tied=tied)
    inputs = left_padded([prompt(5), prompt(130)], pad=VOCAB - 1)
    want_logits = model(**inputs).logits
    want = plain(model, **inputs, max_new_tokens=8)
    spec = dscale.attach(model)
    for stage in ("attached", "detached"):
        assert torch.equal(model(**inputs).logits, want_logits)
        assert torch.equal(plain(model, **inputs, max_new_tokens=8), want)
        model.save_pretrained(tmp_path / stage)
        again = type(model).from_pretrained(tmp_path / stage).eval()
        for name, p in tiny_model(family, tied=tied).named_parameters():
            assert torch.equal(again.get_parameter(name), p), (stage, name)
        assert (tmp_path / stage / "model.safetensors").stat().st_size < 4e5
        spec.detach()
        spec.detach()
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=8), want)


def test_training_goes_on_after_detach() -> None:
    model = tiny_model()
    dscale.attach(model).detach()
    model(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())

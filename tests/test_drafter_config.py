"""A drafter's config.json: variants that mean the same, and refusals by name."""

from typing import Any

import pytest
import torch
from drafters import drafter_json, nested

from dscale.drafter_config import config_json, default_taps, inverse_frequencies, parse_config


class Tokens:
    """A tokenizer with one known token."""

    unk_token_id = 0

    def convert_tokens_to_ids(self, token: str) -> int:
        """59 for `<mask>`, the unknown id for the rest."""
        return 59 if token == "<mask>" else 0


def test_config_variants_mean_the_same() -> None:
    plain = parse_config(drafter_json())
    assert plain.taps == (1, 3)
    assert plain.block_size == 16
    inner = {"block_size": 16, "mask_token_id": 59, "target_layer_ids": [1, 3]}
    variants = [
        drafter_json(block_size=None, dflash_config=inner),
        drafter_json(dflash_config=None, **inner),
        drafter_json(block_size=8, dflash_config=inner),
        drafter_json(block_size=None),
        drafter_json(
            rope_theta=None, rope_parameters={"rope_theta": 10000, "rope_type": "default"}
        ),
        drafter_json(layer_types=None, architectures=None, model_type=None),
        drafter_json(dtype=None, torch_dtype="bfloat16", is_causal=False, output_multiplier=1.0),
        nested(is_causal=False, projector_type="dflash", final_logit_softcapping=0.0),
    ]
    for raw in variants:
        assert parse_config(raw) == plain
    raw = nested(mask_token_id=None, mask_token="<mask>")
    assert parse_config(raw, tokenizer=Tokens()) == plain


def test_default_taps_are_z_labs() -> None:
    module = pytest.importorskip("dflash.model", reason="needs PyPI dflash (z-lab's formula)")
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    for depth in range(5, 80):
        for layers in range(1, 9):
            theirs = tuple(module.build_target_layer_ids(depth, layers))
            assert default_taps(depth, layers) == theirs
    raw = nested(target_layer_ids=None)
    assert parse_config(raw).taps == default_taps(6, 2)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_scaled_rotary_embeddings_are_transformers_own(rope: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    raw = drafter_json(**rope)
    config = parse_config(raw)
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**raw))
    assert torch.equal(inverse_frequencies(config), theirs.inv_freq)
    assert config.rope_scaling == theirs.attention_scaling
    assert not torch.equal(
        inverse_frequencies(config), inverse_frequencies(parse_config(drafter_json()))
    )
    saved = config_json(config, torch.bfloat16)
    assert parse_config(saved) == config


REFUSED: list[tuple[dict[str, Any], str]] = [
    (drafter_json(architectures=["Qwen3DSparkModel"]), "architectures: .*DSpark"),
    (drafter_json(architectures=["DFlash2DraftModel"]), "architectures: .*DFlash2"),
    (drafter_json(architectures=["LagunaDFlashModel"]), "architectures: .*Laguna"),
    (drafter_json(model_type="llama"), "model_type: .*'llama'"),
    (drafter_json(markov_rank=0), "markov_rank: .*DSpark.*got 0"),
    (drafter_json(enable_confidence_head=True), "enable_confidence_head: .*True"),
    (nested(projector_type="domino"), r"dflash_config\.projector_type: .*'domino'"),
    (nested(shift_label=True), r"dflash_config\.shift_label: .*True"),
    (nested(pure_draft_prefix_len=1), r"pure_draft_prefix_len: .*Domino"),
    (nested(conv_kernel_size=4), r"conv_kernel_size: .*DFlash2.*got 4"),
    (nested(selector_top_k=16), r"selector_top_k: .*DFlash2.*got 16"),
    (nested(output_multiplier=0.5), r"output_multiplier: .*got 0.5"),
    (nested(final_logit_softcapping=30.0), r"final_logit_softcapping: .*got 30.0"),
    (drafter_json(final_logit_softcapping=30.0), r"final_logit_softcapping: .*got 30.0"),
    (nested(input_embedding_scale=48.0), r"input_embedding_scale: .*got 48.0"),
    (nested(novel_key=3), r"dflash_config\.novel_key: .*got 3"),
    (drafter_json(dflash_config=[1]), r"dflash_config: expected an object"),
    (drafter_json(is_causal=True), "is_causal: .*both directions, got True"),
    (nested(causal=True), r"dflash_config\.causal: .*both directions, got True"),
    (drafter_json(attention_bias=True), "attention_bias: .*got True"),
    (drafter_json(hidden_act="gelu"), "hidden_act: .*silu.*got 'gelu'"),
    (drafter_json(quantization_config={"bits": 4}), "quantization_config: "),
    (drafter_json(speculators_model_type="dflash"), "speculators_model_type: "),
    (drafter_json(draft_vocab_size=30), "draft_vocab_size: .*60, got 30"),
    (
        drafter_json(layer_types=["full_attention", "sliding_attention"], sliding_window=2048),
        "layer_types: .*2048.*sliding_attention",
    ),
    (
        drafter_json(
            layer_types=None, sliding_window=2048, use_sliding_window=True, max_window_layers=1
        ),
        "layer_types: .*2048.*sliding_attention",
    ),
    (drafter_json(layer_types=["full_attention"]), "layer_types: expected 2 entries"),
    (drafter_json(hidden_size=None), "hidden_size: .*got None"),
    (drafter_json(head_dim="16"), "head_dim: .*got '16'"),
    (drafter_json(num_key_value_heads=3), "num_key_value_heads: .*4, got 3"),
    (drafter_json(rms_norm_eps=None), "rms_norm_eps: .*got None"),
    (drafter_json(rope_theta=None), "rope_theta: .*got None"),
    (drafter_json(rope_parameters={"rope_theta": 5e5}), "rope_theta: .*500000.0, got 10000"),
    (drafter_json(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type: .*'dynamic'"),
    (drafter_json(rope_scaling="yarn"), "rope_scaling: .*'yarn'"),
    (drafter_json(partial_rotary_factor=0.5), "partial_rotary_factor: .*got 0.5"),
    (
        drafter_json(rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]}),
        "mrope_section: ",
    ),
    (drafter_json(block_size=1), r"block_size: .*2\.\.16, got 1"),
    (drafter_json(block_size=32), r"block_size: .*2\.\.16, got 32"),
    (nested(mask_token_id=None), "mask_token_id: .*got None"),
    (nested(mask_token_id=None, mask_token="<mask>"), "mask_token: .*tokenizer.*'<mask>'"),
    (nested(target_layer_ids=[]), r"target_layer_ids: .*got \[\]"),
    (nested(target_layer_ids=["1"]), r"target_layer_ids: .*got \['1'\]"),
    (
        nested(target_layer_ids=None) | {"num_target_layers": None},
        "target_layer_ids: .*num_target_layers.*got None",
    ),
]


@pytest.mark.parametrize(("raw", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsupported_configs_are_refused_by_name(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_config(raw)
    assert str(caught.value).startswith("drafter config: ")


def test_an_unknown_mask_token_is_refused() -> None:
    raw = nested(mask_token_id=None, mask_token="<other>")
    with pytest.raises(ValueError, match=r"mask_token: .*got '<other>'"):
        parse_config(raw, tokenizer=Tokens())


def test_unknown_top_level_keys_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"unknown keys \{'novel': 3\}"):
        assert parse_config(drafter_json(novel=3, empty=None, other=0)) == parse_config(
            drafter_json()
        )

"""What generate refuses: by name, before any forward, and without a trace."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, left_padded, plain, prompt, tiny_drafter, tiny_model
from transformers import (
    CompileConfig,
    DynamicCache,
    EncoderNoRepeatNGramLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    PrefixConstrainedLogitsProcessor,
    WatermarkingConfig,
)

import dscale
from dscale import Attachment
from dscale.compiled.target import Target
from dscale.sampling import KNOWN, NEUTRAL, SUPPORTED

IDS = torch.tensor([prompt(9)])
Refused = Callable[..., None]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attachment]:
    """A model attached with a random drafter."""
    model = tiny_model()
    with dscale.attach(model, tiny_drafter(tmp_path_factory.mktemp("drafter"), model)) as spec:
        yield spec


@pytest.fixture(scope="module")
def want(spec: Attachment) -> torch.Tensor:
    tokens: torch.Tensor = plain(tiny_model(), IDS, max_new_tokens=6)
    return tokens


@pytest.fixture
def refused(spec: Attachment, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Check that a call is refused by a name and leaves the model as it was."""
    model, forwards = spec.model, []
    forward = Target.forward

    def counted(self: Target, *args: Any) -> Any:
        forwards.append(self)
        return forward(self, *args)

    monkeypatch.setattr(Target, "forward", counted)
    module = model.model.embed_tokens
    embed = module.forward
    monkeypatch.setattr(module, "forward", lambda ids: forwards.append(ids) or embed(ids))

    def check(name: str, *args: Any, **kwargs: Any) -> None:
        before = vars(model)["generate"], [p.data_ptr() for p in model.parameters()]
        calls = spec.stats.calls
        with pytest.raises(ValueError, match=rf"(^|[^a-z_]){name}\b"):
            model.generate(*args, **kwargs)
        assert forwards == []
        assert spec.stats.calls == calls
        assert (vars(model)["generate"], [p.data_ptr() for p in model.parameters()]) == before
        model.generation_config = GenerationConfig()
        assert torch.equal(model.generate(IDS, max_new_tokens=6), want)
        assert forwards
        forwards.clear()

    return check


FIELDS: dict[str, Any] = {
    "early_stopping": True, "num_beams": 3, "use_mtp": True, "use_cache": False,
    "cache_implementation": "static", "cache_config": {"a": 1}, "max_cache_len": 100,
    "length_penalty": 2.0, "token_healing": True, "guidance_scale": 2.0,
    "watermarking_config": WatermarkingConfig(), "output_attentions": True,
    "output_hidden_states": True, "decoder_start_token_id": 3,
    "is_assistant": True, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1, "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 3, "assistant_early_exit": 2, "assistant_lookbehind": 3,
    "target_lookbehind": 3, "assistant_ensemble_weight": 0.5, "speculation_type": "dflash",
    "compile_config": CompileConfig(), "disable_compile": True,
    "continuous_batching_config": {"a": 1}, "low_memory": True, "penalty_alpha": 0.5,
    "dola_layers": "low", "diversity_penalty": 0.5, "num_beam_groups": 2, "constraints": [1],
    "force_words_ids": [[3]], "prefill_chunk_size": 64,
}  # fmt: skip


def test_every_field_either_works_or_is_refused() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert known - {"transformers_version"} <= FIELDS.keys() | SUPPORTED
    assert not FIELDS.keys() & SUPPORTED


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("field", FIELDS)
def test_fields_of_the_config(field: str, spec: Attachment, refused: Refused) -> None:
    value = FIELDS[field]
    refused(field, IDS, max_new_tokens=5, **{field: value})
    if field not in KNOWN | NEUTRAL.keys():
        return  # this release of transformers has no such field and ignores it in a config
    config = GenerationConfig(max_new_tokens=5)
    setattr(config, field, value)
    refused(field, IDS, config)
    refused(field, IDS, generation_config=config)
    spec.model.generation_config = config
    refused(field, IDS, max_new_tokens=3)


@pytest.mark.parametrize(
    "kind", ["paged", "offloaded", "offloaded_static", "quantized", "dynamic", "sliding_window"]
)
def test_other_caches(kind: str, refused: Refused) -> None:
    refused("cache_implementation", IDS, max_new_tokens=5, cache_implementation=kind)


ARGUMENTS: dict[str, Any] = {
    "synced_gpus": True,
    "assistant_model": tiny_model(), "negative_prompt_ids": IDS,
    "negative_prompt_attention_mask": IDS, "custom_generate": "owner/name",
    "assistant_tokenizer": object(), "use_model_defaults": True,
    "inputs_embeds": torch.zeros(1, 3, 32), "position_ids": IDS, "cache": DynamicCache(),
    "past_key_values": DynamicCache(), "token_type_ids": IDS, "labels": IDS, "logits_to_keep": 1,
    "max_new_token": 3, "trust_remote_code": True, "generator": torch.Generator(),
    "_eos_token_tensor": 3, "_from_model_config": True, "transformers_version": "5",
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments(name: str, refused: Refused) -> None:
    refused(name, IDS, max_new_tokens=5, **{name: ARGUMENTS[name]})


SAMPLING: list[tuple[str, Any]] = [
    ("temperature", 0.0), ("temperature", -1.0), ("temperature", float("nan")),
    ("temperature", float("inf")), ("temperature", 2), ("top_k", -1), ("top_k", 1.5),
    ("top_p", -0.1), ("top_p", 1.5), ("top_p", float("nan")), ("min_p", -0.5), ("min_p", 1.5),
    ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("seed", "a"), ("seed", True),
    ("seed", [1, 2]), ("seed", [None]), ("seed", torch.tensor(5)), ("num_return_sequences", 0),
    ("num_return_sequences", -1), ("num_return_sequences", 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SAMPLING)
def test_sampling_settings(name: str, value: Any, refused: Refused) -> None:
    refused(name, IDS, max_new_tokens=5, do_sample=True, **{name: value})


def test_settings_without_sampling(refused: Refused) -> None:
    refused("num_return_sequences", IDS, max_new_tokens=5, num_return_sequences=2)
    refused("seed", IDS, max_new_tokens=5, seed=3)


STOPS: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer", {"stop_strings": ["a"]}), ("tokenizer", {"stop_strings": "a"}),
    ("stop_strings", {"stop_strings": [3], "tokenizer": object()}),
    ("stop_strings", {"stop_strings": [], "tokenizer": object()}),
    ("stopping_criteria", {"stopping_criteria": max}),
    ("stopping_criteria", {"stopping_criteria": [3]}),
    ("logits_processor", {"logits_processor": max}),
    ("logits_processor", {"logits_processor": [3]}),
    ("prefix_allowed_tokens_fn", {"prefix_allowed_tokens_fn": [1]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kwargs"), STOPS)
def test_stops(name: str, kwargs: dict[str, Any], refused: Refused) -> None:
    refused(name, IDS, max_new_tokens=5, **kwargs)


def test_rows_that_stop_without_a_pad_id(refused: Refused) -> None:
    criteria = [EosTokenCriteria(eos_token_id=3)]
    refused("pad_token_id", IDS.expand(2, -1), stopping_criteria=criteria, max_new_tokens=5)


OWN = lambda ids, scores: scores  # noqa: E731
ROWS: dict[str, Any] = {
    "function": OWN,
    "PrefixConstrained": PrefixConstrainedLogitsProcessor(lambda row, ids: [3], 1),
    "EncoderNoRepeatNGram": EncoderNoRepeatNGramLogitsProcessor(2, IDS),
}


@pytest.mark.parametrize("kind", ROWS)
def test_processors_of_a_batch(kind: str, refused: Refused) -> None:
    batch = left_padded([prompt(9), prompt(4)])
    refused("logits_processor", **batch, max_new_tokens=5, logits_processor=[ROWS[kind]])
    settings = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 5}
    refused("logits_processor", IDS, logits_processor=[ROWS[kind]], **settings)


LENGTHS: list[tuple[str, Any]] = [
    ("max_new_tokens", 0), ("max_new_tokens", -3), ("max_new_tokens", 2.5),
    ("max_new_tokens", "3"), ("max_length", 9), ("max_length", 5), ("max_length", 20.0),
    ("max_new_tokens", 10**12),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), LENGTHS)
def test_lengths(name: str, value: Any, refused: Refused) -> None:
    refused(name, IDS, **{name: value})


BAD_IDS: dict[str, Any] = {
    "1-D": IDS[0], "3-D": IDS[None], "scalar": torch.tensor(3), "no rows": IDS[:0],
    "no tokens": IDS[:, :0], "float": IDS.float(), "bool": IDS > 9, "list": IDS.tolist(),
    "numpy": IDS.numpy(), "too large": IDS + VOCAB, "negative": IDS - VOCAB, "text": "hello",
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_IDS)
def test_ids(kind: str, refused: Refused) -> None:
    refused("input_ids", BAD_IDS[kind], max_new_tokens=5)
    refused("input_ids", input_ids=BAD_IDS[kind], max_new_tokens=5)


def test_ids_twice_or_never(refused: Refused) -> None:
    refused("input_ids", IDS, input_ids=IDS, max_new_tokens=5)
    refused("input_ids", max_new_tokens=5)
    refused("generation_config", IDS, {"max_new_tokens": 5})


ONES = torch.ones_like(IDS)
MASKS: dict[str, Any] = {
    "short": ONES[:, :5], "long": torch.ones(1, 12), "rows": ONES.expand(2, -1), "1-D": ONES[0],
    "4-D": torch.ones(1, 1, 9, 9), "list": ONES.tolist(), "all zeros": 0 * ONES,
    "right padding": torch.tensor([[1] * 6 + [0] * 3]),
    "additive": torch.tensor([[-torch.inf] * 2 + [0.0] * 7]), "twos": 2 * ONES,
    "NaN": torch.nan * ONES, "weights": torch.tensor([[0.0] * 4 + [0.5] * 5]),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, refused: Refused) -> None:
    refused("attention_mask", IDS, attention_mask=MASKS[kind], max_new_tokens=5)


def test_a_row_of_padding_in_a_batch(refused: Refused) -> None:
    inputs = left_padded([prompt(9), prompt(4)])
    inputs["attention_mask"][1] = 0
    refused("attention_mask", **inputs, max_new_tokens=5)
    # Inferred by transformers from the pad token.
    ids = torch.tensor([[30, 31, 7, 7], [1, 2, 3, 4]])
    refused("attention_mask", ids, pad_token_id=7, max_new_tokens=5)
    refused("attention_mask", attention_mask=ONES, bos_token_id=3, max_new_tokens=5)


class Ends:
    ended = 0

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None:
        self.ended += 1


def test_streamers(refused: Refused) -> None:
    refused("streamer", IDS, streamer=1, max_new_tokens=5)
    refused("streamer", IDS, streamer=[print], max_new_tokens=5)
    for kwargs, name in (
        ({"inputs": IDS, "num_beams": 2}, "num_beams"),
        ({"inputs": IDS, "foo": 2}, "foo"),
        ({"inputs": IDS + VOCAB}, "input_ids"),
    ):
        streamer = Ends()
        refused(name, streamer=streamer, max_new_tokens=5, **kwargs)
        assert streamer.ended == 1


def test_a_pool_that_is_too_small(tmp_path: Path, want: torch.Tensor) -> None:
    model = tiny_model()
    with dscale.attach(model, tiny_drafter(tmp_path, model), pool_tokens=384) as spec:
        for rows, length, new in ((1, 352, 1), (1, 100, 253), (4, 400, 5), (1, 4000, 5)):
            ids = torch.tensor([prompt(length)]).expand(rows, -1)
            with pytest.raises(ValueError, match=r"pool_tokens: expected at least \d+.*got 384"):
                model.generate(ids, max_new_tokens=new)
        assert spec.stats.passes == 0
        for length, new in ((351, 1), (100, 252), (9, 6)):
            out = model.generate(torch.tensor([prompt(length)]), max_new_tokens=new)
            assert out.shape == (1, length + new)
        assert torch.equal(out, want)


def test_stale_fields_that_transformers_ignores_too(want: torch.Tensor, spec: Attachment) -> None:
    spec.model.generation_config = GenerationConfig(chat_format="chatml", max_window_size=6144)
    assert torch.equal(spec.model.generate(IDS, max_new_tokens=6), want)
    config = GenerationConfig(max_new_tokens=6, max_window_size=1)
    assert torch.equal(spec.model.generate(IDS, config), want)
    # A field that the call sets back to neutral asks for nothing.
    spec.model.generation_config = GenerationConfig(repetition_penalty=1.1, num_beams=4)
    out = spec.model.generate(IDS, max_new_tokens=6, repetition_penalty=1.0, num_beams=1)
    assert torch.equal(out, want)
    spec.model.generation_config = GenerationConfig()


def test_a_misspelt_argument_gets_a_hint(refused: Refused) -> None:
    refused("did you mean max_new_tokens", IDS, max_new_token=6)

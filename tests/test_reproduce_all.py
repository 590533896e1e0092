"""The recipe that runs every command of the results page, on made-up commands."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import reproduce_all

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
BENCH, BROKEN, LAST = "python -m bench.a --prompts DATA", "python -m bench.b", "python last.py"
REPLAY = "python -m bench.a --parts replay"


class Machine:
    """Stands in for processes; `ran` holds the commands, `broken` those that fail."""

    def __init__(self) -> None:
        self.ran: list[list[str]] = []
        self.broken = {"bench.b"}

    def call(self, asked: list[str], *, cwd: Path, stdout: Any, stderr: Any) -> int:
        self.ran.append(asked)
        stdout.write("loading\nno such kernel\n")
        return int(bool(self.broken & {*asked}))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A GPU machine with four commands to run."""
    made = Machine()
    monkeypatch.setattr(subprocess, "call", made.call)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(reproduce_all, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(reproduce_all, "PAGE", LAST)
    monkeypatch.setattr(reproduce_all, "commands", lambda: [BENCH, BROKEN, REPLAY, LAST])
    return made


def test_every_command_of_the_page_runs_once() -> None:
    lines = PAGE.read_text().splitlines()
    named = {line for line in lines if line.startswith("python ")}
    got = reproduce_all.commands()
    assert {*got} == named | {"python recipes/reproduce_results.py"}
    assert len({*got}) == len(got)
    benches = [command.startswith("python -m bench") for command in got]
    assert benches == sorted(benches, reverse=True)
    assert got[-1] == "python recipes/reproduce_results.py"


def test_a_failure_stops_nothing_and_is_told(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"failed: \['python -m bench.b'\]"):
        reproduce_all.main(["--prompts", str(tmp_path)])
    python = sys.executable
    assert machine.ran == [
        [python, "-m", "bench.a", "--prompts", str(tmp_path)],
        [python, "-m", "bench.b"],
        [python, "-m", "bench.a", "--parts", "replay"],
        [python, "last.py"],
    ]
    assert "no such kernel" in (tmp_path / "logs" / "01.txt").read_text()


def test_the_next_run_takes_up_what_is_left(machine: Machine, tmp_path: Path) -> None:
    asked = ["--prompts", str(tmp_path)]
    with pytest.raises(SystemExit):
        reproduce_all.main(asked)
    machine.ran.clear()
    machine.broken.clear()
    reproduce_all.main(asked)
    assert [words[1:] for words in machine.ran] == [["-m", "bench.b"], ["last.py"]]
    machine.ran.clear()
    reproduce_all.main([*asked, "--again"])
    assert len(machine.ran) == 4


def test_another_commit_runs_everything_anew(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.broken.clear()
    for commit in ("one", "two", "one"):
        monkeypatch.setattr(reproduce_all, "head_commit", lambda commit=commit: commit)
        reproduce_all.main(["--prompts", str(tmp_path)])
    assert len(machine.ran) == 4 + 4 + 1


def test_without_a_gpu_what_needs_one_is_named(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reproduce_all.main(["--prompts", str(tmp_path)])
    assert [words[1:] for words in machine.ran] == [
        ["-m", "bench.a", "--parts", "replay"],
        ["last.py"],
    ]
    said = capsys.readouterr().out
    assert f"left out, needs a CUDA device: {BENCH}" in said
    assert f"left out, needs a CUDA device: {BROKEN}" in said


def test_nothing_starts_when_the_time_is_up(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reproduce_all.main(["--prompts", str(tmp_path), "--seconds", "0"])
    assert machine.ran == []
    assert "time is up: 4 not measured" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [[], ["--prompts", "no/such/folder"]])
def test_prompts_must_be_a_folder(
    machine: Machine, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        reproduce_all.main(asked)
    assert "--prompts: expected a folder" in capsys.readouterr().err
    assert machine.ran == []

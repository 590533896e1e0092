"""Measure anew everything that docs/results.md is made of, and write the page: hours on one GPU.

    python recipes/reproduce_all.py --prompts DATA           # --list says what it would run

Runs the commands that the page names, one after the other, each in a process of its own with its
output in runs/reproduce_all. A command that ended well at this commit is not run again, so that a
run may be cut off and started anew. One that fails does not stop the others: what failed and what
was left out is told at the end. Without a GPU only those are run that need none.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from reproduce_fp8 import COMMANDS as EIGHT_BIT
from reproduce_results import EXPERIMENTS
from tqdm import tqdm

from bench.attempts import Attempts
from bench.rows import head_commit

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "runs" / "reproduce_all"
PAGE = "python recipes/reproduce_results.py"


def commands() -> list[str]:
    """What the page names, each once: benches, then the recipes that read their rows."""
    named = [command for each in EXPERIMENTS for command in each.part().commands]
    every = dict.fromkeys([*named, *EIGHT_BIT])
    benches = [command for command in every if command.startswith("python -m bench")]
    return [*dict.fromkeys([*benches, *every]), PAGE]


def needs_gpu(command: str) -> bool:
    """Whether it measures times that a CPU cannot stand in for."""
    computed = "--parts replay" in command or "--from-steps" in command
    return command.startswith("python -m bench") and not computed


def arguments_of(command: str, prompts: Path) -> list[str]:
    """For a process: this interpreter, and the prompts' folder for DATA."""
    named = {"python": sys.executable, "DATA": str(prompts.resolve())}
    return [named.get(word, word) for word in shlex.split(command)]


class Finished:
    """The commands that ended well at a commit, in a file that outlives this run."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path, self.commit = path, commit
        self.seconds: dict[str, dict[str, float]] = {}
        if path.is_file():
            self.seconds = json.loads(path.read_text())

    def __contains__(self, command: str) -> bool:
        return command in self.seconds.get(self.commit, {})

    def add(self, command: str, seconds: float) -> None:
        """Note that a command took so long."""
        self.seconds.setdefault(self.commit, {})[command] = round(seconds, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.seconds, indent=1) + "\n")


def run(command: str, prompts: Path, log: Path) -> None:
    """Run a command in the repository's root. Raises RuntimeError where it fails, with the last
    line it wrote."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        asked = arguments_of(command, prompts)
        code = subprocess.call(asked, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{command}: exit status {code}: {last} ({log})")


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is left to run."""
    args = parse(argv)
    asked = commands()
    if args.list:
        print("\n".join(asked))
        return
    done, attempts = Finished(LOGS / "finished.json", head_commit()), Attempts(args.seconds)
    attempts.most = float("inf")
    left = [c for c in asked if c == PAGE or args.again or c not in done]
    if not torch.cuda.is_available():
        for command in filter(needs_gpu, left):
            print(f"left out, needs a CUDA device: {command}")
        left = [command for command in left if not needs_gpu(command)]
    for command in tqdm(left, unit="command"):
        if not attempts.may_start():
            continue
        tqdm.write(command)
        began = time.monotonic()
        with attempts.attempt(command):
            run(command, args.prompts, LOGS / f"{asked.index(command):02d}.txt")
            done.add(command, time.monotonic() - began)
    attempts.end()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--prompts", type=Path, help="folder with the sets' prompt files (bench/data/README.md)")
    add("--list", action="store_true", help="print the commands and end")
    add("--again", action="store_true", help="also what ended well at this commit")
    add("--seconds", type=float, default=float("inf"), help="start nothing after so long")
    args = parser.parse_args(argv)
    if not args.list and (args.prompts is None or not args.prompts.is_dir()):
        parser.error(f"--prompts: expected a folder, got {args.prompts}")
    return args


if __name__ == "__main__":
    main()

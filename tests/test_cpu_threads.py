"""OpenMP threads are let go by whoever waits."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tiny import prompt, tiny_model

import dscale
import dscale.worker
from dscale.cpu_threads import _pause

CODE = """
import os, torch
from dscale.cpu_threads import release_threads
count = lambda: len(os.listdir("/proc/self/task"))
x = torch.arange(4_000_000) / 1e6
release_threads()
for _ in range(2):
    before = count()
    assert torch.equal(x.exp()[:9], x[:9].exp())
    during = count()
    release_threads()
    print(during > before, count() == before)
"""


@pytest.mark.skipif(_pause() is None, reason="needs a PyTorch with libgomp")
def test_a_team_is_gone_and_comes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True"] * 4, done.stdout


def test_the_caller_and_the_idle_engine_release_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(
        dscale.worker, "release_threads", lambda: released.append(threading.current_thread().name)
    )
    with dscale.attach(tiny_model(), mode="ar") as spec:
        spec.model.generate(torch.tensor([prompt(5)]), max_new_tokens=3)
        spec.engine.close()
    assert threading.current_thread().name in released
    # Before it first waits, and again when the call is over.
    assert released.count("dscale") >= 2

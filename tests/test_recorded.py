"""Traces recorded from served requests, and dealt out for a replay."""

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import closed_loop as real
from bench import recorded
from bench import simulated_cells as cells
from bench.loop_cells import Cell


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_every_pass_is_recorded(tmp_path: Path) -> None:
    args = recorded.parse(["--tiny", "--file", str(tmp_path / "t.npz"), "--sets", "gsm8k"])
    args.cells = [Cell("gsm8k", args.concurrency, 0.0, "dscale-half", 0, 1)]
    pair = real.toy(args)
    try:
        recorder = recorded.record(pair, args)
    finally:
        pair.engine.close()
    assert len(recorder.passes) == args.requests
    for request, passes in recorder.passes.items():
        assert [accepted + 1 for _, accepted in passes] == request.progress
        assert sum(request.progress) == args.output_cap - 1
        assert all((np.diff(score) <= 0).all() for score, _ in passes)
    count = sum(len(passes) - 1 for passes in recorder.passes.values())
    assert recorder.save(args.file) == count
    score, accepted = recorded.load(args.file, 64, 3)
    assert (score.shape, accepted.shape) == ((64, 3, 15), (64, 3))
    first = next(iter(recorder.passes.values()))
    known = {tuple(np.float32(np.float16(s)).tolist()) for s, _ in first[:-1]}
    assert any(tuple(row.tolist()) in known for row in score[:, 0])


def test_requests_stay_whole_and_come_in_random_order(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    request = np.repeat(np.arange(4, dtype=np.int32), 3)
    accepted = np.arange(12, dtype=np.uint8)
    np.savez(path, score=np.zeros((12, 15), np.float16), accepted=accepted, request=request)
    _, dealt = recorded.load(path, 24, 2, seed=1)
    for column in dealt.T.tolist():
        assert sorted(column) == sorted(2 * list(range(12)))
        assert all(a + 1 == b for a, b in pairwise(column) if b % 3)
    assert not torch.equal(dealt[:, 0], dealt[:, 1])
    assert torch.equal(dealt, recorded.load(path, 24, 2, seed=1)[1])
    args = argparse.Namespace(recorded=path, slots=1)
    drawn = cells.draws(args, "recorded", 1)
    assert drawn[1].shape == (cells.TRACE_STEPS, 2)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    path.write_text("not a zip")
    with pytest.raises(ValueError, match=r"t\.npz: expected a recorded trace"):
        recorded.load(path, 4, 1)
    np.savez(path, score=np.zeros((2, 15)))
    with pytest.raises(ValueError, match=r"t\.npz: expected a recorded trace"):
        recorded.load(path, 4, 1)
    np.savez(path, score=np.zeros((2, 7)), accepted=np.zeros(2), request=np.zeros(2))
    with pytest.raises(ValueError, match="expected passes of 15 candidates, got"):
        recorded.load(path, 4, 1)

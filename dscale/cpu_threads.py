"""OpenMP threads on a CPU, of which only one thread of the process should have any."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

HARD = 2
"""omp_pause_hard of the OpenMP 5.0 standard."""


def release_threads() -> None:
    """Let go the OpenMP threads that wait for this thread's next parallel region.

    Every thread that computes gets a team of its own, and where teams outnumber the cores libgomp
    no longer lets them spin, so that short regions wait for sleepers: products of one row took 4.4
    ms where they take 2.1, on 2 cores. So whoever is going to wait, the caller or the engine's
    thread, releases its team first. Does nothing with another OpenMP library, whose call would
    end other threads' teams as well."""
    pause = _pause()
    if pause is not None:
        pause(HARD)


@cache
def _pause() -> Any:
    """omp_pause_resource_all of the libgomp that PyTorch uses, None without one."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    mine = sorted(path for path in found if "/torch/lib/libgomp" in path)
    return getattr(ctypes.CDLL(mine[0]), "omp_pause_resource_all", None) if mine else None

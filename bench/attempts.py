"""Measurements that run unattended: one that fails does not take the others with it, and none is
started when the time is up."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Attempts:
    """`seconds`: start nothing so long after `begin`; `most`: give up after so many failures."""

    seconds: float = float("inf")
    most: float = 3
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """Count the seconds from now on: compiling, before it, uses up none of them."""
        self._began = time.perf_counter()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Print what goes wrong inside and go on; raises the error of the last failure allowed."""
        try:
            yield
        except Exception:
            self.failed.append(what)
            if len(self.failed) >= self.most:
                raise
            traceback.print_exc()

    def may_start(self) -> bool:
        """Whether there is time for one more; counts those for which there is none."""
        enough = time.perf_counter() - self._began < self.seconds
        self.skipped += not enough
        return enough

    def end(self) -> None:
        """Say what was not started; exit with an error where something failed."""
        if self.skipped:
            print(f"time is up: {self.skipped} not measured; run again to go on", flush=True)
        if self.failed:
            raise SystemExit(f"failed: {self.failed}")

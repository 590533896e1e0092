"""Counters of what an engine did, and the progress of every decode pass of the last call."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Stats:
    """Totals since the engine was made (or `reset`).

    `calls`: of `generate`; `requests`: queued. `steps`: decode passes of the whole batch.
    `passes`: the same counted per request (target passes a request took part in). `tokens`: tokens
    committed by decode passes; the first token of a request comes from its prefill. `drafted`,
    `accepted`: candidates verified and kept, the successor not counted. `prompt_tokens`:
    prefilled; `prefix_hits`: prompt tokens found in the cache instead. `uncaptured_steps`: those
    of `steps` in which the host chose (docs/design.md, "Host path"). `prefill_seconds`,
    `decode_seconds`: of the engine's thread. `last_progress`: per request of the last call, tokens
    of each pass."""

    calls: int = 0
    requests: int = 0
    steps: int = 0
    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    prefix_hits: int = 0
    uncaptured_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    last_progress: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        """Mean progress: tokens committed per request and decode pass (0.0 before the first)."""
        return self.tokens / self.passes if self.passes else 0.0

    def add_pass(self, count: int, rows: int) -> None:
        """Count one request's decode pass of `rows` rows that committed `count` tokens."""
        self.passes += 1
        self.tokens += count
        self.drafted += rows - 1
        self.accepted += min(count, rows) - 1

    def take_back(self, tokens: int, passes: int) -> None:
        """Uncount tokens that were committed past a stop, of which `passes` passes brought nothing
        else. The passes were made and stay counted."""
        self.tokens -= tokens
        self.accepted -= tokens - passes

    def reset(self) -> None:
        """Set every counter to zero."""
        fresh = Stats()
        for counter in fields(self):
            setattr(self, counter.name, getattr(fresh, counter.name))

"""One request: its prompt, its settings, and what has come out so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from dscale.pages import pages_for


@dataclass(slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` keys the sampling
    noise together with the absolute position. `tokens` grows by each step's progress; `progress`
    has one entry per decode pass."""

    prompt: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Pages its worst case needs."""
        return pages_for(len(self.prompt), self.max_new_tokens)

    @property
    def context(self) -> int:
        """Tokens so far, the prompt's and its own."""
        return len(self.prompt) + len(self.tokens)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError naming the field that no request can have."""
        if not self.prompt:
            raise ValueError(
                "input_ids: expected at least one prompt token per row, got an empty prompt"
            )
        worst = next((t for t in self.prompt if not 0 <= t < vocab_size), None)
        if worst is not None:
            raise ValueError(f"input_ids: expected token ids in 0..{vocab_size - 1}, got {worst}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")

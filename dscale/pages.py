"""Which physical pages belong to which request: a free list over the pool."""

from __future__ import annotations

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.kv import PAGE


def pages_for(prompt_tokens: int, max_new_tokens: int) -> int:
    """Pages a request reserves: its worst case, and two blocks because a draft block always writes
    16 slots."""
    return -(-(prompt_tokens + max_new_tokens + 2 * VERIFY_TILE) // PAGE)


class PageAllocator:
    """Free list of physical pages 1..num_pages - 1; page 0 is scratch and never handed out."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` pages. Raises ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(
                f"pages: expected at most {len(self._free)} (free now), got a request for {count}"
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Return pages taken before."""
        self._free.extend(reversed(pages))
        assert len(self._free) < self.num_pages, (
            f"{len(self._free)} free pages of {self.num_pages - 1}"
        )

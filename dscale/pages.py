"""Which physical pages belong to which request: a free list over the pool, and the pages that
requests of one beginning share."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import sha256
from itertools import takewhile

from dscale.compiled.attention import VERIFY_TILE
from dscale.compiled.kv import PAGE


def pages_for(prompt_tokens: int, max_new_tokens: int) -> int:
    """Pages a request reserves: its worst case, and two blocks because a draft block always writes
    16 slots."""
    return -(-(prompt_tokens + max_new_tokens + 2 * VERIFY_TILE) // PAGE)


def page_keys(tokens: list[int]) -> list[bytes]:
    """A key for every whole page of a text: a digest of its tokens and of all before them."""
    keys, key = [], b""
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        key = sha256(key + array("q", tokens[start : start + PAGE]).tobytes()).digest()
        keys.append(key)
    return keys


class PageAllocator:
    """Physical pages 1..num_pages - 1; page 0 is scratch and never handed out.

    A page is free, private to one request, or shared: then it has a key, by which others find it,
    and counts its users. A shared page without users stays until its room is needed, the longest
    unused first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._unused)

    @property
    def num_shared(self) -> int:
        """Pages that a request of the same beginning would find."""
        return len(self._page_of)

    def take(self, count: int) -> list[int]:
        """Take `count` pages. Raises ValueError when fewer are free."""
        if count > self.num_free:
            raise ValueError(
                f"pages: expected at most {self.num_free} (free now), got a request for {count}"
            )
        while len(self._free) < count:
            page, _ = self._unused.popitem(last=False)
            del self._page_of[self._key_of.pop(page)], self._users[page]
            self._free.append(page)
        return [self._free.pop() for _ in range(count)]

    def find(self, keys: list[bytes]) -> list[int]:
        """The shared pages of the longest known beginning, taken for one more user."""
        pages = [self._page_of[key] for key in takewhile(self._page_of.__contains__, keys)]
        for page in pages:
            self._users[page] += 1
            self._unused.pop(page, None)
        return pages

    def share(self, pages: list[int], keys: list[bytes]) -> None:
        """Let others find a request's first `len(keys)` pages, complete in both caches from now
        on. Where another page has the key already, that one stays the shared one."""
        for page, key in zip(pages, keys, strict=False):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page], self._users[page] = page, key, 1

    def give_back(self, pages: list[int]) -> None:
        """Return a request's pages."""
        # From its end: of an old text the beginning, which most others share, stays longest.
        for page in reversed(pages):
            users = self._users.get(page, 1) - 1
            assert users >= 0, f"page {page} has no user"
            if users or page in self._key_of:
                self._users[page] = users
            else:
                self._users.pop(page, None)
                self._free.append(page)
            if not users and page in self._key_of:
                self._unused[page] = None
        assert self.num_free < self.num_pages, f"{self.num_free} free of {self.num_pages - 1}"

    def forget_all(self) -> None:
        """Let nobody find what was shared so far; its users keep it."""
        for page in self._unused:
            del self._users[page]
            self._free.append(page)
        self._unused.clear()
        self._page_of.clear()
        self._key_of.clear()

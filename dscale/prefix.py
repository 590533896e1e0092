"""Pages for requests: those of a beginning that is known, and new ones for the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from dscale.compiled.kv import PAGE
from dscale.pages import PageAllocator, page_keys
from dscale.request import Request
from dscale.stats import Stats
from dscale.weights import WeightWatch


@dataclass(slots=True)
class PagePool:
    """Hands pages out and takes them back; with `sharing`, whole pages of a text that are complete
    in both caches are found by later prompts that begin alike."""

    sharing: bool
    weights: WeightWatch
    stats: Stats
    allocator: PageAllocator = field(default_factory=lambda: PageAllocator(1))
    _looked: bool = False  # at the weights, since requests have been running

    def reset(self, num_pages: int) -> None:
        """Begin anew with a pool of so many pages, all free."""
        self.allocator = PageAllocator(num_pages)

    def idle(self) -> None:
        """Nothing runs, so that weights may have been written to."""
        self._looked = False

    def reserve(self, request: Request, filling: list[Request]) -> bool:
        """Give a request the shared pages of its prompt's beginning and new ones for the rest, if
        there are as many; and a leader, if one of `filling` is about to complete pages it wants.
        """
        allocator, pages = self.allocator, list[int]()
        if self.sharing:
            if request.keys is None:
                # The last token must be run for its logits.
                request.keys = page_keys(request.prompt[:-1])
            pages = allocator.find(request.keys) if allocator.num_shared else []
            if pages and self._outdated():
                allocator.give_back(pages)
                allocator.forget_all()
                pages = []
        if request.num_pages - len(pages) > allocator.num_free:
            allocator.give_back(pages)
            return False
        request.pages = pages + allocator.take(request.num_pages - len(pages))
        request.prefilled = len(pages) * PAGE
        request.leader = _leader(request, filling)
        self.stats.prefix_hits += request.prefilled
        return True

    def follow(self, filling: list[Request]) -> list[Request]:
        """Give requests whose leader has prefilled its prompt, or has ended, the pages that are
        shared by now; returns them, to be placed again."""
        found = [r for r in filling if r.leader is not None and r.leader not in filling]
        for request in found:
            self.stats.prefix_hits -= request.prefilled
            self.allocator.give_back(request.pages)
            reserved = self.reserve(request, [])
            assert reserved, "a request needs no more pages than it had"
        return found

    def share(self, request: Request, text: list[int]) -> None:
        """Let others find the pages of a request that `text` fills in both caches."""
        if self.sharing and request.error is None and len(text) >= PAGE:
            if self._outdated():
                self.allocator.forget_all()
            self.allocator.share(request.pages, page_keys(text))

    def _outdated(self) -> bool:
        """Whether weights were written to since pages were shared. Looks once while requests run:
        they may only change while none does."""
        looked, self._looked = self._looked, True
        return not looked and not self.weights.same()


def _leader(request: Request, filling: list[Request]) -> Request | None:
    """Who of `filling` has the most of this prompt's beginning still to run, and spends at least
    half of what is left of its own prompt on that."""
    best, most = None, request.prefilled // PAGE
    for other in filling:
        if other.leader is not None or not request.keys or not other.keys:
            continue
        pairs = zip(request.keys, other.keys, strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        wanted = (alike - request.prefilled // PAGE) * PAGE
        if alike > most and 2 * wanted >= len(other.prompt) - other.prefilled:
            best, most = other, alike
    return best

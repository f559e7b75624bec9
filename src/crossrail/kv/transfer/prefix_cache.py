"""Which page holds which content, and in which order unheld ones are given up: least recently held first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice


class PrefixCache:
    """Names of pages. A page that bears one is held by leases, or evictable; its owner, the pool, says which.

    Invariant: no two pages bear the same name; every evictable page bears one.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._unheld: dict[int, None] = {}  # in the order of eviction

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def evictable(self) -> int:
        return len(self._unheld)

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of names."""
        found = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def count_evictable(self, pages: Iterable[int]) -> int:
        return sum(page in self._unheld for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._unheld.pop(page, None)

    def let_go(self, pages: Iterable[int]) -> list[int]:
        """Nobody holds these now. Those that bear names become evictable, in this order; they are returned."""
        cached = [page for page in pages if page in self._name_of]
        self._unheld.update(dict.fromkeys(cached))
        return cached

    def add(self, pages: Iterable[int], names: Iterable[bytes]) -> None:
        """Names held pages. A page keeps the name it has, a name the page that bears it."""
        for page, name in zip(pages, names, strict=True):
            if name not in self._page_of and page not in self._name_of:
                self._page_of[name] = page
                self._name_of[page] = name

    def evict(self, count: int) -> list[int]:
        """Takes the names of so many evictable pages, the longest unheld first, and returns the pages."""
        victims = list(islice(self._unheld, count))
        self._forget(victims)
        return victims

    def clear(self) -> list[int]:
        """Takes all names, also of held pages, and returns the pages that were evictable."""
        unheld = list(self._unheld)
        self._forget(list(self._name_of))
        return unheld

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            del self._page_of[self._name_of.pop(page)]
            self._unheld.pop(page, None)

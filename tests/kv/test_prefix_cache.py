"""The native prefix cache against the plainest one there is, and what it costs."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossrail as xr
from crossrail._core.kv import PrefixCache
from crossrail.kv import page_hashes

PAGES = 12
NAMES = page_hashes(range(20), 1)


class Plain:
    """The same in dictionaries: page of a name, name of a page, unheld pages in the order of eviction."""

    def __init__(self) -> None:
        self.page_of: dict[int, int] = {}
        self.name_of: dict[int, int] = {}
        self.unheld: dict[int, None] = {}

    def match(self, names: list[int]) -> list[int]:
        known = next((at for at, name in enumerate(names) if name not in self.page_of), len(names))
        return [self.page_of[name] for name in names[:known]]

    def count_evictable(self, pages: list[int]) -> int:
        return sum(page in self.unheld for page in pages)

    def hold(self, pages: list[int]) -> None:
        for page in pages:
            self.unheld.pop(page, None)

    def let_go(self, pages: list[int]) -> list[int]:
        cached = [page for page in pages if page in self.name_of]
        self.unheld.update(dict.fromkeys(cached))
        return cached

    def add(self, pages: list[int], names: list[int]) -> None:
        for page, name in zip(pages, names, strict=True):
            if name not in self.page_of and page not in self.name_of:
                self.page_of[name] = page
                self.name_of[page] = name

    def evict(self, count: int) -> list[int]:
        victims = list(islice(self.unheld, count))
        self.forget(victims)
        return victims

    def clear(self) -> list[int]:
        unheld = list(self.unheld)
        self.forget(list(self.name_of))
        return unheld

    def forget(self, pages: list[int]) -> None:
        for page in pages:
            del self.page_of[self.name_of.pop(page)]
            self.unheld.pop(page, None)


pages_of = st.lists(st.integers(0, PAGES - 1), max_size=6)
names_of = st.lists(st.integers(0, len(NAMES) - 1), max_size=8)
STEPS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(0, 19)), max_size=8)),
    st.tuples(st.sampled_from(["hold", "let_go", "count_evictable"]), pages_of),
    st.tuples(st.just("match"), names_of),
    st.tuples(st.just("evict"), st.integers(0, 5)),
    st.tuples(st.just("clear"), st.none()),
)


def row(pages: list[int]) -> np.ndarray:
    return np.array(pages, np.uint32)


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=40))
def test_does_what_the_plainest_cache_does(steps: list) -> None:
    cache, plain = PrefixCache(PAGES), Plain()
    for what, given_ in steps:
        if what == "add":
            pages, names = [page for page, _ in given_], [name for _, name in given_]
            got, wanted = cache.add(row(pages), NAMES[names]), plain.add(pages, names)
        elif what == "match":
            got, wanted = cache.match(NAMES[given_]), plain.match(given_)
        elif what == "evict":
            got, wanted = cache.evict(given_), plain.evict(given_)
        elif what == "clear":
            got, wanted = cache.clear(), plain.clear()
        else:
            got, wanted = getattr(cache, what)(row(given_)), getattr(plain, what)(given_)
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == wanted
        assert (len(cache), cache.evictable) == (len(plain.page_of), len(plain.unheld))
    assert [cache.match(NAMES[at : at + 1]).tolist() for at in range(20)] == [plain.match([at]) for at in range(20)]


@pytest.mark.parametrize("what", ["hold", "let_go", "count_evictable"])
def test_page_out_of_range_is_refused(what: str) -> None:
    with pytest.raises(xr.UsageError, match=f"page {PAGES} is out of range: the cache has {PAGES} pages"):
        getattr(PrefixCache(PAGES), what)(row([0, PAGES]))


def test_names_that_are_none_are_refused() -> None:
    cache = PrefixCache(PAGES)
    with pytest.raises(xr.UsageError, match="names has 2 entries, must have 1, one for each of pages"):
        cache.add(row([1]), NAMES[:2])
    with pytest.raises(xr.UsageError, match="must be 32"):
        cache.match(NAMES[:, :16].copy())
    assert len(cache) == 0

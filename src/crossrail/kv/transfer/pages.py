"""Who may use a page of KV memory, and when somebody else may: the lifetime rules, as states.

A lease is one request's hold on pages. Pages that are its own go through its states:

    free -> reserved       nobody else knows of them: they can be released
         -> filling        somebody writes them, a peer or the model: they cannot be released
         -> in use         they are complete; whoever holds the lease reads, and writes behind what is complete
         -> draining       filling, or being sent from, was given up: something may still touch them
         -> quarantined    the same, and whoever could say when that ends has not answered
    reserved, in use -> cached, if somebody may ask for the same content again, else free

From draining and quarantined there is one way out, confirm(): whoever calls it knows that nothing touches the pages any
more. Pages that a lease shares with others (a known prefix) are complete, only read, and return when nobody holds them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from crossrail._core.kv import PrefixCache
from crossrail._options import check_counts
from crossrail.errors import UsageError
from crossrail.kv.errors import DuplicateRequest, NoPages, PagesInUse
from crossrail.kv.transfer.prefix import NO_NAMES, PageNames


class PageState(IntEnum):
    """The state of a page in its pool, and of a lease; _NEXT says which state may follow which."""

    FREE = 0
    CACHED = 1
    RESERVED = 2
    FILLING = 3
    IN_USE = 4
    DRAINING = 5
    QUARANTINED = 6

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


_WAYS_OUT = {
    PageState.FILLING: ". Next: at the prefiller await job.finish(), at the decoder reception.arrived() or withdraw()",
    PageState.DRAINING: ". Next: withdraw() again, or receiver.fence(writer)",
    PageState.QUARANTINED: ". Next: withdraw() again, or receiver.fence(writer)",
}


_NEXT: dict[PageState, frozenset[PageState]] = {
    PageState.RESERVED: frozenset({PageState.FILLING, PageState.FREE}),
    PageState.FILLING: frozenset({PageState.IN_USE, PageState.DRAINING}),
    PageState.IN_USE: frozenset({PageState.DRAINING, PageState.FREE}),
    PageState.DRAINING: frozenset({PageState.RESERVED, PageState.QUARANTINED}),
    PageState.QUARANTINED: frozenset({PageState.RESERVED}),
    PageState.FREE: frozenset(),
}


class PoolReport(NamedTuple):
    """How many pages are in which state, and who holds them: (owner, state of the lease, own pages, shared pages)."""

    pages: dict[PageState, int]
    leases: list[tuple[str, PageState, int, int]]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {state}" for state, count in self.pages.items() if count)
        return "\n".join(
            [f"{sum(self.pages.values())} pages: {counts}"]
            + [f"  {owner!r} holds {own} + {shared} shared, {state}" for owner, state, own, shared in self.leases]
        )


class Pages(Protocol):
    """What a lease tells whoever manages its pages."""

    page_tokens: int

    def _move(self, lease: PageLease, state: PageState) -> None: ...

    def _publish(self, pages: npt.NDArray[np.uint32], names: PageNames) -> None: ...

    def _return(self, lease: PageLease) -> None: ...


# Per page of a PagePool: its state, its references, its place in the stack, and the prefix cache's share
# (kPrefixCachePageBytes).
POOL_PAGE_BYTES = 1 + 4 + 4 + 73


class PagePool:
    """The pages of one instance: page p is page p at every layer and rank.

    Threads: one at a time, the event loop's. No Python runs per page.
    Invariant: every page is in exactly one state; free and cached pages are in no lease.
    Invariant: a page has one reference for each lease that holds it; at 0 it is cached if it has a name, and free
    otherwise.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        check_counts(1, pages=pages, page_tokens=page_tokens)
        self.page_tokens = int(page_tokens)  # numpy's whole numbers are none in a message
        self._state = np.full(pages, PageState.FREE, np.uint8)
        self._references = np.zeros(pages, np.int32)
        self._free = np.arange(pages - 1, -1, -1, dtype=np.uint32)  # a stack, its top at _free_count
        self._free_count = pages
        self._cache = PrefixCache(pages)
        self._leases: dict[str, PageLease] = {}

    def __repr__(self) -> str:
        return f"<PagePool of {self.pages} pages, {self.available} available>"

    @property
    def pages(self) -> int:
        """How many there are."""
        return len(self._state)

    @property
    def available(self) -> int:
        """Pages that a reservation could get now: free ones, and cached ones that no lease holds."""
        return self._free_count + self._cache.evictable

    def match(self, names: PageNames) -> int:
        """How many of these pages, from the first on, are in the prefix cache. names: from page_hashes."""
        return len(_pages(self._cache.match(_given(names))))

    def reserve(self, count: int, owner: str, *, names: PageNames = NO_NAMES) -> PageLease:
        """Takes count pages for a request. The first ones are shared with the prefix cache, as far as it has them.

        names: of the request's first pages, from page_hashes; leave out those that must not be shared.
        Raises NoPages, and has then taken none; DuplicateRequest while the owner has a lease.
        """
        check_counts(0, count=count)
        if owner in self._leases:
            raise DuplicateRequest(f"request {owner!r} has a lease already, {self._leases[owner].state}")
        shared = _pages(self._cache.match(_given(names)[:count]))
        fresh = count - len(shared)
        available = self.available - self._cache.count_evictable(shared)
        if fresh > available:
            raise NoPages(
                owner,
                f"{fresh} pages are needed beside {len(shared)} shared ones, {available} of {self.pages} are free",
                fresh,
                available,
            )
        self._cache.hold(shared)
        self._state[shared[self._state[shared] == PageState.CACHED]] = PageState.IN_USE
        if fresh > self._free_count:
            self._free_pages(_pages(self._cache.evict(fresh - self._free_count)))
        self._free_count -= fresh
        own = self._free[self._free_count : self._free_count + fresh][::-1].copy()
        pages = np.concatenate([shared, own])
        self._references[pages] += 1
        self._state[own] = PageState.RESERVED
        pages.flags.writeable = False
        lease = self._leases[owner] = PageLease(self, owner, pages, len(shared))
        return lease

    def report(self) -> PoolReport:
        """Which lease holds which pages. After the last request, every page must be free or cached."""
        counts = np.bincount(self._state, minlength=len(PageState))
        return PoolReport(
            {state: int(counts[state]) for state in PageState},
            [(lease.owner, lease.state, len(lease.own), lease.shared) for lease in self._leases.values()],
        )

    def drop_cache(self) -> int:
        """Forgets all names, for example after a change of weights; cached pages become free. Returns how many."""
        dropped = _pages(self._cache.clear())
        self._free_pages(dropped)
        return len(dropped)

    # ---- for leases

    def _move(self, lease: PageLease, state: PageState) -> None:
        self._state[lease.own] = state

    def _publish(self, pages: npt.NDArray[np.uint32], names: PageNames) -> None:
        self._cache.add(pages, names)

    def _return(self, lease: PageLease) -> None:
        del self._leases[lease.owner]
        self._references[lease.pages] -= 1
        held = self._references[lease.pages] > 0
        self._state[lease.pages[held]] = PageState.IN_USE
        # The last first: pages at the end of a prompt are the first to be evicted, since those before serve more.
        unheld = lease.pages[~held][::-1]
        self._state[_pages(self._cache.let_go(np.ascontiguousarray(unheld)))] = PageState.CACHED
        self._free_pages(unheld[self._state[unheld] != PageState.CACHED])

    def _free_pages(self, pages: npt.NDArray[np.uint32]) -> None:
        self._state[pages] = PageState.FREE
        self._free[self._free_count : self._free_count + len(pages)] = pages
        self._free_count += len(pages)


def _given(names: PageNames) -> PageNames:
    """None of them may be any empty sequence."""
    return NO_NAMES if len(names) == 0 else names


def _pages(found: object) -> npt.NDArray[np.uint32]:
    """Converts the native cache's result."""
    return cast("npt.NDArray[np.uint32]", found)


class PageLease:
    """The pages of one request, in the order of its tokens: first shared ones of a known prefix, then its own.

    pages: uint32, read-only. Made by PagePool.reserve or foreign_lease; the module's docstring explains the states.
    Threads: as for the pool.
    """

    def __init__(self, pool: Pages, owner: str, pages: npt.NDArray[np.uint32], shared: int) -> None:
        self.owner = owner
        self.pages = pages
        self.shared = shared
        self.state = PageState.RESERVED
        self._pool = pool
        self._is_published = False

    @property
    def own(self) -> npt.NDArray[np.uint32]:
        """The pages that no other request shares."""
        return self.pages[self.shared :]

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens whose KV is already there."""
        return self.shared * self._pool.page_tokens

    def check_page_tokens(self, page_tokens: int) -> None:
        """UsageError unless its pages have as many tokens as those of the layout that it is used with."""
        if self._pool.page_tokens != page_tokens:
            raise UsageError(
                f"the lease of request {self.owner!r} is of pages of {self._pool.page_tokens} tokens, those of the "
                f"layout have {page_tokens}"
            )

    def fill(self) -> None:
        """Somebody else writes from now on: call this before the writer learns about the pages."""
        if self._is_published:
            raise PagesInUse(f"pages of request {self.owner!r} are published: others share what would be overwritten")
        self._move(PageState.FILLING)

    def use(self) -> None:
        """Everything has arrived, and nobody else writes any more."""
        self._move(PageState.IN_USE)

    def drain(self) -> None:
        """Given up, but writes may still be in flight."""
        self._move(PageState.DRAINING)

    def quarantine(self) -> None:
        """Draining has taken too long: the pages cannot be used until confirm()."""
        self._move(PageState.QUARANTINED)

    def confirm(self) -> None:
        """The caller knows that nothing touches the pages any more: they are reserved again."""
        if self.state not in (PageState.DRAINING, PageState.QUARANTINED):
            raise self._refusal("confirmed")
        self._move(PageState.RESERVED)

    def publish(self, names: PageNames) -> None:
        """Lets later requests share the pages with these names, from the request's first page on.

        Only while in use. The holder must not write them any more. If another page has a name already, it keeps it.
        """
        if self.state is not PageState.IN_USE:
            raise self._refusal("published")
        self._publish(names)

    def publish_computed(self, names: PageNames) -> None:
        """Like publish(), also while filling: called by the writer once it has written what the names cover.

        They may still be sent from; the lease cannot be released before that has ended.
        """
        if self.state not in (PageState.FILLING, PageState.IN_USE):
            raise self._refusal("published as computed")
        self._publish(names)

    def _publish(self, names: PageNames) -> None:
        if len(names) > len(self.pages):
            raise UsageError(f"{len(names)} names for the {len(self.pages)} pages of request {self.owner!r}")
        own = slice(self.shared, len(names))
        self._pool._publish(self.pages[own], _given(names)[own])
        self._is_published = True

    def release(self) -> None:
        """Gives all pages back. Raises PagesInUse while anybody else may touch them."""
        if PageState.FREE not in _NEXT[self.state]:
            raise self._refusal("released")
        self.state = PageState.FREE
        self._pool._return(self)

    def _move(self, state: PageState) -> None:
        if state not in _NEXT[self.state]:
            raise self._refusal(str(state))
        self.state = state
        self._pool._move(self, state)

    def _refusal(self, wish: str) -> PagesInUse:
        return PagesInUse(
            f"the {len(self.own)} pages of request {self.owner!r} are {self.state}: they cannot be {wish} now"
            + _WAYS_OUT.get(self.state, "")
        )

    def __repr__(self) -> str:
        return f"<PageLease of {self.owner!r}: {len(self.own)} + {self.shared} shared pages, {self.state}>"

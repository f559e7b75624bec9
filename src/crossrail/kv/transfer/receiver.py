"""The decoder's side: an instance's memory, and requests that get their part of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from crossrail._closing import Closing
from crossrail._options import check_counts, check_kind, check_seconds
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.kv.errors import NoPages
from crossrail.kv.transfer.access import Access, Closers, Tails
from crossrail.kv.transfer.layout import KvLayout
from crossrail.kv.transfer.memory import RankMemory, to_ranks
from crossrail.kv.transfer.pages import PageLease, PagePool
from crossrail.kv.transfer.prefix import NO_NAMES, PageNames
from crossrail.kv.transfer.reception import Reception
from crossrail.kv.transfer.target import check_request

log = logging.getLogger("crossrail.kv")

_IDLE_KEPT = 64  # writers that nothing is under way of: one that comes back finds its registrations
_SHUT_S = 5.0


class KvReceiver(Closing):
    """Receives the KV of requests: for the ranks of an instance, with its page pool and room for tails.

    ranks: memory of rank 0, 1, ..., on one engine or several. Or a mapping from rank to memory, for the ranks that this
        process has; each process then has a receiver for the request, which waits for the KV of its own ranks.
    pool: None if the caller decides which pages a request gets: use adopt() instead of reserve().
    tail_bytes: length of a request's tail; 0: no tails. tail_slots: how many requests can have one at the same time.
        Tails arrive at rank 0.
    Threads: the event loop's.
    """

    def __init__(
        self,
        layout: KvLayout,
        ranks: Sequence[RankMemory] | Mapping[int, RankMemory],
        pool: PagePool | None,
        *,
        tail_bytes: int = 0,
        tail_slots: int = 64,
    ) -> None:
        check_kind(layout, "layout", KvLayout, "a KvLayout")
        ranks = to_ranks(layout, ranks)
        if pool is not None:
            check_kind(pool, "pool", PagePool, "a PagePool or None")
        if pool is not None and (pool.pages != layout.pages or pool.page_tokens != layout.page_tokens):
            raise UsageError(
                f"the pool has {pool.pages} pages of {pool.page_tokens} tokens, the layout {layout.pages} of "
                f"{layout.page_tokens}"
            )
        check_counts(0, tail_bytes=tail_bytes)
        check_counts(1, tail_slots=tail_slots)
        tail_bytes = int(tail_bytes)  # numpy's whole numbers are none in a message
        if tail_bytes and 0 not in ranks:
            raise UsageError("tails arrive at rank 0, which another process has")
        self.layout = layout
        self.ranks = ranks
        self.pool = pool
        self.tail_bytes = tail_bytes
        self._is_closed = False
        self._closers = Closers()
        self._accesses: OrderedDict[str, Access] = OrderedDict()  # the one dispatched to last at the end
        self._retired: dict[Access, asyncio.Task[None]] = {}  # what is being shut for good
        self._tails = Tails(self.ranks[0].engine, tail_bytes, tail_slots) if tail_bytes else None

    def __repr__(self) -> str:
        return f"<KvReceiver of ranks {sorted(self.ranks)}>"

    def reserve(self, request: str, tokens: int, *, room_tokens: int = 0, names: PageNames = NO_NAMES) -> Reception:
        """Takes pages for `tokens` tokens that will arrive, and for room_tokens that the decoder will add.

        names: names of the request's full pages within `tokens`, from page_hashes; pages that the pool already has are
            not sent.
        Raises NoPages or DuplicateRequest, and has then taken nothing.
        """
        self._check_open()
        check_request(request)
        check_counts(0, tokens=tokens, room_tokens=room_tokens)
        if self.pool is None:
            raise UsageError("this receiver has no pool of pages: adopt() takes a lease of yours")
        full_pages = tokens // self.layout.page_tokens
        if self._tails is not None and not self._tails.free_slots:
            raise NoPages(request, "all room for tails is in use", 1, 0)
        lease = self.pool.reserve(self.layout.pages_of(tokens + room_tokens), request, names=names[:full_pages])
        return Reception(request, int(tokens), self.layout, self.ranks, lease, self._tails, self._access_of)

    def adopt(self, request: str, tokens: int, lease: PageLease) -> Reception:
        """Like reserve(), with a reserved lease of the caller's, whose first prefix_tokens tokens are already here."""
        self._check_open()
        check_request(request)
        check_counts(0, tokens=tokens)
        check_kind(lease, "lease", PageLease, "a PageLease")
        lease.check_page_tokens(self.layout.page_tokens)
        if not 0 <= lease.prefix_tokens <= tokens or len(lease.pages) < self.layout.pages_of(tokens):
            raise UsageError(
                f"request {request!r}: the lease has {len(lease.pages)} pages, {lease.prefix_tokens} tokens are there; "
                f"{tokens} tokens take {self.layout.pages_of(tokens)}"
            )
        return Reception(request, int(tokens), self.layout, self.ranks, lease, None, self._access_of)

    async def fence(self, writer: str, timeout_s: float) -> None:
        """Shuts a prefiller out: once this returns, nothing from it can land here, however late it arrives.

        For one that is dead, frozen or not trusted any more. Its requests that have not arrived never will: withdraw()
        of each returns at once. Does nothing if nothing was dispatched to it. A prefiller that comes back can be given
        requests again, by new registrations.
        Raises WaitTimeout while the prefiller is in the middle of a copy, for example because it froze there.
        Everything else from it is refused already; call fence() again.
        """
        check_seconds(timeout_s=timeout_s)
        access = self._accesses.get(writer)
        if access is not None:
            await access.shut(timeout_s)
            if self._accesses.get(writer) is access:
                del self._accesses[writer]

    def close(self) -> None:
        """Closes all registrations of writers, and the memory of tails, after all requests have ended. Idempotent.

        Afterwards reserve(), adopt() and dispatch() raise UsageError; what is there can still be withdrawn, and
        released. Blocks: in a running loop that others need, shut() is the better one. All that can be closed are, also
        when WaitTimeout is raised: a writer is frozen in the middle of a copy.
        """
        accesses = self._all_accesses()
        for access in accesses:  # all are refused before one is waited for
            access.give_up()
            with contextlib.suppress(WaitTimeout):
                access.close(0.0)
        stuck: WaitTimeout | None = None
        for access in accesses:
            try:
                access.close(0.0 if stuck else _SHUT_S)
                access.note_closed()
            except WaitTimeout as error:
                stuck = stuck or error
        self._end(stuck)

    async def shut(self) -> None:
        """Like close(), without blocking the loop."""
        accesses = self._all_accesses()
        ends = await asyncio.gather(*(access.shut(_SHUT_S) for access in accesses), return_exceptions=True)
        for access in accesses:
            access.give_up()
        self._end(next((end for end in ends if end is not None), None))

    def _all_accesses(self) -> list[Access]:
        """All accesses, to be closed for good: from here on nothing else closes the retired ones, and no new ones are
        made.
        """
        self._is_closed = True
        for task in self._retired.values():
            task.cancel()
        return [*self._accesses.values(), *self._retired]

    def _end(self, stuck: BaseException | None) -> None:
        """Releases what all writers share. stuck: why not all of them are shut out."""
        self._closers.end()
        if self._tails is not None:
            self._tails.region.close(0.0 if stuck else _SHUT_S)
        if stuck is not None:
            raise stuck
        self._accesses.clear()
        self._retired.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self!r} is closed: nothing would arrive")

    def _access_of(self, writer: str | None) -> Access:
        """None: a separate one."""
        self._check_open()
        if writer is None:
            return Access(self.ranks, self._tails, self._closers)
        access = self._accesses.get(writer)
        if access is not None and access.is_closing and not access.is_shut:
            raise UsageError(
                f"writer {writer!r} did not answer and is being fenced off: nothing can be dispatched to it before its "
                "last copy to here has ended, or it has"
            )
        if access is None or access.is_shut:
            self._accesses.pop(writer, None)  # so that the new one is the latest, and not taken for an idle one
            access = self._accesses[writer] = Access(self.ranks, self._tails, self._closers)
            self._retire_idle()
        self._accesses.move_to_end(writer)
        return access

    def _retire_idle(self) -> None:
        """A prefiller that was restarted is another writer, and nobody says that the one before will not come back."""
        idle = [writer for writer, access in self._accesses.items() if not access.attempts]
        for writer in idle[:-_IDLE_KEPT]:
            access = self._accesses.pop(writer)
            task = asyncio.create_task(self._retire(access), name=f"kv-retire-{writer}")
            self._retired[access] = task  # the loop itself does not keep tasks

    async def _retire(self, access: Access) -> None:
        is_told = False
        while not access.is_shut:
            try:
                await access.shut(_SHUT_S)
            except CrossrailError as error:
                if not is_told:
                    log.warning("registrations that nobody uses are not closed yet: %s", error)
                if not isinstance(error, WaitTimeout):
                    return
                is_told = True
        del self._retired[access]

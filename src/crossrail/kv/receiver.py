"""The decoder's side: an instance's memory, and requests that get their part of it."""

from __future__ import annotations

from collections.abc import Sequence

from crossrail.errors import UsageError
from crossrail.kv.access import Access, Tails
from crossrail.kv.errors import NoPages
from crossrail.kv.layout import KvLayout
from crossrail.kv.memory import RankMemory
from crossrail.kv.pages import PagePool
from crossrail.kv.reception import Reception
from crossrail.kv.target import check_request


class KvReceiver:
    """Where requests' KV arrives: all ranks of an instance, its page pool, and room for tails.

    ranks: memory of rank 0, 1, ...; their engines may be one or several. tail_bytes: of a request's tail, 0: none;
    tail_slots: requests that can have one at a time. Tails arrive at rank 0.
    Threads: that of the event loop.
    """

    def __init__(
        self,
        layout: KvLayout,
        ranks: Sequence[RankMemory],
        pool: PagePool,
        *,
        tail_bytes: int = 0,
        tail_slots: int = 64,
    ) -> None:
        if len(ranks) != layout.tp:
            raise UsageError(f"{len(ranks)} ranks are given, the layout has {layout.tp}")
        for rank, memory in enumerate(ranks):
            if memory.layout != layout:
                raise UsageError(f"rank {rank} has another layout: {memory.layout.describe()}")
        if pool.pages != layout.pages or pool.page_tokens != layout.page_tokens:
            raise UsageError(
                f"the pool has {pool.pages} pages of {pool.page_tokens} tokens, the layout {layout.pages} of "
                f"{layout.page_tokens}"
            )
        if tail_bytes < 0 or tail_slots < 1:
            raise UsageError(f"tail_bytes={tail_bytes} must be 0 or more, tail_slots={tail_slots} 1 or more")
        self.layout = layout
        self.ranks = tuple(ranks)
        self.pool = pool
        self.tail_bytes = tail_bytes
        self._accesses: dict[str, Access] = {}
        self._tails = Tails(ranks[0].engine, tail_bytes, tail_slots) if tail_bytes else None

    def reserve(self, request: str, tokens: int, *, room_tokens: int = 0, names: Sequence[bytes] = ()) -> Reception:
        """Takes pages for `tokens` tokens that shall arrive and room_tokens that the decoder itself will add.

        names: of the request's full pages within `tokens`, from page_hashes; what the pool has of them is not sent.
        Raises NoPages, DuplicateRequest, having taken nothing.
        """
        check_request(request)
        if tokens < 0 or room_tokens < 0:
            raise UsageError(f"tokens={tokens} and room_tokens={room_tokens} must be 0 or more")
        full_pages = tokens // self.layout.page_tokens
        if self._tails is not None and not self._tails.free_slots:
            raise NoPages(f"request {request!r}: all room for tails is in use", 1, 0)
        lease = self.pool.reserve(self.layout.pages_of(tokens + room_tokens), request, names=names[:full_pages])
        return Reception(request, tokens, self.layout, lease, self._tails, self._access_of)

    async def fence(self, writer: str, timeout_s: float) -> None:
        """Shuts a prefiller out: returns once nothing of it can land here any more, however late it comes.

        For one that is dead, frozen or not believed any more. Its requests that have not arrived will not: withdraw()
        of each then returns at once. Does nothing when it was never dispatched to. One that comes back can be given
        requests again, by new registrations.
        Raises WaitTimeout while it is in the middle of a copy, as when it froze there: all else is refused; call again.
        """
        access = self._accesses.get(writer)
        if access is not None:
            await access.shut(timeout_s)
            if self._accesses.get(writer) is access:
                del self._accesses[writer]

    def close(self) -> None:
        """Closes all registrations of writers, and the memory of tails. After all requests have ended. Idempotent."""
        for access in self._accesses.values():
            access.close()
        self._accesses.clear()
        if self._tails is not None:
            self._tails.region.close()

    def _access_of(self, writer: str | None) -> Access:
        """None: one of its own."""
        if writer is None:
            return Access(self.ranks, self._tails)
        access = self._accesses.get(writer)
        if access is None or access.is_shut:
            access = self._accesses[writer] = Access(self.ranks, self._tails)
        elif access.is_closing:
            raise UsageError(f"writer {writer!r} is being fenced off: nothing can be dispatched to it")
        return access

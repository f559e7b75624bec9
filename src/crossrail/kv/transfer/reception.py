"""One request at the decoder: its pages and its immediate, neither of which is reused while a write may still arrive.

No message tells a decoder that a transfer is done: it knows how many immediates the transfer makes, and counts them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from crossrail import Engine, ImmCounter
from crossrail._options import check_kind, check_seconds, check_texts, check_timeout
from crossrail.control.deadlines import first_of, loop_time_s
from crossrail.errors import CrossrailError, PeerLost, UsageError, WaitTimeout
from crossrail.kv.errors import PagesInUse, SurplusCount, TransferStopped
from crossrail.kv.transfer.access import Access, Tails
from crossrail.kv.transfer.layout import KvLayout
from crossrail.kv.transfer.pages import PageLease, PageState
from crossrail.kv.transfer.plan import expected_count
from crossrail.kv.transfer.target import KvTarget, RankTarget

log = logging.getLogger("crossrail.kv")

_LAST_COUNTS_S = 0.05  # of bytes that were in place when their writer was shut out
_SHUT_S = 5.0  # for registrations to close: only a copy by a frozen peer takes longer


@dataclass
class _Awaited:
    """What one of our engines waits for, on an immediate of its own."""

    counter: ImmCounter
    expected: int = 0
    is_there: bool = False


class Reception:
    """The pages of one request at the decoder, while they arrive and while they are used. Made by KvReceiver.reserve.

    Lifecycle: 1. reserved. 2. dispatch(): a prefiller may write. 3. arrived(): everything is there, in use; or
    withdraw(): reserved again once nothing can land any more, for another dispatch() or release(). 4. release().
    Invariant: from dispatch() until the full count or a confirmed withdrawal nobody else gets pages, tail or immediate.
    Threads: the event loop's. One task at a time awaits arrived(); cancelling it does not stop the transfer.
    """

    def __init__(
        self,
        request: str,
        tokens: int,
        layout: KvLayout,
        ranks: Collection[int],
        lease: PageLease,
        tails: Tails | None,
        access_of: Callable[[str | None], Access],
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.lease = lease
        self._layout = layout
        self._ranks = tuple(ranks)
        self._tails = tails
        self._slot = tails.free_slots.pop() if tails else 0
        self._access_of = access_of
        # Of the attempt in progress, if any.
        self._access: Access | None = None
        self._owns_access = False
        self._awaited: list[_Awaited] = []
        self._has_surplus = False
        self._is_awaited = False
        self._withdrawal: asyncio.Task[None] | None = None

    @property
    def prefix_tokens(self) -> int:
        """Tokens that are already here, which the prefiller does not send."""
        return self.lease.prefix_tokens

    @property
    def state(self) -> PageState:
        """State of the pages: reserved, being filled, in use, draining, in quarantine, or free again."""
        return self.lease.state

    def dispatch(self, source: KvLayout, writer: str | None = None) -> KvTarget:
        """What a prefiller of this layout has to know.

        Call it once per attempt, and send the result to that prefiller alone. From here on the prefiller may write,
        whether or not the message arrives, until arrived() or withdraw() ends it.
        writer: a name for the prefiller's incarnation. Its requests share registrations of our memory, which are made
            for the first and last until KvReceiver.fence(writer), or until it has had no request for long. None: this
            attempt has its own registrations. They cost time, and so does the prefiller's first use of them, but such
            an attempt can be ended without the prefiller's confirmation.
        Raises LayoutMismatch, or PagesInUse while another attempt is not over; nothing has changed then.
        """
        check_kind(source, "source", KvLayout, "a KvLayout")
        if writer is not None:
            check_texts(writer=writer)
        layout = self._layout
        if self.state is not PageState.RESERVED:
            raise PagesInUse(f"request {self.request!r} cannot be dispatched now: its pages are {self.state}")
        counts = {
            rank: expected_count(
                source,
                layout,
                rank,
                self.tokens,
                prefix_tokens=self.prefix_tokens,
                tail=self._tails is not None and rank == 0,
            )
            for rank in self._ranks
        }
        access = self._access_of(writer)
        by_engine = _awaited_by_engine(access, counts)
        self._awaited = list(by_engine.values())
        try:
            self.lease.fill()
        except PagesInUse:
            self._release_imms()
            raise
        self._access, self._owns_access = access, writer is None
        access.attempts += 1
        self._has_surplus = False
        return KvTarget(
            request=self.request,
            layout=layout,
            tokens=self.tokens,
            prefix_tokens=self.prefix_tokens,
            pages=self.lease.pages[: layout.pages_of(self.tokens)],
            ranks=tuple(
                RankTarget(
                    imm=by_engine[memory.engine].counter.imm,
                    regions=memory.descriptors,
                    tail=access.tail.descriptor if access.tail is not None and rank == 0 else None,
                    tail_offset=self._slot * self._tails.nbytes if self._tails and rank == 0 else 0,
                )
                if (memory := access.ranks.get(rank)) is not None
                else None
                for rank in range(layout.tp)
            ),
            tail_bytes=self._tails.nbytes if self._tails else 0,
        )

    @property
    def needs_nothing(self) -> bool:
        """True if all tokens are in the prefix and there is no tail, so nothing has to be sent."""
        return self.prefix_tokens == self.tokens and self._tails is None

    async def arrived(self, timeout_s: float | None = None) -> None:
        """Returns when all KV and the tail have arrived: the pages are in use, and nobody else writes them.

        Raises WaitTimeout: the transfer continues; call it again, or withdraw(). TransferStopped: it does not, its
        writer was shut out, by fence() or KvReceiver.close(); withdraw() it. SurplusCount: the pages are quarantined.
        If the request needs_nothing, nobody needs to be dispatched to.
        """
        check_timeout(timeout_s)
        if self.state is PageState.IN_USE:
            return
        if self.state is PageState.RESERVED and self.needs_nothing:
            self.lease.fill()
            self.lease.use()
            return
        if self.state is not PageState.FILLING or self._is_awaited:
            raise UsageError(f"request {self.request!r}: nothing to wait for, or another task does; it is {self.state}")
        self._is_awaited = True
        try:
            await self._take(timeout_s)
        finally:
            self._is_awaited = False

    async def withdraw(self, ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        """Takes the pages back: returns when nothing can land in them any more, and they are reserved again.

        ask: tells the prefiller to stop, and returns when the prefiller has confirmed that nothing of the request is in
            flight; raises PeerLost if the prefiller is dead, whose registrations are then closed. The full count, or a
            fence(), ends the attempt just as well.
        If none of this happens within timeout_s, or ask raises another error: registrations of this attempt alone are
        closed, which ends it too. Shared ones are not; then WaitTimeout or that error is raised, and the pages are
        quarantined: call it again, perhaps after fence(writer).
        timeout_s is for the confirmation alone. Closing registrations comes on top: for 5 s at most; if they are not
        closed by then, a peer is frozen in the middle of a copy, and WaitTimeout is raised, as above.
        A second call while the first is in progress shares its result; cancelling the awaiting task does not stop it.
        Does nothing before dispatch(). UsageError once it has arrived: release() is what is left to do then.
        """
        check_seconds(timeout_s=timeout_s)
        if self._withdrawal is None or self._withdrawal.done():
            if self._is_awaited:
                raise UsageError(f"request {self.request!r}: a task awaits arrived(); end that first")
            if self.state is PageState.IN_USE:
                raise UsageError(
                    f"request {self.request!r} has arrived, nobody writes to its pages any more: release() it"
                )
            if self.state is PageState.RESERVED:
                return
            if self.state is PageState.FREE:
                raise UsageError(f"request {self.request!r} was released: its pages may be somebody else's")
            self._withdrawal = asyncio.create_task(self._withdraw(ask, timeout_s), name=f"kv-withdraw-{self.request}")
            # Whoever awaited it may have been cancelled: what it raises then is in the state of the pages.
            self._withdrawal.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._withdrawal)

    def tail(self) -> memoryview:
        """The bytes of the tail, valid until release(). Only while the request is in use."""
        if self._tails is None or self.state is not PageState.IN_USE:
            raise UsageError(f"request {self.request!r} has no tail, or it is not there: {self.state}")
        return self._tails.region.view()[self._slot * self._tails.nbytes :][: self._tails.nbytes]

    def release(self) -> None:
        """Gives back the pages and the room for the tail. Raises PagesInUse while a prefiller may write."""
        self.lease.release()
        if self._tails is not None:
            self._tails.free_slots.append(self._slot)

    async def _take(self, timeout_s: float | None) -> None:
        """Waits for everything, and then the pages are ours alone."""
        await self._count_until_shut(timeout_s)
        if surplus := sum(awaited.counter.poll() for awaited in self._awaited):
            self._has_surplus = True
            self.lease.drain()
            self.lease.quarantine()
            raise SurplusCount(
                f"request {self.request!r}: {surplus} more counts than its plan makes: two senders use its immediate, "
                "or one that has another plan. Its pages are quarantined"
            )
        await self._end_attempt()
        self.lease.use()

    async def _count_until_shut(self, timeout_s: float | None) -> None:
        """Like _count(), unless the writer is shut out meanwhile: then whatever has not arrived will not."""
        assert self._access is not None  # it was dispatched
        counted = asyncio.ensure_future(self._count(timeout_s))
        shut = asyncio.ensure_future(self._access.wait_shut())
        if counted in await first_of([counted, shut]):
            return counted.result()
        try:
            await self._count(_LAST_COUNTS_S)
        except WaitTimeout:
            raise TransferStopped(
                f"request {self.request!r}: its writer was shut out, by fence() or close(), before all had arrived"
            ) from None

    async def _count(self, timeout_s: float | None) -> None:
        """Takes what is expected, engine by engine; what was taken when it is interrupted stays taken."""
        deadline_at_s = None if timeout_s is None else loop_time_s() + timeout_s
        for awaited in self._awaited:
            if awaited.expected and not awaited.is_there:
                left_s = None if deadline_at_s is None else max(deadline_at_s - loop_time_s(), 0)
                await awaited.counter.wait_async(awaited.expected, left_s)
            awaited.is_there = True

    async def _withdraw(self, ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        if self.state is PageState.FILLING:
            self.lease.drain()
        try:
            try:
                await self._await_quiet(ask, timeout_s)
            except Exception as error:  # ask is the caller's code, and may raise anything
                if not self._owns_access and not isinstance(error, PeerLost):
                    raise
                level = logging.INFO if isinstance(error, CrossrailError) else logging.WARNING
                log.log(level, "request %r: %s; the way to our memory is shut", self.request, repr(error))
                assert self._access is not None  # it was dispatched
                await self._access.shut(_SHUT_S)  # a separate limit: timeout_s may be used up
            await self._end_attempt()
        except BaseException:
            if self.state is PageState.DRAINING:
                self.lease.quarantine()
            raise
        self.lease.confirm()

    async def _await_quiet(self, ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        """Returns once the prefiller has confirmed, everything has arrived, or its access is shut. Raises what ask
        raised.
        """
        assert self._access is not None  # it was dispatched
        asked = asyncio.ensure_future(ask())
        # After a surplus the count is meaningless: somebody has written more than was expected, and may continue.
        counted = asyncio.ensure_future(asyncio.Event().wait() if self._has_surplus else self._count(None))
        shut = asyncio.ensure_future(self._access.wait_shut())
        done = await first_of([asked, counted, shut], timeout_s)
        if not done:
            raise WaitTimeout(
                f"request {self.request!r}: its prefiller has not confirmed within {timeout_s:g} s that it stopped"
            )
        if not any(end.exception() is None for end in done):
            done[0].result()

    async def _end_attempt(self) -> None:
        """Nothing can land: registrations of this attempt and its immediates go."""
        if self._access is not None:
            if self._owns_access:
                await self._access.shut(_SHUT_S)
            self._access.attempts -= 1
        self._access = None
        self._release_imms()

    def _release_imms(self) -> None:
        for awaited in self._awaited:
            awaited.counter.release()
        self._awaited = []

    def __repr__(self) -> str:
        return f"<Reception of {self.request!r}: {self.tokens} tokens, {self.state}>"


def _awaited_by_engine(access: Access, counts: dict[int, int]) -> dict[Engine, _Awaited]:
    """An immediate for each engine, and the sum of its ranks' counts. All of them, or none."""
    by_engine: dict[Engine, _Awaited] = {}
    try:
        for rank, memory in access.ranks.items():
            if memory.engine not in by_engine:
                by_engine[memory.engine] = _Awaited(memory.engine.alloc_imm())
            by_engine[memory.engine].expected += counts[rank]
    except BaseException:
        for awaited in by_engine.values():
            awaited.counter.release()
        raise
    return by_engine

"""One request at the decoder: pages and an immediate, and nothing reused before it is quiet.

Nobody tells a decoder that a transfer is done: it knows how many immediates it makes, and counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from crossrail import Engine, ImmCounter
from crossrail.errors import PeerLost, UsageError, WaitTimeout
from crossrail.kv.errors import PagesInUse, SurplusCount
from crossrail.kv.layout import KvLayout
from crossrail.kv.memory import RankMemory
from crossrail.kv.pages import PageLease, PageState
from crossrail.kv.plan import expected_count
from crossrail.kv.target import KvTarget, RankTarget


class Tails:
    """Room for the tails of some requests, at rank 0. A slot has the same life as its request's pages."""

    def __init__(self, engine: Engine, nbytes: int, slots: int) -> None:
        self.nbytes = nbytes
        self.region = engine.alloc(nbytes * slots)
        self.free_slots = list(range(slots - 1, -1, -1))


@dataclass
class _Awaited:
    """What one engine of ours waits for, on an immediate of its own."""

    counter: ImmCounter
    expected: int = 0
    is_there: bool = False


class Reception:
    """One request's pages at the decoder, while they arrive and while they are used. Made by KvReceiver.reserve.

    Lifecycle: 1. reserved. 2. dispatch(): a prefiller may write. 3. arrived(): in use, all is there; or withdraw():
    reserved again once nothing can land any more, for another dispatch() or release(). 4. release().
    Invariant: from dispatch() until the full count or a confirmed withdrawal nobody else gets pages, tail, immediate.
    Threads: that of the event loop. One task awaits arrived() at a time; cancelling it leaves the transfer as it is.
    """

    def __init__(
        self, request: str, tokens: int, lease: PageLease, ranks: Sequence[RankMemory], tails: Tails | None
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.lease = lease
        self._ranks = ranks
        self._tails = tails
        self._slot = tails.free_slots.pop() if tails else 0
        self._awaited: list[_Awaited] = []
        self._is_awaited = False
        self._withdrawal: asyncio.Task[None] | None = None

    @property
    def prefix_tokens(self) -> int:
        """Tokens that are here already: the prefiller does not send them."""
        return self.lease.prefix_tokens

    @property
    def state(self) -> PageState:
        return self.lease.state

    def dispatch(self, source: KvLayout) -> KvTarget:
        """What the prefiller of this layout has to know. Call it once an attempt, then send it to that prefiller alone.

        From here on it may write, whether or not the message arrives: what ends this is arrived() or withdraw().
        Raises LayoutMismatch, PagesInUse while another attempt is not over; nothing has changed then.
        """
        layout = self._ranks[0].layout
        if self.state is not PageState.RESERVED:
            raise PagesInUse(f"request {self.request!r} cannot be dispatched now: its pages are {self.state}")
        counts = [
            expected_count(
                source, layout, rank, self.tokens, prefix_tokens=self.prefix_tokens, tail=self._has_tail(rank)
            )
            for rank in range(layout.tp)
        ]
        by_engine: dict[Engine, _Awaited] = {}
        for memory, count in zip(self._ranks, counts, strict=True):
            if memory.engine not in by_engine:
                by_engine[memory.engine] = _Awaited(memory.engine.alloc_imm())
            by_engine[memory.engine].expected += count
        self._awaited = list(by_engine.values())
        self.lease.fill()
        return KvTarget(
            request=self.request,
            layout=layout,
            tokens=self.tokens,
            prefix_tokens=self.prefix_tokens,
            pages=self.lease.pages[: layout.pages_of(self.tokens)],
            ranks=tuple(
                self._rank_target(rank, by_engine[memory.engine].counter.imm) for rank, memory in enumerate(self._ranks)
            ),
            tail_bytes=self._tails.nbytes if self._tails else 0,
        )

    async def arrived(self, timeout_s: float | None = None) -> None:
        """Returns when all KV and the tail are there: the pages are in use, and nobody else writes them.

        Raises WaitTimeout: the transfer goes on, call it again or withdraw(). SurplusCount: the pages are quarantined.
        """
        if self.state is PageState.IN_USE:
            return
        if self.state is not PageState.FILLING or self._is_awaited:
            raise UsageError(f"request {self.request!r}: nothing to wait for, or another task does; it is {self.state}")
        self._is_awaited = True
        try:
            await self._count(timeout_s)
        finally:
            self._is_awaited = False
        if surplus := sum(awaited.counter.poll() for awaited in self._awaited):
            self.lease.drain()
            self.lease.quarantine()
            raise SurplusCount(
                f"request {self.request!r}: {surplus} more counts than its plan makes: two senders use its immediate, "
                "or one that has another plan. Its pages are quarantined"
            )
        self._release_imms()
        self.lease.use()

    async def withdraw(self, ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        """Takes the pages back: returns when nothing can land in them any more, and they are reserved again.

        ask: tells the prefiller to stop, and returns when it has confirmed that nothing of the request is under way;
        raises PeerLost when it is dead, which is as good. The full count, should it come first, is so too.
        Raises WaitTimeout when none of this came in timeout_s, and whatever else ask raised: the pages are quarantined
        then, until withdraw() is called again or confirm(). A second call while the first is under way shares its end;
        cancelling the task that awaits does not stop it. Does nothing before dispatch().
        """
        if self._withdrawal is None or self._withdrawal.done():
            if self._is_awaited or self.state is PageState.IN_USE:
                raise UsageError(f"request {self.request!r}: it arrived, or a task awaits arrived(); end that first")
            if self.state is PageState.RESERVED:
                return
            self._withdrawal = asyncio.create_task(self._withdraw(ask, timeout_s), name=f"kv-withdraw-{self.request}")
        await asyncio.shield(self._withdrawal)

    def confirm(self) -> None:
        """Whoever calls this knows that nothing can land in the quarantined pages any more: they are reserved again.

        As when the prefiller's process is known to be gone, or it cannot reach this memory any more.
        """
        self.lease.confirm()
        self._release_imms()

    def tail(self) -> memoryview:
        """The tail's bytes, ours until release(). Only while the request is in use."""
        if self._tails is None or self.state is not PageState.IN_USE:
            raise UsageError(f"request {self.request!r} has no tail, or it is not there: {self.state}")
        return self._tails.region.view()[self._slot * self._tails.nbytes :][: self._tails.nbytes]

    def release(self) -> None:
        """Gives pages and room for the tail back. Raises PagesInUse while a prefiller may write."""
        self.lease.release()
        if self._tails is not None:
            self._tails.free_slots.append(self._slot)

    def _has_tail(self, rank: int) -> bool:
        return self._tails is not None and rank == 0

    def _rank_target(self, rank: int, imm: int) -> RankTarget:
        regions = self._ranks[rank].descriptors
        if self._tails is None or rank != 0:
            return RankTarget(imm, regions)
        return RankTarget(imm, regions, self._tails.region.descriptor, self._slot * self._tails.nbytes)

    async def _count(self, timeout_s: float | None) -> None:
        """Takes what is expected, engine by engine; what was taken when it is interrupted stays taken."""
        clock = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else clock() + timeout_s
        for awaited in self._awaited:
            if awaited.expected and not awaited.is_there:
                left_s = None if deadline is None else max(deadline - clock(), 0)
                await awaited.counter.wait_async(awaited.expected, left_s)
            awaited.is_there = True

    async def _withdraw(self, ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        if self.state is PageState.FILLING:
            self.lease.drain()
        counted = asyncio.ensure_future(self._count(None))
        asked = asyncio.ensure_future(ask())
        try:
            await asyncio.wait({counted, asked}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            error = None if _succeeded(counted) else self._answer(asked, timeout_s)
        finally:
            counted.cancel()
            asked.cancel()
            await asyncio.wait({counted, asked})
        if error is None:
            self.confirm()
            return
        if self.state is PageState.DRAINING:
            self.lease.quarantine()
        raise error

    def _answer(self, asked: asyncio.Future[object], timeout_s: float) -> BaseException | None:
        """None when the prefiller confirmed, or is dead."""
        if not asked.done():
            return WaitTimeout(
                f"request {self.request!r}: its prefiller has not confirmed within {timeout_s:g} s that it stopped; "
                f"its {len(self.lease.own)} pages are quarantined"
            )
        error = asked.exception()
        return None if isinstance(error, PeerLost) else error

    def _release_imms(self) -> None:
        for awaited in self._awaited:
            awaited.counter.release()
        self._awaited = []

    def __repr__(self) -> str:
        return f"<Reception of {self.request!r}: {self.tokens} tokens, {self.state}>"


def _succeeded(task: asyncio.Future[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None

"""What a writer may touch: registrations of a decoder's memory that are its own, so that it can be shut out alone.

A prefiller that is dead, frozen or cut off may have writes under way that nobody can call back: in its own memory, in a
kernel's buffers, on a wire. Closing the registration that they name makes them land nowhere, however late they come,
while others go on writing to the same pages by registrations of theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from crossrail import Engine
from crossrail.errors import WaitTimeout
from crossrail.kv.memory import RankMemory


class Tails:
    """Room for the tails of some requests, at rank 0. A slot has the same life as its request's pages."""

    def __init__(self, engine: Engine, nbytes: int, slots: int) -> None:
        self.engine = engine
        self.nbytes = nbytes
        self.region = engine.alloc(nbytes * slots)
        self.free_slots = list(range(slots - 1, -1, -1))


class Access:
    """One writer's registrations of all ranks that this process has, and of tails.

    Lifecycle: 1. open. 2. closing: its descriptors are refused. 3. shut: nothing of it can land any more.
    attempts: of requests, that are under way by it.
    Threads: that of the event loop.
    """

    def __init__(self, ranks: Mapping[int, RankMemory], tails: Tails | None) -> None:
        self.ranks = {rank: memory.registered_again() for rank, memory in ranks.items()}
        self.tail = tails.engine.register(tails.region.view()) if tails else None
        self._regions = [region for memory in self.ranks.values() for region in memory.regions]
        if self.tail is not None:
            self._regions.append(self.tail)
        self.attempts = 0
        self.is_closing = False
        self._shut = asyncio.Event()

    @property
    def is_shut(self) -> bool:
        return self._shut.is_set()

    async def wait_shut(self) -> None:
        await self._shut.wait()

    async def shut(self, timeout_s: float) -> None:
        """Returns once nothing of the writer can land any more. Idempotent.

        Raises WaitTimeout when it is in the middle of something that does not end, as a copy while it is frozen. It is
        refused everything new all the same; call again.
        """
        self.is_closing = True
        # In a thread, since it blocks: until a copy into our memory is over, for one.
        await asyncio.to_thread(self.close, timeout_s)
        self._shut.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """The same, blocking, timeout_s for each region at most: any thread."""
        busy = []
        for region in self._regions:
            try:
                region.close(0.0)
            except WaitTimeout:  # refused from now on, like all; now wait for those that somebody is in the middle of
                busy.append(region)
        for region in busy:
            region.close(timeout_s)

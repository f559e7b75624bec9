"""What a prefiller may write to: each has its own registrations of the decoder's memory, so it can be shut out alone.

A prefiller that is dead, frozen or cut off may have writes in flight that nobody can call back: in its own memory, in a
kernel's buffers, on a wire. Once the registration that they name is closed they land nowhere, however late they come,
while others go on writing to the same pages through their own registrations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from crossrail import Engine
from crossrail.errors import WaitTimeout
from crossrail.kv.transfer.memory import RankMemory

_FIRST_S = 0.05  # for what ends by itself, which is all but a copy by a frozen peer
_PAUSE_S = 0.05  # then, between two looks
_CLOSERS_MAX = 4


class Tails:
    """Room for the tails of some requests, at rank 0. A slot has the same life as its request's pages."""

    def __init__(self, engine: Engine, nbytes: int, slots: int) -> None:
        self.engine = engine
        self.nbytes = nbytes
        self.region = engine.alloc(nbytes * slots)
        self.free_slots = list(range(slots - 1, -1, -1))


class Closers:
    """A receiver's threads for closing registrations, which blocks: for example until a copy into our memory is over,
    or a NIC has released it. The loop's own threads are few, models compute in them, and other writers must be fenced
    meanwhile. No call occupies one of these for longer than one look.

    Threads: that of the event loop.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None  # made when it is needed

    def run(self, call: Callable[[float], None], timeout_s: float) -> asyncio.Future[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_CLOSERS_MAX, "crossrail-kv-shut")
        return asyncio.get_running_loop().run_in_executor(self._executor, call, timeout_s)

    def end(self) -> None:
        """They end when they have done what they have to."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None


class Access:
    """One writer's registrations, of all ranks that this process has, and of tails.

    Lifecycle: 1. open. 2. closing: its descriptors are refused. 3. shut: nothing of it can land any more.
    attempts: of requests, that are under way by it.
    Threads: that of the event loop, but for close().
    """

    def __init__(self, ranks: Mapping[int, RankMemory], tails: Tails | None, closers: Closers) -> None:
        self.ranks = {rank: memory.registered_again() for rank, memory in ranks.items()}
        self.tail = tails.engine.register(tails.region.view()) if tails else None
        self._regions = [region for memory in self.ranks.values() for region in memory.regions]
        if self.tail is not None:
            self._regions.append(self.tail)
        self._closers = closers
        self.attempts = 0
        self.is_closing = False
        self._shut = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._busy: WaitTimeout | None = None  # what it waited for last

    @property
    def is_shut(self) -> bool:
        return self._shut.is_set()

    async def wait_shut(self) -> None:
        await self._shut.wait()

    async def shut(self, timeout_s: float) -> None:
        """Returns once nothing of the writer can land any more. Idempotent.

        Raises WaitTimeout when it is in the middle of something that does not end, as a copy while it is frozen. It is
        refused everything new all the same, and one task goes on closing, however many wait for that: call again.
        """
        self.is_closing = True
        if self._closing is None or (self._closing.done() and not self.is_shut):
            self._closing = asyncio.create_task(self._close_all(), name="kv-shut")
            # Whoever waited for it may be gone.
            self._closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([self._closing], timeout=timeout_s)
        if not self._closing.done() or self._closing.cancelled():
            why = f": {self._busy}" if self._busy else ""
            raise WaitTimeout(f"registrations of a writer are not closed after {timeout_s:g} s{why}")
        self._closing.result()

    def give_up(self) -> None:
        """Nobody waits for shut() any more: leaves no task behind."""
        if self._closing is not None:
            self._closing.cancel()

    def note_closed(self) -> None:
        """Once close() has returned, of a caller who has no use for shut(): whoever waits for its end has it."""
        self.is_closing = True
        self._shut.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Like shut(), but blocking, up to timeout_s for each region: any thread.

        All that can be closed are, also when WaitTimeout is raised for one that cannot.
        """
        busy = []
        for region in self._regions:
            try:
                region.close(0.0)
            except WaitTimeout:  # refused from now on, like all; now wait for those that somebody is in the middle of
                busy.append(region)
        stuck: WaitTimeout | None = None
        for region in busy:
            try:
                region.close(0.0 if stuck else timeout_s)
            except WaitTimeout as error:
                stuck = stuck or error
        if stuck:
            raise stuck

    async def _close_all(self) -> None:
        wait_s = _FIRST_S
        while True:
            try:
                await self._closers.run(self.close, wait_s)
                break
            except WaitTimeout as error:
                self._busy = error
            wait_s = 0.0
            await asyncio.sleep(_PAUSE_S)
        self._busy = None
        self._shut.set()

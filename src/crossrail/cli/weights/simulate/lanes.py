"""One trainer of a simulated update: its lanes on an engine, and what each waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

import crossrail as xr
from crossrail.cli.weights.simulate.outcome import Spans
from crossrail.cli.weights.simulate.setting import Setting
from crossrail.cli.weights.simulate.works import Work
from crossrail.weights import Plan

HELLO, UPDATE = 1, 2  # immediates


class Meetings:
    """Collective steps: prepared when the last member has come."""

    def __init__(self, members: dict[str, int]) -> None:
        self._missing = dict(members)
        self._come = {name: asyncio.Event() for name in members}

    async def at(self, name: str) -> None:
        """Returns when the last one has arrived."""
        self._missing[name] -= 1
        if self._missing[name] == 0:
            self._come[name].set()
        await self._come[name].wait()


class Memory:
    """The watermark of one trainer."""

    def __init__(self, nbytes: int) -> None:
        self._all = self._free = nbytes
        self._changed = asyncio.Event()

    async def take(self, nbytes: int) -> None:
        """Waits until there is so much: never for more than all."""
        assert nbytes <= self._all
        while nbytes > self._free:
            self._changed.clear()
            await self._changed.wait()
        self._free -= nbytes

    def give(self, nbytes: int) -> None:
        """Releases these bytes."""
        self._free += nbytes
        self._changed.set()


class Trainer:
    """Lifecycle: 1. made. 2. source is given to the others. 3. meet(). 4. update(), once.

    source: what the others read from it. done_s: when its own writes were. own_s: how long a lane was busy or a write
    under way, so without what it waits for others, as StepReport.own_s.
    """

    def __init__(
        self, engine: xr.Engine, plan: Plan, works: list[Work], held_bytes: int, setting: Setting, slow: float
    ) -> None:
        self.works = works
        self.spans = Spans()
        self.done_s = self.own_s = 0.0
        self._active = 0
        self._engine = engine
        self._costs = setting.costs
        self._collective = setting.collective
        self._slow = slow
        self._under_way: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._memory = Memory(setting.watermark_bytes)
        self._writes = plan.writes
        ends = plan.writes["source"] + plan.writes["nbytes"]
        read = max((nbytes for work in works for _, nbytes in work.reads), default=0)
        self.source = engine.register_phantom(max(int(ends.max(initial=1)), held_bytes, read))

    async def meet(self, targets: Mapping[int, Any], sources: Mapping[int, Any]) -> None:
        """Connects to all of its targets, and to whom it reads from. Both: descriptors by rank."""
        self._to = [targets[rank] for rank in self._writes["target"].tolist()]
        self._sources = sources
        peers = [targets[rank] for rank in sorted(set(self._writes["target"].tolist()))]
        peers += [sources[rank] for rank in sorted({rank for work in self.works for rank, _ in work.reads})]
        if peers:
            await self._engine.submit_scatter(self.source, peers, lengths=0, src_offsets=0, dst_offsets=0, imm=HELLO)

    async def update(self, meetings: Meetings, barrier: Meetings) -> None:
        """Does all works, each lane as soon as it is free."""
        loaded: asyncio.Queue[Work] = asyncio.Queue()
        prepared: asyncio.Queue[Work] = asyncio.Queue()
        lanes = asyncio.gather(
            self._load(loaded), self._prepare(loaded, prepared, meetings, barrier), self._submit(prepared)
        )
        # A transfer that fails never gives its memory back: then the lanes would wait for ever.
        either: set[asyncio.Future[Any]] = {lanes, self._failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            await lanes
        finally:
            lanes.cancel()
            await asyncio.gather(lanes, return_exceptions=True)  # else asyncio reports how they ended
        await asyncio.gather(*self._under_way)
        self.done_s = asyncio.get_running_loop().time()
        await self._wait_for_all(barrier, "end")

    async def _wait_for_all(self, barrier: Meetings, name: str) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await barrier.at(name)
        await asyncio.sleep(self._costs.barrier_ms / 1e3)
        self.spans.add("wait for others", began_s, clock())

    @contextmanager
    def _own(self) -> Iterator[float]:
        """Wraps work of its own; yields its begin."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        if not self._active:
            self._own_since_s = began_s
        self._active += 1
        try:
            yield began_s
        finally:
            self._active -= 1
            if not self._active:
                self.own_s += clock() - self._own_since_s

    async def _busy(self, **stages: float) -> None:
        """A lane is, with one stage after the other; seconds on a trainer that is not slow."""
        with self._own() as at_s:
            await asyncio.sleep(sum(stages.values()) * self._slow)
        for stage, seconds in stages.items():
            if seconds:
                self.spans.add(stage, at_s, at_s + seconds * self._slow)
                at_s += seconds * self._slow

    async def _load(self, loaded: asyncio.Queue[Work]) -> None:
        for work in self.works:
            await self._memory.take(work.tmp_bytes)
            await self._busy(h2d=work.h2d_s)
            if work.reads:
                self._start(self._read(work, loaded))
            else:
                loaded.put_nowait(work)

    async def _prepare(
        self, loaded: asyncio.Queue[Work], prepared: asyncio.Queue[Work], meetings: Meetings, barrier: Meetings
    ) -> None:
        has_met = not self._collective
        for _ in self.works:
            work = await loaded.get()
            if work.group and not has_met:
                has_met = True
                await self._wait_for_all(barrier, "groups")
            if work.meet:
                await meetings.at(work.meet)
            await self._busy(**work.prepare_s)
            prepared.put_nowait(work)
        if not has_met:  # it has no tasks in the second group, and others wait for it
            await self._wait_for_all(barrier, "groups")

    async def _submit(self, prepared: asyncio.Queue[Work]) -> None:
        for _ in self.works:
            work = await prepared.get()
            count = work.writes.stop - work.writes.start
            if not count:
                self._memory.give(work.tmp_bytes)
                continue
            await self._busy(submit=count * self._costs.submit_us / 1e6)
            self._start(self._write(work))

    # ---- transfers

    def _start(self, transfer: Coroutine[Any, Any, None]) -> None:
        self._under_way.append(asyncio.create_task(self._tell_failure(transfer)))

    async def _tell_failure(self, transfer: Coroutine[Any, Any, None]) -> None:
        try:
            await transfer
        except xr.CrossrailError as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise

    async def _read(self, work: Work, loaded: asyncio.Queue[Work]) -> None:
        """The lane goes on meanwhile; works are prepared in the order in which they are complete."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        reads = [self._engine.submit_read(self.source, self._sources[rank], nbytes) for rank, nbytes in work.reads]
        await asyncio.gather(*(_done(read) for read in reads))
        self.spans.add("read", began_s, clock())
        loaded.put_nowait(work)

    async def _write(self, work: Work) -> None:
        rows = self._writes[work.writes]
        with self._own() as began_s:
            await self._engine.submit_scatter(
                self.source,
                self._to[work.writes],
                lengths=np.ascontiguousarray(rows["nbytes"]),
                src_offsets=np.ascontiguousarray(rows["source"]),
                dst_offsets=np.ascontiguousarray(rows["offset"]),
                imm=UPDATE,
            )
        self.spans.add("write", began_s, asyncio.get_running_loop().time())
        self._memory.give(work.tmp_bytes)


async def _done(transfer: xr.Transfer) -> None:
    await transfer

"""One update at one trainer: its tasks in a pipeline of gather, load, prepare and write, groups between barriers.

One task of the event loop moves them all as far as they go, and sleeps only when none of them moves. The engine moves
bytes in its own thread; conversions run in one of ours, and loads, copies from the host to the GPU that converts, in
another one: so the stages overlap. Small tasks go to these threads many at a time, since each hand-over costs as much
as converting some hundred kilobytes (preparer.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import crossrail as xr
from crossrail.weights.step.arena import Arena
from crossrail.weights.step.barrier import Barrier
from crossrail.weights.step.preparer import Preparer
from crossrail.weights.step.schedule import Schedule
from crossrail.weights.step.task import Batch, ReadyTask

_WRITES_MAX = 512  # submits under way: enough to keep every rail busy, few enough to look through
_AHEAD_MAX = 512  # tasks begun and not yet prepared: what they read is on its way meanwhile
_HANDED_MAX = 64  # tasks that a thread is given in one go, if they are no larger together than the preparer says
_HOLD_S = 0.002  # for so long the event loop is kept from others while tasks move
# An idle pipeline watches these positions among its transfers, in the order in which they began: waking up for each one
# that ends would cost more than the work then done. If all of these are stragglers, it polls the others once in a
# while.
_WATCHED = (1 / 8, 1 / 4, 1 / 2)
_LOOK_S = 0.02
_NAMED = 3  # of those whom transfers go to or come from


@dataclass
class StepReport:
    """What a step did at one trainer. Seconds are of its pipeline's own clock.

    gather_s, write_s: while any task was in that stage; load_s: copies from the host to a GPU alone; prepare_s:
    conversions alone; barrier_s: waiting for others. They overlap. own_s: while it loaded, converted or wrote, so not
    while it only waited for others.
    python_s: processor time of the event loop's thread, which runs all but loads and conversions; what a submit copies
    itself, as it drives the engine, is in it.
    peak_bytes: most of the arena that was in use.
    """

    tasks: int = 0
    writes: int = 0
    written_bytes: int = 0
    gathered_bytes: int = 0
    peak_bytes: int = 0
    total_s: float = 0.0
    gather_s: float = 0.0
    load_s: float = 0.0
    prepare_s: float = 0.0
    write_s: float = 0.0
    barrier_s: float = 0.0
    own_s: float = 0.0
    python_s: float = 0.0


@dataclass
class Places:
    """Where all data of a step is.

    sources: regions of this trainer, by index in its inventory. peers: those of the others, by rank and index. targets:
    those of inference ranks, likewise. imm: what writes count.
    """

    arena: xr.Region | None
    sources: Sequence[xr.Region]
    peers: Mapping[tuple[int, int], xr.RegionDescriptor]
    targets: Mapping[tuple[int, int], xr.RegionDescriptor]
    imm: int


class Step:
    """Runs once. tasks: of this trainer, in order. groups: of the whole plan, ascending. meets_first: at a barrier,
    before any trainer reads from another. preparer: None where all tasks are direct; it prepares on `executor`, and
    loads on `loader`, which run one thing each at a time.

    Threads: the event loop's. run() may be cancelled: it then takes back what it can, and `pending` has the transfers
    that still touch memory.
    """

    def __init__(
        self,
        engine: xr.Engine,
        tasks: Sequence[ReadyTask],
        groups: Sequence[int],
        arena: Arena,
        places: Places,
        barrier: Barrier,
        executor: Executor | None = None,
        preparer: Preparer | None = None,
        meets_first: bool = False,
        loader: Executor | None = None,
    ) -> None:
        self.report = StepReport()
        self._engine = engine
        self._tasks = tasks
        self._groups = groups
        self._arena = arena
        self._places = places
        self._barrier = barrier
        self._executor = executor
        self._loader = loader
        self._preparer = preparer
        if preparer is not None:
            preparer.open(places.sources, places.arena)
        self._meets_first = meets_first
        sizes = [task.piece_bytes for task in tasks]
        self._schedule = Schedule(arena, sizes, [task.group for task in tasks], [task.name for task in tasks])
        # By task in a stage: its transfers that were not yet seen to be done; the next one to check is the last.
        self._gathering: dict[int, list[xr.Transfer]] = {}
        self._may_load = any(task.loads for task in tasks)
        self._gathered: deque[int] = deque()  # of which something has to be loaded
        self._loading: tuple[list[int], asyncio.Future[float]] | None = None
        self._ready: deque[int] = deque()
        self._preparing: tuple[list[int], asyncio.Future[float]] | None = None
        self._writing: dict[int, list[xr.Transfer]] = {}
        self._writes_under_way = 0
        self._waited_for: str | None = None  # once it has ended

    @property
    def pending(self) -> list[xr.Transfer]:
        """Transfers that have not ended."""
        every = [*self._gathering.values(), *self._writing.values()]
        return [transfer for transfers in every for transfer in transfers if not transfer.done]

    @property
    def waits_for(self) -> str:
        """What it waits for, or was waiting for when it ended too early, in words; "": only for the other trainers."""
        return self._under_way() if self._waited_for is None else self._waited_for

    def _under_way(self) -> str:
        writes = Counter(batch.target for batch in self._open(self._writing, lambda task: task.batches))
        reads = Counter(read.trainer for read in self._open(self._gathering, lambda task: task.reads))
        words = [f"{n} writes to inference rank {rank}" for rank, n in writes.most_common(_NAMED)]
        words += [f"{n} reads from trainer {rank}" for rank, n in reads.most_common(_NAMED)]
        words += ["copies to the GPU"] * (self._loading is not None)
        words += ["conversions"] * (self._preparing is not None)
        return ", ".join(words)

    def _open(
        self, stage: Mapping[int, list[xr.Transfer]], parts_of: Callable[[ReadyTask], Sequence[Any]]
    ) -> Iterator[Any]:
        """What the stage's transfers that have not ended are of."""
        for index, transfers in stage.items():
            parts = parts_of(self._tasks[index])  # of which transfers were taken from the end
            yield from (part for part, transfer in zip(parts, transfers, strict=False) if not transfer.done)

    async def run(self, timeout_s: float) -> StepReport:
        """Returns when all own writes are done, and all trainers have prepared all of theirs: weights may change.

        Raises what a transfer, a load, a conversion or the barrier raised. After an exception, and after a
        cancellation, no load or conversion runs; see `pending`.
        """
        clock = asyncio.get_running_loop().time
        begun, began_code = clock(), time.thread_time()
        deadline_at_s = begun + timeout_s
        self._arena.reset_peak()
        try:
            if self._meets_first:  # a trainer that has not arrived may still be changing what we would read
                await self._meet_others(deadline_at_s)
            for group in self._groups:
                self._schedule.enter(group)
                await self._move_until(lambda: self._schedule.is_prepared)
                await self._meet_others(deadline_at_s)
            await self._move_until(lambda: self._schedule.is_over)
        finally:
            self._waited_for = self._under_way()
            await self._end()
            self.report.python_s = time.thread_time() - began_code
        self.report.total_s = clock() - begun
        self.report.peak_bytes = self._arena.peak_bytes
        return self.report

    async def _meet_others(self, deadline_at_s: float) -> None:
        """The barrier; writes continue meanwhile."""
        clock = asyncio.get_running_loop().time
        entered = clock()
        meeting = asyncio.ensure_future(self._barrier.wait(max(deadline_at_s - entered, 0.0)))
        try:
            await self._move_until(meeting.done, meeting)
        finally:
            meeting.cancel()
            await asyncio.wait([meeting])
        meeting.result()
        self.report.barrier_s += clock() - entered

    async def _end(self) -> None:
        for transfer in self.pending:
            transfer.cancel()
        for stage in (self._loading, self._preparing):
            if stage is not None:
                # The thread cannot be interrupted, and uses the arena.
                await asyncio.wait([stage[1]])
                if not stage[1].cancelled():
                    stage[1].exception()  # mark as retrieved: something else has ended the step

    async def _move_until(self, is_reached: Callable[[], bool], event: asyncio.Future[None] | None = None) -> None:
        """Every task as far as it goes; whenever none does, waits until something has happened, or the event."""
        clock = asyncio.get_running_loop().time
        began = slept = clock()
        while not is_reached():
            in_gather, in_write = bool(self._gathering), bool(self._writing)
            is_own = in_write or self._loading is not None or self._preparing is not None
            moved = self._collect_writes() + self._collect_gathers() + self._collect_loaded() + self._load_next()
            moved += self._collect_prepared() + self._prepare_next() + self._begin()
            if not moved:
                await self._something(event)
                slept = clock()
            now = clock()
            if now - slept > _HOLD_S:
                await asyncio.sleep(0)
                slept = now = clock()
            self.report.gather_s += now - began if in_gather else 0.0
            self.report.write_s += now - began if in_write else 0.0
            self.report.own_s += now - began if is_own else 0.0
            began = now

    # ---- stages; each says how many tasks it moved

    def _begin(self) -> int:
        count = 0
        while self._may_begin and (next_task := self._schedule.begin()) is not None:
            index, base = next_task
            task = self._tasks[index]
            if task.is_direct:
                self._schedule.prepared(index)
                self._write(index)
            elif task.reads:
                reading = self._gathering[index] = []  # one by one: if a submit raises, those before it are known
                for read in task.reads:
                    reading.append(self._read(read, base))
                self.report.gathered_bytes += sum(read.nbytes for read in task.reads)
            else:
                self._to_next(index)
            count += 1
        return count

    def _to_next(self, index: int) -> None:
        """The task's reads are done: it goes to the next stage."""
        (self._gathered if self._tasks[index].loads else self._ready).append(index)

    @property
    def _may_begin(self) -> bool:
        ahead = len(self._gathering) + len(self._gathered) + len(self._ready)
        return self._writes_under_way < _WRITES_MAX and ahead < _AHEAD_MAX

    def _collect_gathers(self) -> int:
        gathered = [index for index, transfers in self._gathering.items() if _are_done(transfers)]
        for index in gathered:
            del self._gathering[index]
            self._to_next(index)
        return len(gathered)

    def _load_next(self) -> int:
        if self._loading is not None or not self._gathered:
            return 0
        assert self._preparer is not None
        self._loading = self._hand_over(self._gathered, self._preparer.load, self._loader)
        return len(self._loading[0])

    def _collect_loaded(self) -> int:
        if self._loading is None or not self._loading[1].done():
            return 0
        (some, future), self._loading = self._loading, None
        self.report.load_s += future.result()
        self._ready += some
        return len(some)

    def _prepare_next(self) -> int:
        if self._preparing is not None or not self._ready:
            return 0
        assert self._preparer is not None
        self._preparing = self._hand_over(self._ready, self._preparer.prepare, self._executor)
        return len(self._preparing[0])

    def _hand_over(
        self, waiting: deque[int], work: Callable[[list[tuple[ReadyTask, int]]], None], executor: Executor | None
    ) -> tuple[list[int], asyncio.Future[float]]:
        """As many of those that wait as go to the executor's thread in one go; and how long that works, in seconds."""
        assert self._preparer is not None
        some: list[int] = []
        nbytes = 0
        while waiting and len(some) < _HANDED_MAX and nbytes < self._preparer.bytes_at_once:
            some.append(waiting.popleft())
            nbytes += self._tasks[some[-1]].piece_bytes
        tasks = [(self._tasks[index], self._schedule.bases[index]) for index in some]
        return some, asyncio.get_running_loop().run_in_executor(executor, _timed, work, tasks)

    def _collect_prepared(self) -> int:
        if self._preparing is None or not self._preparing[1].done():
            return 0
        (some, future), self._preparing = self._preparing, None
        self.report.prepare_s += future.result()
        self._prepare_next()  # first: submits may copy in this thread, and the other has work meanwhile
        for index in some:
            self._schedule.prepared(index)
            self._write(index)
        return len(some)

    def _collect_writes(self) -> int:
        count = 0
        for index in list(self._writing):
            transfers = self._writing[index]
            before = len(transfers)
            is_written = _are_done(transfers)
            self._writes_under_way -= before - len(transfers)
            if is_written:
                del self._writing[index]
                self._schedule.finished(index)
                self.report.tasks += 1
                self.report.writes += self._tasks[index].write_count
                self.report.written_bytes += self._tasks[index].write_bytes
                count += 1
        return count

    # ---- submitting

    def _read(self, read: Any, base: int) -> xr.Transfer:
        arena = self._places.arena
        assert arena is not None
        source = self._places.peers[read.trainer, read.region]
        return self._engine.submit_read(
            arena, source, read.nbytes, dst_offset=base + read.piece, src_offset=read.source
        )

    def _write(self, index: int) -> None:
        task, places = self._tasks[index], self._places
        if task.own_region is None:
            region, base = places.arena, self._schedule.bases[index]
        else:
            region, base = places.sources[task.own_region], task.own_offset
        assert region is not None
        transfers = self._writing[index] = []
        for batch in task.batches:
            transfers.append(self._submit(batch, region, base))
        self._writes_under_way += len(transfers)

    def _submit(self, batch: Batch, region: xr.Region, base: int) -> xr.Transfer:
        target, imm = self._places.targets[batch.target, batch.region], self._places.imm
        source = base + batch.source
        if len(batch.source_index) == 1:
            return self._engine.submit_write(
                region, target, batch.nbytes, src_offset=source, dst_offset=batch.offset, imm=imm
            )
        return self._engine.submit_paged_writes(
            region,
            batch.source_index,
            target,
            batch.offset_index,
            batch.nbytes,
            src_stride=batch.source_step,
            dst_stride=batch.offset_step,
            src_offset=source,
            dst_offset=batch.offset,
            imm=imm,
        )

    # ---- waiting

    async def _something(self, event: asyncio.Future[None] | None) -> None:
        """Waits for what may let a task move, for the event, or for a while."""
        heads: list[Any] = [*_watched(self._writing)]
        heads += [stage[1] for stage in (self._loading, self._preparing) if stage is not None]
        if self._preparing is None or (self._may_load and self._loading is None):
            heads += _watched(self._gathering)  # otherwise what is gathered meanwhile could not proceed
        if event is not None:
            heads.append(event)
        assert heads, "tasks are under way, and none of them waits for anything"
        waits = [asyncio.ensure_future(_ended(head)) for head in heads]
        try:
            timeout_s = _LOOK_S if self._writing or self._gathering else None
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def _timed(work: Callable[[list[tuple[ReadyTask, int]]], None], tasks: list[tuple[ReadyTask, int]]) -> float:
    """Seconds of real time that it took."""
    begun = time.perf_counter()
    work(tasks)
    return time.perf_counter() - begun


def _watched(stage: Mapping[int, list[xr.Transfer]]) -> list[xr.Transfer]:
    under_way = list(stage.values())
    return [under_way[at][-1] for at in {int(len(under_way) * share) for share in _WATCHED}] if under_way else []


async def _ended(head: Any) -> None:
    """Returns however it ended: its failure is raised when it is collected."""
    if isinstance(head, asyncio.Future):
        await asyncio.wait([head])
        return
    try:
        await head
    except xr.CrossrailError:
        return


def _are_done(transfers: list[xr.Transfer]) -> bool:
    """Removes finished transfers from the end of the list, up to one that is not; raises the error of a failed one."""
    while transfers and transfers[-1].done:
        transfers.pop().wait(0)
    return not transfers

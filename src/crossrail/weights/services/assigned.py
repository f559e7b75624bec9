"""A trainer's part of a plan: sent by the controller, prepared by the trainer, replayed in each step."""

from __future__ import annotations

from collections.abc import Collection

import crossrail as xr
from crossrail.errors import UsageError
from crossrail.weights.planning.plan import Plan
from crossrail.weights.services import messages as m
from crossrail.weights.step.ready import ready_tasks
from crossrail.weights.step.task import ReadyTask


class Assigned:
    """An assignment. Made empty; filled by open() and then make(), which any one thread may run while others read it.

    plan: which plan; attempt: for which attempt. data: packed, from messages.Assignment, as are gone, groups,
    meets_first. tasks: those that are ready so far, all of them once is_ready. trainers: addresses by rank. peers,
    targets: descriptors by rank and region, of targets by rank, buffer and region.
    """

    def __init__(self, plan: str, attempt: int, data: bytes, rank: int) -> None:
        self.plan = plan
        self.attempt = attempt
        self.groups: list[int] = []
        self.meets_first = False
        self.gone: list[bytes] = []
        self.tasks: list[ReadyTask] = []
        self.is_ready = False
        self.trainers: dict[int, xr.Address] = {}
        self.peers: dict[tuple[int, int], xr.RegionDescriptor] = {}
        self.targets: dict[tuple[int, int, int], xr.RegionDescriptor] = {}
        self._data = data
        self._part = b""
        self._rank = rank
        self._is_dropped = False

    def open(self) -> None:
        """UsageError for data that is no assignment, and once it is dropped."""
        self._check_wanted()
        assignment = m.Assignment.from_bytes(m.unpacked(self._data))
        self._data, self._part = b"", assignment.part
        self.groups, self.meets_first, self.gone = assignment.groups, assignment.meets_first, assignment.gone
        self.trainers = {each.rank: xr.Address.from_bytes(each.address) for each in assignment.trainers}
        self.peers = {
            (each.rank, each.region): xr.RegionDescriptor.from_bytes(each.descriptor) for each in assignment.peers
        }
        self.targets = {
            (each.rank, each.buffer, each.region): xr.RegionDescriptor.from_bytes(each.descriptor)
            for each in assignment.targets
        }

    def make(self, far: Collection[int] = ()) -> None:
        """Takes some 10 us per task. far: as in ready_tasks(). UsageError for an invalid part, for unknown casts, and
        after drop().
        """
        for task in ready_tasks(Plan.from_bytes(self._part), self._rank, far):
            self._check_wanted()
            self.tasks.append(task)
        self._part = b""
        self.is_ready = True

    def drop(self) -> None:
        """The assignment is not wanted any more: open() and make() end early. Any thread."""
        self._is_dropped = True

    def _check_wanted(self) -> None:
        if self._is_dropped:
            raise UsageError(f"plan {self.plan} is not wanted any more")

    @property
    def largest(self) -> ReadyTask | None:
        """The task that needs most of the arena; None: none needs any."""
        largest = max(self.tasks, key=lambda task: task.piece_bytes, default=None)
        return largest if largest is not None and largest.piece_bytes else None


class Pieces:
    """Collects what an assignment is cut into: of one attempt, the latest that any came of. Threads: one."""

    def __init__(self) -> None:
        self._attempt = 0
        self._count = 0
        self._data: dict[int, bytes] = {}

    def clear(self, attempt: int) -> None:
        """Drops the pieces of attempts up to this one."""
        if self._attempt <= attempt:
            self._data.clear()

    def add(self, assign: m.Assign) -> bytes | None:
        """All of it, once; None while others are missing. UsageError for a piece of an attempt before, or that does not
        fit the others.
        """
        if assign.attempt < self._attempt:
            raise UsageError(f"attempt {assign.attempt} is over: {self._attempt} has begun")
        if assign.attempt > self._attempt:
            self._attempt, self._count, self._data = assign.attempt, assign.pieces, {}
        if assign.pieces != self._count or assign.piece >= assign.pieces:
            raise UsageError(f"piece {assign.piece} of {assign.pieces} of an assignment in {self._count}")
        self._data[assign.piece] = assign.data
        if len(self._data) < self._count:
            return None
        data, self._data = b"".join(self._data[at] for at in range(self._count)), {}
        return data

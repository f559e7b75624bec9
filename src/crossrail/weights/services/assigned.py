"""A trainer's part of a plan: told by the controller, made ready by the trainer, replayed by each step."""

from __future__ import annotations

import crossrail as xr
from crossrail.errors import UsageError
from crossrail.weights.planning.plan import Plan
from crossrail.weights.services import messages as m
from crossrail.weights.step.ready import ready_tasks
from crossrail.weights.step.task import ReadyTask


class Assigned:
    """An Assign. Made empty; filled by make(), which any one thread may run. The others may look meanwhile.

    plan: which. groups: of the whole plan. tasks: those that are ready so far, all once is_ready. trainers: addresses
    by rank. peers, targets: descriptors by rank and region, of targets by rank, buffer and region. meets_first: of
    messages.Assign.
    """

    def __init__(self, assign: m.Assign, rank: int) -> None:
        self.plan = assign.plan
        self.groups = assign.groups
        self.meets_first = assign.meets_first
        self.tasks: list[ReadyTask] = []
        self.is_ready = False
        self.trainers: dict[int, xr.Address] = {}
        self.peers: dict[tuple[int, int], xr.RegionDescriptor] = {}
        self.targets: dict[tuple[int, int, int], xr.RegionDescriptor] = {}
        self._assign = assign
        self._rank = rank
        self._is_dropped = False

    def make(self) -> None:
        """Takes some 10 us for each task. UsageError for a part that is none, for casts that there are not, and once
        it is dropped.
        """
        self.trainers = {each.rank: xr.Address.from_bytes(each.address) for each in self._assign.trainers}
        self.peers = {
            (each.rank, each.region): xr.RegionDescriptor.from_bytes(each.descriptor) for each in self._assign.peers
        }
        self.targets = {
            (each.rank, each.buffer, each.region): xr.RegionDescriptor.from_bytes(each.descriptor)
            for each in self._assign.targets
        }
        for task in ready_tasks(Plan.from_bytes(m.unpacked(self._assign.part)), self._rank):
            if self._is_dropped:
                raise UsageError(f"plan {self.plan} is not wanted any more")
            self.tasks.append(task)
        self.is_ready = True

    def drop(self) -> None:
        """Nobody wants it any more: make() ends early. Any thread."""
        self._is_dropped = True

    @property
    def largest(self) -> ReadyTask | None:
        """The task that needs most of the arena; None: none needs any."""
        largest = max(self.tasks, key=lambda task: task.piece_bytes, default=None)
        return largest if largest is not None and largest.piece_bytes else None

"""Which task of a step may begin: in the plan's order, one group at a time, within the available memory. No clock."""

from __future__ import annotations

from collections.abc import Sequence

from crossrail.weights.errors import WatermarkTooSmall
from crossrail.weights.step.arena import Arena


class Schedule:
    """The tasks of one step.

    sizes: bytes of the arena that each task takes while in progress. groups: of each task, ascending. names: for
    errors. bases: where the pieces of tasks in progress begin.

    Lifecycle of a task: 1. begin() gives it a piece. 2. prepared(): its sources are not needed any more. 3. finished():
    the piece is free again. Of a group: 1. enter(). 2. is_prepared: all of its tasks are; the caller waits for the
    other trainers before it enters the next group.

    Invariant: tasks in progress hold disjoint pieces of the arena; those of a later group have not begun.

    Raises WatermarkTooSmall if some task could never begin. Threads: one.
    """

    def __init__(self, arena: Arena, sizes: Sequence[int], groups: Sequence[int], names: Sequence[str]) -> None:
        largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
        if largest is not None and sizes[largest] > arena.nbytes:
            raise WatermarkTooSmall(names[largest], sizes[largest], arena.nbytes)
        assert list(groups) == sorted(groups), "a plan has its tasks in the order of their groups"
        self._arena = arena
        self._sizes = sizes
        self._groups = groups
        self._next = 0
        self._group: int | None = None
        self._unprepared = 0  # of those begun
        self.bases: dict[int, int] = {}

    @property
    def is_prepared(self) -> bool:
        """Whether all tasks of the current group are prepared."""
        return not self._unprepared and not self._has_next

    @property
    def is_over(self) -> bool:
        """Whether all tasks of all groups are finished."""
        return self._next == len(self._sizes) and not self.bases

    @property
    def _has_next(self) -> bool:
        return self._next < len(self._sizes) and self._groups[self._next] == self._group

    def begin(self) -> tuple[int, int] | None:
        """The next task of the group and where its piece begins; None: no task can begin now."""
        if not self._has_next:
            return None
        base = self._arena.take(self._sizes[self._next])
        if base is None:
            return None
        task, self._next = self._next, self._next + 1
        self.bases[task] = base
        self._unprepared += 1
        return task, base

    def prepared(self, task: int) -> None:
        """The task's buffer is made: it reads nobody's weights any more."""
        assert task in self.bases
        self._unprepared -= 1

    def finished(self, task: int) -> None:
        """Nothing touches the task's piece of the arena any more."""
        self._arena.give(self.bases.pop(task), self._sizes[task])

    def enter(self, group: int) -> None:
        """Goes on to a group, in which this trainer may have no tasks. Earlier groups are prepared."""
        assert self.is_prepared
        assert self._next == len(self._groups) or self._groups[self._next] >= group, "a group was left out"
        self._group = group

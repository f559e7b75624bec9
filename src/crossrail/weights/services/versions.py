"""Which version of the weights lies in which memory of an inference rank, and who may read it. No clock, no I/O."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from crossrail.errors import UsageError
from crossrail.weights.errors import TornWeights

VERSION_MAX = 1 << 62


class State(Enum):
    """The state of one buffer."""

    WHOLE = "whole"
    RECEIVING = "receiving"
    TORN = "torn"


def checked_version(version: object) -> int:
    """A version's number, of whatever kind of whole number. UsageError for anything else."""
    try:
        if isinstance(version, bool):
            raise TypeError
        number = operator.index(version)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise UsageError(f"version is {version!r}, must be a whole number") from None
    if not 0 <= number <= VERSION_MAX:
        raise UsageError(f"version is {number}, must be in 0..{VERSION_MAX}")
    return number


class Versions:
    """One buffer, updated in place while nobody reads; or two, of which one is read while the other is written.

    Lifecycle of an update: 1. opening(): no new reader of the buffer that it goes into, until the last one has gone and
    it may_open. 2. open(). 3. commit(), abort() or withdraw().
    front: the buffer that is read; back: the one that the next update goes into, or the current one does.
    Invariant: a buffer that is RECEIVING has no readers; with two, the front is never RECEIVING.
    Threads: one.
    """

    def __init__(self, buffers: int, *, is_torn: bool = False) -> None:
        """is_torn: whether the initial contents are torn; otherwise they are whole, and none of our versions."""
        self.front = 0
        self._versions: list[int] = [-1] * buffers
        self._states = [State.WHOLE] * buffers
        self._opened = State.WHOLE  # what the back was, as the last update opened
        if is_torn:
            self._states[0] = State.TORN
        self._readers = [0] * buffers
        self._openings = 0  # updates that wait for readers to go

    @property
    def back(self) -> int:
        return len(self._states) - 1 - self.front if len(self._states) == 2 else 0

    @property
    def version(self) -> int:
        """The version in the front buffer; -1 while nothing was committed there."""
        return self._versions[self.front]

    @property
    def state(self) -> State:
        """The state of the front buffer."""
        return self._states[self.front]

    @property
    def is_first_torn(self) -> bool:
        """The buffer that is the front at first is torn, or an update goes into it."""
        return self._states[0] is not State.WHOLE

    @property
    def is_first_outdated(self) -> bool:
        """The front is the other buffer, which is whole, and nobody reads this one."""
        return self.front != 0 and not self._readers[0]

    @property
    def is_receiving(self) -> bool:
        """An update is open."""
        return self._states[self.back] is State.RECEIVING

    @property
    def may_open(self) -> bool:
        """Whether nobody reads the back buffer."""
        return not self._readers[self.back]

    @contextmanager
    def opening(self) -> Iterator[None]:
        """While an update waits for readers of the back to go: in place no others come, or it might wait for ever."""
        self._openings += 1
        try:
            yield
        finally:
            self._openings -= 1

    def open(self) -> int:
        """The buffer that an update is written into from here on."""
        assert self.may_open
        self._opened, self._states[self.back] = self._states[self.back], State.RECEIVING
        return self.back

    def commit(self, version: int) -> None:
        """Everything has arrived in the back buffer: it is the front now."""
        assert self._states[self.back] is State.RECEIVING
        back = self.back
        self._states[back] = State.WHOLE
        self._versions[back] = version
        self.front = back

    def abort(self) -> None:
        """Something may have been written: the buffer's former contents are lost."""
        assert self._states[self.back] is State.RECEIVING
        self._states[self.back] = State.TORN

    def withdraw(self) -> None:
        """Nothing was written, nor will be: the buffer keeps its contents."""
        assert self._states[self.back] is State.RECEIVING
        self._states[self.back] = self._opened

    def begin_reading(self, *, is_nested: bool = False) -> int | None:
        """The buffer to read, which nobody writes until end_reading(); None: an update in place is in progress.

        is_nested: the caller is reading already, and would wait for an update that waits for it. Raises TornWeights
        after an update in place has failed.
        """
        if self.state is State.TORN:
            after = f" after version {self.version}" if self.version >= 0 else ""
            raise TornWeights(f"an update in place failed{after}: these weights are part old, part new")
        if self.state is State.RECEIVING or (self._openings and self.back == self.front and not is_nested):
            return None
        self._readers[self.front] += 1
        return self.front

    def end_reading(self, buffer: int) -> None:
        """Ends the reading of a buffer that begin_reading() returned."""
        assert self._readers[buffer]
        self._readers[buffer] -= 1

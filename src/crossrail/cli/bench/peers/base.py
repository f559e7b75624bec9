"""The interface of an adapter to a library: one of the two sides, and a few calls. All adapters share the same loops.

To add one, write a subclass of Side (or of TwoSided, if the receiver has to post receives) in a file of its own, which
imports the library only in open(), and add an Offer in offers.py.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.int64]
Role = Literal["sender", "receiver"]
ROLES: tuple[Role, Role] = ("sender", "receiver")

PAGE = 4096
MESSAGE_BYTES_MAX = 1024  # and its last byte belongs to the adapter
PAGE_WINDOW = 64  # writes of pages under way, where a library takes no list of them
PLACES_MAX = 256  # different places that a stream walks through, so that what is prepared for each stays small


@dataclass(frozen=True)
class Offer:
    """A library that can be measured: how, and what has to be known besides the figures.

    factory: "module:Class" of the Side, with `options`. needs: modules that must be there. distributions: of PyPI,
    whose versions are shown. kind: what one "write" is. threads: those that the library runs besides the caller's.
    environment: set in its processes only, before anything is imported.
    """

    name: str
    title: str
    factory: str
    kind: str
    notes: str
    install: str = ""
    needs: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: Literal["", "mpiexec"] = ""
    is_limit: bool = False  # moves bytes within one process: there is nothing to verify or to wait for


class Side(ABC):
    """One side. Its process calls open, meet, then the rest on one thread. Calls that block may block for ever: the
    parent has the deadline and kills the process.

    memory: uint8; the pool, then the page from which messages are sent, then the one where they land. can_submit:
    whether post() returns before the write is done, so that its cost can be measured.
    """

    memory: Memory
    can_submit = True

    def __init__(self, role: Role, pool_bytes: int) -> None:
        self.role = role
        self.pool_bytes = pool_bytes
        self.outgoing = pool_bytes  # offsets in memory
        self.incoming = pool_bytes + PAGE
        self.memory_bytes = pool_bytes + 2 * PAGE

    @property
    def is_sender(self) -> bool:
        """Whether this side drives."""
        return self.role == "sender"

    @abstractmethod
    def open(self) -> bytes:
        """Import the library, make memory known to it. Returns what the other side has to know."""

    @abstractmethod
    def meet(self, theirs: bytes) -> None:
        """theirs: the result of the other side's open. Connects, as far as the library does that beforehand."""

    @abstractmethod
    def close(self) -> None:
        """Closes in the order that the library's documentation requires. Both sides are asked at once."""

    # --- a stream of writes ---

    def prepare(self, places: Sequence[tuple[int, int]], nbytes: int) -> None:  # noqa: B027 - most need nothing
        """Sender, not timed: what a program would do once for (source offset, target offset) that it writes often."""

    @abstractmethod
    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> Any:
        """Sender: begin one write."""

    @abstractmethod
    def finish(self, handle: Any) -> None:
        """Sender: wait until this one is done, in the library's meaning of it, and the source may be written to."""

    def end_of_stream(self) -> None:
        """Sender: all writes are finished; tell the receiver that everything is there."""
        self.message(8)

    def take_stream(self, places: Sequence[tuple[int, int]], nbytes: int, count: int, window: int) -> None:
        """Receiver: waits until everything has arrived."""
        self.take(8)

    # --- pages ---

    def prepare_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:  # noqa: B027 - likewise
        """Sender, not timed: what a program would do once for a pool of pages."""

    def send_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:
        """Sender: page src[i] to page dst[i]; done when end_of_stream may be called."""
        pending: deque[Any] = deque()
        for src_page, dst_page in zip(src.tolist(), dst.tolist(), strict=True):
            if len(pending) == PAGE_WINDOW:
                self.finish(pending.popleft())
            pending.append(self.post(src_page * page_bytes, dst_page * page_bytes, page_bytes))
        while pending:
            self.finish(pending.popleft())

    def take_pages(self, page_bytes: int, dst: Pages) -> None:
        """Receiver: waits until all pages have arrived."""
        self.take(8)

    # --- messages: a small write from outgoing to the other side's incoming, and a way to learn of it ---

    @abstractmethod
    def message(self, nbytes: int) -> None:
        """Send what is at `outgoing`. The last of nbytes is the adapter's to use."""

    @abstractmethod
    def take(self, nbytes: int) -> None:
        """Wait for the next one; it is then at `incoming`."""


class TwoSided(Side):
    """For libraries whose receiver must say where each write goes: `expect` is the counterpart of `post`."""

    @abstractmethod
    def expect(self, dst_offset: int, nbytes: int) -> Any:
        """Receiver: begin to receive the next one. `finish` waits for it, too."""

    def end_of_stream(self) -> None:
        """The receiver knows already."""

    def take_stream(self, places: Sequence[tuple[int, int]], nbytes: int, count: int, window: int) -> None:
        """Posts as many receives ahead as there are sends in flight."""
        self._take([places[index % len(places)][1] for index in range(count)], nbytes, window)

    def take_pages(self, page_bytes: int, dst: Pages) -> None:
        """Receives in the order of the sends."""
        self._take((dst * page_bytes).tolist(), page_bytes, PAGE_WINDOW)

    def _take(self, offsets: Sequence[int], nbytes: int, window: int) -> None:
        pending: deque[Any] = deque()
        for offset in offsets:
            if len(pending) == window:
                self.finish(pending.popleft())
            pending.append(self.expect(offset, nbytes))
        while pending:
            self.finish(pending.popleft())


def stream(side: Side, places: Sequence[tuple[int, int]], nbytes: int, count: int, window: int) -> list[int]:
    """Sender: so many writes, at most a window of them under way. Returns how long each post took, in ns."""
    took_ns: list[int] = []
    pending: deque[Any] = deque()
    post, finish = side.post, side.finish
    for index in range(count):
        if len(pending) == window:
            finish(pending.popleft())
        src_offset, dst_offset = places[index % len(places)]
        begun = perf_counter_ns()
        pending.append(post(src_offset, dst_offset, nbytes))
        took_ns.append(perf_counter_ns() - begun)
    while pending:
        finish(pending.popleft())
    return took_ns


def private_memory(nbytes: int) -> Memory:
    """Ordinary memory of a process, from a page boundary on, not yet touched."""
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)

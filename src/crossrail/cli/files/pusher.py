"""The sending side of `crossrail push`: reads a file into slots, and writes them to those of a serve."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import crossrail as xr
from crossrail.cli.files import wire
from crossrail.cli.source import SourceFile
from crossrail.errors import CrossrailError, WaitTimeout

_LOOK_PERIOD_S = 0.25
_ANSWER_TIMEOUT_S = 60.0
# Both sides give up when nothing moves for a while, and see what has moved by whole writes: what a slow network carries
# within some seconds.
_WRITE_BYTES = 256 << 10
_ABORT_TIMEOUT_S = 0.5

_M = TypeVar("_M", bound=wire.Message)


class Pusher:
    """One push. Lifecycle: 1. offer. 2. accepted: slots are known. 3. segment after segment. 4. end, checked."""

    def __init__(self, engine: xr.Engine, pool: xr.ReceivePool, server: xr.Address, source: SourceFile) -> None:
        """The parts, all open; the caller closes them."""
        self._engine = engine
        self._pool = pool
        self._server = server
        self._source = source
        self._push = secrets.randbits(62)
        self._stored: set[int] = set()
        self._digest = hashlib.sha256()
        self._transfers: list[xr.Transfer] = []
        self._has_ended = False  # all was sent: the server may have stored the file, whatever we hear of it

    def run(
        self, dst: str, *, force: bool, on_accepted: Callable[[], object], on_stored: Callable[[int], object]
    ) -> wire.Done:
        """The whole push. on_stored is called with the bytes of each segment stored."""
        try:
            self._send(wire.Offer(self._push, dst, self._source.nbytes, self._source.mode, force))
            slots = self._accepted(self._receive(wire.Accept))
            on_accepted()
            self._write_all(slots, on_stored)
            self._has_ended = True
            self._send(wire.End(self._push, self._digest.hexdigest()))
            return self._checked(self._receive(wire.Done))
        except BaseException:
            self._abort()
            raise

    def _accepted(self, accept: wire.Accept) -> _Slots:
        layout = wire.Layout(self._source.nbytes, accept.slot_bytes, accept.page_bytes)
        region = xr.RegionDescriptor.from_bytes(bytes.fromhex(accept.region)) if accept.region else None
        if layout.segments > 0:
            if region is None or region.owner != self._server:
                raise wire.ProtocolError("the server's answer names memory that is not its own")
            if not accept.imms or region.nbytes < len(accept.imms) * accept.slot_bytes:
                raise wire.ProtocolError("the server's answer promises more memory than it gives")
        return _Slots(self._engine, layout, accept.imms, region)

    def _write_all(self, slots: _Slots, on_stored: Callable[[int], object]) -> None:
        layout = slots.layout
        reported: set[int] = set()

        def report() -> None:
            for index in self._stored - reported:
                reported.add(index)
                on_stored(layout.segment_bytes(index))

        for index in range(layout.segments):
            self._await_stored(index - slots.count, report)
            data = slots.segment(index)
            self._source.read_into(data, index * layout.slot_bytes)
            self._digest.update(data)
            self._transfers = self._unsettled() + slots.write(index)
        for index in range(layout.segments):
            self._await_stored(index, report)
        for transfer in self._transfers:
            transfer.wait(_ANSWER_TIMEOUT_S)

    def _unsettled(self) -> list[xr.Transfer]:
        """Transfers in flight or failed: for failures the next message explains why, or else _raise_if_gone."""
        return [t for t in self._transfers if not t.done or t.exception() is not None]

    def _await_stored(self, index: int, report: Callable[[], None]) -> None:
        """Waits until segment `index` is on disk, so that its slot is free. Negative: the slot was never used."""
        while index >= 0 and index not in self._stored:
            self._take(self._next_message())
            report()

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, (wire.Refuse, wire.Failed)):
            raise CrossrailError(f"the server says: {message.reason}")
        if isinstance(message, wire.Stored):
            self._stored.add(message.segment)

    def _receive(self, kind: type[_M]) -> _M:
        while True:
            message = self._next_message()
            if isinstance(message, kind):
                return message
            self._take(message)

    def _next_message(self) -> wire.Message:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                received = self._pool.recv(_LOOK_PERIOD_S)
            except WaitTimeout:
                self._raise_if_gone()
                if len(unsettled := self._unsettled()) < len(self._transfers):  # the network is slow, not the server
                    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
                self._transfers = unsettled
                continue
            if received.peer == self._server:
                message = wire.decode(received.data)
                if message.push == self._push:
                    return message
        raise CrossrailError(
            f"the server (pid {self._server.pid} of its host) did not answer for {_ANSWER_TIMEOUT_S:g} s, so "
            f"{self._what_is_known()}: it is stopped, its disk hangs, or its answers do not get through; look at what "
            "it prints, then push again"
        )

    def _raise_if_gone(self) -> None:
        if self._engine.peer_state(self._server) == "lost":
            raise CrossrailError(
                f"the server is gone, so {self._what_is_known()}: {self._engine.explain(self._server).note}"
            )
        for transfer in self._transfers:
            error = transfer.exception() if transfer.done else None
            if isinstance(error, xr.RemoteRegionClosed):
                raise CrossrailError(
                    "the server gave up this push, so the file was not stored; its output says why. Perhaps this "
                    "process was stopped for too long: push again"
                )
            if error is not None:
                raise error

    def _what_is_known(self) -> str:
        if self._has_ended:
            return f"it is unknown whether the file was stored (compare its SHA-256, {self._digest.hexdigest()})"
        return "the file was not stored"

    def _send(self, message: wire.Message) -> None:
        self._engine.submit_send(self._server, wire.encode(message)).wait(_ANSWER_TIMEOUT_S)

    def _checked(self, done: wire.Done) -> wire.Done:
        if done.sha256 != self._digest.hexdigest():
            raise CrossrailError(f"the server stored {done.path} with another SHA-256 sum than was sent")
        return done

    def _abort(self) -> None:
        """Best effort: nothing of ours is in flight any more, and the serve learns it at once, not by our silence."""
        with contextlib.suppress(Exception):
            for transfer in self._transfers:
                transfer.cancel()
            deadline = time.monotonic() + _ABORT_TIMEOUT_S
            for transfer in self._transfers:
                with contextlib.suppress(CrossrailError):
                    transfer.wait(max(deadline - time.monotonic(), 0))
            abort = wire.encode(wire.Abort(self._push))
            self._engine.submit_send(self._server, abort).wait(_ABORT_TIMEOUT_S)


class _Slots:
    """Our copy of the serve's slots: the file is read into it, and written from it to the same places there."""

    def __init__(
        self, engine: xr.Engine, layout: wire.Layout, imms: list[int], target: xr.RegionDescriptor | None
    ) -> None:
        self._engine = engine
        self.layout = layout
        self._imms = imms
        self.count = len(imms)
        self._target = target
        self._memory = None if target is None else engine.alloc(self.count * layout.slot_bytes)
        self._pages_per_slot = layout.slot_bytes // layout.page_bytes

    def segment(self, index: int) -> memoryview:
        """The buffer into which a segment is read."""
        assert self._memory is not None
        start = index % self.count * self.layout.slot_bytes
        return self._memory.view()[start : start + self.layout.segment_bytes(index)]

    def write(self, index: int) -> list[xr.Transfer]:
        """Write a segment: full pages, some in each call, and a short last page in another. Each page counts one."""
        assert self._memory is not None
        assert self._target is not None
        import numpy as np  # here, so that help need not wait for it

        slot = index % self.count
        page_bytes = self.layout.page_bytes
        full, tail_bytes = divmod(self.layout.segment_bytes(index), page_bytes)
        first = slot * self._pages_per_slot
        imm = self._imms[slot]
        transfers = []
        pages_per_write = max(_WRITE_BYTES // page_bytes, 1)
        for begin in range(first, first + full, pages_per_write):
            pages = np.arange(begin, min(begin + pages_per_write, first + full), dtype=np.int64)
            submit = self._engine.submit_paged_writes
            transfers.append(submit(self._memory, pages, self._target, pages, page_bytes, imm=imm))
        if tail_bytes > 0:
            at = (first + full) * page_bytes
            transfers.append(
                self._engine.submit_write(self._memory, self._target, tail_bytes, src_offset=at, dst_offset=at, imm=imm)
            )
        return transfers

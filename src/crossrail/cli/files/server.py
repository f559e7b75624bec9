"""The receiving side of `crossrail serve`. One asyncio task per push; data comes by counted page writes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.progress import Progress

import crossrail as xr
from crossrail._latest import Latest
from crossrail._text import plain, rate_text
from crossrail.cli.files import wire
from crossrail.cli.files.inbox import FileRefused, Inbox, PartFile
from crossrail.cli.text import format_bytes, gb_per_s
from crossrail.control.deadlines import in_time
from crossrail.errors import CrossrailError, PeerLost, TransferError, WaitTimeout

_PAGE_BYTES = 64 << 10
_SLOT_BYTES = 8 << 20
_SLOTS = 4
_LOOK_PERIOD_S = 0.25
_LAST_WORDS_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2.0
_MESSAGES_HELD = 256


class PusherGone(CrossrailError):
    """The pusher died, left, or gave up: there is nobody to answer to."""


@dataclass(frozen=True)
class Limits:
    """The limits of one serve."""

    pushes_max: int
    idle_timeout_s: float


class Slots:
    """The memory that one push writes to: a few slots, each with an immediate of its own."""

    def __init__(self, engine: xr.Engine, nbytes: int) -> None:
        """nbytes: of the whole file. An empty file needs no memory."""
        pages = -(-min(nbytes, _SLOT_BYTES) // _PAGE_BYTES)
        self.layout = wire.Layout(nbytes, max(pages, 1) * _PAGE_BYTES, _PAGE_BYTES)
        self.counters: list[xr.ImmCounter] = []
        self._region: xr.Region | None = None
        count = min(_SLOTS, self.layout.segments)
        if count > 0:
            self._region = engine.alloc(count * self.layout.slot_bytes)
            self.counters = [engine.alloc_imm() for _ in range(count)]

    @property
    def descriptor(self) -> str:
        """The descriptor for the pusher, in hex; empty if there is no memory."""
        return "" if self._region is None else self._region.descriptor.to_bytes().hex()

    def segment(self, index: int) -> memoryview:
        """The bytes of a segment that arrived."""
        assert self._region is not None
        start = index % len(self.counters) * self.layout.slot_bytes
        return self._region.view()[start : start + self.layout.segment_bytes(index)]

    def counter(self, index: int) -> xr.ImmCounter:
        """The counter for the pages of a segment."""
        return self.counters[index % len(self.counters)]

    def close(self, quiesced: bool) -> None:
        """Give memory back. quiesced: no write can be under way, so the immediates may be used for another push."""
        if self._region is not None:
            with contextlib.suppress(WaitTimeout):
                self._region.close(_CLOSE_TIMEOUT_S)
                quiesced = True  # nothing is written to it any more, so nothing counts
        if quiesced:
            for counter in self.counters:
                counter.release(force=True)  # a sender that died may have left a part of a count


class Session:
    """One push, from its offer to its end."""

    def __init__(self, server: Server, peer: xr.Address, offer: wire.Offer) -> None:
        """offer: checked by wire, not yet by the inbox."""
        self._server = server
        self._peer = peer
        self._offer = offer
        self._digest = hashlib.sha256()
        self._end: asyncio.Future[wire.End] = asyncio.get_running_loop().create_future()
        self._aborted = False
        self._quiesced = False
        self._begun = time.monotonic()

    def on_message(self, message: wire.Message) -> None:
        """A message of this push, after the offer."""
        if isinstance(message, wire.End) and not self._end.done():
            self._end.set_result(message)
        elif isinstance(message, wire.Abort):
            self._aborted = True

    async def run(self) -> bool:
        """True when the file was stored. Never raises for what the pusher or the disk does."""
        try:
            part = self._server.inbox.create(self._offer.dst, self._offer.nbytes, force=self._offer.force)
        except FileRefused as refusal:
            self._server.say(f"[yellow]refused[/yellow] {escape(str(refusal))}")
            await self.tell_end(wire.Refuse(self._offer.push, str(refusal)))
            return False
        try:
            await self._receive(part)
            return True
        except PusherGone as gone:
            self._quiesced = True
            self._server.say(f"[red]dropped[/red] {escape(self._offer.dst)}: {escape(str(gone))}; nothing was stored")
            if not self._aborted:  # a stopped pusher reads it once it continues; nobody waits for that
                with contextlib.suppress(CrossrailError):
                    self._submit(wire.Failed(self._offer.push, f"{gone}; nothing was stored"))
        except (CrossrailError, MemoryError) as error:
            self._server.say(f"[red]failed[/red] {escape(self._offer.dst)}: {escape(str(error))}; nothing was stored")
            await self.tell_end(wire.Failed(self._offer.push, str(error)))
        finally:
            part.discard()
        return False

    async def _receive(self, part: PartFile) -> None:
        slots = Slots(self._server.engine, self._offer.nbytes)
        task = self._server.progress.add_task(plain(self._offer.dst), total=self._offer.nbytes)
        try:
            await self.send(self._accept(slots))
            for index in range(slots.layout.segments):
                await self._await_segment(slots, index)
                await _in_thread(self._store, part, slots, index)
                self._server.progress.advance(task, slots.layout.segment_bytes(index))
                await self.send(wire.Stored(self._offer.push, index))
            await self._finish(part)
        finally:
            self._server.progress.remove_task(task)
            await _in_thread(slots.close, self._quiesced or self._lost())

    def _accept(self, slots: Slots) -> wire.Accept:
        imms = [counter.imm for counter in slots.counters]
        layout = slots.layout
        return wire.Accept(self._offer.push, slots.descriptor, layout.page_bytes, layout.slot_bytes, imms)

    async def _await_segment(self, slots: Slots, index: int) -> None:
        counter, pages = slots.counter(index), slots.layout.segment_pages(index)
        arrived, moved_at = 0, time.monotonic()
        while True:
            try:
                await counter.wait_async(pages, timeout_s=_LOOK_PERIOD_S)
                return
            except WaitTimeout:
                self._raise_if_gone()
            if counter.poll() != arrived:
                arrived, moved_at = counter.poll(), time.monotonic()
            self._raise_if_idle(moved_at)

    def _store(self, part: PartFile, slots: Slots, index: int) -> None:
        """On a thread of its own: disk and checksum."""
        data = slots.segment(index)
        self._digest.update(data)
        part.append(data)

    async def _finish(self, part: PartFile) -> None:
        waiting_since = time.monotonic()
        while not self._end.done():
            await asyncio.wait([self._end], timeout=_LOOK_PERIOD_S)
            if not self._end.done():
                self._raise_if_gone()
                self._raise_if_idle(waiting_since)
        self._quiesced = True  # every segment was counted in full, and there are no others
        sha256 = self._digest.hexdigest()
        if self._end.result().sha256 != sha256:
            raise FileRefused("the SHA-256 of what arrived is not that of what was sent")
        await _to_its_end(self._commit(part, sha256))  # also on Ctrl-C: the pusher of a stored file is told so

    async def _commit(self, part: PartFile, sha256: str) -> None:
        await asyncio.to_thread(part.commit, self._offer.mode)
        await self.tell_end(wire.Done(self._offer.push, self._offer.dst, sha256))
        self._report(sha256)

    def _report(self, sha256: str) -> None:
        seconds = time.monotonic() - self._begun
        self._server.say(
            f"[green]stored[/green] {escape(self._offer.dst)}: {format_bytes(self._offer.nbytes)} from "
            f"{escape(plain(self._peer.name))}, {rate_text(gb_per_s(self._offer.nbytes, seconds))}, SHA-256 ok {sha256}"
        )

    async def send(self, message: wire.Message) -> None:
        """PusherGone when it cannot be delivered, or is not taken for as long as a push may be idle."""
        idle_s = self._server.limits.idle_timeout_s
        transfer = self._submit(message)
        try:
            await in_time(_completion(transfer), idle_s)
        except asyncio.TimeoutError:
            transfer.cancel()
            raise PusherGone(f"{plain(self._peer.name)} took no message for {idle_s:g} s (was it stopped?)") from None
        except PeerLost:
            raise self._ended() from None
        except TransferError as error:
            raise PusherGone(str(error)) from None

    async def tell_end(self, message: wire.Message) -> None:
        """The last message of a push, which is over whether the pusher listens or not. A stopped pusher reads it later,
        if this process is still running.
        """
        with contextlib.suppress(asyncio.TimeoutError, CrossrailError):
            await in_time(_completion(self._submit(message)), _LAST_WORDS_TIMEOUT_S)

    def _submit(self, message: wire.Message) -> xr.Transfer:
        return self._server.engine.submit_send(self._peer, wire.encode(message))

    def _lost(self) -> bool:
        return self._server.engine.peer_state(self._peer) == "lost"

    def _raise_if_gone(self) -> None:
        if self._aborted:
            raise PusherGone(f"{plain(self._peer.name)} gave up")
        if self._lost():
            raise self._ended()

    def _ended(self) -> PusherGone:
        note = self._server.engine.explain(self._peer).note
        return PusherGone(f"{plain(self._peer.name)} (pid {self._peer.pid} of its host) is gone: {note}")

    def _raise_if_idle(self, since: float) -> None:
        idle_s = self._server.limits.idle_timeout_s
        if time.monotonic() - since > idle_s:
            raise FileRefused(f"nothing arrived for {idle_s:g} s")


async def _in_thread(work: Callable[..., None], *arguments: object) -> None:
    """Like asyncio.to_thread, but a cancelled caller waits for the thread first."""
    await _to_its_end(asyncio.to_thread(work, *arguments))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Whoever is cancelled waits for the work first: what it uses is closed next."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        running.exception()  # seen: nobody asks any more
        raise cancelled
    running.result()


async def _completion(transfer: xr.Transfer) -> None:
    await transfer


class Server:
    """Takes messages and hands them to sessions."""

    def __init__(self, engine: xr.Engine, inbox: Inbox, progress: Progress, limits: Limits) -> None:
        """The parts, all open; the caller closes them."""
        self.engine = engine
        self.inbox = inbox
        self.progress = progress
        self.limits = limits
        self._sessions: dict[tuple[xr.Address, int], Session] = {}
        self._told_version: Latest[tuple[xr.Address, int], None] = Latest(_MESSAGES_HELD)  # pushes of another version
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_result: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def say(self, markup: str) -> None:
        """Prints one line above the progress bars."""
        self.progress.console.print(markup, soft_wrap=True)

    async def run(self, *, once: bool) -> bool:
        """Serve until cancelled; with `once`, until the first push ended. Returns whether that one was stored."""
        receiving = asyncio.ensure_future(self._receive())
        waited: list[asyncio.Future[bool] | asyncio.Future[None]] = [receiving]
        if once:
            waited.append(self._first_result)
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
                raise CrossrailError("the engine was closed")
            return self._first_result.result()
        finally:
            await self._cancel_all(receiving)

    async def _cancel_all(self, receiving: asyncio.Future[None]) -> None:
        tasks = [receiving, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> None:
        with self.engine.submit_recvs(_MESSAGES_HELD, wire.MESSAGE_BYTES_MAX) as pool:
            async for message in pool:
                try:
                    self._dispatch(message.peer, wire.decode(message.data))
                except wire.ProtocolError as error:
                    sender = escape(plain(message.peer.name))
                    self.say(f"[yellow]ignored[/yellow] a message from {sender}: {escape(plain(str(error)))}")
                    if isinstance(error, wire.OtherVersion):
                        self._tell_version(message.peer, error.push)

    def _tell_version(self, peer: xr.Address, push: int | None) -> None:
        """Once per push. The pusher reads only our version from the refusal, and reports it where it was started."""
        if push is not None and (peer, push) not in self._told_version:
            self._told_version[peer, push] = None
            self.engine.submit_send(peer, wire.encode(wire.Refuse(push, "the server is of another version")))

    def _dispatch(self, peer: xr.Address, message: wire.Message) -> None:
        key = (peer, message.push)
        session = self._sessions.get(key)
        if isinstance(message, wire.Offer) and session is None:
            session = Session(self, peer, message)
            busy = len(self._sessions) >= self.limits.pushes_max
            self._spawn(self._refuse_busy(session, message) if busy else self._run(session, key))
            if not busy:
                self._sessions[key] = session
        elif session is not None:
            session.on_message(message)

    def _spawn(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, session: Session, key: tuple[xr.Address, int]) -> None:
        stored = False
        try:
            stored = await session.run()
        finally:
            del self._sessions[key]
            if not self._first_result.done():
                self._first_result.set_result(stored)

    async def _refuse_busy(self, session: Session, offer: wire.Offer) -> None:
        reason = f"{self.limits.pushes_max} pushes are under way already; try again later"
        await session.tell_end(wire.Refuse(offer.push, reason))

"""How packets reach other nodes: as messages between engines."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from functools import lru_cache, partial
from typing import Protocol

import crossrail as xr
from crossrail._closing import Closing
from crossrail._notify import LoopNotifier, weakly
from crossrail.errors import TransferError, UsageError

_BUFFERS = 256
_ADDRESSES_MAX = 4096

_engines: weakref.WeakSet[xr.Engine] = weakref.WeakSet()  # that had a wire


class Unreachable(xr.CrossrailError):
    """The other node is gone, or never was: nothing was delivered, or nobody can tell."""


class Wire(Protocol):
    """Carries packets between nodes; reliable or not, in any order. Addresses are bytes. Threads: the event loop's."""

    address: bytes
    packet_bytes_max: int

    def identity(self, address: bytes) -> bytes:
        """The 16 bytes that name this incarnation of a node and no other. UsageError for malformed addresses."""

    async def send(self, to: bytes, packet: bytes) -> None:
        """Returns when it was delivered, or was lost without a word. Raises Unreachable."""

    def post(self, to: bytes, packet: bytes) -> asyncio.Future[None]:
        """Like send(), as a future: sending begins at once, and cancelling the future prevents a later delivery."""
        return asyncio.ensure_future(self.send(to, packet))

    def packets(self) -> AsyncIterator[tuple[bytes, bytes]]:
        """(sender, packet), until cancelled or closed."""

    def is_lost(self, address: bytes) -> bool:
        """True when our engine has given that incarnation up: it has ended, or was frozen or cut off for long."""

    async def until_lost(self, address: bytes) -> None:
        """Returns once is_lost(), as soon as our engine knows."""

    def revive(self, address: bytes) -> None:
        """Forgets that a peer was lost, so that the next send() looks for it again. It may have been
        frozen or cut off.
        """


class EngineWire(Closing):
    """The messages of an engine, all of them: it opens the engine's receive pool. close() before the engine.

    One per engine, and one mailbox on it: others know packets and questions of an engine by their numbers. UsageError
    for a second one.
    """

    def __init__(self, engine: xr.Engine, packet_bytes_max: int = 60_000) -> None:
        if engine in _engines:
            raise UsageError(
                f"engine {engine.name!r} has already carried the messages of a service, and those of a second one "
                "would be dropped as repetitions. Next: go on with the first mailbox, or open another engine"
            )
        self.address = engine.address.to_bytes()
        self.packet_bytes_max = packet_bytes_max
        self._engine = engine
        self._pool = engine.submit_recvs(_BUFFERS, packet_bytes_max)
        _engines.add(engine)
        # An Address object remembers what the engine resolved it to, so each is made once. Peers come and go for weeks:
        # addresses not used for long are dropped, and with them what the engine keeps of them.
        self._resolved = lru_cache(_ADDRESSES_MAX)(xr.Address.from_bytes)
        self._waiting: set[asyncio.Event] = set()  # of until_lost(): set after events of the engine
        self._loop: asyncio.AbstractEventLoop | None = None  # theirs: the latest, where one was closed before

    def identity(self, address: bytes) -> bytes:
        return bytes.fromhex(self._resolved(address).incarnation)

    async def send(self, to: bytes, packet: bytes) -> None:
        await self.post(to, packet)

    def post(self, to: bytes, packet: bytes) -> asyncio.Future[None]:
        loop = LoopNotifier.running(self._engine)
        transfer = self._engine.submit_send(self._resolved(to), packet)
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cookie = loop.register(partial(_settle, sent, transfer))
        if transfer._notify(loop.notifier, cookie):
            sent.add_done_callback(partial(_let_go, loop, cookie, transfer))
        else:
            loop.forget(cookie)
            _settle(sent, transfer)
        return sent

    async def packets(self) -> AsyncIterator[tuple[bytes, bytes]]:
        async for message in self._pool:
            yield message.peer.to_bytes(), message.data

    def is_lost(self, address: bytes) -> bool:
        return self._engine.peer_state(self._resolved(address)) == "lost"

    async def until_lost(self, address: bytes) -> None:
        is_first, self._loop = self._loop is None, asyncio.get_running_loop()
        if is_first:
            self._engine._call_after_events(weakly(self._on_events))
        has_news = asyncio.Event()
        self._waiting.add(has_news)  # before the first look
        try:
            while not self.is_lost(address):
                has_news.clear()
                await has_news.wait()
        finally:
            self._waiting.remove(has_news)

    def _on_events(self) -> None:
        """Any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # it is closed, and nobody waits there any more
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for has_news in self._waiting:
            has_news.set()

    def revive(self, address: bytes) -> None:
        if self.is_lost(address):
            self._engine.forget_peer(self._resolved(address))

    def give_up(self, address: bytes) -> None:
        """Ends all that is under way to and from it: what it holds up is ours again. send() looks for it again."""
        self._engine.forget_peer(self._resolved(address))

    def close(self) -> None:
        """Stops receiving. Idempotent."""
        self._pool.close()


def _settle(sent: asyncio.Future[None], transfer: xr.Transfer) -> None:
    """Called when its transfer has completed."""
    if sent.done():
        return
    try:
        transfer.wait(0)
    except (TransferError, xr.EngineClosed) as error:
        # The rest is advice for those who drive an engine by hand: services look for each other again by themselves.
        sent.set_exception(Unreachable(str(error).partition(". Next: ")[0]))
    else:
        sent.set_result(None)


def _let_go(loop: LoopNotifier, cookie: int, transfer: xr.Transfer, sent: asyncio.Future[None]) -> None:
    """Cancels the delivery: a sender that has stopped waiting does not want it later either."""
    if sent.cancelled():
        loop.forget(cookie)
        transfer.cancel()

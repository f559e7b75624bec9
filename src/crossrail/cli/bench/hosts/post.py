"""How the two commands talk: messages between their engines; every wait has a deadline and watches the peer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import crossrail as xr
from crossrail.cli.bench.hosts import wire
from crossrail.errors import CrossrailError, PeerLost, TransferError, WaitTimeout

MESSAGES_HELD = 16
LOOK_S = 0.25
_SEND_S = 10.0

_M = TypeVar("_M", bound=wire.Message)


class PeerGone(CrossrailError):
    """The other side died, left, or is silent."""


class Post:
    """One run's conversation with its peer. Threads: one at a time."""

    def __init__(
        self, engine: xr.Engine, pool: xr.ReceivePool, peer: xr.Address, run: int, who: str,
        on_stranger: Callable[[xr.Message], None],
    ) -> None:  # fmt: skip
        """who: what messages call the peer. on_stranger: gets what comes from others meanwhile."""
        self.run = run
        self.peer = peer
        self._engine = engine
        self._pool = pool
        self._who = who
        self._on_stranger = on_stranger

    def send(self, message: wire.Message) -> None:
        """PeerGone when it cannot be delivered."""
        try:
            self._engine.submit_send(self.peer, wire.encode(message)).wait(_SEND_S)
        except (PeerLost, WaitTimeout, TransferError):
            raise self.gone() from None

    def next(self, timeout_s: float) -> wire.Message | None:
        """The next message of this run; None if there is none within that time, at most LOOK_S at a time.

        PeerGone if the peer is.
        """
        try:
            received = self._pool.recv(min(timeout_s, LOOK_S))
        except WaitTimeout:
            self.raise_if_gone()
            return None
        if received.peer != self.peer:
            self._on_stranger(received)
            return None
        message = wire.decode(received.data)
        return message if message.run == self.run else None

    def receive(self, kind: type[_M], timeout_s: float) -> _M:
        """The next message, which must be of that kind. CrossrailError for Refusal and Failed, and when it is late."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            message = self.next(left_s)
            if isinstance(message, kind):
                return message
            if message is not None:
                self.raise_if_failed(message)
        raise PeerGone(f"{self._who} did not answer within {timeout_s:g} s")

    def raise_if_failed(self, message: wire.Message) -> None:
        """CrossrailError for a message that is no answer."""
        if isinstance(message, (wire.Refusal, wire.Failed)):
            raise CrossrailError(f"{self._who} says: {_printable(message.reason)}")
        if isinstance(message, wire.Bye):
            raise PeerGone(f"{self._who} gave up")
        raise wire.ProtocolError(f"{self._who} sent a message out of turn: {type(message).__name__}")

    def raise_if_gone(self) -> None:
        """PeerGone when it died or left."""
        if self._engine.peer_state(self.peer) == "lost":
            raise self.gone()

    def gone(self) -> PeerGone:
        """The error to raise if the peer is gone."""
        return PeerGone(f"{self._who} (pid {self.peer.pid}) ended, or cannot be reached any more")

    def try_send(self, message: wire.Message) -> None:
        """Sends last words, if possible."""
        with contextlib.suppress(CrossrailError):
            self.send(message)


def _printable(text: str) -> str:
    """A stranger's text as one printable line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)

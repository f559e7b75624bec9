"""The bare TCP connection between the two processes, and both ends of the limits measured over it.

The connection is warm: it stays open from one measure to the next, as a link of the engine does.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from crossrail import _core
from crossrail.cli.bench.arrays import Indices, Memory
from crossrail.cli.child import Child

_HOST = "127.0.0.1"
_TIMEOUT_S = 10.0
_CONNECTS = 50
_CHUNKS_BYTES = tuple(size << 10 for size in (64, 128, 256, 512, 1024))


class Chunks(NamedTuple):
    """The most that one system call of a bare stream moves, at either end; 0: the whole message."""

    send_bytes: int
    recv_bytes: int

    def __str__(self) -> str:
        send, recv = ("whole" if nbytes == 0 else f"{nbytes >> 10} KiB" for nbytes in self)
        return f"bare: send {send}, recv {recv}"


def fastest_chunks(nbytes: int, cost_of: Callable[[Chunks], float], *, rounds: int) -> Chunks:
    """The fastest chunk sizes tried for messages of nbytes: first for receiving, then for sending.

    cost_of: runs the stream once. The least of `rounds` runs counts, taken in turn, so that a machine that changes
    speed meanwhile does not decide.
    """
    sizes = [0, *(size for size in _CHUNKS_BYTES if size < nbytes)]
    receiving = _cheapest([Chunks(0, size) for size in sizes], cost_of, rounds)
    return _cheapest([Chunks(size, receiving.recv_bytes) for size in sizes], cost_of, rounds)


def _cheapest(tried: Sequence[Chunks], cost_of: Callable[[Chunks], float], rounds: int) -> Chunks:
    least = dict.fromkeys(tried, math.inf)
    for _ in range(rounds):
        for chunks in tried:
            least[chunks] = min(least[chunks], cost_of(chunks))
    return min(tried, key=least.__getitem__)


class Sockets:
    """The first process's end, and the clock. Calls give nanoseconds; `wait` is "spin" or "block"."""

    def __init__(self, child: Child, *, quick: bool) -> None:
        """Connect to the peer."""
        self._child = child
        self._quick = quick
        self._unserved_port: int | None = None
        with _listener() as listener:
            child.start("socket_connect", port=listener.getsockname()[1])
            self._socket = listener.accept()[0]
        _core.bench.tune_socket(self._socket.fileno())
        child.finish()

    def close(self) -> None:
        """Our end; the peer's ends with the next one, or with the process."""
        self._socket.close()

    def stream(
        self,
        key: str,
        src: Memory,
        target: int,
        *,
        nbytes: int,
        count: int,
        window: int,
        wait: str = "spin",
        chunks: Chunks | None = None,
    ) -> int:
        """Messages through `src`, to the peer's region `target` of rig `key`. chunks: by default whole messages."""
        chunks = chunks or Chunks(0, 0)
        loop: dict[str, Any] = {"nbytes": nbytes, "count": count, "window": window, "wait": wait}
        self._child.start("socket_stream", key=key, region=target, chunk_bytes=chunks.recv_bytes, **loop)
        took_ns = _core.bench.socket_stream(
            self._socket.fileno(), src, sender=True, chunk_bytes=chunks.send_bytes, **loop
        )
        self._child.finish()
        return took_ns

    def pages(
        self,
        key: str,
        src: Memory,
        target: int,
        src_pages: Indices,
        dst_pages: Indices,
        *,
        page_bytes: int,
        batch_pages: int,
    ) -> int:
        """Sends all these pages to the peer's region `target` of rig `key`."""
        self._child.start(
            "socket_pages",
            key=key,
            region=target,
            page_count=len(dst_pages),
            page_bytes=page_bytes,
            batch_pages=batch_pages,
        )
        took_ns = _core.bench.socket_pages(
            self._socket.fileno(),
            src,
            sender=True,
            src_pages=src_pages,
            dst_pages=dst_pages,
            page_bytes=page_bytes,
            batch_pages=batch_pages,
        )
        self._child.finish()
        return took_ns

    def one_way_ns(self, nbytes: int, *, wait: str) -> float:
        """Half a round trip."""
        rounds = (20_000 if wait == "spin" else 5_000) // (10 if self._quick else 1)
        self._child.start("socket_ping_pong", nbytes=nbytes, rounds=rounds, wait=wait)
        took_ns = _core.bench.socket_ping_pong(
            self._socket.fileno(), first=True, nbytes=nbytes, rounds=rounds, wait=wait
        )
        self._child.finish()
        return took_ns / rounds / 2

    def message_ns(self, nbytes: int) -> float:
        """Nanoseconds of one message in a stream of small ones."""
        count = 100_000 if self._quick else 1_000_000
        self._child.start("socket_messages", nbytes=nbytes, count=count)
        took_ns = _core.bench.socket_messages(self._socket.fileno(), sender=True, nbytes=nbytes, count=count)
        self._child.finish()
        return took_ns / count

    def connect_ns(self) -> float:
        """A connect() to a port on which the peer listens: the handshake of the two kernels."""
        if self._unserved_port is None:
            self._unserved_port = self._child.call("socket_listen")
        took_ns = 0
        for _ in range(_CONNECTS):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
                _core.bench.tune_socket(client.fileno())
                begun = time.perf_counter_ns()
                client.connect((_HOST, self._unserved_port))
                took_ns += time.perf_counter_ns() - begun
                self._child.call("socket_accept", count=1)
        return took_ns / _CONNECTS


class SocketPeer:
    """The second process's end."""

    _socket: socket.socket | None = None
    _listener: socket.socket | None = None

    def connect(self, port: int) -> None:
        """Connects again, replacing an earlier connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        _core.bench.tune_socket(self._socket.fileno())
        self._socket.connect((_HOST, port))

    def stream(self, memory: Memory, *, nbytes: int, count: int, window: int, wait: str, chunk_bytes: int) -> int:
        """Take messages into the memory."""
        return _core.bench.socket_stream(
            self._fd(),
            memory,
            sender=False,
            nbytes=nbytes,
            count=count,
            window=window,
            wait=wait,
            chunk_bytes=chunk_bytes,
        )

    def pages(self, memory: Memory, *, page_count: int, page_bytes: int, batch_pages: int) -> int:
        """Take pages to where the sender says."""
        unused = np.zeros(page_count, np.int64)
        return _core.bench.socket_pages(
            self._fd(),
            memory,
            sender=False,
            src_pages=unused,
            dst_pages=unused,
            page_bytes=page_bytes,
            batch_pages=batch_pages,
        )

    def ping_pong(self, *, nbytes: int, rounds: int, wait: str) -> int:
        """Send each back."""
        return _core.bench.socket_ping_pong(self._fd(), first=False, nbytes=nbytes, rounds=rounds, wait=wait)

    def messages(self, *, nbytes: int, count: int) -> int:
        """Take small messages."""
        return _core.bench.socket_messages(self._fd(), sender=False, nbytes=nbytes, count=count)

    def listen(self) -> int:
        """Listens on a port of its own, and returns it."""
        if self._listener is None:
            self._listener = _listener()
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self, count: int) -> None:
        """Take so many connections and close them."""
        assert self._listener is not None
        for _ in range(count):
            self._listener.accept()[0].close()

    def _fd(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    _core.bench.tune_socket(listener.fileno())
    listener.settimeout(_TIMEOUT_S)
    listener.bind((_HOST, 0))
    listener.listen()
    return listener

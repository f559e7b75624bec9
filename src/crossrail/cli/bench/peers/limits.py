"""The limits that the libraries are compared with: one thread's memcpy, and a bare TCP socket used from Python."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import numpy as np

from crossrail import _core
from crossrail.cli.bench.peers.base import Memory, Pages, Role, Side, private_memory

_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 60.0
_PAGES_PER_CALL = 256  # of sendmsg: below IOV_MAX


class Memcpy(Side):
    """The sender copies within its own memory; the receiver does nothing."""

    can_submit = False

    def open(self) -> bytes:
        """Two pools in one process."""
        self.memory = private_memory(self.memory_bytes)
        self._target: Memory = private_memory(self.memory_bytes)
        if self.is_sender:
            self._target[:] = 0
        return b""

    def meet(self, theirs: bytes) -> None:
        """Does nothing: there is nobody to meet."""

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> None:
        """One copy."""
        np.copyto(self._target[dst_offset : dst_offset + nbytes], self.memory[src_offset : src_offset + nbytes])

    def finish(self, handle: None) -> None:
        """Does nothing: the write is done."""

    def send_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:
        """A native loop over the pages, as a library would have it."""
        _core.bench.copy_pages(self._target[: self.pool_bytes], self.memory[: self.pool_bytes], dst, src, page_bytes)

    def message(self, nbytes: int) -> None:
        """Does nothing: nobody waits for it."""

    def take(self, nbytes: int) -> None:
        """Nothing comes."""

    def close(self) -> None:
        """Nothing to close."""


class Socket(Side):
    """One blocking connection with TCP_NODELAY: sendall, and recv_into the place where the bytes shall be."""

    can_submit = False

    def __init__(self, role: Role, pool_bytes: int) -> None:
        super().__init__(role, pool_bytes)
        self._listener: socket.socket | None = None
        self._stream: socket.socket | None = None

    def open(self) -> bytes:
        """The receiver listens."""
        self.memory = private_memory(self.memory_bytes)
        if self.is_sender:
            return b"null"
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._listener.settimeout(_TIMEOUT_S)
        return json.dumps(self._listener.getsockname()).encode()

    def meet(self, theirs: bytes) -> None:
        """The sender connects."""
        if self._listener is None:
            self._stream = socket.create_connection(tuple(json.loads(theirs)), _TIMEOUT_S)
        else:
            self._stream, _ = self._listener.accept()
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.settimeout(None)  # not one poll for each call; the parent has the deadline

    def _connection(self) -> socket.socket:
        assert self._stream is not None
        return self._stream

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> None:
        """Into the kernel's buffer."""
        self._connection().sendall(self.memory.data[src_offset : src_offset + nbytes])

    def finish(self, handle: None) -> None:
        """Does nothing: the data has been sent."""

    def end_of_stream(self) -> None:
        """The receiver counts bytes."""

    def take_stream(self, places: Sequence[tuple[int, int]], nbytes: int, count: int, window: int) -> None:
        """One after another."""
        for index in range(count):
            self._receive(places[index % len(places)][1], nbytes)

    def send_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:
        """Gathered by the kernel."""
        stream, pages = self._connection(), self.memory[: self.pool_bytes].reshape(-1, page_bytes)
        for first in range(0, len(src), _PAGES_PER_CALL):
            parts = [memoryview(pages[page]) for page in src[first : first + _PAGES_PER_CALL]]
            while parts:
                sent = stream.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]

    def take_pages(self, page_bytes: int, dst: Pages) -> None:
        """One after another."""
        for page in dst.tolist():
            self._receive(page * page_bytes, page_bytes)

    def message(self, nbytes: int) -> None:
        """Like any bytes."""
        self.post(self.outgoing, self.incoming, nbytes)

    def take(self, nbytes: int) -> None:
        """Likewise."""
        self._receive(self.incoming, nbytes)

    def _receive(self, offset: int, nbytes: int) -> None:
        stream, view, had = self._connection(), self.memory.data[offset : offset + nbytes], 0
        while had < nbytes:
            more = stream.recv_into(view[had:], 0, socket.MSG_WAITALL)
            if more == 0:
                raise ConnectionError("the other side closed the connection")
            had += more

    def close(self) -> None:
        """Both sockets."""
        for each in (self._stream, self._listener):
            if each is not None:
                each.close()

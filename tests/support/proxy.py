"""A TCP relay between two engines that can cut, stall, delay or corrupt what passes. One thread, one selector."""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import crossrail as xr
from tests.support.tcp_wire import endpoints_of, reset, with_ports

CHUNK_BYTES = 64 << 10


class _Pipe:
    """One direction of one connection: what was read from `source` and not yet written to `sink`."""

    def __init__(self, source: socket.socket, sink: socket.socket, is_forward: bool) -> None:
        self.source = source
        self.sink = sink
        self.is_forward = is_forward  # from who connected to who was connected to
        self.late: deque[tuple[float, bytes]] = deque()  # what was read, and when it is passed on; b"": the end
        self.waiting = b""
        self.passed_bytes = 0
        self.is_read = False  # to its end
        self.pauses_until_s = 0.0
        self.ended = False

    def read(self, delay_s: float) -> bytes | None:
        """The data to pass on now. None: nothing yet, b"": end of stream."""
        if not self.is_read:
            with contextlib.suppress(BlockingIOError):
                data = self.source.recv(CHUNK_BYTES)
                self.is_read = not data
                self.late.append((time.monotonic() + delay_s, data))
        if not self.late or time.monotonic() < self.late[0][0]:
            return None
        return self.late.popleft()[1]


class _Relay:
    """A connection that was made through the proxy."""

    def __init__(self, near: socket.socket, far: socket.socket, budget_bytes: int | None, is_abrupt: bool) -> None:
        self.near = near
        self.far = far
        self.budget_bytes = budget_bytes  # cut once so many have passed, both directions together
        self.ends_at_s: float | None = None  # once they have
        # With a reset, data that an engine has not read yet is lost too; otherwise it still reads what has passed.
        self.is_abrupt = is_abrupt
        self.pipes = (_Pipe(near, far, True), _Pipe(far, near, False))


class TcpProxy:
    """Listens on the target's IP address and forwards connections to the target.

    Threads: any may call. Owner: its creator calls close().
    """

    def __init__(self, ip: str, port: int) -> None:
        self._target = (ip, port)
        self._listener = socket.create_server((ip, 0), backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.RLock()
        self._relays: list[_Relay] = []
        self._stalled = False
        self._stalls_at_bytes: int | None = None  # of all that passes
        self._passed_bytes = 0
        self.delay_s = 0.0  # of what passes, in either direction: half a round trip
        self.bytes_per_s: float | None = None  # of each direction of each connection
        self._forgotten: list[_Relay] = []
        self._away = False
        self._corruptions: list[tuple[bool, int]] = []
        self._stop = False
        self.next_budget: Callable[[], int | None] = lambda: None
        self.swallows_s = 0.0  # for so long it takes what comes beyond the budget, and passes nothing on
        self.connections_made = 0
        self.tap: bytearray | None = None  # all that passes, if it is wanted
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    # --- faults ---

    def shrink_buffers(self, nbytes: int) -> None:
        """Shrinks the proxy's receive buffer of connections accepted from now on."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)

    def cut(self, spare: Sequence[object] = ()) -> int:
        """Resets every connection at both ends; what is on its way is lost. Returns how many there were."""
        with self._lock:
            relays = [relay for relay in self._relays if relay not in spare]
            for relay in relays:
                self._reset(relay)
        return len(relays)

    def connections(self) -> list[object]:
        """The open connections, oldest first: to be named to other calls."""
        with self._lock:
            return list(self._relays)

    def stall(self, stalled: bool = True) -> None:
        """Forwards nothing until told otherwise; connections stay open, and new ones are accepted."""
        with self._lock:
            self._stalled, self._stalls_at_bytes = stalled, None
        self._wake_write.send(b"x")

    def stall_after(self, nbytes: int) -> None:
        """Stalls once so many bytes have passed from the start, in both directions of all connections."""
        with self._lock:
            self._stalls_at_bytes = nbytes

    def forget(self, spare: Sequence[object] = ()) -> None:
        """Like a restarted firewall: drops what existing connections carry, and tells nobody. New ones pass."""
        with self._lock:
            self._forgotten = [relay for relay in self._relays if relay not in spare]

    def go_away(self, away: bool = True) -> None:
        """Cuts all connections and resets new ones, until told otherwise."""
        with self._lock:
            self._away = away
            if away:
                self.cut()

    def corrupt(self, *, forward: bool, after_bytes: int) -> None:
        """Flips the bits of one byte of the next connection, `after_bytes` into that direction."""
        with self._lock:
            self._corruptions.append((forward, after_bytes))

    @property
    def is_stalled(self) -> bool:
        with self._lock:
            return self._stalled

    def all_passed_bytes(self) -> int:
        """From the start, in both directions of all connections."""
        with self._lock:
            return self._passed_bytes

    def passed_bytes(self) -> list[tuple[int, int]]:
        """(forward, backward) of every open connection."""
        with self._lock:
            return [(relay.pipes[0].passed_bytes, relay.pipes[1].passed_bytes) for relay in self._relays]

    def close(self) -> None:
        with self._lock:
            self._stop = True
        self._wake_write.send(b"x")
        self._thread.join(10)
        self.cut()
        for item in (self._listener, self._wake_read, self._wake_write, self._selector):
            item.close()

    # --- the thread ---
    def _run(self) -> None:
        while not self._stop:
            events = self._selector.select(0.01)
            with self._lock:
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_read.recv(100)
                if self.bytes_per_s is not None:
                    time.sleep(0.001)  # what waits would be shown at once
                if not self._stalled:
                    for relay in list(self._relays):
                        if relay not in self._forgotten and not self._stalled:
                            self._pass_on(relay)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            near, _ = self._listener.accept()
            if self._away:
                reset(near)
                return
            try:
                far = socket.create_connection(self._target, 5)
            except OSError:
                reset(near)
                return
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.bytes_per_s is not None:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
                self._selector.register(end, selectors.EVENT_READ)
            self.connections_made += 1
            self._relays.append(_Relay(near, far, self.next_budget(), self.connections_made % 2 == 0))

    def _pass_on(self, relay: _Relay) -> None:
        try:
            for pipe in relay.pipes:
                if relay in self._relays and not self._stalled:
                    self._move(relay, pipe)
        except OSError:
            self._reset(relay)
            return
        if relay in self._relays and all(pipe.ended and not pipe.waiting for pipe in relay.pipes):
            self._drop(relay)

    def _move(self, relay: _Relay, pipe: _Pipe) -> None:
        for _ in range(16):
            if time.monotonic() < pipe.pauses_until_s:
                return
            if not pipe.waiting:
                if pipe.ended:
                    return
                data = pipe.read(self.delay_s)
                if pipe.is_read:
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(pipe.source)
                if data is None:
                    return
                if not data:
                    pipe.ended = True
                    with contextlib.suppress(OSError):
                        pipe.sink.shutdown(socket.SHUT_WR)
                    return
                if self.tap is not None:
                    self.tap += data
                pipe.waiting = self._damaged(pipe, data)
            room = len(pipe.waiting)
            if relay.budget_bytes is not None:
                room = min(room, relay.budget_bytes - sum(p.passed_bytes for p in relay.pipes))
                if room <= 0:
                    relay.ends_at_s = relay.ends_at_s or time.monotonic() + self.swallows_s
                    if time.monotonic() < relay.ends_at_s:
                        pipe.pauses_until_s = time.monotonic() + len(pipe.waiting) / (self.bytes_per_s or 1e9)
                        pipe.waiting = b""
                        return
                    if relay.is_abrupt:
                        raise ConnectionResetError("the budget of this connection")
                    self._drop(relay)
                    return
            if self._stalls_at_bytes is not None:
                room = min(room, self._stalls_at_bytes - self._passed_bytes)
                if room <= 0:
                    self._stalled = True
                    return
            try:
                sent = pipe.sink.send(pipe.waiting[:room])
            except BlockingIOError:
                return
            pipe.passed_bytes += sent
            self._passed_bytes += sent
            if self.bytes_per_s is not None:
                pipe.pauses_until_s = time.monotonic() + sent / self.bytes_per_s
            pipe.waiting = pipe.waiting[sent:]

    def _damaged(self, pipe: _Pipe, data: bytes) -> bytes:
        for item in list(self._corruptions):
            forward, at = item
            if forward is pipe.is_forward and pipe.passed_bytes <= at < pipe.passed_bytes + len(data):
                self._corruptions.remove(item)
                index = at - pipe.passed_bytes
                data = data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]
        return data

    def _reset(self, relay: _Relay) -> None:
        self._forget(relay)
        reset(relay.near)
        reset(relay.far)

    def _drop(self, relay: _Relay) -> None:
        self._forget(relay)
        relay.near.close()
        relay.far.close()

    def _forget(self, relay: _Relay) -> None:
        self._relays.remove(relay)
        for end in (relay.near, relay.far):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)


class ProxiedAddress:
    """An engine's address with a proxy before each of its rails."""

    def __init__(self, address: xr.Address) -> None:
        self.proxies = [TcpProxy(ip, port) for ip, port in endpoints_of(address.to_bytes())]
        self.address = self.instead_of(address)

    def instead_of(self, address: xr.Address) -> xr.Address:
        """A proxied address of another engine that listens, or listened, where the first one does."""
        return xr.Address.from_bytes(with_ports(address.to_bytes(), [proxy.port for proxy in self.proxies]))

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()


@contextlib.contextmanager
def proxied(address: xr.Address) -> Iterator[ProxiedAddress]:
    made = ProxiedAddress(address)
    try:
        yield made
    finally:
        made.close()

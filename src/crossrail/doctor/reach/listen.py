"""The listening side. Threads: one that accepts, one per connection; `close` ends and joins all of them.

What a stranger can make it do: send and swallow zeros for at most ten seconds a request, on at most
CONNECTIONS_PER_HOST_MAX connections at a time. Every connection has a deadline from its first byte to its last.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from crossrail._text import rate_text
from crossrail.doctor.reach import wire
from crossrail.doctor.reach.rails import Rail
from crossrail.doctor.reach.wire import Frame, Kind, Status, WireError
from crossrail.errors import TransportError

CONNECTIONS_MAX = 32
CONNECTIONS_PER_HOST_MAX = 8
_BACKLOG = 64
_BUFFER_BYTES = 1 << 20
_LINES_MAX = 500
_REFUSAL_S = 1.0
_OTHER_PORT = "choose another port: crossrail doctor --listen PORT"
_REMEDIES = {
    errno.EADDRINUSE: f"ss -ltnp shows who has it; {_OTHER_PORT}",
    errno.EACCES: f"ports of such numbers are for root (net.ipv4.ip_unprivileged_port_start); {_OTHER_PORT}",
}


class Listener:
    """Answers peers until closed. A context manager.

    Invariant: every open connection is in _connections; a thread of ours serves it and takes it out.
    """

    def __init__(
        self,
        port: int,
        rails: Callable[[str], list[Rail]],
        version: str,
        say: Callable[[str], None] = lambda _: None,
        *,
        bind: str = "",
    ) -> None:
        """port: 0 for any. rails: what to tell a peer that connected to the given address of ours.

        say: gets lines for people, from any thread, after what they are about; it neither blocks nor raises.
        bind: the one address to listen on; all of them without. It also listens at a port that the kernel chooses, as
        engines do that are given none: a firewall may pass one and not the other.
        """
        self._rails = rails
        self._version = version
        self._say = say
        self._lines_left = _LINES_MAX
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, str] = {}
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._zeros = memoryview(bytes(_BUFFER_BYTES))
        self._socket = _listen(port, bind)
        self._other = _listen(0, bind)
        self._wake_receive, self._wake_send = socket.socketpair()
        self._accepting = threading.Thread(target=self._accept_all, name="doctor-accept", daemon=True)
        self._accepting.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    @property
    def other_port(self) -> int:
        """The one that the kernel chose."""
        return int(self._other.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every connection and thread. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._wake_send.close()
        self._accepting.join()
        while True:
            with self._lock:
                threads = list(self._threads)
            if not threads:
                break
            for thread in threads:
                thread.join()
        self._socket.close()
        self._other.close()
        self._wake_receive.close()

    def _accept_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._other, selectors.EVENT_READ)
            selector.register(self._wake_receive, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select() if isinstance(key.fileobj, socket.socket)}
                if self._wake_receive in ready:
                    return
                for listening in ready & {self._socket, self._other}:
                    self._accept(listening)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, address = listening.accept()
        except OSError:  # it went away again, or there is no file left for it
            time.sleep(0.01)
            return
        self._admit(connection, str(address[0]).removeprefix("::ffff:"))

    def _admit(self, connection: socket.socket, host: str) -> None:
        with self._lock:
            per_host = Counter(self._connections.values())[host]
            full = len(self._connections) >= CONNECTIONS_MAX or per_host >= CONNECTIONS_PER_HOST_MAX
            if not self._closing and not full:
                thread = threading.Thread(target=self._serve, args=(connection, host), name="doctor-serve", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads to have: that connection is one too many
                    connection.close()
                    return
                # Under the lock, and not earlier: close() joins the threads that it finds here, and each thread leaves
                # under this lock.
                self._connections[connection] = host
                self._threads.add(thread)
                return
        # Into the empty buffer of a new socket, without waiting.
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(wire.encode(Frame(Kind.RAILS, 0, Status.BUSY, self._version)))
        connection.close()

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                self._answer(connection, host)
        except (WireError, OSError) as error:
            self._tell(f"{host}: refused or broken off ({error})")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._threads.discard(threading.current_thread())

    def _answer(self, connection: socket.socket, host: str) -> None:
        begun = time.monotonic()
        request = wire.decode(wire.receive_exactly(connection, wire.FRAME_BYTES, begun + wire.FRAME_DEADLINE_S))
        status = wire.check_request(request)
        if status is not Status.OK:
            refusal = Frame(request.kind, 0, status, self._version)
            wire.send_all(connection, wire.encode(refusal), time.monotonic() + _REFUSAL_S)
            self._tell(f"{host}: {_refusal(status, request)}")
            return
        serve = {
            Kind.RAILS: self._send_rails,
            Kind.PING: self._echo,
            Kind.SINK: self._sink,
            Kind.SOURCE: self._source,
            Kind.PORT: self._send_port,
            Kind.SEEN: self._send_seen,
        }
        serve[Kind(request.kind)](connection, host, request)

    def _send_rails(self, connection: socket.socket, host: str, request: Frame) -> None:
        here = str(connection.getsockname()[0]).removeprefix("::ffff:")
        rails = wire.encode_rails(self._rails(here))
        answer = wire.encode(Frame(Kind.RAILS, len(rails), version=self._version))
        wire.send_all(connection, answer + rails, time.monotonic() + wire.GRACE_S)
        if request.version == self._version:
            self._tell(f"{host} (crossrail {request.version}) begins")
        else:
            self._tell(
                f"{host} begins. It runs crossrail {request.version or 'unknown'}, this side {self._version}: "
                "use one version"
            )

    def _send_port(self, connection: socket.socket, host: str, request: Frame) -> None:
        answer = wire.encode(Frame(Kind.PORT, self.other_port, version=self._version))
        wire.send_all(connection, answer, time.monotonic() + wire.GRACE_S)

    def _send_seen(self, connection: socket.socket, host: str, request: Frame) -> None:
        text = host.encode("ascii", "replace")[: wire.ADDRESS_BYTES_MAX]
        answer = wire.encode(Frame(Kind.SEEN, len(text), version=self._version))
        wire.send_all(connection, answer + text, time.monotonic() + wire.GRACE_S)

    def _echo(self, connection: socket.socket, host: str, request: Frame) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + wire.GRACE_S
        self._accept_request(connection, request, deadline)
        for _ in range(request.value):
            wire.send_all(connection, wire.receive_exactly(connection, wire.FRAME_BYTES, deadline), deadline)

    def _sink(self, connection: socket.socket, host: str, request: Frame) -> None:
        deadline = time.monotonic() + request.value / 1000 + wire.GRACE_S
        pair = _pair(connection, "<-")
        self._accept_request(connection, request, deadline)
        room, total, begun = bytearray(_BUFFER_BYTES), 0, time.monotonic()
        while True:
            wire.arm(connection, deadline)
            count = connection.recv_into(room)
            if count == 0:
                break
            total += count
        seconds = time.monotonic() - begun
        wire.send_all(connection, wire.encode(Frame(Kind.SINK, total, version=self._version)), deadline)
        self._tell(f"{pair}: received {rate_text(total / max(seconds, 1e-9) / 1e9)}")

    def _source(self, connection: socket.socket, host: str, request: Frame) -> None:
        begun, pair = time.monotonic(), _pair(connection, "->")
        deadline = begun + request.value / 1000 + wire.GRACE_S
        self._accept_request(connection, request, deadline)
        total = 0
        while time.monotonic() < begun + request.value / 1000:
            wire.arm(connection, deadline)
            total += connection.send(self._zeros)
        connection.shutdown(socket.SHUT_WR)
        seconds = time.monotonic() - begun
        self._tell(f"{pair}: sent {rate_text(total / max(seconds, 1e-9) / 1e9)}")
        # Wait until the peer has everything: closing now could reset data in flight.
        with contextlib.suppress(WireError):
            wire.receive_exactly(connection, 1, deadline)

    def _accept_request(self, connection: socket.socket, request: Frame, deadline: float) -> None:
        wire.send_all(connection, wire.encode(Frame(request.kind, request.value, version=self._version)), deadline)

    def _tell(self, line: str) -> None:
        with self._lock:
            if self._closing or self._lines_left <= 0:
                return
            self._lines_left -= 1
            last = self._lines_left == 0
        self._say(line + (" (and no more lines from here on)" if last else ""))


def _refusal(status: Status, request: Frame) -> str:
    if status is Status.OTHER_PROTOCOL:
        return (
            f"refused: it runs crossrail {request.version or 'unknown'} with protocol {request.protocol}, this "
            f"side speaks {wire.PROTOCOL}; use one version on both sides"
        )
    return f"refused a request out of bounds (kind {request.kind}, value {request.value})"


def _pair(connection: socket.socket, arrow: str) -> str:
    here, there = (
        str(name[0]).removeprefix("::ffff:") for name in (connection.getsockname(), connection.getpeername())
    )
    return f"{here} {arrow} {there}"


def _listen(port: int, bind: str) -> socket.socket:
    """IPv6 and IPv4 in one socket where the machine has both."""
    dual = not bind and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    except OSError as error:
        text = f"cannot listen on port {port}: {error.strerror or error}"
        raise TransportError("bind", error.errno or 0, text, _REMEDIES.get(error.errno or 0, "")) from None

"""The connecting side: finds the peer, then measures each pair of addresses.

Every wait has a deadline. What the network does raises nothing: it becomes a state of the pair.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any

from crossrail.doctor.reach import wire
from crossrail.doctor.reach.rails import Rail
from crossrail.doctor.reach.wire import Frame, Kind, Status, WireError

PINGS = 20
_PINGS_S = 1.5  # for all of them: the listener allows GRACE_S
STREAM_PAIRS_MAX = 16
UNKNOWN = "?"  # the interface of an address that the peer does not know to be its own
_CONNECT_DEADLINE_S = 3.0
_RESOLVE_DEADLINE_S = 5.0
_BUSY_TRIES = 5
_BUSY_PAUSE_S = 0.2
_BUFFER_BYTES = 1 << 20
_QUEUED_BYTES_MAX = 64 << 20  # in the sockets of a stream: who sends more after its time does not mean to end
_ADDRESSES_MAX = 16
_PORT_MAX = 65535
_BEFORE_THE_PEER_S = 0.5  # we give up a stream before the peer does, and so learn why
_IP_MTU, _IPV6_MTU = 14, 24
_TCP_INFO_BYTES = 128
_SND_MSS_OFFSET, _TOTAL_RETRANS_OFFSET, _BYTES_ACKED_OFFSET = 16, 100, 120


class Unreached(Exception):
    """state: "refused", "timeout", "unreachable", "broken", "busy" or "version"; the text says more."""

    def __init__(self, state: str, text: str) -> None:
        super().__init__(text)
        self.state = state


class OtherVersion(Unreached):
    """The peer speaks another protocol. version: its version of crossrail."""

    def __init__(self, answer: Frame) -> None:
        super().__init__("version", f"it runs crossrail {answer.version or 'unknown'} with protocol {answer.protocol}")
        self.version = answer.version


@dataclass(frozen=True)
class Attempt:
    """One address that the name resolved to. state: "ok" or one of Unreached."""

    address: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Pair:
    """One address here, one there.

    state: "ok", "stalled" (small messages pass, data does not), "ended" (nobody listened any more) or one of Unreached.
    rtt_us: median of PINGS, of fewer where each takes long. mtu: of the path, as the kernel knows it; mss: payload of a
    segment. Rates: of one stream, None when not measured. retransmits: segments sent again while sending.
    """

    here: Rail
    there: Rail
    state: str = "ok"
    detail: str = ""
    rtt_us: float | None = None
    mtu: int | None = None
    mss: int | None = None
    out_gb_per_s: float | None = None
    in_gb_per_s: float | None = None
    retransmits: int | None = None

    @property
    def name(self) -> str:
        """The pair's name, for sentences."""
        return f"{self.here} -> {self.there}"


@dataclass
class Matrix:
    """All results. error: why nothing was measured, or empty. peer_version: its version of crossrail.

    other: the first pair that connects, tried at a port there that the kernel chose, other_port; None: not tried.
    seen_as: (address here, what the other side sees instead) if something on the path translates addresses; else None.
    """

    target: str
    port: int
    attempts: list[Attempt] = field(default_factory=list)
    peer_version: str = ""
    rails_there: list[Rail] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    error: str = ""
    other: Pair | None = None
    other_port: int = 0
    seen_as: tuple[str, str] | None = None


def measure(
    target: str,
    port: int,
    rails_here: Callable[[bool], list[Rail]],
    version: str,
    *,
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
) -> Matrix:
    """Runs all steps. rails_here(loopback): addresses of this machine. seconds: of each stream, each way.

    say: told what is going on.
    """
    matrix = Matrix(target, port)
    prober = _Prober(port, version, seconds)
    say(f"looking up {target}")
    try:
        addresses = resolve(target, port)
    except Unreached as unreached:
        matrix.error = str(unreached)
        return matrix
    reached = ""
    for address in addresses:
        say(f"connecting to {address}")
        attempt = prober.meet(matrix, address)
        matrix.attempts.append(attempt)
        if attempt.state == "ok" and not reached:
            reached = address
    if reached:
        loopback = ip_address(reached.partition("%")[0]).is_loopback
        here = rails_here(loopback)
        prober.own_addresses = {rail.address for rail in here}
        matrix.pairs = _measure_pairs(prober, possible_pairs(here, matrix.rails_there, reached), say)
        matrix.seen_as = prober.seen_as(reached)
        matrix.other_port = prober.other_port(reached)
        pair = next((pair for pair in matrix.pairs if pair.state == "ok"), None)
        if matrix.other_port and pair is not None:
            say(f"connecting to port {matrix.other_port}")
            matrix.other = prober.at(matrix.other_port).probe(Pair(pair.here, pair.there))
    return matrix


def resolve(target: str, port: int) -> list[str]:
    """Addresses of a name, looked up in a thread of its own: the C library's resolver has no deadline."""
    found: list[str] = []
    failure: list[str] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(target, port, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(_address(entry[4]) for entry in entries))
        except (OSError, UnicodeError) as error:
            failure.append(str(getattr(error, "strerror", None) or error))

    thread = threading.Thread(target=look_up, daemon=True, name="doctor-resolve")
    thread.start()
    thread.join(_RESOLVE_DEADLINE_S)
    if thread.is_alive():
        text = f"looking up {target!r} took more than {_RESOLVE_DEADLINE_S:g} s: no name server answers"
        raise Unreached("timeout", text)
    if not found:
        raise Unreached(
            "unreachable", f"{target!r} is not the name of a host: {failure[0] if failure else 'no address'}"
        )
    return found[:_ADDRESSES_MAX]


def _address(place: tuple[Any, ...]) -> str:
    """A link-local IPv6 address with its interface, as in fe80::1%eth0; by number if sockets would not
    accept the name.
    """
    scope = place[3] if len(place) > 3 else 0
    if not scope:
        return str(place[0])
    name = socket.if_indextoname(scope)
    return f"{place[0]}%{name if name.isascii() else scope}"


def possible_pairs(here: Sequence[Rail], there: Sequence[Rail], reached: str) -> list[Pair]:
    """All pairs of our and their addresses with the same IP version. reached: where the peer answered; engines cannot
    use a link-local address.
    """
    loopback = ip_address(reached).is_loopback
    # A peer may name any address; loopback ones would lead to ourselves.
    there = [rail for rail in there if rail.is_loopback == loopback]
    is_known = any(rail.address == reached for rail in there)
    if not is_known and not ip_address(reached).is_link_local:  # it is behind address translation
        there = [Rail(UNKNOWN, reached, 0, None), *there]
    return [Pair(a, b) for a in here for b in there[:_ADDRESSES_MAX] if a.is_ipv6 == b.is_ipv6]


def _measure_pairs(prober: _Prober, pairs: list[Pair], say: Callable[[str], None]) -> list[Pair]:
    measured = []
    for index, pair in enumerate(pairs):
        say(f"connecting {pair.name} ({index + 1} of {len(pairs)})")
        measured.append(prober.probe(pair))
    chosen = choose_streams(measured)
    for index, pair in enumerate(chosen):
        say(f"measuring {pair.name} ({index + 1} of {len(chosen)})")
        measured[measured.index(pair)] = prober.stream(pair)
    return measured


def choose_streams(pairs: Sequence[Pair], most: int = STREAM_PAIRS_MAX) -> list[Pair]:
    """The pairs worth a stream, at most `most`: each address once first, neighbours before others."""
    able = [pair for pair in pairs if pair.state == "ok"]
    able.sort(key=lambda pair: -_common_bits(pair.here.address, pair.there.address))
    first: list[Pair] = []
    seen: set[tuple[str, str]] = set()
    for pair in able:
        ends = {("here", pair.here.address), ("there", pair.there.address)}
        if not ends <= seen:
            first.append(pair)
            seen |= ends
    rest = [pair for pair in able if pair not in first]
    return [*first, *rest][:most]


def _common_bits(a: str, b: str) -> int:
    x, y = ip_address(a), ip_address(b)
    return x.max_prefixlen - (int(x) ^ int(y)).bit_length()


class _Prober:
    """Makes the requests of wire.py to one peer."""

    def __init__(self, port: int, version: str, seconds: float) -> None:
        self.own_addresses: set[str] = set()
        self._port = port
        self._version = version
        self._seconds = seconds

    def meet(self, matrix: Matrix, address: str) -> Attempt:
        """Asks for the peer's rails."""
        try:
            connection, answer = self._request(None, address, Kind.RAILS, 0)
            with connection:
                matrix.peer_version = answer.version
                if answer.value > wire.RAILS_BYTES_MAX:
                    raise WireError("its list of addresses is too long")
                data = wire.receive_exactly(connection, answer.value, time.monotonic() + wire.GRACE_S)
            matrix.rails_there = wire.decode_rails(data)
        except OtherVersion as other:
            matrix.peer_version = other.version
            return Attempt(address, other.state, str(other))
        except Unreached as unreached:
            return Attempt(address, unreached.state, str(unreached))
        except WireError as error:
            return Attempt(address, "broken", str(error))
        return Attempt(address, "ok")

    def seen_as(self, address: str) -> tuple[str, str] | None:
        """(where a connection leaves, where the peer sees it come from), unless they are the same."""
        try:
            connection, answer = self._request(None, address, Kind.SEEN, 0)
            with connection:
                if answer.value > wire.ADDRESS_BYTES_MAX:
                    return None
                data = wire.receive_exactly(connection, answer.value, time.monotonic() + wire.GRACE_S)
                here = str(connection.getsockname()[0]).partition("%")[0]
            there = wire.decode_address(data)
        except (Unreached, WireError):  # one of an older version
            return None
        return None if here == there else (here, there)

    def other_port(self, address: str) -> int:
        """Another port on which it listens; 0: it does not say."""
        try:
            connection, answer = self._request(None, address, Kind.PORT, 0)
            connection.close()
        except (Unreached, WireError):
            return 0
        return answer.value if answer.value <= _PORT_MAX else 0

    def at(self, port: int) -> _Prober:
        """A prober of another port of the same peer."""
        prober = _Prober(port, self._version, self._seconds)
        prober.own_addresses = self.own_addresses
        return prober

    def probe(self, pair: Pair) -> Pair:
        """Round trips, MTU and segment size."""
        try:
            pair, first_s = self._ping(pair, 1)
            count = min(int(_PINGS_S / first_s), PINGS)
            with contextlib.suppress(Unreached, WireError):  # it was reached: a stream tells what is wrong
                return self._ping(pair, count)[0] if count > 1 else pair
            return pair
        except Unreached as unreached:
            return replace(pair, state=unreached.state, detail=str(unreached))
        except WireError as error:
            return replace(pair, state="broken", detail=str(error))

    def _ping(self, pair: Pair, count: int) -> tuple[Pair, float]:
        """(what is known then, median of so many round trips in seconds)."""
        connection, _ = self._request(pair.here, pair.there.address, Kind.PING, count)
        with connection:
            rtt_s = statistics.median(_round_trips_s(connection, count))
            info = _tcp_info(connection)
            mss = info.mss if info else None
            return replace(pair, rtt_us=rtt_s * 1e6, mtu=_path_mtu(connection), mss=mss), rtt_s

    def stream(self, pair: Pair) -> Pair:
        """One stream there, then one back."""
        try:
            rate, retransmits = self._send(pair)
            pair = replace(pair, out_gb_per_s=rate, retransmits=retransmits)
            return replace(pair, in_gb_per_s=self._receive(pair))
        except Unreached as unreached:
            # It connected a moment ago.
            ended = unreached.state == "refused"
            return replace(pair, state="ended" if ended else unreached.state, detail=str(unreached))
        except WireError as error:
            return replace(pair, state="stalled", detail=str(error))

    def _send(self, pair: Pair) -> tuple[float, int | None]:
        """(GB/s, segments retransmitted). The clock stops with the peer's count: data that it has not received does not
        count. If a slow network is still busy at the deadline, what has arrived by then counts.
        """
        connection, _ = self._request(pair.here, pair.there.address, Kind.SINK, round(self._seconds * 1000))
        with connection, _broken_is_wire_error():
            zeros = memoryview(bytes(_BUFFER_BYTES))
            begun = time.monotonic()
            until = begun + self._seconds
            deadline = until + wire.GRACE_S - _BEFORE_THE_PEER_S
            with contextlib.suppress(TimeoutError, WireError):  # no room in the socket for so long
                while time.monotonic() < until:
                    wire.arm(connection, until)
                    connection.send(zeros)
            connection.shutdown(socket.SHUT_WR)
            sent = _tcp_info(connection)
            try:
                moved = wire.decode(wire.receive_exactly(connection, wire.FRAME_BYTES, deadline)).value
            except WireError:
                info = _tcp_info(connection)
                if time.monotonic() < deadline or not sent or not info or info.bytes_acked == sent.bytes_acked:
                    raise
                moved = info.bytes_acked
            seconds, info = time.monotonic() - begun, _tcp_info(connection)
            return moved / seconds / 1e9, info.retransmits if info else None

    def _receive(self, pair: Pair) -> float:
        """GB/s."""
        connection, _ = self._request(pair.here, pair.there.address, Kind.SOURCE, round(self._seconds * 1000))
        with connection, _broken_is_wire_error():
            room, total, begun = bytearray(_BUFFER_BYTES), 0, time.monotonic()
            until, total_by_then = begun + self._seconds, 0
            try:
                while True:
                    wire.arm(connection, until + wire.GRACE_S)
                    count = connection.recv_into(room)
                    if count == 0:
                        break
                    total += count
                    if time.monotonic() < until:
                        total_by_then = total
            except (TimeoutError, WireError):
                if not 0 < total - total_by_then <= _QUEUED_BYTES_MAX:
                    raise
            if total == 0:
                raise WireError("no data came")
            return total / (time.monotonic() - begun) / 1e9

    def _request(self, here: Rail | None, there: str, kind: Kind, value: int) -> tuple[socket.socket, Frame]:
        """A connection on which the peer agreed to the request. The caller closes it."""
        for attempt in range(_BUSY_TRIES):
            connection = self._connect(here, there)
            try:
                deadline = time.monotonic() + wire.FRAME_DEADLINE_S
                wire.send_all(connection, wire.encode(Frame(kind, value, version=self._version)), deadline)
                answer = wire.decode(wire.receive_exactly(connection, wire.FRAME_BYTES, deadline))
                if answer.protocol != wire.PROTOCOL or answer.status == Status.OTHER_PROTOCOL:
                    raise OtherVersion(answer)
                if answer.status == Status.OK and answer.kind == kind:
                    return connection, answer
                if answer.status != Status.BUSY:
                    raise WireError("it refused the request")
            except BaseException:
                connection.close()
                raise
            connection.close()
            if attempt < _BUSY_TRIES - 1:
                time.sleep(_BUSY_PAUSE_S)
        raise Unreached("busy", "it has too many connections: do other doctors measure it?")

    def _connect(self, here: Rail | None, there: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in there else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECT_DEADLINE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if here is not None:
                self._leave_by(connection, here, there)
            connection.connect(_place(there, self._port))
            return connection
        except TimeoutError:
            connection.close()
            raise Unreached("timeout", f"no answer within {_CONNECT_DEADLINE_S:g} s") from None
        except OSError as error:
            connection.close()
            code = error.errno or 0
            state = {errno.ECONNREFUSED: "refused", errno.ETIMEDOUT: "timeout"}.get(code, "unreachable")
            raise Unreached(state, os.strerror(code) if code else str(error)) from None

    def _leave_by(self, connection: socket.socket, here: Rail, there: str) -> None:
        """Leaves by that address and interface, like the engine's TCP. Traffic to this very machine never leaves it."""
        if not here.is_loopback and there not in self.own_addresses:
            with contextlib.suppress(PermissionError):  # kernels before 5.7 ask for CAP_NET_RAW
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, os.fsencode(here.interface) + b"\0")
        connection.bind((here.address, 0))


def _place(address: str, port: int) -> tuple[Any, ...]:
    """The address as sockets take it: the zone of a link-local address is a separate field."""
    bare, _, zone = address.partition("%")
    if not zone:
        return address, port
    return bare, port, 0, int(zone) if zone.isdecimal() else socket.if_nametoindex(zone)


@contextlib.contextmanager
def _broken_is_wire_error() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise WireError("no data passes") from None
    except OSError as error:
        raise WireError(f"the connection broke: {error.strerror}") from None


def _round_trips_s(connection: socket.socket, count: int) -> list[float]:
    deadline = time.monotonic() + wire.GRACE_S
    payload, times_s = bytes(wire.FRAME_BYTES), []
    for _ in range(count):
        begun = time.perf_counter()
        wire.send_all(connection, payload, deadline)
        wire.receive_exactly(connection, len(payload), deadline)
        times_s.append(time.perf_counter() - begun)
    return times_s


def _path_mtu(connection: socket.socket) -> int | None:
    try:
        if connection.family == socket.AF_INET6:
            return connection.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
        return connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return None


@dataclass(frozen=True)
class _TcpInfo:
    """Fields of tcp_info in linux/tcp.h. mss: payload of a segment. retransmits: segments sent again."""

    mss: int
    retransmits: int
    bytes_acked: int


def _tcp_info(connection: socket.socket) -> _TcpInfo | None:
    """tcp_info of a socket; None if this kernel does not give it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    mss, retransmits = (struct.unpack_from("=I", info, at)[0] for at in (_SND_MSS_OFFSET, _TOTAL_RETRANS_OFFSET))
    return _TcpInfo(mss, retransmits, struct.unpack_from("=Q", info, _BYTES_ACKED_OFFSET)[0])

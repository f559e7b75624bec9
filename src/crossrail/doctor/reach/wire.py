"""The frames between `--peer` and `--listen`. One connection carries one request.

Every frame has 64 bytes, in all versions: magic, protocol version, kind, status, a number, and the sender's crossrail
version. So two of different versions can still tell each other so.

    RAILS   value 0              answer: value n, then n bytes of JSON: the listener's addresses
    PING    value count          answer, then each 64 bytes come back as they were sent, count times
    SINK    value milliseconds   answer, then the peer sends until it shuts down; then a frame with the bytes received
    SOURCE  value milliseconds   answer, then the listener sends for so long and closes
    PORT    value 0              answer: value port: it listens there, too, at a port that its kernel chose
    SEEN    value 0              answer: value n, then n bytes of text: the address that the listener sees us come from

Life of a request: 1. frame within FRAME_DEADLINE_S; 2. checked, answered or refused; 3. served within its own deadline;
4. closed. Nothing is kept between requests.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated

import msgspec
from msgspec import Meta

from crossrail.doctor.reach.rails import Rail
from crossrail.errors import CrossrailError

PORT = 7311
PROTOCOL = 1
FRAME_BYTES = 64
FRAME_DEADLINE_S = 3.0
GRACE_S = 3.0
PINGS_MAX = 100
MILLISECONDS_MAX = 10_000
RAILS_BYTES_MAX = 16 * 1024
RAILS_MAX = 64
ADDRESS_BYTES_MAX = 64

_MAGIC = b"XRDR"
_FRAME = struct.Struct("!4sBBHQ48s")
assert _FRAME.size == FRAME_BYTES


class WireError(CrossrailError):
    """Bytes from the other side that are not our protocol, or none at all within the time limit."""


class Kind(enum.IntEnum):
    """The kind of a request."""

    RAILS = 1
    PING = 2
    SINK = 3
    SOURCE = 4
    PORT = 5
    SEEN = 6


class Status(enum.IntEnum):
    """The status of an answer; requests say OK."""

    OK = 0
    OTHER_PROTOCOL = 1
    BUSY = 2
    BAD_REQUEST = 3


class _Rail(msgspec.Struct):
    """mbit_per_s: 0 for unknown."""

    interface: Annotated[str, Meta(max_length=64)]
    address: Annotated[str, Meta(max_length=64)]
    mtu: Annotated[int, Meta(ge=0, le=1 << 20)]
    mbit_per_s: Annotated[int, Meta(ge=0, le=100_000_000)]


_rails_decoder = msgspec.json.Decoder(Annotated[list[_Rail], Meta(max_length=RAILS_MAX)])


@dataclass(frozen=True)
class Frame:
    """protocol: of the sender. version: of its crossrail."""

    kind: int
    value: int
    status: int = Status.OK
    version: str = ""
    protocol: int = PROTOCOL


def encode(frame: Frame) -> bytes:
    """Always FRAME_BYTES."""
    text = frame.version.encode("ascii", "replace")[:48]
    return _FRAME.pack(_MAGIC, frame.protocol, frame.kind, frame.status, frame.value, text)


def decode(data: bytes) -> Frame:
    """WireError for what is no frame of any version. Kind, status and value are the receiver's to judge."""
    if len(data) != FRAME_BYTES or not data.startswith(_MAGIC):
        raise WireError("what answers there is not `crossrail doctor`")
    _, protocol, kind, status, value, text = _FRAME.unpack(data)
    version = text.rstrip(b"\0").decode("ascii", "replace")
    return Frame(kind, value, status, clean(version), protocol)


def check_request(frame: Frame) -> Status:
    """Whether a listener should serve it."""
    if frame.protocol != PROTOCOL:
        return Status.OTHER_PROTOCOL
    bounds = {
        Kind.RAILS: (0, 0),
        Kind.PING: (1, PINGS_MAX),
        Kind.SINK: (1, MILLISECONDS_MAX),
        Kind.SOURCE: (1, MILLISECONDS_MAX),
        Kind.PORT: (0, 0),
        Kind.SEEN: (0, 0),
    }
    if frame.kind not in set(Kind) or frame.status != Status.OK:
        return Status.BAD_REQUEST
    least, most = bounds[Kind(frame.kind)]
    return Status.OK if least <= frame.value <= most else Status.BAD_REQUEST


def encode_rails(rails: list[Rail]) -> bytes:
    """At most RAILS_MAX of them. JSON has no place for names that are no UTF-8: they go as the peer would show them."""
    return msgspec.json.encode(
        [_Rail(clean(rail.interface), rail.address, rail.mtu, rail.mbit_per_s or 0) for rail in rails[:RAILS_MAX]]
    )


def decode_rails(data: bytes) -> list[Rail]:
    """WireError for anything else than a list of rails within bounds."""
    try:
        return [_rail(item) for item in _rails_decoder.decode(data)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"its list of addresses is malformed: {error}") from None


def decode_address(data: bytes) -> str:
    """An IP address without a zone, as SEEN tells it. WireError for anything else."""
    try:
        return str(ip_address(data.decode("ascii").partition("%")[0]))
    except ValueError:
        raise WireError("what it sees us come from is no IP address") from None


def _rail(item: _Rail) -> Rail:
    try:
        address = str(ip_address(item.address))
    except ValueError:
        raise WireError("its list holds something that is not an IP address") from None
    if "%" in address:  # a zone, which means nothing on this host
        raise WireError("its list holds an address with a zone")
    return Rail(clean(item.interface), address, item.mtu, item.mbit_per_s or None)


def clean(text: str) -> str:
    """The text without what a terminal would interpret."""
    return "".join(c if c.isprintable() else "?" for c in text)


# ---- sockets with deadlines: time.monotonic() values. Each call waits no longer, however the bytes trickle.


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """count bytes. WireError at the deadline, or when the other side closes first."""
    data = bytearray()
    while len(data) < count:
        arm(connection, deadline)
        try:
            piece = connection.recv(count - len(data))
        except TimeoutError:
            raise WireError("no answer in time") from None
        except OSError as error:
            raise WireError(f"the connection broke: {error.strerror}") from None
        if not piece:
            raise WireError("the other side closed the connection")
        data += piece
    return bytes(data)


def send_all(connection: socket.socket, data: bytes, deadline: float) -> None:
    """Sends all of it. WireError at the deadline, or if the connection breaks."""
    view = memoryview(data)
    while view:
        arm(connection, deadline)
        try:
            view = view[connection.send(view) :]
        except TimeoutError:
            raise WireError("the other side accepts no data") from None
        except OSError as error:
            raise WireError(f"the connection broke: {error.strerror}") from None


def arm(connection: socket.socket, deadline: float) -> None:
    """Sets the time-out of the next call. WireError when the deadline has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise WireError("no answer in time")
    connection.settimeout(left_s)

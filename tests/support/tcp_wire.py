"""The tcp transport's wire format in Python: a peer made of a bare socket, honest or not.

Formats: native/transport/tcp/handshake.h and wire.h, native/transport/descriptor.cc for addresses.
"""

import contextlib
import functools
import hashlib
import hmac
import operator
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

import crossrail as xr
from tests.support.limits import WAIT_S
from tests.support.sealing import resealed

MAGIC = 0x54525258
VERSION = 5
FRAME_MARK = 0xC7
INCARNATION_AT = 10
HAS_IMM = 1 << 31
FRAME_HEAD = struct.Struct("<BBHHHII")


class Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    ACCEPT = 4
    REFUSAL = 5
    START_TLS = 6


class Frame(IntEnum):
    WRITE = 1
    READ = 2
    MESSAGE = 3
    RESOLVE = 4
    PING = 5
    READ_DATA = 6
    READ_END = 7
    ACK = 8
    TAKEN = 9
    REFUSED = 10
    RESOLVED = 11
    PONG = 12
    BYE = 13
    CLOSING = 14
    SHARE = 15
    SHARED = 16
    SERVICE = 17
    RECALL = 18


# --- addresses ---


def _endpoints_at(address: bytes) -> list[tuple[int, int]]:
    """(offset, ip bytes) of each endpoint."""
    at = INCARNATION_AT + 16
    for _ in range(2):  # name and host
        at += 1 + address[at]
    at += 8 + 4 + 1
    count = address[at]
    at += 1
    found = []
    for _ in range(count):
        ip_bytes = 4 if address[at] == 4 else 16
        found.append((at, ip_bytes))
        at += 1 + ip_bytes + 2 + 1 + 4
    return found


def endpoints_of(address: bytes) -> list[tuple[str, int]]:
    """IP address and port of each rail."""
    found = []
    for at, ip_bytes in _endpoints_at(address):
        ip = address[at + 1 : at + 1 + ip_bytes]
        (port,) = struct.unpack_from("<H", address, at + 1 + ip_bytes)
        found.append((socket.inet_ntop(socket.AF_INET if ip_bytes == 4 else socket.AF_INET6, ip), port))
    return found


def with_ports(address: bytes, ports: Sequence[int]) -> bytes:
    data = bytearray(address)
    for (at, ip_bytes), port in zip(_endpoints_at(address), ports, strict=True):
        struct.pack_into("<H", data, at + 1 + ip_bytes, port)
    return resealed(bytes(data))


def give_up(engine: xr.Engine, peer: xr.Address, timeout_s: float) -> None:
    """Has the engine lose this peer, that it does not know yet, as if it had been cut off: nobody listens where it is
    looked for. Both over tcp, by one rail.
    """
    with socket.socket() as taken:
        taken.bind((endpoints_of(bytes(peer))[0][0], 0))
        elsewhere = with_ports(bytes(peer), [taken.getsockname()[1]])
        with contextlib.suppress(xr.PeerLost):
            engine.connect(xr.Address.from_bytes(elsewhere), timeout_s)
    assert engine.peer_state(peer) == "lost"


def with_incarnation(address: bytes, incarnation: bytes) -> bytes:
    return resealed(address[:INCARNATION_AT] + incarnation + address[INCARNATION_AT + 16 :])


def incarnation_of(address: bytes) -> bytes:
    return address[INCARNATION_AT : INCARNATION_AT + 16]


def reset(end: socket.socket) -> None:
    """Closes such that the other side sees a reset, and what it has not read is lost."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


# --- handshake ---


def message(kind: int, body: bytes, *, version: int = VERSION, magic: int = MAGIC) -> bytes:
    return struct.pack("<IHHB", magic, version, 9 + len(body), kind) + body


def target_tag(incarnation: bytes) -> bytes:
    return hashlib.sha256(b"crossrail tcp target" + incarnation).digest()[:8]


def key_of(secret: str, incarnation: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"crossrail tcp key" + incarnation, "sha256")


def proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + hello + nonce, "sha256")


def hello_body(
    target: bytes,
    sender: bytes,
    *,
    link_id: int,
    channel: int = 0,
    epoch: int = 1,
    resumes: bool = False,
    bulk: bool = False,
) -> bytes:
    flags = (1 if resumes else 0) | (2 if bulk else 0)
    numbers = struct.pack("<QIIBH", link_id, channel, epoch, flags, len(sender))
    return target_tag(incarnation_of(target)) + os.urandom(32) + numbers + sender


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer when the connection ends."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            break
        data += more
    return data


def receive_message(connection: socket.socket) -> tuple[int, bytes]:
    """Kind and body; (0, b"") when the connection ended."""
    head = receive_exactly(connection, 9)
    if len(head) < 9:
        return 0, b""
    _, _, total, kind = struct.unpack("<IHHB", head)
    return kind, receive_exactly(connection, total - 9)


def refusal(code: int, text: str) -> bytes:
    return message(Kind.REFUSAL, struct.pack("<BH", code, len(text)) + text.encode())


def refusal_text(body: bytes) -> str:
    return body[3:].decode()


# --- frames ---


def frame(
    kind: int, meta: bytes = b"", payload: bytes = b"", *, count: int = 0, operations: int = 0, mark: int = FRAME_MARK
) -> bytes:
    return head(kind, meta, len(payload), count=count, operations=operations, mark=mark) + payload


def head(
    kind: int, meta: bytes, payload_bytes: int, *, count: int = 0, operations: int = 0, mark: int = FRAME_MARK
) -> bytes:
    """The beginning of a frame, its metadata included."""
    header = FRAME_HEAD.pack(kind, mark, count, operations, len(meta), payload_bytes, 0)
    mark = functools.reduce(operator.xor, header)
    return with_sum(FRAME_HEAD.pack(kind, mark, count, operations, len(meta), payload_bytes, 0) + meta)


def with_sum(head: bytes) -> bytes:
    """The head with the checksum that it needs: HeadSum in native/transport/tcp/frames.h."""
    zeroed = head[: FRAME_HEAD.size - 4] + bytes(4) + head[FRAME_HEAD.size :]
    state, mask = 0xD6E8FEB86659FD93, (1 << 64) - 1
    for (word,) in struct.iter_unpack("<Q", zeroed + bytes(-len(zeroed) % 8)):
        state = (state ^ word) * 0x9E3779B97F4A7C15 & mask
        state ^= state >> 32
    return zeroed[: FRAME_HEAD.size - 4] + struct.pack("<I", state & 0xFFFFFFFF) + zeroed[FRAME_HEAD.size :]


def write_frame(
    region_id: int, entries: Sequence[tuple[int, bytes, int | None]], operations: int | None = None
) -> bytes:
    """Entries: offset, bytes, and the wire form of an immediate (number | share code << 28) or None."""
    table = b"".join(
        struct.pack("<QII", offset, len(data) | (0 if imm is None else HAS_IMM), imm or 0)
        for offset, data, imm in entries
    )
    return frame(
        Frame.WRITE,
        struct.pack("<Q", region_id) + table,
        b"".join(data for _, data, _ in entries),
        count=len(entries),
        operations=len(entries) if operations is None else operations,
    )


def read_frame(region_id: int, offset: int, length: int, read_id: int) -> bytes:
    return frame(Frame.READ, struct.pack("<QQQQ", region_id, offset, length, read_id), operations=1)


def message_frame(message_id: int, payload: bytes) -> bytes:
    return frame(Frame.MESSAGE, struct.pack("<Q", message_id), payload, operations=1)


def service_frame(payload: bytes) -> bytes:
    """A message between engines: native/engine/service_wire.h."""
    return frame(Frame.SERVICE, payload, operations=1)


SERVICE_PING = bytes([2, 1])  # version, kind


def resolve_frame(acked: int, channel: int, epoch: int) -> bytes:
    return frame(Frame.RESOLVE, struct.pack("<QII", acked, channel, epoch))


def ping_frame(token: int = 1) -> bytes:
    return frame(Frame.PING, struct.pack("<Q", token))


def receive_frame(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Kind, metadata and payload; (0, b"", b"") when the connection ended."""
    head = receive_exactly(connection, FRAME_HEAD.size)
    if len(head) < FRAME_HEAD.size:
        return 0, b"", b""
    kind, _, _, _, meta_bytes, payload_bytes, _ = FRAME_HEAD.unpack(head)
    assert functools.reduce(operator.xor, head[: FRAME_HEAD.size - 4]) == FRAME_MARK
    meta = receive_exactly(connection, meta_bytes)
    assert len(meta) < meta_bytes or with_sum(head + meta) == head + meta
    return kind, meta, receive_exactly(connection, payload_bytes)


# --- peers ---


class RawPeer:
    """An initiator made of sockets, towards a live engine."""

    def __init__(self, target: xr.Address, *, secret: str = "", name_of: xr.Address | None = None) -> None:
        self.target = target.to_bytes()
        self.secret = secret
        # A real address with an incarnation of our own: nobody connects back.
        self.sender = with_incarnation((name_of or target).to_bytes(), os.urandom(16))
        self.link_id = int.from_bytes(os.urandom(7), "little")
        self.epoch = 0

    def dial(self, rail: int = 0) -> socket.socket:
        return socket.create_connection(endpoints_of(self.target)[rail], WAIT_S)

    def hello(self, channel: int = 0, **changes: bool) -> bytes:
        self.epoch += 1
        body = hello_body(self.target, self.sender, link_id=self.link_id, channel=channel, epoch=self.epoch, **changes)
        return message(Kind.HELLO, body)

    def answer(self, hello: bytes, challenge: bytes) -> bytes:
        """Our proof, for the body of a challenge."""
        key = key_of(self.secret, incarnation_of(self.target))
        assert hmac.compare_digest(challenge[32:], proof(key, b"acceptor", hello, challenge[:32]))
        return message(Kind.PROOF, proof(key, b"initiator", hello, challenge[:32]))

    @contextlib.contextmanager
    def connected(self, channel: int = 0, **changes: bool) -> Iterator[socket.socket]:
        """A peer after a whole handshake."""
        with self.dial() as connection:
            hello = self.hello(channel, **changes)
            connection.sendall(hello)
            kind, challenge = receive_message(connection)
            assert kind == Kind.CHALLENGE, refusal_text(challenge)
            connection.sendall(self.answer(hello, challenge))
            kind, body = receive_message(connection)
            assert kind == Kind.ACCEPT, refusal_text(body)
            yield connection


class RawAcceptor:
    """A target made of sockets: what it pretends to be has the address `address`."""

    def __init__(self, like: xr.Address, *, secret: str = "", incarnation: bytes | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.listener.settimeout(WAIT_S)
        self.secret = secret
        self.incarnation = incarnation or os.urandom(16)
        ports = [self.listener.getsockname()[1]] * len(endpoints_of(like.to_bytes()))
        self.address = xr.Address.from_bytes(with_ports(with_incarnation(like.to_bytes(), self.incarnation), ports))

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(WAIT_S)
        return connection

    def challenge(self, connection: socket.socket) -> tuple[bytes, bytes]:
        """Takes the Hello and answers with a challenge. Returns the hello's body and the link's id."""
        kind, body = receive_message(connection)
        assert kind == Kind.HELLO
        nonce = os.urandom(32)
        key = key_of(self.secret, self.incarnation)
        connection.sendall(message(Kind.CHALLENGE, nonce + proof(key, b"acceptor", message(Kind.HELLO, body), nonce)))
        return body, body[40:48]

    def handshake(self, connection: socket.socket) -> int:
        """Does the whole handshake. Returns the id of the link."""
        _, link_id = self.challenge(connection)
        kind, _ = receive_message(connection)
        assert kind == Kind.PROOF
        connection.sendall(message(Kind.ACCEPT, b""))
        return int.from_bytes(link_id, "little")

    def close(self) -> None:
        self.listener.close()

"""Authenticated, bounded, replay-safe packets, in which control messages travel.

A packet is `header | payload | HMAC-SHA256`. The MAC covers the identity of the receiver too, so a packet recorded on
its way to one engine is worth nothing at another, nor at the same name restarted: identities are incarnations, drawn at
random when an engine opens. Within one incarnation every packet has a number, and the receiver takes each once.
No clock takes part, so clocks may differ between hosts by any amount.

Nothing is encrypted: whoever can read the network reads what services tell each other, prompts too.

Nothing but the version is read of a packet of another version. Its sender gets a notice, whose form is the same in all
versions: `magic, version, release, sender's incarnation | HMAC-SHA256`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from crossrail import __version__
from crossrail._options import check_kind, encoded
from crossrail.errors import CrossrailError, UsageError

VERSION = 3  # of sealing, and of the messages of all services that use it
IDENTITY_BYTES = 16
MESSAGE_BYTES_MAX = 8 << 20

_MAGIC = b"xrct"
# magic, version, part, parts, sender's incarnation, number of the packet
_HEADER = struct.Struct("<4sBxHH16sQ")
_MAC_BYTES = 32
OVERHEAD_BYTES = _HEADER.size + _MAC_BYTES
_NOTICE_MAGIC = b"xrcv"
_NOTICE = struct.Struct("<4sBx32s16s")  # magic, version, release, sender's incarnation
_WINDOW = 4096  # packets of one sender that may overtake each other
_ALL_SEEN = (1 << _WINDOW) - 1
# A sender costs up to a KiB, and nodes that are started again and again are new ones: of those that were not heard from
# for longest only the last number is kept, in some 150 bytes.
_SENDERS_MAX, _NUMBERS_MAX = 16384, 1 << 20
_PARTIAL_MAX = 1024  # packets of one sender that are kept because others of their messages are still missing


class Spoken(NamedTuple):
    """What a side speaks. release: its version of crossrail."""

    version: int
    release: str

    def __str__(self) -> str:
        return f"version {self.version} of control messages (crossrail {self.release})"


OURS = Spoken(VERSION, __version__)


class Rejected(CrossrailError):
    """A packet that is not taken. kind: for counting, one of `malformed`, `version`, `secret`, `sender`, `replay`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass
class _Partial:
    """A message of so many parts, of which these, by index, have come."""

    parts: int
    pieces: dict[int, bytes] = field(default_factory=dict)


@dataclass
class _Sender:
    """State kept for one sender.

    Invariant: bit i of `seen` is set if packet `highest - i` was accepted; anything older than the window counts as
    accepted. partial: incomplete messages, by the number of their first packet. partial_packets: packets held in them.
    """

    highest: int = -1
    seen: int = 0
    partial: dict[int, _Partial] = field(default_factory=dict)
    partial_packets: int = 0

    def take(self, number: int) -> bool:
        """False when this packet was taken before, or is too old to tell."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = ((self.seen << min(ahead, _WINDOW)) | 1) & _ALL_SEEN
            self.highest = number
            return True
        if -ahead >= _WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


class Sealer:
    """Seals what one engine sends and opens what it receives. Threads: one, the event loop's.

    secret: shared by all nodes of a cluster, 1..1024 bytes, or text, which is encoded in UTF-8. own: identity of this
    engine, IDENTITY_BYTES. packet_bytes_max: the longest packet that the carrier takes. purpose: what the packets are
    for, as "crossrail kv control": those for another purpose are refused even under the same secret. spoken: by this
    side; others are for tests. rejected: number of refused packets, by kind.
    """

    def __init__(
        self, secret: str | bytes, own: bytes, packet_bytes_max: int, purpose: bytes, spoken: Spoken = OURS
    ) -> None:
        if isinstance(secret, str):
            secret = encoded(secret, "secret")
        check_kind(secret, "secret", bytes, "text or bytes")
        if not 1 <= len(secret) <= 1024:
            raise UsageError(f"secret has {len(secret)} bytes, must have 1..1024: all nodes of a cluster share one")
        if len(own) != IDENTITY_BYTES:
            raise UsageError(f"own has {len(own)} bytes, must have {IDENTITY_BYTES}")
        if packet_bytes_max <= OVERHEAD_BYTES:
            raise UsageError(f"packet_bytes_max is {packet_bytes_max}, must be more than {OVERHEAD_BYTES}")
        self.spoken = spoken
        self.rejected: Counter[str] = Counter()
        self._key = hmac.digest(secret, purpose, "sha256")
        self._own = own
        self._room = packet_bytes_max - OVERHEAD_BYTES
        self._next = 0
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()  # the one heard from last at the end
        self._numbers: dict[bytes, int] = {}  # of the others: their highest

    def packets_of(self, message: bytes) -> int:
        """How many packets it takes. UsageError when it is too long to be sent."""
        if len(message) > MESSAGE_BYTES_MAX:
            raise UsageError(f"message has {len(message)} bytes, at most {MESSAGE_BYTES_MAX} are sent")
        parts = max(1, -(-len(message) // self._room))
        if parts > 0xFFFF:
            raise UsageError(f"message of {len(message)} bytes takes {parts} packets, at most {0xFFFF} are sent")
        return parts

    def seal(self, message: bytes, to: bytes) -> list[bytes]:
        """The packets of a message to the engine of identity `to`. UsageError when it is too long."""
        parts = self.packets_of(message)
        first, self._next = self._next, self._next + parts
        packets = []
        for part in range(parts):
            header = _HEADER.pack(_MAGIC, self.spoken.version, part, parts, self._own, first + part)
            body = header + message[part * self._room : (part + 1) * self._room]
            packets.append(body + self._mac(to, body))
        return packets

    def open(self, packet: bytes, sender: bytes) -> bytes | None:
        """The message that this packet completes, None while parts are missing. Rejected, and counted, if not sound.

        sender: identity of the engine that the carrier received it from.
        """
        try:
            return self._open(packet, sender)
        except Rejected as rejection:
            self.rejected[rejection.kind] += 1
            raise

    def notice(self, to: bytes) -> bytes:
        """A packet that tells the engine of identity `to` what this side speaks."""
        body = _NOTICE.pack(_NOTICE_MAGIC, self.spoken.version, self.spoken.release.encode()[:32], self._own)
        return body + self._mac(to, body)

    def noticed(self, packet: bytes, sender: bytes) -> Spoken | None:
        """What the sender speaks, if this is an authentic notice of another version than ours."""
        if len(packet) != _NOTICE.size + _MAC_BYTES or not packet.startswith(_NOTICE_MAGIC):
            return None
        body, mac = packet[:-_MAC_BYTES], packet[-_MAC_BYTES:]
        _, version, release, claimed = _NOTICE.unpack(body)
        if (
            claimed != sender
            or version == self.spoken.version
            or not hmac.compare_digest(mac, self._mac(self._own, body))
        ):
            return None
        text = release.rstrip(b"\0").decode(errors="replace")
        return Spoken(version, "".join(c if c.isprintable() else "?" for c in text))

    def _open(self, packet: bytes, sender: bytes) -> bytes | None:
        if len(packet) < OVERHEAD_BYTES:
            raise Rejected("malformed", f"{len(packet)} bytes, a packet has at least {OVERHEAD_BYTES}")
        magic, version, part, parts, claimed, number = _HEADER.unpack_from(packet)
        if magic != _MAGIC:
            raise Rejected("malformed", "it does not begin like a packet")
        if version != self.spoken.version:
            raise Rejected("version", f"its sender speaks version {version}, this side {self.spoken}")
        body, mac = packet[:-_MAC_BYTES], packet[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._own, body)):
            raise Rejected("secret", "the MAC is wrong: another secret, or meant for another engine or service")
        if claimed != sender:
            raise Rejected("sender", "it names another sender than it came from")
        if not part < parts or number < part or (parts - 1) * self._room > MESSAGE_BYTES_MAX:
            raise Rejected("malformed", f"part {part} of {parts}")
        known = self._sender(sender)
        if not known.take(number):
            raise Rejected("replay", f"packet {number} was taken before")
        payload = body[_HEADER.size :]
        return payload if parts == 1 else _assemble(known, number - part, part, parts, payload)

    def _sender(self, identity: bytes) -> _Sender:
        known = self._senders.get(identity)
        if known is not None:
            self._senders.move_to_end(identity)
            return known
        highest = self._numbers.pop(identity, None)
        # Forgetting one would let its packets be taken again, so the table has an end instead.
        if highest is None and len(self._numbers) >= _NUMBERS_MAX:
            senders_max = _SENDERS_MAX + _NUMBERS_MAX
            raise Rejected("sender", f"more than {senders_max} senders since this engine opened: restart it")
        known = self._senders[identity] = _Sender() if highest is None else _Sender(highest, _ALL_SEEN)
        if len(self._senders) > _SENDERS_MAX:
            silent, state = self._senders.popitem(last=False)
            self._numbers[silent] = state.highest
        return known

    def _mac(self, to: bytes, body: bytes) -> bytes:
        mac = hmac.new(self._key, to, hashlib.sha256)
        mac.update(body)
        return mac.digest()


def _assemble(sender: _Sender, first: int, part: int, parts: int, payload: bytes) -> bytes | None:
    message = sender.partial.setdefault(first, _Partial(parts))
    if message.parts != parts:
        raise Rejected("malformed", f"part {part} of {parts}, and others of that message say of {message.parts}")
    message.pieces[part] = payload
    sender.partial_packets += 1
    if len(message.pieces) == parts:
        sender.partial_packets -= len(sender.partial.pop(first).pieces)
        return b"".join(message.pieces[index] for index in range(parts))
    while sender.partial_packets > _PARTIAL_MAX and len(sender.partial) > 1:
        # The oldest has waited longest for parts that were lost; its sender asks again.
        sender.partial_packets -= len(sender.partial.pop(next(iter(sender.partial))).pieces)
    return None

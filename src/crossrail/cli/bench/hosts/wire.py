"""The messages between `bench run` and `bench serve`, and the bounds that each side enforces on the other's values.

Life of a run: Hello -> Welcome (or Refusal); Meet -> Met; then any number of Step -> Done, one at a time, each a piece
of work for all workers of the serve, done while those of the run do theirs; Bye. Failed in place of an answer ends the
run. Each message carries the version of this protocol; nothing else is read of another version's message.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from crossrail.errors import CrossrailError

VERSION = 1
MESSAGE_BYTES_MAX = 256 << 10  # 32 workers of 16 rails each fit
PROCESSES_MAX = 32
SPAN_BYTES_MIN = 1 << 20
SPAN_BYTES_MAX = 1 << 40
CONTROL_BYTES = 1 << 20  # of each worker: where ping-pongs land
WINDOW_MAX = 1024
COUNT_MAX = 1 << 40
TIMEOUT_S_MAX = 3600.0
_ADDRESS_BYTES_MAX = 4 << 10

Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
_Nbytes = Annotated[int, Meta(ge=0, le=SPAN_BYTES_MAX)]
_Hex = Annotated[str, Meta(max_length=2 * _ADDRESS_BYTES_MAX, pattern="^([0-9a-f][0-9a-f])*$")]


class ProtocolError(CrossrailError):
    """Bytes from the other side that are no message of this protocol."""


class OtherVersion(ProtocolError):
    """A message of another version. theirs: which."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the other side speaks version {theirs} of the benchmark's protocol, this one {VERSION}: use the same "
            "crossrail on both"
        )
        self.theirs = theirs


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One worker for the other side: its engine's address, and its memory and control region, in hex."""

    address: _Hex
    memory: _Hex
    control: _Hex


class _Message(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True, kw_only=True):
    """run: drawn by `bench run`; receivers ignore messages of other runs."""

    run: Annotated[int, Meta(ge=0, lt=1 << 62)]
    version: int = VERSION


class Hello(_Message, tag="hello"):
    """Run: I want so many workers there, each with `span_bytes`; "as mine" is what Step says."""

    processes: Annotated[int, Meta(ge=1, le=PROCESSES_MAX)]
    span_bytes: Annotated[int, Meta(ge=SPAN_BYTES_MIN, le=SPAN_BYTES_MAX)]
    polling: Annotated[str, Meta(pattern="^(adaptive|spin)$")]


class Welcome(_Message, tag="welcome"):
    """Serve: here they are. machine: what machine() says there; cores: how many the workers may use."""

    crossrail: Text
    machine: dict[str, Any]
    cores: Annotated[int, Meta(ge=1, le=1 << 20)]
    parts: Annotated[list[Part], Meta(max_length=PROCESSES_MAX)]


class Meet(_Message, tag="meet"):
    """Run: and these are mine, in the same order. Both sides connect."""

    parts: Annotated[list[Part], Meta(max_length=PROCESSES_MAX)]


class Met(_Message, tag="met"):
    """Serve: they are connected."""


class Step(_Message, tag="step"):
    """Run: each of your workers shall do this; mine begin when they like, the first word between them is the signal.

    what: "receive" (count arrivals), "ping-pong", "clear" and "digest" (of the first nbytes of its memory), "fill"
    (them, from the seed `count`), "listen" (for a bare connection) and "stream" (take from it).
    """

    what: Annotated[str, Meta(pattern="^(receive|ping-pong|clear|digest|fill|listen|stream)$")]
    count: Count = 1
    nbytes: _Nbytes = 0
    window: Annotated[int, Meta(ge=1, le=WINDOW_MAX)] = 1
    verify: bool = False
    spin: bool = False  # of "stream": look at the socket again and again, and do not sleep
    timeout_s: Annotated[float, Meta(gt=0, le=TIMEOUT_S_MAX)] = 60.0


class Done(_Message, tag="done"):
    """Serve: all have done it. answers: of each, as text (a digest, where it listens)."""

    answers: Annotated[list[Text], Meta(max_length=PROCESSES_MAX)]


class Refusal(_Message, tag="refused"):
    """Serve: no, and why. There is no run."""

    reason: Text


class Failed(_Message, tag="failed"):
    """Serve: it went wrong, and the run is over."""

    reason: Text


class Bye(_Message, tag="bye"):
    """Run: that was all."""


Message = Hello | Welcome | Meet | Met | Step | Done | Refusal | Failed | Bye


class _Head(msgspec.Struct):
    version: int


_head_decoder = msgspec.msgpack.Decoder(_Head)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message. OtherVersion if its version differs; ProtocolError if it is malformed or out of bounds."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"message of {len(data)} bytes is longer than {MESSAGE_BYTES_MAX}")
    try:
        version = _head_decoder.decode(data).version
        if version != VERSION:
            raise OtherVersion(version)
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a valid message of the benchmark: {error}") from None

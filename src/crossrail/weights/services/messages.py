"""The messages between controller, trainers and inference ranks: typed MessagePack, every field bounded.

Every question may be asked again; mailboxes answer it once. Durations are seconds: hosts need no common clock.
"""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from crossrail.control.language import Language
from crossrail.control.mailbox import RESEND_S, Mailbox
from crossrail.control.messages import Failed, Text
from crossrail.control.wire import Wire
from crossrail.errors import UsageError
from crossrail.weights.services.versions import VERSION_MAX

UNPACKED_MAX = 1 << 30
PIECE_BYTES = 4 << 20  # of what is longer than a message may be
PIECES_MAX = UNPACKED_MAX // PIECE_BYTES
SECONDS_MAX = 1e6

Rank = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Version = Annotated[int, Meta(ge=0, le=VERSION_MAX)]
Attempt = Annotated[int, Meta(ge=1, le=(1 << 62))]
Count = Annotated[int, Meta(ge=0, le=(1 << 48))]
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
Digest = Annotated[str, Meta(min_length=1, max_length=64)]
AddressBytes = Annotated[bytes, Meta(min_length=1, max_length=4096)]
Descriptor = Annotated[bytes, Meta(min_length=1, max_length=4096)]
Descriptors = Annotated[list[Descriptor], Meta(max_length=1 << 16)]


def packed(data: bytes) -> bytes:
    """Compressed: rows of inventories and plans are alike, and messages end at 8 MiB."""
    return zlib.compress(data, 1)


def unpacked(data: bytes) -> bytes:
    """The inverse of packed(). UsageError for anything else, and for more than UNPACKED_MAX bytes."""
    opened = zlib.decompressobj()
    try:
        plain = opened.decompress(data, UNPACKED_MAX)
    except zlib.error as error:
        raise UsageError(f"nothing that was packed: {error}") from None
    if not opened.eof:
        raise UsageError(f"cut off, or more than {UNPACKED_MAX} bytes")
    return plain


def in_pieces(data: bytes) -> list[bytes]:
    """Cuts it into pieces of at most PIECE_BYTES. UsageError for more than PIECES_MAX."""
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)] or [b""]
    if len(pieces) > PIECES_MAX:
        raise UsageError(f"{len(data)} bytes, at most {PIECES_MAX * PIECE_BYTES} are sent")
    return pieces


class Join(Struct, frozen=True, tag=True):
    """A trainer or inference rank registers. inventory: packed(Inventory.to_bytes()).

    number: of its Joins and Leaves, ascending: messages may overtake each other, and the last one sent counts. spare:
    of a double-buffered inference rank, its second memory: a descriptor for each region. is_again: it was left out, and
    joins again automatically; refused while another process has its rank.
    """

    number: Count
    inventory: bytes
    spare: Descriptors = []
    is_again: bool = False


class Joined(Struct, frozen=True, tag=True):
    """The member is in the plan from the next update on. version: the last that was completed, -1: none."""

    version: int


class JoinRefused(Struct, frozen=True, tag=True):
    """The member does not fit, and never will."""

    reason: Text


class Leave(Struct, frozen=True, tag=True):
    """The sender leaves, and is in no plan any more. number: as in Join."""

    number: Count


class PeerRegion(Struct, frozen=True, array_like=True):
    """A region of a trainer, from which others gather."""

    rank: Rank
    region: Count
    descriptor: Descriptor


class TargetRegion(Struct, frozen=True, array_like=True):
    """A region of an inference rank. buffer: 0, or 1 in its spare memory."""

    rank: Rank
    buffer: Annotated[int, Meta(ge=0, le=1)]
    region: Count
    descriptor: Descriptor


class Member(Struct, frozen=True, array_like=True):
    """A trainer of the plan."""

    rank: Rank
    address: AddressBytes


class Assign(Struct, frozen=True, tag=True):
    """A piece of packed(Assignment.to_bytes()), of so many. plan: which, for an attempt.

    Answered at once while others are missing, and the last one when the trainer is ready.
    """

    plan: Digest
    attempt: Attempt
    piece: Annotated[int, Meta(ge=0, lt=PIECES_MAX)]
    pieces: Annotated[int, Meta(ge=1, le=PIECES_MAX)]
    data: Annotated[bytes, Meta(max_length=PIECE_BYTES)]


class Assignment(Struct, frozen=True):
    """A trainer's part of a plan. part: Plan.of_trainer().to_bytes(); groups: of the whole plan.

    gone: those whom this trainer need not wait for any more. meets_first: trainers read from each other, which none may
    begin before all offer their weights.
    """

    part: bytes
    groups: Annotated[list[Count], Meta(max_length=1 << 20)]
    trainers: Annotated[list[Member], Meta(max_length=1 << 20)]
    peers: Annotated[list[PeerRegion], Meta(max_length=1 << 24)]
    targets: Annotated[list[TargetRegion], Meta(max_length=1 << 24)]
    gone: Annotated[list[AddressBytes], Meta(max_length=1 << 20)] = []
    meets_first: bool = False

    def to_bytes(self) -> bytes:
        """MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Assignment:
        """The inverse. UsageError for anything else."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"not a valid assignment: {error}") from None


class Expect(Struct, frozen=True, tag=True):
    """How many writes come to an inference rank by this plan."""

    plan: Digest
    count: Count


class Taken(Struct, frozen=True, tag=True):
    """Done as asked."""


class Open(Struct, frozen=True, tag=True):
    """Get ready for a version, whose writes count on `imm`. They arrive within timeout_s, or the update has failed."""

    version: Version
    attempt: Attempt
    plan: Digest
    imm: Count
    timeout_s: Seconds

    @property
    def say_why_s(self) -> float:
        """How long before its deadline the request is given up: the reason for the delay must reach the controller
        while it still listens, even on busy hosts.
        """
        return max(0.05 * self.timeout_s, min(0.25 * self.timeout_s, 0.5))


class Opened(Struct, frozen=True, tag=True):
    """Nobody reads the inference rank's buffer any more."""

    buffer: Annotated[int, Meta(ge=0, le=1)]


class Go(Struct, frozen=True, tag=True):
    """Write a version. buffers: of each inference rank, which one. Answered by Sent when all own writes are done."""

    version: Version
    attempt: Attempt
    plan: Digest
    imm: Count
    barrier_imm: Count
    buffers: Annotated[list[tuple[Rank, int]], Meta(max_length=1 << 20)]
    timeout_s: Seconds


class Sent(Struct, frozen=True, tag=True):
    """report: StepReport, by field."""

    report: dict[str, int | float]


class Await(Struct, frozen=True, tag=True):
    """Answered by Whole when all writes of a version have been counted."""

    version: Version
    attempt: Attempt


class Whole(Struct, frozen=True, tag=True):
    """All writes have been counted."""


class Commit(Struct, frozen=True, tag=True):
    """To an inference rank: all ranks have everything; this version is now the current one. To a trainer: those that
    could be told have switched to it.
    """

    version: Version
    attempt: Attempt


class Abort(Struct, frozen=True, tag=True):
    """This attempt has failed. Answered once nothing of it can land any more, or is being written.

    has_begun: False: no trainer was told to write, and none will be. By default one may have been.
    """

    attempt: Attempt
    reason: Text
    has_begun: bool = True


class Aborted(Struct, frozen=True, tag=True):
    """regions: of an inference rank, the descriptors that are valid now, a list for each buffer; old ones are dead."""

    regions: Annotated[list[Descriptors], Meta(max_length=2)] = []


class Evicted(Struct, frozen=True, tag=True):
    """Whoever gets this is in no plan any more. It did not answer in time, and may join again; displaced: another has
    joined under its rank since its Join of this number. number: of the Join by which it was in.
    """

    reason: Text
    displaced: Count | None = None
    number: Count = 0


class Closed(Struct, frozen=True, tag=True):
    """The answer, to any question, of a member that is alive and no longer takes part: it, or its memory,
    was closed.
    """

    reason: Text


class RollCall(Struct, frozen=True, tag=True):
    """Is it there? Taken, or Refused."""


class Refused(Struct, frozen=True, tag=True):
    """A trainer's answer to RollCall: it is there, and its publish() of this version was refused at the call. No offer
    was made since, and no update has failed.
    """

    version: Version
    reason: Text


class Refusing(Struct, frozen=True, tag=True):
    """From a trainer: if it is asked RollCall now, it answers Refused."""


class Withdraw(Struct, frozen=True, tag=True):
    """To a trainer: an offer of this version that no update has asked for is of no use, for the reason that another
    trainer gave.
    """

    version: Version
    reason: Text


class AskProgress(Struct, frozen=True, tag=True):
    """Asks for the trainer's progress."""


class Progress(Struct, frozen=True, tag=True):
    """ready: tasks of its part of a plan that are made ready. written_bytes: of the step under way, or of the last.

    is_offered: publish() is under way. withdrawn: the version that the last one offered, if that was cancelled or ran
        out of time, and no update has failed since. waits_for: as Step has it, of the step under way, or of the last.
    """

    ready: Count
    written_bytes: Count
    is_offered: bool = False
    withdrawn: Version | None = None
    waits_for: Text = ""


Message = (
    Join | Joined | JoinRefused | Leave | Assign | Expect | Taken | Open | Opened | Go | Sent | Await | Whole | Commit
    | Abort | Aborted | Evicted | Closed | RollCall | Refused | Refusing | Withdraw | AskProgress | Progress | Failed
)  # fmt: skip


class Envelope(Struct, frozen=True):
    """A message, and which question it is (ask) or answers (answers); 0: none."""

    body: Message
    ask: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    answers: Annotated[int, Meta(ge=0, le=1 << 40)] = 0


_LANGUAGE = Language(b"crossrail weights control", Envelope)


def mailbox(wire: Wire, secret: str | bytes, resend_s: float = RESEND_S) -> Mailbox:
    """A mailbox in this language: one per engine."""
    return Mailbox(wire, secret, _LANGUAGE, resend_s)

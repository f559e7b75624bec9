"""The messages between routers, prefillers and decoders: typed MessagePack, every field bounded.

A new field has a default: receivers that do not know it ignore it. Any change of meaning increments seal.VERSION.
Times are durations in seconds, never points in time: hosts need no common clock. Tokens are int32, little-endian.
Every request may be repeated (messages are lost, duplicated and late); answers say so where it matters.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from crossrail.control.language import Language
from crossrail.control.mailbox import RESEND_S, Mailbox
from crossrail.control.messages import Failed as Failed
from crossrail.control.messages import Text as Text
from crossrail.control.messages import clipped as clipped
from crossrail.control.wire import Wire
from crossrail.errors import UsageError
from crossrail.kv.limits import SECONDS_MAX as SECONDS_MAX

TOKENS_MAX = 1 << 20

PIECES_MAX = 512  # pieces, each of one request, in a message
NAME_CHARS_MAX = 128
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
AddressBytes = Annotated[bytes, Meta(min_length=1, max_length=4096)]
TokenBytes = Annotated[bytes, Meta(max_length=4 * TOKENS_MAX)]
Index = Annotated[int, Meta(ge=0, le=1 << 40)]
Attempt = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, Meta(ge=0.0, le=SECONDS_MAX)]
Plain = dict[str, Any]
Role = Literal["prefiller", "decoder"]
TraceParent = Annotated[str, Meta(max_length=55)]  # W3C Trace Context, or empty
Ended = Literal["written", "failed"]  # how an attempt ended
EndReason = Literal["stop", "length", "cancelled", "deadline", "overloaded", "unavailable", "error"]


class Load(Struct, frozen=True):
    """A node's load. queued_tokens: prompt tokens not yet prefilled, or tokens in decoding requests.

    draining: it takes no more requests, and will end. hangs: its model hangs; it takes none until the model goes on.
    """

    requests: Index = 0
    queued_tokens: Index = 0
    pages_free: Index = 0
    pages_total: Index = 0
    pages_quarantined: Index = 0
    draining: bool = False
    hangs: bool = False

    @property
    def takes_requests(self) -> bool:
        return not (self.draining or self.hangs)


class NodeRef(Struct, frozen=True):
    """One incarnation of a node, with what others need in order to talk to it. layout: KvLayout.to_wire()."""

    node: Name
    address: AddressBytes
    layout: Plain


class NodeRecord(NodeRef, frozen=True, kw_only=True):
    """A NodeRef with what a router needs in order to choose the node."""

    role: Role
    model: Name

    @property
    def ref(self) -> NodeRef:
        return NodeRef(self.node, self.address, self.layout)


class Sampling(Struct, frozen=True):
    """temperature 0: greedy. seed and position alone decide the draw, so every node draws the same."""

    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] = 16
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    ignore_end: bool = False


class Span(Struct, frozen=True):
    """A piece of a request's timeline. begin_s: relative to the request's arrival at its router."""

    name: Name
    begin_s: float
    length_s: float


class End(Struct, frozen=True):
    """How a request ended. detail: for people, may be empty."""

    reason: EndReason
    detail: Text = ""
    timeline: Annotated[list[Span], Meta(max_length=4096)] = []


class _OfRequest(Struct, frozen=True):
    """A message about a request."""

    request: Name


class _OfAttempt(_OfRequest, frozen=True):
    """A message about one attempt of a request to have its prompt prefilled."""

    attempt: Attempt


class _Reason(Struct, frozen=True):
    """An answer that consists of a reason in words."""

    reason: Text


# --- node to router ---


class Join(Struct, frozen=True, tag=True):
    """A node registers itself, again after the router was restarted. running: requests that are still in progress,
    followed by ended ones that are kept for the router, in the order in which they ended: `ended` of them.

    number: increases with each Join of this incarnation, in the order in which their lists were made; 0: unknown. The
    node begins nothing for its router until one is answered.
    """

    record: NodeRecord
    load: Load
    running: Annotated[list[Name], Meta(max_length=100_000)] = []
    number: Index = 0
    ended: Index = 0


class Joined(Struct, frozen=True, tag=True):
    """The node is a member while its heartbeats are less than lease_s apart; it should send one every heartbeat_s."""

    router: Name
    heartbeat_s: Seconds
    lease_s: Seconds


class JoinRefused(_Reason, frozen=True, tag=True):
    """The node does not fit; there is no point in asking again."""


class Heartbeat(Struct, frozen=True, tag=True):
    """The node is alive, and this is its load."""

    node: Name
    load: Load


class HeartbeatTaken(Struct, frozen=True, tag=True):
    """member: whether the router knows this incarnation; if not, it has to join again."""

    member: bool


class Leave(Struct, frozen=True, tag=True):
    """The node has nothing left to do and leaves."""

    node: Name


class Tokens(_OfRequest, frozen=True, tag=True):
    """Tokens of a request from index `first` on, and how it ended if it has. Resent until acknowledged.

    Indices count from the first token after the client's prompt, whichever decoder generated it. placement: that of the
    Start which these answer. elsewhere: the request has ended only here, and another decoder may continue it.
    """

    first: Index
    tokens: TokenBytes
    end: End | None = None
    placement: Attempt = 1
    elsewhere: bool = False


class TokensOfSeveral(Struct, frozen=True, tag=True):
    """Tokens of several requests that were ready at the same moment. Answered by TakenOfSeveral."""

    pieces: Annotated[list[Tokens], Meta(min_length=1, max_length=PIECES_MAX)]


class PrefillerLost(_OfAttempt, frozen=True, tag=True):
    """This attempt's prefiller does not answer, or has refused or failed. Answered by Reassigned.

    placement: that of the Start. busy: that of DispatchRefused.
    """

    node: Name
    address: AddressBytes
    reason: Text
    placement: Attempt = 1
    busy: bool = False


# --- router to decoder ---


class Start(_OfRequest, frozen=True, tag=True):
    """Serve this request. prefiller None: the context is a single token, so there is nothing to prefill.

    placement: number of its first attempt at a prefiller; each time the router places the request at a decoder the
    number is larger. generated: how many of the tokens, the last ones, were generated by earlier decoders; they count
    towards sampling.max_tokens, and are not sent again. has_waited: the request has waited for long: if it is refused
    for lack of room, nothing else may start before it for as long as the router keeps asking.

    For its timeline: age_s: time since it reached the router; waited_s: how much of that it has just waited for a
    decoder.
    """

    tokens: TokenBytes
    sampling: Sampling
    timeout_s: Seconds
    prefiller: NodeRef | None = None
    placement: Attempt = 1
    generated: Index = 0
    traceparent: TraceParent = ""
    has_waited: bool = False
    age_s: Seconds = 0.0
    waited_s: Seconds = 0.0


class Started(_OfRequest, frozen=True, tag=True):
    """The request has been started, now or earlier."""


class StartRefused(_OfRequest, frozen=True, tag=True):
    """busy: another decoder, or this one later, may accept it; otherwise no decoder should be asked.

    is_duplicate: its name was used here before, by a request of any router.
    """

    reason: Text
    busy: bool
    is_duplicate: bool = False


class Cancel(_OfRequest, frozen=True, tag=True):
    """Neither this placement nor an earlier one is wanted any more. The answer only acknowledges the message.

    The end comes as Tokens. placement 0: the request is not placed here; it no longer waits here, so keep no room for
    it.
    """

    reason: Text
    placement: Index = 1


class Reassigned(_OfAttempt, frozen=True, tag=True):
    """prefiller None: there is none, or the request is unknown; `reason` says which. ends: how the
    request then ends.
    """

    prefiller: NodeRef | None
    reason: Text = ""
    ends: EndReason = "error"


# --- decoder to prefiller ---


class Dispatch(_OfAttempt, frozen=True, tag=True):
    """Prefill tokens and write their KV as the ticket says. ticket: KvTarget.to_wire()."""

    tokens: TokenBytes
    ticket: Plain
    timeout_s: Seconds
    traceparent: TraceParent = ""


class Dispatched(_OfAttempt, frozen=True, tag=True):
    """The attempt is queued, now or earlier."""


class DispatchRefused(_OfAttempt, frozen=True, tag=True):
    """Nothing was or will be written. busy: because there is no room or the model hangs; the same prefiller may accept
    the attempt later.
    """

    reason: Text
    busy: bool = False


class Probe(_OfAttempt, frozen=True, tag=True):
    """Asks how far the attempt is."""


class Progress(_OfAttempt, frozen=True, tag=True):
    """state unknown: nothing of the attempt will be written. failed: likewise, and detail says why.

    timeline: what is known so far; begin_s is relative to when the prefiller took the request. model_silent_s: of an
    attempt that is still to be computed: for how long the model, busy with any request, has announced no layer; 0 while
    it is idle.
    """

    state: Literal["queued", "running", "written", "failed", "unknown"]
    detail: Text = ""
    timeline: Annotated[list[Span], Meta(max_length=4096)] = []
    model_silent_s: Seconds = 0.0


class Withdraw(_OfAttempt, frozen=True, tag=True):
    """Stop. Answered by Quiesced once nothing can land any more, which may take as long as the writes in flight.

    reason: why the decoder does not want it, for people; it may be empty.
    """

    reason: Text = ""


class Quiesced(_OfAttempt, frozen=True, tag=True):
    """Nothing of this attempt can land any more; if its Dispatch still arrives, it will be refused."""


class Taken(Struct, frozen=True, tag=True):
    """Acknowledges tokens. wanted False: the request is unknown, nobody waits for it."""

    wanted: bool = True


class TakenOfSeveral(Struct, frozen=True, tag=True):
    """One Taken for each piece, in their order."""

    wanted: Annotated[list[bool], Meta(max_length=PIECES_MAX)]


Message = (
    Join | Joined | JoinRefused | Heartbeat | HeartbeatTaken | Leave | Tokens | TokensOfSeveral | PrefillerLost
    | Start | Started | StartRefused | Cancel | Reassigned
    | Dispatch | Dispatched | DispatchRefused | Probe | Progress | Withdraw | Quiesced | Taken | TakenOfSeveral | Failed
)  # fmt: skip


class Envelope(Struct, frozen=True):
    """A message; its own number as a question (ask), or the question that it answers (answers); 0: none."""

    body: Message
    ask: Index = 0
    answers: Index = 0


LANGUAGE = Language(b"crossrail kv control", Envelope)


def mailbox(wire: Wire, secret: str | bytes, resend_s: float = RESEND_S) -> Mailbox:
    """A mailbox for these messages: one per engine."""
    return Mailbox(wire, secret, LANGUAGE, resend_s)


def check_name(name: str, what: str = "name") -> None:
    """UsageError for a name, of a node, router or model, that no message can carry, or that no line of a log should."""
    if not 1 <= len(name) <= NAME_CHARS_MAX:
        raise UsageError(f"{what} {clipped(name)!r} has {len(name)} characters, must have 1..{NAME_CHARS_MAX}")
    if not name.isprintable():
        raise UsageError(f"{what} {name!r} must be printable text, without ends of lines and other control characters")


def pack_tokens(tokens: npt.ArrayLike) -> bytes:
    """int32, little-endian. UsageError for more than TOKENS_MAX tokens, or numbers out of range."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size > TOKENS_MAX:
        raise UsageError(f"tokens have shape {array.shape}, must be one row of at most {TOKENS_MAX}")
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 0x7FFFFFFF):
        raise UsageError(f"tokens must be integers in 0..{0x7FFFFFFF}")
    return array.astype("<i4").tobytes()


def pack_few(tokens: Sequence[int]) -> bytes:
    """pack_tokens for a short list or tuple: numpy's calls alone would take longer than all of this."""
    if not tokens:
        return b""
    try:
        if min(tokens) >= 0:
            return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error:  # a number that is no int32: reported below
        pass
    return pack_tokens(tokens)


def unpack_few(data: bytes) -> list[int]:
    """unpack_tokens for what pack_few has packed."""
    if len(data) % 4 == 0:
        tokens = list(struct.unpack(f"<{len(data) // 4}i", data))
        if not tokens or min(tokens) >= 0:
            return tokens
    return list(unpack_tokens(data))


def unpack_tokens(data: bytes) -> npt.NDArray[np.int32]:
    """The inverse of pack_tokens; read-only. UsageError when malformed."""
    if len(data) % 4:
        raise UsageError(f"tokens have {len(data)} bytes, not a multiple of 4")
    tokens = np.frombuffer(data, "<i4").astype(np.int32, copy=False)
    if tokens.size and tokens.min() < 0:
        raise UsageError(f"token {tokens.min()} is negative")
    return tokens

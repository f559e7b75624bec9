"""Messages between the ranks of a decoder and a prefiller: those of crossrail.kv, and four more."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from crossrail.control.language import Language
from crossrail.control.mailbox import RESEND_S, Mailbox
from crossrail.control.wire import Wire
from crossrail.integrations.sglang.prompts import Prompt
from crossrail.kv import messages as m

AUX_BYTES_MAX = 4 << 20  # of all rows of one request
AUX_ROWS_MAX = 64

Row = Annotated[bytes, Meta(max_length=AUX_BYTES_MAX)]


class Wanted(Struct, frozen=True, tag=True):
    """A decoder's rank has taken a request of this room in, and will ask for its part once it has pages.

    Answered by Dispatched, or by DispatchRefused if the prefiller will not send it.
    """

    request: m.Name
    attempt: m.Attempt


class Destination(Struct, frozen=True, tag=True):
    """A decoder's rank has pages for its part of a room. ticket: KvTarget.to_wire(), pages behind the known prefix.

    request: of instance.rank_name. attempt: which of the decoder's requests of that room it is. Answered by Dispatched
    or DispatchRefused. prefix_tokens: which the decoder has: the prefiller begins behind them. prompt: what it takes
    the request for, if it knows.
    """

    request: m.Name
    attempt: m.Attempt
    ticket: m.Plain
    timeout_s: m.Seconds
    prefix_tokens: m.Index = 0
    prompt: Prompt | None = None


class Aux(Struct, frozen=True, tag=True):
    """A request's metadata besides its KV, one row of each of SGLang's buffers. From rank 0. Answered by Taken."""

    request: m.Name
    attempt: m.Attempt
    rows: Annotated[list[Row], Meta(max_length=AUX_ROWS_MAX)]


class GivenUp(Struct, frozen=True, tag=True):
    """To a decoder's rank that waits for pages, after Wanted: the prefiller will not send it. Answered by Taken."""

    request: m.Name
    attempt: m.Attempt
    why: m.Text


Message = (
    Wanted | Destination | GivenUp | Aux | m.Dispatched | m.DispatchRefused | m.Probe | m.Progress | m.Withdraw
    | m.Quiesced | m.Taken | m.Failed
)  # fmt: skip


class Envelope(Struct, frozen=True):
    """A message, and which question it is (ask) or answers (answers); 0: none."""

    body: Message
    ask: m.Index = 0
    answers: m.Index = 0


LANGUAGE = Language(b"crossrail sglang control", Envelope)


def mailbox(wire: Wire, secret: bytes, resend_s: float = RESEND_S) -> Mailbox:
    """A mailbox in this language: one per engine."""
    return Mailbox(wire, secret, LANGUAGE, resend_s)

"""Questions and answers between nodes: the mailbox of every service, in the language of kv."""

from __future__ import annotations

from crossrail.control import mailbox as control
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Wire
from crossrail.kv import messages as m

__all__ = ["Mailbox", "NoAnswer"]


class _KvLanguage:
    purpose = b"crossrail kv control"

    def encode(self, body: m.Message, ask: int, answers: int) -> bytes:
        return m.encode(m.Envelope(body, ask=ask, answers=answers))

    def decode(self, data: bytes) -> m.Envelope:
        return m.decode(data)


class Mailbox(control.Mailbox):
    """One per engine, for the messages of crossrail.kv. The rest is crossrail.control.mailbox's."""

    def __init__(self, wire: Wire, secret: bytes, resend_s: float = control.RESEND_S) -> None:
        super().__init__(wire, secret, _KvLanguage(), resend_s)

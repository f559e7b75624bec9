"""Questions and answers between nodes: the mailbox of every service, in the language of kv."""

from __future__ import annotations

from crossrail.control import mailbox as control
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Wire
from crossrail.kv.messages import LANGUAGE

__all__ = ["Mailbox", "NoAnswer"]


class Mailbox(control.Mailbox):
    """One per engine, for the messages of crossrail.kv. The rest is crossrail.control.mailbox's."""

    def __init__(self, wire: Wire, secret: bytes, resend_s: float = control.RESEND_S) -> None:
        super().__init__(wire, secret, LANGUAGE, resend_s)

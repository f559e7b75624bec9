"""What a writer of KV remembers of ended attempts, to answer repeated messages; for some the outcome stays unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from crossrail._latest import Latest
from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox
from crossrail.kv import messages as m
from crossrail.kv.transfer.job import Doubts, SendJob

# (decoder, request, attempt): the asking incarnation, because names may come from clients and two routers may have
# given the same one to two decoders; the request, or part of it; the attempt's number.
Key = tuple[bytes, str, int]


class OfAttempt(Protocol):
    """A message about an attempt."""

    @property
    def request(self) -> str: ...

    @property
    def attempt(self) -> int: ...


class AttemptBook:
    """The attempts of one writer. Threads: the event loop's.

    ended: how attempts ended, by key, the latest `kept`. A Dispatch whose key is in it is refused, even if the attempt
    was withdrawn before its Dispatch arrived.
    """

    def __init__(self, mailbox: Mailbox, kept: int) -> None:
        self._wire = mailbox.wire
        self.ended: Latest[Key, m.Progress] = Latest(kept)
        self._doubts = Doubts()

    def key_of(self, decoder: bytes, about: OfAttempt) -> Key:
        """decoder: address of the message's sender."""
        return self._wire.identity(decoder), about.request, about.attempt

    def end(
        self, key: Key, job: SendJob | None, state: m.Ended, detail: str = "", timeline: Sequence[m.Span] = ()
    ) -> None:
        """Notes that nothing of the attempt will be written any more. job: its transfer; None: it had none."""
        self._doubts.note(key, job)
        self.ended[key] = m.Progress(key[1], key[2], state, m.clipped(detail), list(timeline))

    def quiesced(self, key: Key, job: SendJob | None = None) -> m.Quiesced:
        """The answer to a Withdraw, once its job was cancelled and has ended. TransferStopped: something sent earlier
        may still arrive.
        """
        self._doubts.note(key, job)
        self._doubts.check(key)
        return m.Quiesced(key[1], key[2])

    def why_unwanted(self, decoder: bytes, deadline_at_s: float) -> str:
        """Why the decoder cannot want the attempt any more; empty: it may."""
        if self._wire.is_lost(decoder):
            return "its decoder is gone"
        if loop_time_s() >= deadline_at_s:
            return "its decoder's time is up"
        return ""

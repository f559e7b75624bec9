"""The state of a request, in SGLang's terms, shared by two threads."""

from __future__ import annotations

import threading
from enum import IntEnum

ONE_SAMPLE = "with n > 1, SGLang gives all samples of a request the same room; send a request for each"


def unusable_room(number: int) -> str:
    """Why SGLang cannot use this room number; empty if it can.

    Its metadata buffers hold the number, and 0 means that nothing was written yet: a decoder would wait for ever. A
    number that torch cannot store there would end the scheduler.
    """
    return "" if 0 < number < 1 << 63 else f"bootstrap_room={number} must be in 1..{(1 << 63) - 1}"


def wanted_twice(number: int) -> str:
    """Why requests of one decoder that are under way with one room fail, all of them."""
    return f"one decoder wants room {number} twice: {ONE_SAMPLE}"


class Poll(IntEnum):
    """SGLang's KVPoll, with its numbers: SGLang uses the smallest of all ranks."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class Progress:
    """Written by the loop, read by the scheduler.

    Invariant: poll is FAILED or SUCCESS only while quiet is set; from then on nothing changes. error: why it failed;
    set before quiet.
    """

    def __init__(self) -> None:
        self.poll = Poll.BOOTSTRAPPING
        self.error = ""
        self.quiet = threading.Event()  # set once neither we nor a peer touch its pages, now or later

    @property
    def is_over(self) -> bool:
        return self.poll in (Poll.FAILED, Poll.SUCCESS)

    def advance(self, poll: Poll) -> None:
        """Advances to a later state, unless the request is over or failing."""
        if not self.is_over and not self.error:
            self.poll = max(self.poll, poll)

    def fail(self, why: str) -> None:
        """The first reason is the one; `end` follows once it is quiet."""
        if not self.is_over and not self.error:
            self.error = why or "failed"

    def end(self) -> None:
        """The request is quiet: failed if there was a reason, else complete."""
        if not self.is_over:
            self.poll = Poll.FAILED if self.error else Poll.SUCCESS
        self.quiet.set()

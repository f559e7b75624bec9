"""The loops of api.py, one function for each side, through the Python API as a user would write them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import crossrail as xr

_REGION_BYTES = 1 << 20
WORD_BYTES = 8
_IMM = 1
_TIMEOUT_S = 20.0
MESSAGE_BYTES = 256
_MESSAGES_HELD = 1024
_MESSAGE_WINDOW = 256


class Side:
    """One engine with a region, a counter and a receive pool, and what it needs to know of its partner."""

    partner: xr.RegionDescriptor

    def __init__(self, name: str, transport: str, rails: int | Sequence[str] = 1) -> None:
        """Opens everything."""
        self.engine = xr.Engine(name, transport=transport, rails=rails)
        self.region = self.engine.alloc(_REGION_BYTES, populate=True)
        self.counter = self.engine.imm_counter(_IMM)
        self.pool = self.engine.submit_recvs(_MESSAGES_HELD, MESSAGE_BYTES)

    def meet(self, descriptor: bytes) -> None:
        """The partner's region."""
        self.partner = xr.RegionDescriptor.from_bytes(descriptor)

    def ping(self) -> None:
        """One small write with the immediate."""
        self.engine.submit_write(self.region, self.partner, WORD_BYTES, imm=_IMM)

    def close(self) -> None:
        """Closes everything."""
        self.pool.close()
        self.engine.close()


def ping_blocking(side: Side, rounds: int) -> int:
    """First side of the ping-pong, blocking waits. Nanoseconds."""
    begun = time.perf_counter_ns()
    for _ in range(rounds):
        side.ping()
        side.counter.wait(1, _TIMEOUT_S)
    return time.perf_counter_ns() - begun


def answer_blocking(side: Side, rounds: int) -> None:
    """Second side."""
    for _ in range(rounds):
        side.counter.wait(1, _TIMEOUT_S)
        side.ping()


async def ping_awaiting(side: Side, rounds: int) -> int:
    """First side of the ping-pong, awaiting. Nanoseconds."""
    begun = time.perf_counter_ns()
    for _ in range(rounds):
        side.ping()
        await side.counter.wait_async(1, _TIMEOUT_S)
    return time.perf_counter_ns() - begun


async def answer_awaiting(side: Side, rounds: int) -> None:
    """Second side."""
    for _ in range(rounds):
        await side.counter.wait_async(1, _TIMEOUT_S)
        side.ping()


def send_messages(side: Side, count: int) -> int:
    """Send so many, a window of them under way, until the partner says that it has them all. Nanoseconds."""
    message = bytes(MESSAGE_BYTES)
    window: list[xr.Transfer | None] = [None] * _MESSAGE_WINDOW
    submit, peer = side.engine.submit_send, side.partner.owner
    begun = time.perf_counter_ns()
    for index in range(count):
        slot = index % _MESSAGE_WINDOW
        oldest = window[slot]
        if oldest is not None and not oldest.done:
            oldest.wait(_TIMEOUT_S)
        window[slot] = submit(peer, message)
    side.pool.recv(_TIMEOUT_S)
    return time.perf_counter_ns() - begun


def take_messages(side: Side, count: int) -> None:
    """Second side: take them in batches, then send one."""
    taken = 0
    while taken < count:
        taken += len(side.pool.poll(64)) or _take_one(side)
    side.engine.submit_send(side.partner.owner, b"all").wait(_TIMEOUT_S)


def _take_one(side: Side) -> int:
    side.pool.recv(_TIMEOUT_S)
    return 1


def ping_messages(side: Side, rounds: int) -> int:
    """First side of a ping-pong of messages. Nanoseconds."""
    message = bytes(MESSAGE_BYTES)
    begun = time.perf_counter_ns()
    for _ in range(rounds):
        side.engine.submit_send(side.partner.owner, message)
        side.pool.recv(_TIMEOUT_S)
    return time.perf_counter_ns() - begun


def echo_messages(side: Side, count: int) -> None:
    """Second side."""
    for _ in range(count):
        message = side.pool.recv(_TIMEOUT_S)
        side.engine.submit_send(message.peer, message.data)

"""The loops of api.py, one function per side, written with the Python API as a user would write them."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Sequence

import crossrail as xr
from crossrail.control.deadlines import in_time

_REGION_BYTES = 1 << 20
WORD_BYTES = 8
_IMM = 1
_TIMEOUT_S = 20.0
MESSAGE_BYTES = 256
_MESSAGES_HELD = 1024
_MESSAGE_WINDOW = 256
_PAUSE_S = 0.002  # until all have fallen asleep


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
        """Sends one small write with the immediate."""
        self.engine.submit_write(self.region, self.partner, WORD_BYTES, imm=_IMM)

    @property
    def word(self) -> int:
        """The word that the small write sends, and the place where the partner's lands."""
        return int.from_bytes(self.region.view()[:WORD_BYTES], "little")

    @word.setter
    def word(self, value: int) -> None:
        self.region.view()[:WORD_BYTES] = value.to_bytes(WORD_BYTES, "little")

    def clear(self) -> None:
        """Zero the region."""
        self.region.view()[:] = bytes(_REGION_BYTES)

    def digest(self) -> str:
        """SHA-256 of the region."""
        return hashlib.sha256(self.region.view()).hexdigest()

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


async def ping_sparsely(side: Side, rounds: int, *, blocking: bool) -> list[int]:
    """First side of a ping-pong with a pause before each round, in which all fall asleep. Nanoseconds of each."""
    took_ns: list[int] = []
    for _ in range(rounds):
        await asyncio.sleep(_PAUSE_S)
        begun = time.perf_counter_ns()
        side.ping()
        await _arrival(side, blocking=blocking)
        took_ns.append(time.perf_counter_ns() - begun)
    return took_ns


async def answer_awaiting(side: Side, rounds: int) -> None:
    """Second side."""
    for _ in range(rounds):
        await side.counter.wait_async(1, _TIMEOUT_S)
        side.ping()


async def ping_verified(side: Side, rounds: int, *, blocking: bool) -> None:
    """First side of a ping-pong in which each write is another word. CrossrailError when one was not there as it was
    counted; at the end, so that the partner need not wait for us."""
    wrong = 0
    for number in range(1, rounds + 1):
        side.word = 2 * number
        side.ping()
        await _arrival(side, blocking=blocking)
        wrong += side.word != 2 * number + 1
    _refuse(wrong, "words of a ping-pong")


async def answer_verified(side: Side, rounds: int, *, blocking: bool) -> None:
    """Second side, likewise."""
    wrong = 0
    for number in range(1, rounds + 1):
        await _arrival(side, blocking=blocking)
        wrong += side.word != 2 * number
        side.word = 2 * number + 1
        side.ping()
    _refuse(wrong, "words of a ping-pong")


def _refuse(wrong: int, what: str) -> None:
    if wrong:
        raise xr.CrossrailError(f"{what}: what arrived is not what was sent, {wrong} times")


async def _arrival(side: Side, *, blocking: bool) -> None:
    if blocking:
        side.counter.wait(1, _TIMEOUT_S)
    else:
        await side.counter.wait_async(1, _TIMEOUT_S)


def listen_bare(family: socket.AddressFamily) -> socket.socket:
    """Listens for the partner's connect_bare(), which gets its getsockname()."""
    listener = socket.socket(family)
    listener.bind(b"" if family == socket.AF_UNIX else ("127.0.0.1", 0))  # any free name of Unix sockets, or port
    listener.listen(1)
    listener.settimeout(_TIMEOUT_S)
    return listener


def connect_bare(address: str | tuple[str, int]) -> socket.socket:
    """Connects to the partner's listener; the address determines the family."""
    bare = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    bare.settimeout(_TIMEOUT_S)
    bare.connect(address)
    return bare


def ping_streams(bare: socket.socket, rounds: int, *, first: bool) -> int:
    """The same ping-pong with asyncio's streams, on either side. Closes the socket. Nanoseconds."""
    return asyncio.run(in_time(_ping_streams(bare, rounds, first=first), _TIMEOUT_S))


async def ping_streams_sparsely(bare: socket.socket, rounds: int) -> list[int]:
    """As ping_sparsely(), with asyncio's streams; the partner does as in any ping-pong. Closes the socket."""
    reader, writer = await _streams(bare)
    took_ns: list[int] = []
    for _ in range(rounds):
        await asyncio.sleep(_PAUSE_S)
        begun = time.perf_counter_ns()
        writer.write(bytes(WORD_BYTES))
        await reader.readexactly(WORD_BYTES)
        took_ns.append(time.perf_counter_ns() - begun)
    writer.close()
    await writer.wait_closed()
    return took_ns


async def _streams(bare: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    open_streams = asyncio.open_unix_connection if bare.family == socket.AF_UNIX else asyncio.open_connection
    bare.setblocking(False)
    return await open_streams(sock=bare)


async def _ping_streams(bare: socket.socket, rounds: int, *, first: bool) -> int:
    reader, writer = await _streams(bare)
    word = bytes(WORD_BYTES)
    begun = time.perf_counter_ns()
    for _ in range(rounds):
        if first:
            writer.write(word)
        await reader.readexactly(WORD_BYTES)
        if not first:
            writer.write(word)
    took_ns = time.perf_counter_ns() - begun
    writer.close()
    await writer.wait_closed()
    return took_ns


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


def send_verified(side: Side, count: int) -> None:
    """Send so many that differ, until the partner says that it has them all."""
    for number in range(count):
        side.engine.submit_send(side.partner.owner, _numbered(number)).wait(_TIMEOUT_S)
    side.pool.recv(_TIMEOUT_S)


def take_verified(side: Side, count: int) -> None:
    """Second side: each must come once, and whole. Then send one. CrossrailError after that."""
    missing = {_numbered(number) for number in range(count)}
    for _ in range(count):
        missing.discard(side.pool.recv(_TIMEOUT_S).data)
    side.engine.submit_send(side.partner.owner, b"all").wait(_TIMEOUT_S)
    _refuse(len(missing), "messages")


def _numbered(number: int) -> bytes:
    return number.to_bytes(8, "little") * (MESSAGE_BYTES // 8)


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

"""Stand-ins for engines (and their objects) that live in other processes, in the shape of parts.py."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossrail.campaign.books import Bytes
from crossrail.campaign.checkers import REFUSED
from crossrail.campaign.child import RegionNumber
from crossrail.campaign.process import Process
from crossrail.campaign.usage import Usage
from crossrail.errors import TransferError
from crossrail.peers import Address
from crossrail.regions import RegionDescriptor

_NUMBERS_AT_ONCE = 64
_NEVER = ("protocol-error", "imm-overflow", "checksum-mismatch")  # events that no fault of ours explains,
_HARMLESS = (
    "the handshake was not finished in time",
)  # except this one, from a peer that was frozen in the middle of it
_MODULUS_OF = "imm_units_received"


class RemoteRegion:
    """A region there, whose memory is also mapped here."""

    def __init__(self, engine: RemoteEngine, number: int, descriptor: RegionDescriptor, memory: Bytes) -> None:
        self.engine = engine
        self.number = number
        self.descriptor = descriptor
        self.memory = memory
        self.slot: int | None = None
        self.closed = False  # or it is about to be, or revoked: not to be used any more
        self.is_gone = False  # closed over there

    def close(self, timeout_s: float | None = 5.0) -> None:
        """Closes it, and waits for that. Raises TimeoutError with the engine's words."""
        self.closed = True
        if self.is_gone:
            return
        if why := self.engine.process.ask("close-region", self.number, timeout_s):
            raise TimeoutError(why)
        self._let_go()

    def close_soon(self, timeout_s: float, on_closed: Callable[[], None]) -> None:
        """Tells it to close, or to stop trying after that long; on_closed: when it did."""
        self.closed = True

        def closed() -> None:
            self._let_go()
            on_closed()

        self.engine.when_done(self.engine.process.ask_soon("close-region", self.number, timeout_s), closed)

    def revoke_soon(self, timeout_s: float, on_revoked: Callable[[], None]) -> None:
        """Tells it to lock peers out; on_revoked: when they are."""
        self.closed = True
        self.engine.when_done(self.engine.process.ask_soon("revoke", self.number, timeout_s), on_revoked)

    def renew(self) -> None:
        """Lets peers in again, by another descriptor."""
        descriptor = self.engine.process.ask("renew", self.number)
        assert isinstance(descriptor, RegionDescriptor)
        self.descriptor = descriptor
        self.closed = False

    def _let_go(self) -> None:
        self.is_gone = True
        if self.slot is not None:
            self.engine.process.slots_resting.append(self.slot)
            self.slot = None


class RemoteTransfer:
    """One submit in the other process."""

    def __init__(self, engine: RemoteEngine, number: int) -> None:
        self._engine = engine
        self.number = number
        self.status = "pending"
        self.why = ""
        self.nbytes = 0
        self._callbacks: list[Callable[[RemoteTransfer], object]] = []

    def cancel(self) -> None:
        self._engine.process.tell("cancel", self.number)

    def wait(self, timeout_s: float | None = None) -> None:  # noqa: ARG002 - as a Transfer's
        """Raises TransferError when it has failed; does not wait."""
        if self.status not in ("pending", "done"):
            raise TransferError(self.why or self.status)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        self._callbacks.append(fn)

    def complete(self, status: str, why: str) -> None:
        """Called once for each word of its completion: more than one is for the ledger to find."""
        self.status, self.why = status, why
        for fn in self._callbacks:
            fn(self)


class RemoteCounter:
    """A counter there. poll() returns the latest report."""

    def __init__(self, engine: RemoteEngine, imm: int) -> None:
        self._engine = engine
        self.imm = imm

    def poll(self) -> int:
        return self._engine.counts.get(self.imm, 0)

    def on_count(self, count: int, fn: Callable[[], object]) -> None:
        """Calls fn when that many have arrived. They are given back over there."""
        number = self._engine.process.fleet.next_number()
        self._engine.on_counts[number] = fn
        self._engine.process.tell("on-count", number, self.imm, count)

    def release(self, *, force: bool = False) -> None:
        self._engine.released.add(self.imm)
        self._engine.process.tell("release", self.imm, force)

    def _give_back(self, count: int) -> None:
        """The child did."""


class RemotePool:
    """Buffers for messages there."""

    def __init__(self, engine: RemoteEngine, number: int) -> None:
        self._engine = engine
        self._number = number
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self._engine.process.tell("close-pool", self._number)


class _Message:
    def __init__(self, data: bytes) -> None:
        self.data = data


class RemoteEngine:
    """The engine of a process. Submits return at once; what comes of them is heard while time passes.

    report() makes counts, stats() and usage what they are at that moment.
    """

    def __init__(self, process: Process, name: str, rails: int, options: dict[str, Any]) -> None:
        self.process = process
        self.name = name
        self.rails = rails
        self.closed = False
        self.counts: dict[int, int] = {}
        self.usage: Usage | None = None
        self.on_counts: dict[int, Callable[[], object]] = {}
        self.released: set[int] = set()  # numbers; of so few none may be handed out again
        self.events: dict[str, int] = {}  # kinds, how many
        self.address: Address
        self._stats: dict[str, int] = {}
        self._units_before = 0
        self._numbers: list[int] = []
        self._transfers: dict[int, RemoteTransfer] = {}
        self._on_message: dict[int, Callable[[Any], object]] = {}
        self._awaited: dict[int, Callable[[], None]] = {}
        self._closing: int | None = None
        process.listeners = {
            "submitted": self._submitted, "completed": self._completed, "message": self._message,
            "counted": self._counted, "event": self._event, "complaint": process.fleet.complaints.append,
        }  # fmt: skip
        process.on_end = self.ended
        address = process.ask("open", name, options)
        assert isinstance(address, Address)
        self.address = address

    # ---- memory

    def register(self, memory: Bytes) -> RemoteRegion:
        """Memory that is one of the process's slots."""
        slot = next(index for index in self.process.slots_free if self.process.slots[index] is memory)
        number = self.process.fleet.next_number()
        descriptor = self.process.ask("register", number, slot)
        assert isinstance(descriptor, RegionDescriptor)
        region = RemoteRegion(self, number, descriptor, memory)
        self.process.slots_free.remove(slot)
        region.slot = slot
        return region

    def alloc(self, nbytes: int) -> RemoteRegion:
        """Memory of that engine's own, mapped here too."""
        number = self.process.fleet.next_number()
        reply = self.process.ask("alloc", number, nbytes)
        assert isinstance(reply, tuple)
        descriptor, fd, offset = reply
        ours = os.open(f"/proc/{self.process.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            whole = mmap.mmap(ours, 0)
        finally:
            os.close(ours)
        return RemoteRegion(self, number, descriptor, np.frombuffer(whole, np.uint8, nbytes, offset))

    # ---- operations

    def submit_write(self, src: RemoteRegion, dst: RegionDescriptor, nbytes: int, **options: Any) -> RemoteTransfer:
        return self._submit("submit_write", RegionNumber(src.number), dst, nbytes, **options)

    def submit_read(self, dst: RemoteRegion, src: RegionDescriptor, nbytes: int, **options: Any) -> RemoteTransfer:
        return self._submit("submit_read", RegionNumber(dst.number), src, nbytes, **options)

    def submit_paged_writes(
        self, src: RemoteRegion, from_pages: Any, dst: RegionDescriptor, to_pages: Any, page_bytes: int, **options: Any
    ) -> RemoteTransfer:
        source = RegionNumber(src.number)
        return self._submit("submit_paged_writes", source, from_pages, dst, to_pages, page_bytes, **options)

    def submit_scatter(self, src: RemoteRegion, targets: Sequence[RegionDescriptor], **options: Any) -> RemoteTransfer:
        return self._submit("submit_scatter", RegionNumber(src.number), list(targets), **options)

    def submit_send(self, peer: Address, payload: bytes) -> RemoteTransfer:
        return self._submit("submit_send", peer, payload)

    def add_peer_group(self, peers: Sequence[Address]) -> tuple[Address, ...]:
        return tuple(peers)

    def submit_barrier(self, group: tuple[Address, ...], imm: int) -> RemoteTransfer:
        return self._submit("submit_barrier", group, imm)

    def _submit(self, method: str, *arguments: Any, **options: Any) -> RemoteTransfer:
        transfer = RemoteTransfer(self, self.process.fleet.next_number())
        self._transfers[transfer.number] = transfer
        self.process.tell("submit", transfer.number, method, arguments, options)
        return transfer

    def submit_recvs(self, count: int, nbytes: int, on_message: Callable[[Any], object]) -> RemotePool:
        pool = RemotePool(self, self.process.fleet.next_number())
        self._on_message[pool._number] = on_message
        self.process.tell("open-pool", pool._number, count, nbytes)
        return pool

    # ---- counting

    def imm_counter(self, imm: int) -> RemoteCounter:
        return RemoteCounter(self, imm)

    def alloc_imm(self) -> RemoteCounter:
        """One of the numbers that stock_numbers() fetched; LookupError if there are no more."""
        if not self._numbers:
            raise LookupError("no number left of those that were fetched")
        return RemoteCounter(self, self._numbers.pop())

    def stock_numbers(self) -> None:
        """Sees that there are numbers to allocate."""
        if len(self._numbers) < _NUMBERS_AT_ONCE:
            fresh = self.process.ask("numbers", _NUMBERS_AT_ONCE)
            assert isinstance(fresh, list)
            if again := self.released.intersection(fresh):
                self.process.fleet.complaints.append(f"{self.name!r} hands out {sorted(again)} again, just released")
            self._numbers = fresh + self._numbers

    # ---- peers

    def peer_state(self, peer: Address) -> str:
        return str(self.process.ask("peer-state", peer))

    def forget_peer(self, peer: Address) -> None:
        self.process.tell("forget", peer)

    # ---- how it is

    def report(self, imms: Sequence[int] = ()) -> None:
        """Asks how it is: counts of these numbers, statistics, what the process holds."""
        reply = self.process.ask("report", list(imms))
        assert isinstance(reply, tuple)
        self._stats, counts, self.usage = reply
        self.counts.update(counts)

    def stats(self) -> dict[str, int]:
        """As the process reported; counts are relative to begin_round()."""
        return self._stats | {_MODULUS_OF: self._stats[_MODULUS_OF] - self._units_before}

    def begin_round(self) -> None:
        """From now on counts belong to another ledger."""
        self.stock_numbers()
        self.report()
        self._units_before = self._stats[_MODULUS_OF]
        for things in (self.counts, self.on_counts, self._transfers, self._on_message):
            things.clear()

    def when_done(self, ask: int, fn: Callable[[], None]) -> None:
        """Calls fn, from settle(), if that question is answered by "", which means that it was done."""
        self._awaited[ask] = fn

    def settle(self) -> None:
        """Takes note of the answers that came."""
        for ask in list(self._awaited):
            if (answer := self.process.take_reply(ask)) is not None:
                fn = self._awaited.pop(ask)
                if answer == "":
                    fn()

    @property
    def is_settled(self) -> bool:
        """Whether no answer is outstanding."""
        return not self._awaited

    # ---- its end

    def close(self, timeout_s: float) -> None:
        """Closes the engine, for this process immediately; its own process continues."""
        self.closed = True
        self._closing = self.process.ask_soon("close", timeout_s)

    def left_behind(self) -> str:
        """After close(): what its process still holds and did not before the engine opened, in words."""
        assert self._closing is not None
        return str(self.process.reply_to(self._closing, "close"))

    def ended(self) -> None:
        """The process is gone: everything in progress completes as if the engine had been closed."""
        self.closed = True
        self._awaited.clear()
        for transfer in self._transfers.values():
            if transfer.status == "pending":
                transfer.complete("engine-closed", "its process was killed")

    # ---- what it tells

    def _submitted(self, number: int, nbytes: int) -> None:
        self._transfers[number].nbytes = nbytes

    def _completed(self, number: int, status: str, why: str) -> None:
        transfer = self._transfers[number]  # kept: a second word of it would be a mistake that the ledger finds
        if status == REFUSED and "closed" not in why and "revoked" not in why:
            self.process.fleet.complaints.append(f"a submit of {self.name!r} was refused: {why}")
        transfer.complete(status, why)

    def _message(self, number: int, data: bytes) -> None:
        self._on_message[number](_Message(data))

    def _counted(self, number: int) -> None:
        fn = self.on_counts.pop(number, None)
        if fn is not None:
            fn()

    def _event(self, kind: str, peer: str, detail: str) -> None:
        self.events[kind] = self.events.get(kind, 0) + 1
        if kind in _NEVER and not any(words in detail for words in _HARMLESS):
            self.process.fleet.complaints.append(f"engine {self.name!r} has the event {kind} of {peer!r}: {detail}")

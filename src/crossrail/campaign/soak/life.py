"""One engine of a soak from open to close (a "life"): its memory, its peers, its operations and what became of them."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crossrail.campaign.books import Bytes
from crossrail.campaign.checks import SOURCE_POISON, TARGET_POISON, wrong_bytes
from crossrail.campaign.soak.records import (
    ACCEPTED,
    AREA_BYTES,
    AREAS,
    ARRIVALS,
    CLASSES,
    ENDED,
    FREE,
    GIVEN_UP,
    HANDED,
    HANDED_SLOTS,
    INTENT,
    KINDS,
    LIBRARY_BYTES,
    REFUSED,
    ROWS,
    SLAB_BYTES,
    STATUSES,
    SUSPECT,
    THREADS,
    Book,
    Stage,
    area_of,
    data,
    library,
    number_of,
    slot_offset,
)  # fmt: skip
from crossrail.counters import CountTicket
from crossrail.engine import Engine
from crossrail.errors import EngineClosed, TransportError, UsageError, WaitTimeout
from crossrail.messages import Message, ReceivePool
from crossrail.peers import Address
from crossrail.regions import RegionDescriptor
from crossrail.transfers import Transfer

MESSAGE_BYTES_MAX = 16384
INBOX_BYTES = 1 << 18  # of a thread, for what it reads
_POOL_BUFFERS = 16
_QUARANTINE_LIMIT_S = 20.0  # nobody is stopped for as long


@dataclass(frozen=True)
class Member:
    """A life as the others know it.

    fd, inode, offset: where its process has the slab, if its engine allocated it.

    fences: how often it had been fenced when this descriptor was issued.
    """

    life: int
    seat: int
    index: int
    name: str
    address: Address
    descriptor: RegionDescriptor
    fences: int
    pid: int
    fd: int | None = None
    inode: int = 0
    offset: int = 0


@dataclass(eq=False)
class Place:
    """A range at a target, and what an operation is to bring there. A slot of a peer's slab, or, read, an inbox's."""

    memory: Bytes
    source: Bytes | None  # ours, poisoned at the completion; a peer's library is not
    data_at: int
    nbytes: int
    owner: Book | None = None  # of the slab; None: our own inbox
    slot: tuple[int, int] | None = None  # area here of the target, and slot
    fence: int = 0


@dataclass(eq=False)
class Job:
    """One submit that may be in progress."""

    kind: str
    rows: list[int]
    places: list[Place]
    is_stale: bool = False  # by a descriptor that was revoked or closed before the submit: must not be done
    is_pinned: bool = False  # to a rail, which may be down
    transfer: Transfer | None = None
    completions: int = 0
    after: list[Callable[[], None]] = field(default_factory=list)


class Life:
    """The engine and its books. complain: called for violations, on any thread."""

    def __init__(
        self, stage: Stage, seat: int, index: int, life: int, options: dict[str, Any], is_mapped: bool,
        complain: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.stage, self.seat, self.index, self.life = stage, seat, index, life
        self.book = stage.books[seat][index]
        self.complain = complain
        self.engine = Engine(f"soak-{seat}", **options)
        self.engine.on_event(self._event)
        self.region = self.engine.alloc(SLAB_BYTES) if is_mapped else self.engine.register(stage.slabs[seat][index])
        self.slab: Bytes = self.region.array() if is_mapped else stage.slabs[seat][index]
        self.is_mapped = is_mapped
        self._wipe()
        self.source = np.full(AREAS * AREA_BYTES, SOURCE_POISON, np.uint8)
        self.source_region = self.engine.register(self.source, access="local")
        self.inbox = np.full(THREADS * INBOX_BYTES, TARGET_POISON, np.uint8)
        self.inbox_region = self.engine.register(self.inbox, access="local")
        self.members: dict[int, Member] = {}  # by seat, without our own
        self.memories: dict[int, Bytes] = {}  # their slabs, by life, where we see them
        self.jobs: dict[int, Job] = {}  # under way, by first row
        self.free: dict[tuple[int, int, str], list[int]] = {}  # slots, by thread, area and class
        self.round = 0
        self.pool: ReceivePool | None = None
        self.word = self.engine.alloc_watcher(_ignore)  # for which triggered writes wait
        self._lock = threading.Lock()
        self._rows = 0
        self._is_expecting = False
        self._counters: dict[int, Any] = {}
        self._tickets: dict[int, CountTicket] = {}  # by number

    # ---- rounds

    def begin_round(self, number: int, members: Sequence[Member]) -> None:
        """Begins a round: all books are clear, and all slabs of living engines are poison."""
        self.round = number
        self._rows = 0
        self._is_expecting = True
        self.free.clear()
        self.members.clear()
        self.meet(members)
        self.open_pool()

    def meet(self, members: Sequence[Member]) -> None:
        """Records the present members, and new descriptors."""
        for member in members:
            if member.seat == self.seat:
                continue
            before = self.members.get(member.seat)
            if member.life not in self.memories and (memory := self._memory_of(member)) is not None:
                self.memories[member.life] = memory
            if before is None or before.life != member.life:
                self._make_slots(area_of(member.seat, member.index))
                self._expect(member)
            self.members[member.seat] = member
        known = {member.life for member in self.members.values()}
        for life in [life for life in self.memories if life not in known]:
            del self.memories[life]

    def _memory_of(self, member: Member) -> Bytes | None:
        """None: it has ended already."""
        if member.fd is None:
            return self.stage.slabs[member.seat][member.index]
        return map_descriptor(member)

    def _make_slots(self, area: int) -> None:
        for one in CLASSES.values():
            for thread in range(THREADS):
                self.free[thread, area, one.name] = list(range(one.first + thread, one.first + one.count, THREADS))

    # ---- what comes

    def open_pool(self) -> None:
        if self.pool is None or self.pool.closed:
            self.pool = self.engine.submit_recvs(_POOL_BUFFERS, MESSAGE_BYTES_MAX, self._message)

    def _message(self, message: Message) -> None:
        payload = np.frombuffer(bytes(message.data), np.uint8)
        life, row, data_at = (int(number) for number in payload[:12].view("<u4"))
        at = int(self.book.head["arrivals"][0])  # one thread, the callbacks', counts them
        if at == ARRIVALS:
            self.complain(f"more than {ARRIVALS} messages arrived in a round")
            return
        record = self.book.arrivals[at]
        record["life"], record["row"] = life, row
        record["is_right"] = np.array_equal(payload[12:], data()[data_at : data_at + len(payload) - 12])
        record["state"] = ENDED
        self.book.head["arrivals"][0] = at + 1

    def _expect(self, sender: Member) -> None:
        """Looks at the bytes of its handed slots whenever one is counted."""
        for slot in range(HANDED_SLOTS.count):
            self._arm(sender, slot)

    def _arm(self, sender: Member, handed: int) -> None:
        number = number_of(sender.life, self.round, handed)

        def counted() -> None:
            self._look(sender, handed)
            if self._is_expecting:
                self._arm(sender, handed)

        with contextlib.suppress(EngineClosed):
            self._tickets[number] = self.counter(number).on_count(1, counted)

    def _look(self, sender: Member, handed: int) -> None:
        """Checks what was handed over: the count says that all bytes have arrived. Then the slot is the
        sender's again.
        """
        area, slot = area_of(sender.seat, sender.index), HANDED_SLOTS.first + handed
        record = self.stage.books[sender.seat][sender.index].slots[area_of(self.seat, self.index), slot]
        begin, nbytes, row, fence = (int(record[name]) for name in ("data_at", "nbytes", "row", "fence"))
        self.book.seen[area, handed] += 1
        at = slot_offset(area, slot)
        memory = self.slab[at : at + nbytes]
        wrong = wrong_bytes(memory, data()[begin : begin + nbytes], TARGET_POISON, is_done=True)
        if wrong and self.book.fences == fence:
            self.complain(f"row {row} of {sender.name}/{sender.life} was counted at {self.life}, and {wrong}")
        memory[:] = TARGET_POISON
        self.book.taken[area, handed] = row + 1

    def counter(self, number: int) -> Any:
        with self._lock:
            if number not in self._counters:
                self._counters[number] = self.engine.imm_counter(number)
            return self._counters[number]

    def release(self, numbers: Sequence[int], force: Sequence[bool]) -> None:
        """Releases all numbers that were expected in a round."""
        self._is_expecting = False
        for ticket in list(self._tickets.values()):
            ticket.cancel()
        self._tickets.clear()
        for number, is_forced in zip(numbers, force, strict=True):
            self.counter(number)
            with self._lock:
                counter = self._counters.pop(number)
            try:
                counter.release(force=is_forced)
            except UsageError as error:
                self.complain(f"release of {number}: {error}")

    def _event(self, event: Any) -> None:
        # A peer that was stopped in the midst of a handshake for longer than that may take is turned away.
        if event.kind in ("protocol-error", "imm-overflow", "checksum-mismatch") and (
            "the handshake was not finished in time" not in event.detail
        ):
            self.complain(f"event {event.kind} of {event.peer!r}: {event.detail}")

    # ---- what is done

    def take_row(self) -> int | None:
        """A free row; None if there are no more in this round."""
        with self._lock:
            if self._rows == ROWS:
                return None
            self._rows += 1
            return self._rows - 1

    def note(self, row: int, kind: str, to: int, nbytes: int, **more: int) -> None:
        """Writes down what is about to be submitted; more: other fields of records.ROW."""
        record = self.book.rows[row]
        record["kind"], record["to"], record["nbytes"] = KINDS.index(kind), to, nbytes
        for name, value in more.items():
            record[name] = value
        record["state"] = INTENT

    def submit(self, job: Job, submit: Callable[[], Transfer]) -> bool:
        """Whether the submit was accepted."""
        rows = self.book.rows
        rows["is_first"][job.rows[0]] = 1
        self.jobs[job.rows[0]] = job
        try:
            job.transfer = submit()
        except (UsageError, TransportError, EngineClosed) as error:
            if "closed" not in str(error):
                self.complain(f"a submit was refused: {error}")
            rows["state"][job.rows] = REFUSED
            del self.jobs[job.rows[0]]
            for place in job.places:
                self.free_place(place)
            return False
        rows["state"][job.rows] = ACCEPTED
        job.transfer.add_done_callback(lambda transfer: self._ended(job, transfer))
        return True

    def fill(self, place: Place) -> None:
        """The source gets its bytes, the slot its record; the target must be as its last completion left it."""
        if place.source is not None:
            place.source[:] = data()[place.data_at : place.data_at + place.nbytes]
        self._check_poison(place)

    def _check_poison(self, place: Place) -> None:
        if (place.memory != TARGET_POISON).any():
            at = int(np.flatnonzero(place.memory != TARGET_POISON)[0])
            self.complain(f"slot {place.slot} was touched after its last completion, at byte {at}")

    # ---- what comes of it

    def _ended(self, job: Job, transfer: Transfer) -> None:
        status = transfer.status
        job.completions += 1
        if job.completions > 1:
            self.complain(f"row {job.rows[0]} of {self.life} completed {job.completions} times")
            return
        if status == "pending" or status not in STATUSES or (status == "transport-failed" and not job.is_pinned):
            self.complain(f"row {job.rows[0]} of {self.life} completed, and its status is {status!r}")
        if status == "done" and job.is_stale:
            self.complain(f"row {job.rows[0]} of {self.life} is done, by a descriptor that was revoked before")
        rows = self.book.rows
        rows["status"][job.rows] = STATUSES.index(status) if status in STATUSES else 0
        for place in job.places:
            self._close(job, place, status)
        rows["state"][job.rows] = ENDED
        for fn in job.after:
            fn()
        self.jobs.pop(job.rows[0], None)

    def _close(self, job: Job, place: Place, status: str) -> None:
        """Looks at the bytes, and poisons source and target: from here on neither may be touched."""
        if place.source is not None:
            place.source[:] = SOURCE_POISON
        record = None if place.slot is None else self.book.slots[place.slot]
        is_handed = place.slot is not None and place.slot[1] >= HANDED_SLOTS.first
        if record is not None:
            if is_handed and status == "done":
                record["state"] = HANDED  # its receiver looks, and poisons
                return
            # The status of a scatter is that of its first target that failed: others may have been given up.
            is_given_up = status in GIVEN_UP or (job.kind == "scatter" and status != "done")
            if is_given_up or (is_handed and status != "cancelled"):  # which may be counted late
                record["state"] = SUSPECT
                return
        wrong = wrong_bytes(
            place.memory, data()[place.data_at : place.data_at + place.nbytes], TARGET_POISON, is_done=status == "done"
        )
        if status == "checksum-mismatch":
            wrong = "fails its checksum, and nobody else wrote there"
        if wrong and (place.owner is None or place.owner.fences == place.fence):
            self.complain(
                f"row {job.rows[0]} ({job.kind}, {place.nbytes} bytes) of {self.life} to {place.slot} {wrong}"
            )
        place.memory[:] = TARGET_POISON
        self.free_place(place)

    def free_place(self, place: Place) -> None:
        """The slot is nobody's."""
        if place.slot is None:
            return
        self.book.slots[place.slot]["state"] = FREE
        area, slot = place.slot
        one = next(one for one in CLASSES.values() if one.first <= slot < one.first + one.count)
        self.free[(slot - one.first) % THREADS, area, one.name].append(slot)

    # ---- its memory

    def fence(self, timeout_s: float, *, is_closing: bool) -> None:
        """Locks peers out, by close() or revoke(), and poisons all. Raises WaitTimeout."""
        if is_closing:
            self.region.close(timeout_s)
        else:
            self.region.revoke(timeout_s)
        self.book.head["fences"][0] += 1
        self.slab[:] = TARGET_POISON

    def lift_fence(self) -> RegionDescriptor:
        """Lets peers in again."""
        self.slab[-LIBRARY_BYTES:] = library()
        if not self.region.closed:
            return self.region.renew()
        self.region = self.engine.register(self.slab)
        return self.region.descriptor

    def _wipe(self) -> None:
        self.slab[:-LIBRARY_BYTES] = TARGET_POISON
        self.slab[-LIBRARY_BYTES:] = library()

    def close(self, timeout_s: float) -> None:
        """The engine; nothing may touch its memory any more."""
        self.engine.close(timeout_s)
        try:
            # Quarantined if a peer was stopped in the middle of something: until it continues, or is killed.
            self.region.close(_QUARANTINE_LIMIT_S)
        except WaitTimeout as error:
            self.complain(f"life {self.life} was closed, and its memory is still in use: {error}")
        self.book.head["fences"][0] += 1
        self.slab[:] = TARGET_POISON
        self.slab = self.slab[:0].copy()  # arrays hide from the garbage collector that region and engine are held by us


def _ignore(_old: int, _new: int) -> None:
    """Nobody needs to know that the word has changed."""


def map_descriptor(member: Member) -> Bytes | None:
    """The slab that its engine allocated; None: it has ended already."""
    assert member.fd is not None
    try:
        fd = os.open(f"/proc/{member.pid}/fd/{member.fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(fd).st_ino != member.inode:  # closed meanwhile, and the number given to another
            return None
        return np.frombuffer(mmap.mmap(fd, 0), np.uint8, SLAB_BYTES, member.offset)
    finally:
        os.close(fd)

"""What one thread of a soak process does: operations drawn from a seed, one after another, until it is stopped."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np

from crossrail.campaign.soak.life import INBOX_BYTES, MESSAGE_BYTES_MAX, Job, Life, Member, Place
from crossrail.campaign.soak.records import (
    BUSY,
    CLASSES,
    FREE,
    HANDED,
    HANDED_SLOTS,
    LIBRARY_BYTES,
    SLAB_BYTES,
    area_of,
    data,
    number_of,
    slot_offset,
)  # fmt: skip
from crossrail.errors import EngineClosed

_JOBS_MAX = 48  # under way, of a life
_SENDS_MAX = 8  # of a thread: they wait while a pool is closed
_REST_S = 0.0005  # when there is nothing to do: all slots are taken, say
_WEIGHTS = {
    "page": 24, "piece": 10, "long": 3, "handed": 14, "pages": 8, "scatter": 5, "read": 8, "send": 10, "barrier": 3,
    "cancel": 6, "regret": 4,
}  # fmt: skip
_VERIFIED = 0.1  # of the operations that can be
_PINNED = 0.15  # of the writes, to a rail
_TRIGGERED = 0.1  # of the writes that are not: they wait for a word that the threads add to
TRIGGER_AHEAD = 2  # how much has to be added at most until they begin


class Load(threading.Thread):
    """One of the submitting threads. seed: for its draws; number: its index within the life."""

    def __init__(self, life: Life, number: int, seed: int) -> None:
        super().__init__(name=f"load-{number}", daemon=True)
        self.life = life
        self.number = number
        self.random = random.Random(seed)
        self.is_stopping = False
        self._sends = self._sent = 0  # counted by this thread, and by the callbacks'
        self._inbox: Place | None = None  # the target of reads, one at a time
        self._actions: dict[str, Callable[[Member], bool]] = {
            "page": lambda to: self._write(to, "page"), "piece": lambda to: self._write(to, "piece"),
            "long": lambda to: self._write(to, "long"), "handed": lambda to: self._write(to, "handed"),
            "pages": self._pages, "scatter": self._scatter, "read": self._read, "send": self._send,
            "barrier": self._barrier, "cancel": self._cancel, "regret": self._regret,
        }  # fmt: skip
        self._reads = 0

    def run(self) -> None:
        names, weights = list(_WEIGHTS), list(_WEIGHTS.values())
        try:
            while not self.is_stopping:
                if self.random.random() < _TRIGGERED:
                    self.life.word.add()
                members = list(self.life.members.values())
                if not members or len(self.life.jobs) >= _JOBS_MAX:
                    time.sleep(_REST_S)
                    continue
                action = self._actions[self.random.choices(names, weights)[0]]
                if not action(self.random.choice(members)):
                    time.sleep(_REST_S)
        except EngineClosed as error:  # between two submits; those note it themselves
            if not self.life.engine.closed:
                self.life.complain(f"thread {self.name} of {self.life.life}: {error}")
        except Exception as error:  # whatever it is, it must not be
            self.life.complain(f"thread {self.name} of {self.life.life}: {type(error).__name__}: {error}")

    # ---- ranges

    def _place(self, to: Member, name: str, nbytes: int | None = None) -> Place | None:
        """A free slot of that class, and a source for it; None: none is free, or its memory is not visible here."""
        life, one = self.life, CLASSES[name]
        memory = life.memories.get(to.life)
        free = life.free.get((self.number, area_of(to.seat, to.index), name))
        if memory is None or free is None or not free:
            return None
        if nbytes is None:
            nbytes = int(one.nbytes ** self.random.uniform(0.4, 1.0)) if name != "long" else self._long()
        slot = free.pop()
        their_area, area_here = area_of(life.seat, life.index), area_of(to.seat, to.index)
        at, from_at = slot_offset(their_area, slot), slot_offset(area_here, slot)
        data_at = self.random.randrange(len(data()) - nbytes)
        owner = life.stage.books[to.seat][to.index]
        source = life.source[from_at : from_at + nbytes]
        return Place(memory[at : at + nbytes], source, data_at, nbytes, owner, (area_here, slot), owner.fences)

    def _row(self, places: list[Place]) -> int | None:
        """A row; None if none is left in this round: then the places are released."""
        row = self.life.take_row()
        if row is None:
            for place in places:
                self.life.free_place(place)
        return row

    def _long(self) -> int:
        """In slices; in slices of even length, at the end the count."""
        return self.random.randint(1_100_000, 2_600_000)

    def _claim(self, place: Place, row: int) -> None:
        """The slot is ours from here on, and everybody may know."""
        assert place.slot is not None
        record = self.life.book.slots[place.slot]
        record["data_at"], record["nbytes"], record["row"], record["fence"] = (
            place.data_at, place.nbytes, row, place.fence,
        )  # fmt: skip
        record["state"] = BUSY
        self.life.fill(place)

    def _offsets(self, place: Place) -> tuple[int, int]:
        """Offsets in the source here and in the target there."""
        assert place.slot is not None
        area, slot = place.slot
        return slot_offset(area, slot), slot_offset(area_of(self.life.seat, self.life.index), slot)

    def _reclaim(self, to: Member) -> None:
        """Frees handed slots that their receiver has checked."""
        life = self.life
        here, there = area_of(to.seat, to.index), area_of(life.seat, life.index)
        taken = life.stage.books[to.seat][to.index].taken
        for handed in range(self.number, HANDED_SLOTS.count, 2):
            slot = HANDED_SLOTS.first + handed
            record = life.book.slots[here, slot]
            if record["state"] == HANDED and taken[there, handed] == record["row"] + 1:
                record["state"] = FREE
                life.free[self.number, here, "handed"].append(slot)

    # ---- operations: whether there was anything to do

    def _write(self, to: Member, name: str) -> bool:
        return self._write_to(to, name) is not None

    def _write_to(self, to: Member, name: str, *, is_probe: bool = False) -> Job | None:
        life = self.life
        if name == "handed":
            self._reclaim(to)
        if (place := self._place(to, name)) is None or (row := self._row([place])) is None:
            return None
        self._claim(place, row)
        assert place.slot is not None
        handed = place.slot[1] - HANDED_SLOTS.first if name == "handed" else None
        number = number_of(life.life, life.round, handed)
        is_verified = self.random.random() < _VERIFIED
        rail = self.random.randrange(life.engine.rails) if not is_probe and self.random.random() < _PINNED else None
        waits = not is_verified and not is_probe and self.random.random() < _TRIGGERED
        trigger = (life.word, life.word.value + self.random.randint(0, TRIGGER_AHEAD)) if waits else None
        at, to_at = self._offsets(place)
        life.note(row, "write", to.life, place.nbytes, number=number, counts=1, is_verified=is_verified)
        job = Job("write", [row], [place], is_stale=place.fence > to.fences, is_pinned=rail is not None)
        accepted = life.submit(job, lambda: life.engine.submit_write(
            life.source_region, to.descriptor, place.nbytes, src_offset=at, dst_offset=to_at, imm=number, rail=rail,
            verify=is_verified, trigger=trigger,
        ))  # fmt: skip
        return job if accepted else None

    def _pages(self, to: Member) -> bool:
        life = self.life
        page_bytes = self.random.choice([16, 512, 4096])
        wanted = self.random.choice([1, 5, 13, 24])
        places = [place for _ in range(wanted) if (place := self._place(to, "page", page_bytes)) is not None]
        if not places or (row := self._row(places)) is None:
            return False
        for place in places:
            self._claim(place, row)
        pages = np.array([place.slot[1] for place in places if place.slot is not None], np.uint32)
        number, is_verified = number_of(life.life, life.round), self.random.random() < _VERIFIED
        life.note(
            row, "paged", to.life, page_bytes * len(places), number=number, counts=len(places), is_verified=is_verified
        )
        job = Job("paged", [row], places, is_stale=places[0].fence > to.fences)
        there, here = area_of(life.seat, life.index), area_of(to.seat, to.index)
        return life.submit(job, lambda: life.engine.submit_paged_writes(
            life.source_region, pages, to.descriptor, pages, page_bytes, src_stride=4096, dst_stride=4096,
            src_offset=slot_offset(here, 0), dst_offset=slot_offset(there, 0), imm=number, verify=is_verified,
        ))  # fmt: skip

    def _scatter(self, _: Member) -> bool:
        life = self.life
        chosen = [(to, place) for to in list(life.members.values()) if (place := self._place(to, "page")) is not None]
        rows = [row for _ in chosen if (row := self._row([place for _, place in chosen])) is not None]
        if not rows or len(rows) < len(chosen):
            return False
        number, is_verified = number_of(life.life, life.round), self.random.random() < _VERIFIED
        for row, (to, place) in zip(rows, chosen, strict=True):
            self._claim(place, row)
            life.note(row, "scatter", to.life, place.nbytes, number=number, counts=1, is_verified=is_verified)
        offsets = [self._offsets(place) for _, place in chosen]
        job = Job("scatter", rows, [place for _, place in chosen])
        job.is_stale = any(place.fence > to.fences for to, place in chosen)
        return life.submit(job, lambda: life.engine.submit_scatter(
            life.source_region, [to.descriptor for to, _ in chosen], lengths=[place.nbytes for _, place in chosen],
            src_offsets=[at for at, _ in offsets], dst_offsets=[to_at for _, to_at in offsets], imm=number,
            verify=is_verified,
        ))  # fmt: skip

    def _read(self, to: Member) -> bool:
        """Reads from the peer's library."""
        life = self.life
        if self._reads or (row := life.take_row()) is None:  # one at a time: the inbox is used by each
            return False
        nbytes = int(INBOX_BYTES ** self.random.uniform(0.3, 1.0))
        at, base = self.random.randrange(LIBRARY_BYTES - nbytes), self.number * INBOX_BYTES
        owner = life.stage.books[to.seat][to.index]
        place = Place(life.inbox[base : base + nbytes], None, at, nbytes)
        self._reads = 1
        life.fill(place)
        is_verified = self.random.random() < _VERIFIED
        life.note(row, "read", to.life, nbytes, is_verified=is_verified)
        job = Job("read", [row], [place], is_stale=owner.fences > to.fences, after=[self._read_ended])
        accepted = life.submit(job, lambda: life.engine.submit_read(
            life.inbox_region, to.descriptor, nbytes, dst_offset=base, verify=is_verified,
            src_offset=SLAB_BYTES - LIBRARY_BYTES + at,
        ))  # fmt: skip
        if not accepted:
            self._reads = 0
        return accepted

    def _read_ended(self) -> None:
        self._reads = 0

    def _send(self, to: Member) -> bool:
        life = self.life
        if self._sends - self._sent >= _SENDS_MAX or (row := life.take_row()) is None:
            return False
        nbytes = self.random.choice([1, 100, 5000, MESSAGE_BYTES_MAX - 12])
        data_at = self.random.randrange(len(data()) - nbytes)
        payload = np.array([life.life, row, data_at], "<u4").tobytes() + data()[data_at : data_at + nbytes].tobytes()
        life.note(row, "send", to.life, len(payload))
        self._sends += 1
        job = Job("send", [row], [], after=[self._send_ended])
        accepted = life.submit(job, lambda: life.engine.submit_send(to.address, payload))
        if not accepted:
            self._sends -= 1
        return accepted

    def _send_ended(self) -> None:
        self._sent += 1

    def _barrier(self, _: Member) -> bool:
        life = self.life
        members = list(life.members.values())
        rows = [row for _ in members if (row := life.take_row()) is not None]
        if len(rows) < len(members):
            return False
        number = number_of(life.life, life.round)
        group = life.engine.add_peer_group([to.address for to in members])
        for row, to in zip(rows, members, strict=True):
            life.note(row, "barrier", to.life, 0, number=number, counts=1)
        job = Job("barrier", rows, [], after=[lambda: life.engine.remove_peer_group(group)])
        return life.submit(job, lambda: life.engine.submit_barrier(group, number))

    # ---- second thoughts

    def _cancel(self, _: Member) -> bool:
        jobs = list(self.life.jobs.values())
        for job in self.random.sample(jobs, min(len(jobs), self.random.choice([1, 1, 3]))):
            if job.transfer is not None:
                job.transfer.cancel()
        return bool(jobs)

    def _regret(self, to: Member) -> bool:
        """Cancels what was submitted a moment ago, in the midst of it if it is long."""
        before = set(self.life.jobs)
        if not self._actions[self.random.choice(["long", "piece", "pages", "scatter", "handed", "read"])](to):
            return False
        time.sleep(10 ** self.random.uniform(-5, -3))
        for row, job in list(self.life.jobs.items()):
            if row not in before and job.transfer is not None:
                job.transfer.cancel()
        return True

    def probe(self) -> list[tuple[Member, Job | None]]:
        """A short write to everybody."""
        return [(to, self._write_to(to, "page", is_probe=True)) for to in list(self.life.members.values())]

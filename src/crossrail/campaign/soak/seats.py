"""The parent's side of the soak's processes: which are alive, and which gets which order."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from crossrail.campaign.books import Bytes
from crossrail.campaign.checkers import CheckFailed
from crossrail.campaign.network import Network
from crossrail.campaign.process import Fleet, Process, ProcessGone
from crossrail.campaign.soak.life import Member, map_descriptor
from crossrail.campaign.soak.records import INDICES, SEATS, Book, Stage
from crossrail.campaign.soak.worker import Worker
from crossrail.campaign.usage import Usage
from crossrail.regions import RegionDescriptor

_NAMES = tuple(f"seat-{number}" for number in range(SEATS))


@dataclass(eq=False)
class LifeSeen:
    """A life, and how the parent last saw it. has_ended: by a close or a kill in this round."""

    member: Member
    slab: Bytes
    book: Book
    stats: dict[str, int] = field(default_factory=dict)  # of the last round's end
    usage: Usage | None = None
    has_ended: bool = False
    is_whole: bool = True  # in the last round nobody can have left it a fraction of a count
    was_closed: bool = False  # by its own process: nothing may touch its memory any more
    is_fenced: bool = False  # until "lift" is answered
    is_closing: bool = False  # by close(), not revoke()


class Seat:
    """A name, under which one life follows the other."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Process
        self.now: LifeSeen | None = None
        self.past: LifeSeen | None = None  # that ended in this round
        self.is_busy = False  # opening, closing, fencing: leave it alone

    @property
    def living(self) -> LifeSeen | None:
        return self.now if self.now is not None and not self.now.has_ended else None


class Seats:
    """All seats, over one transport. One thread; nothing here blocks except ask()."""

    def __init__(self, transport: str, stage: Stage, network: Network) -> None:
        self.transport = transport
        self.stage = stage
        self.network = network
        self.fleet = Fleet()
        self.seats = [Seat(number) for number in range(SEATS)]
        self.started = self.kills = 0
        self._lives = 0
        self._awaited: dict[tuple[int, int], tuple[Process, Callable[[Any], None]]] = {}

    # ---- time, and answers

    def pass_time(self, for_s: float) -> None:
        """Raises CheckFailed when somebody complains."""
        self.fleet.pass_time(for_s)
        for (_, number), (process, fn) in list(self._awaited.items()):
            answer = process.take_reply(number)
            if answer is not None or not process.is_alive:
                del self._awaited[process.pid, number]
                if answer is not None:
                    fn(answer)
        if self.fleet.complaints:
            raise CheckFailed("; ".join(self.fleet.complaints[:5]))

    def when(self, process: Process, fn: Callable[[Any], None], verb: str, *arguments: object) -> None:
        """Asks, and calls fn with the answer while time passes; never, if the process ends before."""
        self._awaited[process.pid, process.ask_soon(verb, *arguments)] = (process, fn)

    @property
    def is_settled(self) -> bool:
        return not self._awaited and not any(seat.is_busy for seat in self.seats)

    # ---- lives

    def start(self, seat: Seat, draw: random.Random, then: Callable[[], None]) -> None:
        """A process for the seat, if it has none, and an engine in it. then: once everybody knows."""
        if seat.now is None or not seat.process.is_alive:
            self.started += 1
            stage, number = self.stage, seat.number
            seat.process = self.fleet.start(_NAMES[number], 0, lambda control, _: Worker(control, stage, number))
            seat.process.listeners = {"complaint": self.fleet.complaints.append}
        index = 0 if seat.now is None else (seat.now.member.index + 1) % INDICES
        seat.past, seat.now = seat.now, None
        seat.is_busy = True
        self._lives += 1
        life = self._lives
        is_mapped = self.transport == "shm" and draw.random() < 0.5

        def opened(answer: Any) -> None:
            address, descriptor, fd, inode, offset = answer
            member = Member(
                life,
                seat.number,
                index,
                _NAMES[seat.number],
                address,
                descriptor,
                0,
                seat.process.pid,
                fd,
                inode,
                offset,
            )
            slab = map_descriptor(member) if is_mapped else self.stage.slabs[seat.number][index]
            seat.is_busy = False
            if slab is None:  # killed since it answered
                return
            seat.now = LifeSeen(member, slab, self.stage.books[seat.number][index])
            then()

        options = self.network.engine_options(self.transport, draw)
        self.when(seat.process, opened, "open", life, index, options, is_mapped)

    def kill(self, seat: Seat) -> None:
        """SIGKILL."""
        self.kills += 1
        seat.is_busy = False
        seat.process.kill()
        if seat.now is not None:
            seat.now.has_ended = True

    def close(self, seat: Seat, timeout_s: float, then: Callable[[], None]) -> None:
        """Closes the engine; the process continues. then: called when it is closed."""
        life = seat.now
        assert life is not None
        life.has_ended = seat.is_busy = True

        def closed(left_behind: str) -> None:
            seat.is_busy = False
            life.was_closed = True
            if left_behind:
                self.fleet.complaints.append(f"{_NAMES[seat.number]} closed its engine, and left behind {left_behind}")
            then()

        self.when(seat.process, closed, "close", timeout_s)

    def tell_all(self) -> None:
        """Tells everybody which members are present, and their descriptors."""
        members = [life.member for life in self.living()]
        for seat in self.seats:
            if seat.living is not None:
                seat.process.tell("meet", members)

    def lifted(self, life: LifeSeen, descriptor: RegionDescriptor, fences: int) -> None:
        """Peers are let in again, by another descriptor."""
        life.member = replace(life.member, descriptor=descriptor, fences=fences)
        life.is_fenced = False

    def ask_all(self, verb: str, *arguments: object) -> dict[int, Any]:
        """Asks everybody who lives, and lets time pass until all have answered: answers by life."""
        asked = [(seat, seat.process.ask_soon(verb, *arguments)) for seat in self.seats if seat.living is not None]
        answers = {}
        for seat, number in asked:
            assert seat.now is not None
            answers[seat.now.member.life] = seat.process.reply_to(number, verb)
        self.pass_time(0.0)
        return answers

    def life(self, number: int) -> LifeSeen:
        """The living engine with this number."""
        return next(life for life in self.living() if life.member.life == number)

    def living(self) -> list[LifeSeen]:
        return [seat.now for seat in self.seats if seat.now is not None and seat.living is not None]

    def dump(self, folder: str) -> None:
        """Writes there what the flight recorders hold."""
        for seat in self.seats:
            if seat.living is not None and seat.process.is_alive:
                with contextlib.suppress(ProcessGone, CheckFailed):  # it has crashed, or hangs: no word of it then
                    seat.process.ask("dump", f"{folder}/{_NAMES[seat.number]}.json")

    def close_all(self) -> None:
        """Ends all processes."""
        self.fleet.close()

"""One round of the soak: some seconds of load and faults, then calm, then all books are compared."""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from crossrail.campaign.checkers import CheckFailed
from crossrail.campaign.checks import TARGET_POISON
from crossrail.campaign.soak import judge
from crossrail.campaign.soak.chaos import Fault, schedule
from crossrail.campaign.soak.records import (
    CANCELLED,
    DONE,
    EMPTY,
    ENDED,
    HANDED,
    HANDED_SLOTS,
    REFUSED,
    STATUSES,
    SUSPECT,
    area_of,
    number_of,
)  # fmt: skip
from crossrail.campaign.soak.seats import LifeSeen, Seat, Seats
from crossrail.regions import RegionDescriptor

_DRAIN_LIMIT_S = 60.0  # a bound against a hang: peers are given up after 3 s, and machines may be slow
_SETTLE_LIMIT_S = 30.0
_OPEN_LIMIT_S = 60.0
_FENCE_LIMIT_S = 20.0
_TICK_S = 0.002
_PROBES = 3
_UNITS_PER_COUNT = 48
SPARED = 0  # the seat that is never killed, nor its engine closed: so that growth is seen


class Round:
    """The events of one round. number: the round's, which determines immediates; seed: for its draws."""

    def __init__(self, seats: Seats, seed: int, number: int, for_s: float) -> None:
        self.seats = seats
        self.seed, self.number, self.for_s = seed, number, for_s
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.bytes_done = 0
        self._began = 0.0
        self._rails_down: set[int] = set()
        self._is_calm = False

    def run(self) -> None:
        """Raises CheckFailed, or whatever else goes wrong: then the processes are of no more use."""
        self._begin()
        plan = schedule(
            self.random, self.for_s, self.seats.transport, has_rails=self.seats.network.can_go_down, spared=SPARED
        )
        for seat in self.seats.seats:
            self._welcome(seat)
        self._began = time.monotonic()
        for fault in plan:
            self._pass_until(self._began + fault.at_s)
            self._do(fault)
        self._pass_until(self._began + self.for_s)
        self._calm()
        self._drain()
        self._probe()
        self._drain()
        self._judge()
        self._count_up()
        self._tidy()

    # ---- its beginning

    def _begin(self) -> None:
        for seat in self.seats.seats:
            if seat.living is None:
                self.seats.start(seat, self.random, lambda: None)
        self._settle("engines to open")
        for books in self.seats.stage.books:
            for book in books:
                book.clear()
        for life in self.seats.living():
            life.member = replace(life.member, fences=0)  # as its book says, from here on
        members = [life.member for life in self.seats.living()]
        for seat in self.seats.seats:
            seat.process.tell("round", self.number, members)
        self.seats.ask_all("jobs")  # the round has begun everywhere

    def _welcome(self, seat: Seat) -> None:
        life = seat.living
        assert life is not None
        seat.process.tell("go", self.seed * 64 + area_of(seat.number, life.member.index))

    def _arrived(self, seat: Seat) -> None:
        """Another life in the midst of a round."""
        members = [life.member for life in self.seats.living()]
        seat.process.tell("round", self.number, members)
        self.seats.tell_all()
        if not self._is_calm:
            self._welcome(seat)

    # ---- faults

    def _do(self, fault: Fault) -> None:
        seat = self.seats.seats[fault.seat]
        life = seat.living
        if life is None or seat.is_busy:
            return
        if fault.kind in ("kill", "reopen") and seat.past is not None:
            return  # one successor a round: books are two
        if fault.kind in ("revoke", "close-region") and life.is_fenced:
            return
        self.faults[fault.kind] += 1
        if fault.kind == "kill":
            self.seats.kill(seat)
            self._later(fault.how_long_s, lambda: self._restart(seat))
        elif fault.kind == "freeze":
            seat.process.freeze(fault.how_long_s)
        elif fault.kind == "reopen":
            self.seats.close(seat, 0.0 if fault.seed % 2 else 0.05, lambda: self._restart(seat))
        elif fault.kind in ("revoke", "close-region"):
            self._fence(seat, life, fault)
        elif fault.kind == "pool":
            seat.process.tell("pool")
            self._later(fault.how_long_s, lambda: seat.process.tell("pool") if seat.living is life else None)
        elif fault.kind == "forget":
            other = self.seats.seats[(fault.seat + 1 + fault.seed % 3) % 4].living
            if other is not None:
                seat.process.tell("forget", other.member.address)
        elif fault.kind == "cut":
            seat.process.tell("cut", (0.1, 0.5, 1.0)[fault.seed % 3], fault.seed)
        elif fault.kind == "rail-down":
            rail = fault.seed % len(self.seats.network.addresses)
            # Not while an engine is opening: the address has to exist.
            if rail not in self._rails_down and not any(seat.is_busy for seat in self.seats.seats):
                self._rails_down.add(rail)
                self.seats.network.set_rail(rail, "down")
                self._later(fault.how_long_s, lambda: self._rail_up(rail))

    def _restart(self, seat: Seat) -> None:
        if seat.living is None and not seat.is_busy and seat.past is None:
            for rail in list(self._rails_down):  # an engine does not open on an address that is not there
                self._rail_up(rail)
            self.seats.start(seat, self.random, lambda: self._arrived(seat))

    def _fence(self, seat: Seat, life: LifeSeen, fault: Fault) -> None:
        """Peers are locked out for a while."""
        life.is_fenced, life.is_closing = True, fault.kind == "close-region"

        def fenced(why_not: str) -> None:
            if not why_not:
                self._later(fault.how_long_s, lambda: self._lift(seat, life))

        self.seats.when(seat.process, fenced, "fence", 1.0 if fault.seed % 2 else 0.01, life.is_closing)

    def _lift(self, seat: Seat, life: LifeSeen) -> None:
        def lifted(answer: tuple[RegionDescriptor, int]) -> None:
            self.seats.lifted(life, *answer)
            self.seats.tell_all()

        if seat.living is life and life.is_fenced:
            self.seats.when(seat.process, lifted, "lift")

    def _rail_up(self, rail: int) -> None:
        if rail in self._rails_down:
            self._rails_down.remove(rail)
            self.seats.network.set_rail(rail, "up")

    def _later(self, after_s: float, fn: Callable[[], object]) -> None:
        def due() -> None:
            if not self._is_calm:
                fn()

        self.seats.fleet.at(time.monotonic() + after_s, due)

    # ---- calm

    def _calm(self) -> None:
        """No more faults; everybody lives, and nobody submits."""
        self.seats.fleet.thaw_all()
        for rail in list(self._rails_down):
            self._rail_up(rail)
        self._settle("what was begun in the midst of faults")
        self._is_calm = True
        for seat in self.seats.seats:
            if seat.living is None:
                self.seats.start(seat, self.random, functools.partial(self._arrived, seat))
        self._settle("engines to open")
        self.seats.ask_all("halt")
        for life in self.seats.living():
            if life.is_fenced:
                self._fence_now(life, is_closing=life.is_closing)
        self.seats.tell_all()

    def _fence_now(self, life: LifeSeen, *, is_closing: bool) -> None:
        """While nothing is in progress it must succeed at once."""
        process = self.seats.seats[life.member.seat].process
        if why_not := process.ask("fence", _FENCE_LIMIT_S, is_closing):
            raise CheckFailed(f"nothing goes on, and peers of life {life.member.life} cannot be locked out: {why_not}")
        answer = process.ask("lift")
        assert isinstance(answer, tuple)
        self.seats.lifted(life, *answer)

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_LIMIT_S
        while True:
            left = [job for jobs in self.seats.ask_all("jobs").values() for job in jobs]
            if not left:
                return
            if time.monotonic() > deadline:
                raise CheckFailed(
                    f"{_DRAIN_LIMIT_S:.0f} s after the last fault there is no end of {', '.join(left[:5])}"
                )
            self.seats.pass_time(_TICK_S)

    def _probe(self) -> None:
        """Everybody reaches everybody, once both have heard that one had given the other up."""
        for _ in range(_PROBES):
            answers = self.seats.ask_all("probe")
            failed = [(life, *one) for life, found in answers.items() for one in found]
            if not failed or any(status != "peer-lost" for _, _, status, _ in failed):
                break
        for life, to, status, why in failed:
            raise CheckFailed(f"all faults are over, and a write of life {life} to {to} is {status}: {why}")

    def _settle(self, what: str) -> None:
        deadline = time.monotonic() + _OPEN_LIMIT_S
        while not self.seats.is_settled:
            if time.monotonic() > deadline:
                raise CheckFailed(f"{_OPEN_LIMIT_S:.0f} s were not enough for {what}")
            self.seats.pass_time(_TICK_S)

    def _pass_until(self, when: float) -> None:
        while (left := when - time.monotonic()) > 0:
            self.seats.pass_time(min(left, 0.02))

    # ---- the books

    def _lives(self) -> Iterator[LifeSeen]:
        """All lives of this round."""
        for seat in self.seats.seats:
            for life in (seat.now, seat.past):
                if life is not None:
                    yield life

    def _judge(self) -> None:
        """Counts and messages may come later than completions: what is wrong then has to be right soon."""
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        while found := list(self._findings()):
            if time.monotonic() > deadline:
                raise CheckFailed("; ".join(found[:5]))
            self.seats.pass_time(10 * _TICK_S)

    def _findings(self) -> Iterator[str]:
        counts = self._ask_counts()
        for sender in self._lives():
            name = f"life {sender.member.life}"
            rows = sender.book.rows
            if not sender.has_ended:
                yield from (f"{name}: {text}" for text in judge.open_rows(rows))
                before = {key: sender.stats.get(key, 0) for key in counts[sender.member.life][0]}
                yield from (
                    f"{name}: {text}" for text in judge.statistics_agree(rows, before, counts[sender.member.life][0])
                )
            elif sender.was_closed:
                yield from (f"{name}, closed: {text}" for text in judge.open_rows(rows))
                if text := judge.whole_is_poison(sender.slab):
                    yield f"{name}, closed: {text}"
            if not sender.has_ended and (text := self._fraction_at(sender, counts[sender.member.life][0])):
                yield f"{name}: {text}"
            for receiver in self.seats.living():
                if receiver.member.seat != sender.member.seat:
                    yield from (
                        f"{name} to life {receiver.member.life}: {text}"
                        for text in self._findings_of(sender, receiver, counts[receiver.member.life][1])
                    )

    def _fraction_at(self, receiver: LifeSeen, stats: dict[str, int]) -> str:
        """Whether it counted a fraction of something, though nothing failed."""
        units = stats["imm_units_received"] - receiver.stats.get("imm_units_received", 0)
        if receiver.is_whole and self._is_whole(receiver) and units % _UNITS_PER_COUNT:
            return f"counted {units}/48 in this round, not a whole number"
        return ""

    def _is_whole(self, receiver: LifeSeen) -> bool:
        return all(judge.leaves_no_share(life.book.rows, receiver.member.life) for life in self._lives())

    def _findings_of(self, sender: LifeSeen, receiver: LifeSeen, counts: dict[int, int]) -> Iterator[str]:
        here = area_of(sender.member.seat, sender.member.index)
        there = area_of(receiver.member.seat, receiver.member.index)
        rows, slots = sender.book.rows[sender.book.rows["state"] != EMPTY], sender.book.slots[there]
        for handed in (None, *range(HANDED_SLOTS.count)):
            number = number_of(sender.member.life, self.number, handed)
            seen = 0 if handed is None else int(receiver.book.seen[here, handed])
            if text := judge.counts_agree(rows, receiver.member.life, number, counts[number] + seen):
                yield text
        arrivals = receiver.book.arrivals[: receiver.book.head["arrivals"][0]]
        yield from judge.messages_agree(sender.book.rows, arrivals, sender.member.life, receiver.member.life)
        yield from judge.area_agrees(receiver.slab, here, slots, is_alive=not sender.has_ended)
        if not sender.has_ended:
            handed_slots, taken = slots[HANDED_SLOTS.first :], receiver.book.taken[here]
            left = (handed_slots["state"] == HANDED) & (taken != handed_slots["row"] + 1)
            yield from (f"what was handed over in slot {slot} was not counted" for slot in np.flatnonzero(left))

    def _ask_counts(self) -> dict[int, tuple[dict[str, int], dict[int, int]]]:
        """For every live engine, by life: its statistics, and how often each number arrived."""
        numbers = [
            number_of(life.member.life, self.number, handed)
            for life in self._lives()
            for handed in (None, *range(HANDED_SLOTS.count))
        ]
        found = {}
        for life, (stats, counts, _) in self.seats.ask_all("counts", numbers).items():
            found[life] = stats, counts
        return found

    # ---- its end

    def _count_up(self) -> None:
        for life in self._lives():
            rows = life.book.rows[life.book.rows["is_first"] == 1]
            for status, count in enumerate(np.bincount(rows["status"][rows["state"] == ENDED])):
                self.ended[STATUSES[status]] += int(count)
            self.ended["refused"] += int((rows["state"] == REFUSED).sum())
            self.ended["in doubt"] += int(((rows["state"] != ENDED) & (rows["state"] != REFUSED)).sum())
            self.bytes_done += int(rows["nbytes"][(rows["state"] == ENDED) & (rows["status"] == DONE)].sum())

    def _tidy(self) -> None:
        """Numbers are released, dead peers forgotten; who may still be written to locks peers out."""
        lives = list(self._lives())
        for life in self.seats.living():
            life.is_whole = self._is_whole(life)
        for seat in self.seats.seats:
            receiver = seat.living
            assert receiver is not None
            senders = [life for life in lives if life.member.seat != receiver.member.seat]
            numbers, force = [], []
            for sender in lives:  # our own number, too: all were asked for
                rows = sender.book.rows[sender.book.rows["to"] == receiver.member.life]
                is_forced = sender.has_ended or not np.isin(rows["status"], (DONE, CANCELLED)).all()
                for handed in (None, *range(HANDED_SLOTS.count)):
                    numbers.append(number_of(sender.member.life, self.number, handed))
                    force.append(bool(is_forced))
            seat.process.tell("release", numbers, force)
            for life in lives:
                if life.has_ended:
                    seat.process.tell("forget", life.member.address)
            there = area_of(receiver.member.seat, receiver.member.index)
            if any(life.has_ended or (life.book.slots[there]["state"] == SUSPECT).any() for life in senders):
                self._fence_now(receiver, is_closing=self.random.random() < 0.5 and receiver.member.fd is None)
        for number, (stats, _, usage) in self.seats.ask_all("counts", []).items():
            seen = self.seats.life(number)
            seen.stats, seen.usage = stats, usage
        for seat in self.seats.seats:
            if seat.past is not None and not seat.past.was_closed:
                seat.past.slab[:] = TARGET_POISON
            seat.past = None
        self.seats.pass_time(_TICK_S)


__all__ = ["SPARED", "Round"]

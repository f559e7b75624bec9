"""How the ranks that are left agree, without anything that moves: records late, lost, out of order, ranks that stop."""

from __future__ import annotations

import random

import pytest

from crossrail.moe.masking.paxos import PATIENCE_S, Paxos
from crossrail.moe.masking.views import COMBINE, DISPATCH, Lasts, Record, View, record_bytes
from tests.support.seeds import Seed


class Chamber:
    """Members that hear of each other whatever the seed lets them. Marks of a rank at another only grow."""

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.members = [Paxos(rank, size) for rank in range(size)]
        self.got = [[[self.random.randint(1, 9), self.random.randint(1, 9)] for _ in range(size)] for _ in range(size)]
        self.decided: dict[int, View] = {}
        self.dead: set[int] = set()
        self.on_their_way: dict[tuple[int, int], list[Record]] = {}  # by sender and target, in order
        self.now_s = 0.0

    def marks(self, rank: int) -> tuple[Lasts, ...]:
        return tuple((even, odd) for even, odd in self.got[rank])

    def step(self, rank: int) -> None:
        member = self.members[rank]
        before = member.record
        view = member.step(self.now_s, lambda: self.marks(rank))
        if view is not None:
            assert self.decided.setdefault(view.number, view) == view, "two decisions of one view"
            if rank not in view.members:
                self.dead.add(rank)
        if member.record != before:
            self.tell(rank)

    def tell(self, rank: int) -> None:
        """As Confirmations does: none overtakes another; each replaces those before it, so that some are never seen."""
        for other in set(range(len(self.members))) - {rank}:
            waiting = self.on_their_way.setdefault((rank, other), [])
            waiting.append(self.members[rank].record)
            del waiting[: -self.random.randint(1, 3)]

    def deliver(self) -> None:
        """One of those that are on their way arrives."""
        way = self.random.choice(list(self.on_their_way))
        record = self.on_their_way[way].pop(0)
        if not self.on_their_way[way]:
            del self.on_their_way[way]
        if way[1] not in self.dead:
            self.members[way[1]].hear(record)

    def suspect(self, by: int, rank: int) -> None:
        self.members[by].suspect(rank)
        self.tell(by)

    def run_randomly(self, steps: int, suspicions: float, deaths: int) -> None:
        size = len(self.members)
        for _ in range(steps):
            self.now_s += self.random.expovariate(1 / 0.02)
            living = [rank for rank in range(size) if rank not in self.dead]
            if not living:
                return
            rank = self.random.choice(living)
            self.step(rank)
            if self.on_their_way and self.random.random() < 0.9:
                self.deliver()
            if self.random.random() < suspicions:
                self.suspect(rank, self.random.randrange(size))
            if deaths > 0 and len(living) > 1 and self.random.random() < 0.01:
                deaths -= 1
                self.dead.add(self.random.choice(living))
            self.got[rank][self.random.randrange(size)][self.random.randrange(2)] += self.random.random() < 0.3

    def settle(self) -> None:
        """Everything arrives, and whoever lives notices who does not."""
        for _ in range(200):
            living = [rank for rank in range(len(self.members)) if rank not in self.dead]
            for rank in living:
                for gone in self.dead & set(self.members[rank].view.members):
                    self.suspect(rank, gone)
                self.step(rank)
            while self.on_their_way:
                self.deliver()
            self.now_s += PATIENCE_S / 4
            if not any(self.members[rank].is_troubled and not self.members[rank].is_hopeless for rank in living):
                return


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_no_two_decisions_of_a_view_differ_whatever_is_suspected_of_whom(seed: Seed, size: int) -> None:
    for number in range(10):
        chamber = Chamber(seed.number() + number, size)
        chamber.run_randomly(300, suspicions=0.02, deaths=1)
        chamber.settle()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_those_that_are_left_agree_when_ranks_die(seed: Seed, size: int) -> None:
    for number in range(10):
        chamber = Chamber(seed.number() + number, size)
        chamber.dead = set(chamber.random.sample(range(size), chamber.random.randint(1, (size - 1) // 2 or 1)))
        chamber.run_randomly(100, suspicions=0.0, deaths=0)
        chamber.settle()
        living = [rank for rank in range(size) if rank not in chamber.dead]
        views = [chamber.members[rank].view for rank in living]
        if 2 * len(living) > size or 0 in living:
            assert all(view == views[0] and view.members == tuple(living) for view in views)
        else:
            assert all(chamber.members[rank].is_hopeless for rank in living)


def test_a_masked_rank_is_part_of_what_all_others_have_of_it() -> None:
    chamber = Chamber(1, 4)
    chamber.got = [[[10, 10]] * 4, [[10, 10]] * 4, [[8, 11], [9, 9], [9, 9], [9, 9]], [[12, 7]] * 4]
    chamber.dead = {0}
    chamber.settle()
    assert chamber.members[1].view == View(1, (1, 2, 3), {0: (8, 7)})


def test_a_leader_that_dies_after_its_proposal_was_accepted_by_some_binds_the_next_one() -> None:
    chamber = Chamber(1, 5)
    first, second, third = (chamber.members[rank] for rank in (0, 1, 2))
    first.suspect(4)
    for _ in range(2):  # promises, acceptances; of rank 1 only the last is heard by nobody but rank 2
        chamber.step(0)
        for rank in (1, 2, 3):
            chamber.members[rank].hear(first.record)
            chamber.step(rank)
            first.hear(chamber.members[rank].record)
        chamber.step(0)
    assert first.view.number == 1
    assert third.record.accepted is not None
    chamber.on_their_way.clear()

    chamber.dead = {0, 4}
    for rank in (1, 2, 3):
        chamber.members[rank].suspect(0)
    chamber.settle()

    assert chamber.decided[1] == first.view
    assert second.view.members == (1, 2, 3)
    assert second.view.number == 2


def test_half_of_a_view_decides_only_with_its_lowest_rank() -> None:
    view = View(3, (2, 4, 5, 7), {})
    assert view.is_quorum([2, 7])
    assert not view.is_quorum([4, 5])
    assert view.is_quorum([4, 5, 7])
    assert not view.is_quorum([2])


def test_a_half_is_without_those_whose_last_one_came_before() -> None:
    view = View(1, (0, 2), {1: (2 * 4 + DISPATCH, 2 * 3 + COMBINE)})
    assert view.absent(2 * 4 + DISPATCH) == ()
    assert view.absent(2 * 4 + COMBINE) == (1,)
    assert view.absent(2 * 3 + COMBINE) == ()
    assert view.absent(2 * 5 + DISPATCH) == (1,)


def test_a_record_is_read_whole_or_not_at_all(seed: Seed) -> None:
    size = 64
    lasts = dict.fromkeys(range(size), (1 << 40, (1 << 40) - 1))
    view = View(1 << 30, tuple(range(size)), lasts)
    record = Record(63, view, frozenset(range(size)), 1 << 40, tuple(lasts.values()), (1 << 40, view), (1 << 40, view))
    data = record.encode(5)
    assert len(data) <= record_bytes(size)
    assert Record.decode(data + bytes(100)) == (5, record)
    assert Record.decode(bytes(record_bytes(size))) is None

    rng = seed.rng()
    for _ in range(500):
        torn = bytearray(data)
        if rng.random() < 0.5:
            torn[int(rng.integers(len(data))) :] = bytes(1)
        else:
            torn[int(rng.integers(len(data)))] ^= int(rng.integers(1, 256))
        assert Record.decode(bytes(torn)) is None

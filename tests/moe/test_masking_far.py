"""on_lost="mask" where not all ranks share memory: those that are left agree on who is, and on which halves count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.moe.rank import Rank
from tests.support.process import PeerProcess

Others = list[PeerProcess]
Meet = Callable[..., tuple[Rank, Others]]

TCP = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 2.0}
# Of an engine, of an AllToAll. "mixed": pairs share memory.
WIRES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"tcp": (TCP, {}), "mixed": ({}, {"node_size": 2})}


@pytest.fixture(params=WIRES)
def meet(request: pytest.FixtureRequest, nothing_leaks: None) -> Iterator[Meet]:
    """A rank of this process, rank 0, and others in processes of their own."""
    engine, wire = WIRES[request.param]
    here = Rank()
    others: Others = []

    def start(size: int) -> tuple[Rank, Others]:
        others.extend(PeerProcess(module="tests.moe.rank") for _ in range(size - 1))
        addresses = [here.open_rank("rank-0", engine)]
        addresses += [other.call("open_rank", name=f"rank-{i}", engine=engine) for i, other in enumerate(others, 1)]
        for other in others:
            other.start("meet", addresses=addresses, on_lost="mask", **wire)
        here.meet(addresses, on_lost="mask", **wire)
        for other in others:
            other.answer()
        return here, others

    yield start
    for other in others:
        other.close()
    here.close_all()


def finish(here: Rank, others: Others, number: int) -> list[list[int]]:
    """All of them play the round, or the rest of it; each checks what it gets, and all say the same of it."""
    for other in others:
        other.start("finish_agreed", number=number)
    told = here.finish_agreed(number)
    for other in others:
        assert other.answer() == told
    return told


def kill(process: PeerProcess) -> None:
    process.kill()
    process.wait_dead()


HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@pytest.mark.parametrize("halves", range(len(HALVES) + 1))
def test_the_others_finish_the_round_in_which_a_rank_was_killed_and_all_that_follow(meet: Meet, halves: int) -> None:
    here, others = meet(4)
    doomed, living = others[0], others[1:]
    assert finish(here, others, 1) == [[], []]
    play_halves(here, doomed, living, halves)

    kill(doomed)

    silent, absent = finish(here, living, 2)
    # What it had sent may have died with it; what somebody has passed counts.
    assert silent in ([[1]] if halves == 0 else [[]] if halves >= 2 else [[], [1]])
    assert absent in ([[1]] if halves < 3 else [[]] if halves >= 4 else [[], [1]])
    for number in range(3, 6):
        assert finish(here, living, number) == [[1], [1]]
    assert [here.masked(), *(one.call("masked") for one in living)] == [[1]] * 3


def play_halves(here: Rank, doomed: PeerProcess, living: Others, halves: int) -> None:
    """The doomed rank has had so many halves of round 2, and the others what that takes."""

    def all_but_last(command: str) -> None:
        for one in living:
            one.start(command, **({} if command == "dispatch_send" else {"number": 2}))
        getattr(here, command)(*([] if command == "dispatch_send" else [2]))
        for one in living:
            one.answer()

    for half in HALVES[:halves]:
        doomed.start(half, **({} if half == "dispatch_send" else {"number": 2}))
        if half == "dispatch_recv":  # passed when all have all of it
            all_but_last("dispatch_send")
            all_but_last("dispatch_recv")
        if half == "combine_recv":
            all_but_last("combine_send")
            all_but_last("combine_recv")
        doomed.answer()

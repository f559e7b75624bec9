"""on_lost="mask" where not all ranks share memory: those that are left agree on who is, and on which halves count."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll, NoMajority
from tests.moe.processes import Meet, Others, kill, meeting
from tests.moe.rank import CONFIG, Rank, batch_of
from tests.moe.ranks import Ranks
from tests.support.limits import NEVER_S, WAIT_S, eventually
from tests.support.node import CommandError
from tests.support.process import PeerProcess

TCP = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 2.0, "heartbeat_s": 0.5}
# Of an engine, of an AllToAll. "mixed": pairs share memory; "uneven": the first two of three do.
WIRES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tcp": (TCP, {}), "mixed": ({}, {"node_size": 2}), "uneven": ({}, {"node_size": [2, 1]}),
}  # fmt: skip


@pytest.fixture
def meet(nothing_leaks: None) -> Iterator[Meet]:
    """Of the name of a wire, how many ranks, and more for AllToAll."""
    with meeting() as start:

        def over(name: str, size: int, **more: object) -> tuple[Rank, Others]:
            engine, wire = WIRES[name]
            return start(size, engine=engine, on_lost="mask", **(wire | more))

        yield over


def finish(here: Rank, others: Others, number: int) -> list[list[int]]:
    """All of them play the round, or the rest of it; each checks what it gets, and all say the same of it."""
    for other in others:
        other.start("finish_agreed", number=number)
    told = here.finish_agreed(number)
    for other in others:
        assert other.answer() == told
    return told


HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@pytest.mark.parametrize(
    ("wire", "size", "halves"),
    [
        *(("tcp", 3, halves) for halves in range(5)),
        ("mixed", 4, 1),
        ("mixed", 4, 3),
        ("uneven", 3, 1),
        ("uneven", 3, 3),
    ],
)
def test_the_others_finish_the_round_in_which_a_rank_was_killed_and_all_that_follow(
    meet: Meet, wire: str, size: int, halves: int
) -> None:
    here, others = meet(wire, size)
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
    assert [here.masked(), *(one.call("masked") for one in living)] == [[1]] * (size - 1)


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


def test_a_rank_that_stood_still_for_too_long_is_masked_and_learns_of_it(meet: Meet) -> None:
    here, (frozen, witness) = meet("tcp", 3)
    finish(here, [frozen, witness], 1)
    frozen.start("finish_agreed", number=2)
    time.sleep(0.2)  # until it waits, most likely: the test holds in either case
    frozen.stop()
    for number in (2, 3):
        told = finish(here, [witness], number)
    assert told == [[1], [1]]

    frozen.resume()

    with pytest.raises(CommandError, match=r"MaskedOut|NoMajority"):
        frozen.answer()
    assert finish(here, [witness], 4) == [[1], [1]]


def test_the_lowest_rank_goes_on_alone_and_the_other_does_not(nothing_leaks: None) -> None:
    batch = batch_of(1, 1)
    with Ranks(2, TCP, on_lost="mask", **CONFIG) as ranks:
        ranks.engines[0].close()
        with pytest.raises(NoMajority, match=r"ranks lost: 0 .*Those left are 1 of 2: too few to go on"):
            ranks.parts[1].dispatch(batch.x, batch.scales, batch.indices)
    with Ranks(2, TCP, on_lost="mask", **CONFIG) as ranks:
        ranks.engines[1].close()
        got = ranks.parts[0].dispatch(batch.x, batch.scales, batch.indices)
        assert got.round.silent == ranks.parts[0].masked == (1,)


def test_a_rank_that_makes_no_calls_is_waited_for_and_named(nothing_leaks: None) -> None:
    batch = batch_of(0, 1)
    with Ranks(2, TCP, on_lost="mask", **CONFIG) as ranks:
        opened = ranks.parts[0].dispatch_send(batch.x, batch.scales, batch.indices)
        ranks.parts[0].timeout_s = NEVER_S
        with pytest.raises(xr.WaitTimeout, match=r"rank 1 .* has not sent its dispatch of round 1"):
            ranks.parts[0].dispatch_recv(opened)
        ranks.parts[0].timeout_s = WAIT_S
        ranks.parts[1].close()
        with pytest.raises(xr.UsageError, match=r"rank 1 .* has closed its AllToAll"):
            ranks.parts[0].dispatch_recv(opened)


@pytest.mark.parametrize("option", [{"dp_size": 2}, {"node_sums": True}, {"private_tokens": 3}], ids=str)
def test_what_a_dead_rank_would_spoil_is_refused(nothing_leaks: None, option: dict[str, object]) -> None:
    (name, value), *_ = option.items()
    with pytest.raises(xr.UsageError, match=f"{name} is {value}, must be .* with on_lost='mask'"):
        Ranks(2, on_lost="mask", node_size=1, **(CONFIG | option))


def test_ranks_that_have_left_in_order_are_not_missed_by_who_still_waits_for_a_confirmation(
    nothing_leaks: None,
) -> None:
    """Two of four have gone after their last round; what the third confirmed to them is late at the fourth."""
    with Ranks(4, **CONFIG, node_size=1, on_lost="mask") as ranks:

        def play(part: AllToAll, rank: int) -> None:
            batch = batch_of(rank, 1)
            agreement = part._peers.agreement
            assert agreement is not None
            got = part.dispatch(batch.x, batch.scales, batch.indices, batch.weights)
            y = np.zeros((got.rows, part.config.hidden), np.float32)
            held: list[tuple[int, int]] = []
            confirm = agreement._confirmations.confirm

            def hold(view: int, mark: int, to: Sequence[int]) -> bool:
                held.append((view, mark))
                return confirm(view, mark, [other for other in to if other != 3])

            if rank == 2:
                agreement._confirmations.confirm = hold  # type: ignore[method-assign]
            part.combine(y, got)
            if rank < 2:
                part.close()
                ranks.engines[rank].close()
            elif rank == 2:
                gone = [ranks.engines[other].address for other in (0, 1)]
                eventually(lambda: all(ranks.engines[3].peer_state(one) == "lost" for one in gone), "they are gone")
                time.sleep(NEVER_S)
                ((view, mark),) = held
                eventually(lambda: confirm(view, mark, [3]), "confirmed")

        ranks.each(play)
        assert ranks.parts[3].masked == ()

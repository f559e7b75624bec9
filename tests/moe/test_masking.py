"""on_lost="mask": a rank dies, and the others go on without it, all from the same half of the same round on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core
from crossrail.moe import AllToAll
from crossrail.moe.board import PARITIES, SENT
from tests.moe.batches import Batch, expected_sums
from tests.moe.processes import Meet, Others, kill, meeting
from tests.moe.rank import CONFIG, Rank, batch_of
from tests.moe.ranks import Ranks, run_ranks
from tests.moe.test_rounds import answer, check_dispatched, first_expert


@pytest.fixture
def meet(nothing_leaks: None) -> Iterator[Meet]:
    """Of ranks that go on without each other."""
    with meeting() as start:
        yield partial(start, on_lost="mask")


def finish(here: Rank, others: Others, number: int, silent: list[int], masked: list[int]) -> None:
    """All of them play the round, or the rest of it; each checks what it gets."""
    for other in others:
        other.start("finish_without", number=number, silent=silent, masked=masked)
    here.finish_without(number, silent, masked)
    for other in others:
        other.answer()


HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@pytest.mark.parametrize("halves", range(len(HALVES) + 1))
def test_the_others_finish_the_round_in_which_a_rank_was_killed_and_all_that_follow(meet: Meet, halves: int) -> None:
    here, (doomed, witness) = meet(3)
    finish(here, [doomed, witness], 1, [], [])
    for half in HALVES[:halves]:
        if half == "dispatch_recv":  # waits for the others
            here.dispatch_send()
            witness.call("dispatch_send")
        if half == "combine_recv":
            for command in ("dispatch_recv", "combine_send"):
                witness.start(command, number=2)
                getattr(here, command)(2)
                witness.answer()
        if half == "dispatch_send":
            doomed.call(half)
        else:
            doomed.call(half, number=2)

    kill(doomed)

    has_sent, has_returned = halves >= 1, halves >= 3
    finish(here, [witness], 2, [] if has_sent else [1], [] if has_returned else [1])
    for number in range(3, 7):
        finish(here, [witness], number, [1], [1])
    assert here.masked() == witness.call("masked") == [1]


def test_one_after_the_other_is_killed_until_one_is_left(meet: Meet) -> None:
    here, others = meet(4)
    finish(here, others, 1, [], [])
    gone: list[int] = []
    for number, rank in ((2, 3), (4, 1), (6, 2)):
        gone.append(rank)
        kill(others[rank - 1])
        living = [other for i, other in enumerate(others, 1) if i not in gone]
        finish(here, living, number, gone, gone)
        finish(here, living, number + 1, gone, gone)
    assert here.masked() == [1, 2, 3]


def test_of_two_rounds_under_way_each_is_without_what_the_dead_rank_had_not_sent(meet: Meet) -> None:
    here, (doomed, witness) = meet(3)
    doomed.call("dispatch_send")
    kill(doomed)
    for _ in range(2):
        here.dispatch_send()
        witness.call("dispatch_send")

    finish(here, [witness], 1, [], [1])
    finish(here, [witness], 2, [1], [1])


def test_a_rank_killed_while_the_others_wait_for_it(meet: Meet) -> None:
    here, (doomed, witness) = meet(3)
    witness.start("finish_without", number=1, silent=[1], masked=[1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.finish_without, 1, [1], [1])
        kill(doomed)
        waiting.result()
    witness.answer()


def play(ranks: Ranks, number: int, playing: list[int], silent: list[int], masked: list[int]) -> None:
    """A round of those ranks, of which only the first need know that others are gone."""
    experts_per_rank = ranks.parts[0].config.experts_per_rank
    dp_size = ranks.parts[0].config.dp_size
    batches = [batch_of(group, number, 0 if group in silent else 8) for group in range(len(ranks) // dp_size)]

    def run(i: int) -> None:
        part = ranks.parts[playing[i]]
        mine = batches[part.rank // dp_size]
        got = part.dispatch(mine.x, mine.scales, mine.indices)
        check_dispatched(got, batches, first_expert(part), 1)
        answer(part, got, in_place=False)
        kept = mine.indices.copy()
        for rank in masked:
            kept[mine.indices // experts_per_rank == rank] = -1
        expected = expected_sums(Batch(mine.x, mine.scales, kept, mine.weights))
        assert (part.combine_recv(got, mine.weights) == expected).all()

    run_ranks(len(playing), run)


def give_up(part: AllToAll, number: int) -> None:
    """Seals that rank's word of the round's dispatch, as one that lost sight of it does."""
    words = np.frombuffer(part._board.view(), np.uint32).reshape(-1, _core.moe.WORD_BYTES // 4)
    words[SENT + number % PARITIES, 0] += 1


def test_who_is_given_up_by_one_is_given_up_by_all_and_told(nothing_leaks: None) -> None:
    with Ranks(3, on_lost="mask", **CONFIG) as ranks:
        play(ranks, 1, [0, 1, 2], [], [])
        give_up(ranks.parts[1], 2)  # it lives, and these see it well

        play(ranks, 2, [0, 2], [1], [1])

        batch = batch_of(1, 2)
        with pytest.raises(xr.PeerLost, match="go on without it"):
            ranks.parts[1].dispatch_send(batch.x, batch.scales, batch.indices)
        play(ranks, 3, [0, 2], [1], [1])
        assert ranks.parts[0].masked == ranks.parts[2].masked == (1,)


def test_results_read_while_others_may_write_are_not_returned(nothing_leaks: None) -> None:
    with Ranks(2, on_lost="mask", **CONFIG) as ranks:
        batches = [batch_of(rank, 1) for rank in range(2)]
        got = ranks.each(lambda part, rank: part.dispatch(batches[rank].x, batches[rank].scales, batches[rank].indices))
        ranks.each(lambda part, rank: answer(part, got[rank], in_place=False))
        give_up(ranks.parts[1], 3)  # of the same memory: rank 0 may be there already

        with pytest.raises(xr.PeerLost, match="go on without it"):
            ranks.parts[1].combine_recv(got[1], batches[1].weights)


def test_a_rank_whose_engine_was_closed_is_left_out(nothing_leaks: None) -> None:
    with Ranks(3, on_lost="mask", **CONFIG) as ranks:
        play(ranks, 1, [0, 1, 2], [], [])
        ranks.engines[1].close()
        for number in (2, 3, 4):
            play(ranks, number, [0, 2], [1], [1])


def test_tokens_of_a_dead_rank_come_from_others_of_its_group(nothing_leaks: None) -> None:
    with Ranks(4, on_lost="mask", dp_size=2, **CONFIG) as ranks:
        play(ranks, 1, [0, 1, 2, 3], [], [])
        give_up(ranks.parts[1], 2)
        for number in (2, 3):
            play(ranks, number, [0, 2, 3], [], [1])

"""on_lost="mask": a rank dies, and the others go on without it, all from the same half of the same round on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import crossrail as xr
from crossrail import _core
from crossrail.moe import AllToAll, CapacityExceeded, Round
from crossrail.moe.links.board import PARITIES, RETURNED, SENT
from tests.moe.batches import Array, Batch, expected_sums, ranks_of
from tests.moe.processes import Meet, Others, kill, meeting
from tests.moe.rank import CONFIG, Rank, batch_of
from tests.moe.ranks import Ranks, run_ranks
from tests.moe.test_rounds import answer, check_dispatched, first_expert
from tests.support.limits import WAIT_S


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
    owners = ranks.parts[0].config.experts_per_rank
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
            kept[ranks_of(owners, mine.indices) == rank] = -1
        expected = expected_sums(Batch(mine.x, mine.scales, kept, mine.weights))
        assert (part.combine_recv(got, mine.weights) == expected).all()

    run_ranks(len(playing), run)


def give_up(part: AllToAll, number: int) -> None:
    """Seals that rank's word of the round's dispatch, as one that lost sight of it does."""
    words = np.frombuffer(part._board.region.view(), np.uint32).reshape(-1, _core.moe.WORD_BYTES // 4)
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


@pytest.mark.parametrize("split", [None, (1, 4, 1), (0, 1, 5)], ids=str)
def test_a_rank_whose_engine_was_closed_is_left_out(split: tuple[int, ...] | None, nothing_leaks: None) -> None:
    with Ranks(3, on_lost="mask", experts_per_rank=split, **CONFIG) as ranks:
        play(ranks, 1, [0, 1, 2], [], [])
        ranks.engines[1].close()
        for number in (2, 3, 4):
            play(ranks, number, [0, 2], [1], [1])


@pytest.mark.parametrize("split", [None, (0, 3, 1, 2)], ids=str)
def test_tokens_of_a_dead_rank_come_from_others_of_its_group(
    split: tuple[int, ...] | None, nothing_leaks: None
) -> None:
    with Ranks(4, on_lost="mask", dp_size=2, experts_per_rank=split, **CONFIG) as ranks:
        play(ranks, 1, [0, 1, 2, 3], [], [])
        give_up(ranks.parts[1], 2)
        for number in (2, 3):
            play(ranks, number, [0, 2, 3], [], [1])


@pytest.mark.parametrize("is_sent", [False, True])
def test_all_ranks_see_alike_whether_there_is_room_whenever_each_learns_of_a_death(
    is_sent: bool, nothing_leaks: None
) -> None:
    """is_sent: the dead rank had sent both rounds; else neither. Rank 0 knows before it sends the second one."""
    tokens, doomed = 8, 4
    options = {"experts": 6, "hidden": 16, "top_k": 1, "max_tokens": tokens, "dtype": "float32", "scale_block": None,
               "out_dtype": "float32", "on_lost": "mask", "dp_size": 2, "capacity_factor": 2.5}  # fmt: skip
    balanced = np.arange(tokens, dtype=np.int32)[:, None] % 6
    skewed = np.array([[doomed]] * 7 + [[1]], np.int32)  # more than it has room for, if two groups send so
    died, sent = threading.Event(), threading.Barrier(6 if is_sent else 5)

    def send(part: AllToAll, value: float, indices: Array) -> Round:
        x = np.full((tokens, 16), value + part.rank // 2, np.float32)
        return part.dispatch_send(x, None, indices, np.ones((tokens, 1), np.float32))

    def whole(part: AllToAll, opened: Round) -> Array:
        got = part.dispatch_recv(opened)
        part.expert_output(got)[:] = got.x
        part.combine_send(part.expert_output(got), got)
        return part.combine_recv(got)

    def run(part: AllToAll, rank: int) -> list[float] | None:
        whole(part, send(part, 100, balanced))
        whole(part, send(part, 200, balanced))
        second = skewed if rank < doomed else balanced
        if rank == doomed:
            if is_sent:
                send(part, 300, balanced)
                send(part, 400, balanced)
                sent.wait(WAIT_S)
            ranks.engines[doomed].close()
            died.set()
            return None
        opened = [send(part, 300, balanced)]
        if rank != 0:
            opened.append(send(part, 400, second))
        sent.wait(WAIT_S)
        assert died.wait(WAIT_S)
        if rank == 0:
            whole(part, opened[0])
            assert part.masked == (doomed,)
            opened.append(send(part, 400, second))
        else:
            whole(part, opened[0])
        try:
            return whole(part, opened[1])[:, 0].tolist()  # type: ignore[no-any-return]
        except CapacityExceeded:
            return None

    with Ranks(6, **options) as ranks:
        got = ranks.each(run)
    for rank in (0, 1, 2, 3, 5):
        value = 400.0 + rank // 2
        kept = [0.0] * 7 + [value] if rank < doomed else [0.0 if i % 6 == doomed else value for i in range(tokens)]
        assert got[rank] == (None if is_sent else kept), rank


def test_a_dead_rank_does_not_come_back_when_numbers_go_round(nothing_leaks: None) -> None:
    with Ranks(3, on_lost="mask", **CONFIG) as ranks:
        play(ranks, 1, [0, 1, 2], [], [])
        give_up(ranks.parts[1], 2)
        play(ranks, 2, [0, 2], [1], [1])
        play(ranks, 3, [0, 2], [1], [1])
        for _ in range(6):
            skip([ranks.parts[0], ranks.parts[2]], 1 << 30)
            for _ in range(2):
                play(ranks, 5, [0, 2], [1], [1])


def skip(parts: list[AllToAll], rounds: int) -> None:
    """As if these had played so many, an even number."""
    for part in parts:
        words = np.frombuffer(part._board.region.view(), np.uint32).reshape(-1, _core.moe.WORD_BYTES // 4)
        words[SENT : RETURNED + PARITIES, 0] += np.uint32(rounds)
        part._ordinal += rounds

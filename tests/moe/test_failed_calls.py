"""A call that is refused on one rank, which goes on: those who wait for it hear of it, and no round is lost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import crossrail as xr
from crossrail.moe import AllToAll, PeerFailed
from crossrail.moe.links.notes import Notes
from tests.moe.processes import Meet, meeting
from tests.moe.ranks import Ranks
from tests.moe.test_erring_ranks import HALVES, LONG_S, SIZES, Player, error_of, play
from tests.moe.test_faults import TCP
from tests.support.limits import NEVER_S, WAIT_S, eventually
from tests.support.node import CommandError

# How engines talk, and how ranks are made, of three.
WIRES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "near": ({}, {}),
    "shm": ({}, {"node_size": 1}),
    "mixed": (TCP | {"transport": "shm+tcp"}, {"node_size": [2, 1]}),
    "tcp": (TCP, {}),
    "tcp, by a thread": (TCP, {"proxy": "thread"}),
    "near, masked": ({}, {"on_lost": "mask"}),
    "mixed, masked": ({}, {"node_size": [2, 1], "on_lost": "mask"}),
    "tcp, masked": (TCP, {"on_lost": "mask"}),
}


@pytest.fixture(params=WIRES)
def meet(request: pytest.FixtureRequest, nothing_leaks: None) -> Iterator[Meet]:
    engine, config = WIRES[request.param]
    with meeting() as start:
        yield partial(start, engine=engine, **config, timeout_s=LONG_S)


@pytest.mark.parametrize("half", HALVES)
def test_who_waits_for_a_rank_whose_call_was_refused_is_told_and_the_round_goes_on_once_it_is_mended(
    meet: Meet, half: str
) -> None:
    here, others = meet(3)
    failing, witness = others
    for each in others:
        each.start("whole_round")
    here.whole_round()
    assert [each.answer() for each in others] == [True, True]

    failing.start("fail_in", half=half, number=2)
    witness.start("go_on", number=2)
    with pytest.raises(PeerFailed) as caught:
        here.go_on(2)
    why = failing.answer()
    assert caught.value.rank == 1
    assert not caught.value.has_left
    assert f"rank 1 ('rank-1', pid {failing.pid}) has not sent its " in str(caught.value)
    assert f": {why}. Nothing is lost: wait again" in str(caught.value)
    with pytest.raises(CommandError, match="PeerFailed: rank 1 ") as told:
        witness.answer()
    assert why in str(told.value)

    for each in others:
        each.start("go_on", number=2)
    here.go_on(2)
    for each in others:
        each.answer()


@pytest.mark.parametrize("wire", ["near", "tcp", "tcp, masked"])
def test_whole_calls_say_how_to_go_on_and_who_waits_again_waits(wire: str, nothing_leaks: None) -> None:
    engine, config = WIRES[wire]
    with Ranks(3, engine, **SIZES, **config, timeout_s=LONG_S) as ranks:
        players = [Player(part, rank) for rank, part in enumerate(ranks.parts)]
        assert isinstance(error_of(lambda: players[0].dispatch_send(is_bad=True)), xr.UsageError)

        def run(part: AllToAll, rank: int) -> None:
            player = players[rank]
            if rank > 0:
                error = error_of(lambda: part.dispatch(player.x, None, player.indices, player.weights))
                assert isinstance(error, PeerFailed)
                assert "its dispatch_send failed: UsageError: x has shape [8, 31]" in str(error)
                assert str(error).endswith(
                    "is open: go on with it by dispatch_recv(open_rounds[-1]), not by dispatch()"
                )
                part.timeout_s = 2 * NEVER_S
                (player.opened,) = part.open_rounds
                error = error_of(player.dispatch_recv)
                assert type(error) is xr.WaitTimeout
                assert "s: its dispatch_send failed: UsageError: x has shape [8, 31]" in str(error)
                part.timeout_s = LONG_S

        ranks.each(run)
        ranks.each(lambda _, rank: play(players[rank]) if rank == 0 else _go_on(players[rank]))
        ranks.each(lambda _, rank: play(players[rank]))


def _go_on(player: Player) -> None:
    for half in HALVES[1:]:
        getattr(player, half)()


@pytest.mark.parametrize("wire", ["near", "tcp", "tcp, masked"])
def test_who_only_looks_is_told_once(wire: str, nothing_leaks: None) -> None:
    engine, config = WIRES[wire]
    with Ranks(3, engine, **SIZES, **config, timeout_s=LONG_S) as ranks:
        players = [Player(part, rank) for rank, part in enumerate(ranks.parts)]
        for player in players[:2]:
            player.dispatch_send()
        assert isinstance(error_of(lambda: players[2].dispatch_send(is_bad=True)), xr.UsageError)
        part, opened = ranks.parts[0], players[0].opened
        with pytest.raises(PeerFailed, match=r"rank 2 .*its dispatch_send failed"):
            eventually(lambda: part.advance(opened), "rank 2's part")
        assert not part.advance(opened)
        players[2].dispatch_send()
        ranks.each(lambda _, rank: _go_on(players[rank]))


def test_what_waits_raise_because_of_others_is_not_told_on(nothing_leaks: None) -> None:
    """Else ranks would tell each other in turns."""
    with Ranks(3, **SIZES, timeout_s=LONG_S) as ranks:
        players = [Player(part, rank) for rank, part in enumerate(ranks.parts)]
        assert isinstance(error_of(lambda: players[0].dispatch_send(is_bad=True)), xr.UsageError)
        errors = ranks.each(lambda _, rank: None if rank == 0 else error_of(lambda: play(players[rank])))
        assert all(isinstance(error, PeerFailed) and error.rank == 0 for error in errors[1:]), errors
        notes = ranks.parts[0]._peers._notes
        assert (notes.words_of(1), notes.words_of(2)) == ("", "")


class _Clock:
    """An engine, as far as notes need one."""

    closed = False
    _now_s = 0.0


class _Board:
    """The memory through which two ranks show notes to each other."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.shown = bytes(256)

    def note(self, data: bytes) -> None:
        self.shown = data

    def note_of(self, rank: int) -> bytes:
        return self.shown


def test_a_note_is_due_once_it_has_stood_for_a_while_and_only_where_its_rank_is_missed() -> None:
    clock, board = _Clock(), _Board()
    here, there = (Notes(clock, rank, 2, board, None) for rank in range(2))  # type: ignore[arg-type]

    def due(is_missing: bool = True) -> str:
        clock._now_s += 0.01
        note = here.due(lambda rank: is_missing and rank == 1)
        return "" if note is None else note.words

    assert due() == ""
    there.post("it failed")
    assert here.words_of(1) == "it failed"
    assert due() == ""
    clock._now_s += 0.1
    assert due() == ""
    there.post("")
    clock._now_s += 0.2
    assert (due(), here.words_of(1)) == ("", "")
    there.post("it failed again" + 300 * "!")
    assert due() == ""
    clock._now_s += 0.2
    whole = board.shown
    board.shown = whole[:-1] + b"?"
    assert due() == ""  # half written
    board.shown = whole
    assert due(is_missing=False) == ""
    assert due() == "it failed again" + 233 * "!"
    assert due() == ""


def test_a_note_that_a_rank_cannot_take_is_no_trouble(nothing_leaks: None) -> None:
    with Ranks(3, TCP, **SIZES, timeout_s=LONG_S) as ranks:
        ranks.each(lambda part, rank: play(Player(part, rank)))
        ranks.parts[2].close()
        ranks.engines[2].close()
        player = Player(ranks.parts[0], 0)
        for _ in range(2):
            error = error_of(lambda: player.part.dispatch_recv(None))  # type: ignore[arg-type]
            assert isinstance(error, xr.UsageError)
        eventually(lambda: ranks.engines[0].peer_state(ranks.engines[2].address) == "lost", "the loss", WAIT_S)
        assert isinstance(error_of(lambda: player.dispatch_send(is_bad=True)), xr.UsageError)

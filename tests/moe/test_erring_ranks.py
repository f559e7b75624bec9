"""A call that fails on one rank only: the others are told who and why, at once; and nothing where it is mended."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll, EngineGroup, PeerFailed, Round
from crossrail.moe.outcome import Outcome
from tests.conftest import EngineFactory
from tests.moe.batches import draw
from tests.moe.ranks import Ranks, run_ranks
from tests.moe.test_faults import TCP
from tests.support.limits import NEVER_S, WAIT_S, eventually

SIZES: dict[str, Any] = {
    "experts": 4, "hidden": 32, "top_k": 2, "max_tokens": 8, "scale_block": None, "out_dtype": "float32",
}  # fmt: skip
LONG_S = 100 * WAIT_S  # nobody's patience ends: run_ranks() gives up long before

# How engines talk, and how many of four ranks share memory.
WIRES: dict[str, tuple[dict[str, Any], int]] = {
    "near": ({}, 4), "shm": ({}, 1), "mixed": ({}, 2), "tcp": (TCP, 1),
}  # fmt: skip


@pytest.fixture(params=WIRES)
def ranks(request: pytest.FixtureRequest, nothing_leaks: None) -> Any:
    engine, node_size = WIRES[request.param]
    with Ranks(4, engine, **SIZES, node_size=node_size, timeout_s=LONG_S) as made:
        yield made


class Player:
    """What one rank does in a round, half by half. spoil: of this half its arguments, or its way there."""

    def __init__(self, part: AllToAll, rank: int) -> None:
        batch = draw(np.random.default_rng(rank), 8, 32, 4, 2, 32)
        self.part, self.x, self.indices, self.weights = part, batch.x, batch.indices, batch.weights

    def dispatch_send(self, is_bad: bool = False) -> Round:
        self.opened = self.part.dispatch_send(self.x[:, :31] if is_bad else self.x, None, self.indices, self.weights)
        return self.opened

    def dispatch_recv(self, is_bad: bool = False) -> None:
        self.got = self.part.dispatch_recv(None if is_bad else self.opened)  # type: ignore[arg-type]

    def combine_send(self, is_bad: bool = False) -> None:
        y = np.ones((self.got.rows + is_bad, 32), np.float32)
        self.part.combine_send(y, self.got)

    def combine_recv(self, is_bad: bool = False) -> None:
        weights = self.weights[:, :1] if is_bad else None
        out = self.part.combine_recv(self.got, weights)
        wanted = np.broadcast_to(self.weights.sum(axis=1, keepdims=True), out.shape)
        np.testing.assert_array_equal(out, wanted)


HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
WHAT_FAILS = {
    "dispatch_send": "UsageError: x has shape",
    "dispatch_recv": "UsageError: dispatch_recv was given NoneType",
    "combine_send": "UsageError: y has shape",
    "combine_recv": "UsageError: weights has shape",
}


def error_of(run: Callable[[], object]) -> BaseException:
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def leave_by(part: AllToAll, run: Callable[[], object]) -> None:
    """As a with block is left by what is raised in it."""
    with part:
        run()


def play(player: Player, until: str | None = None) -> None:
    """The halves of a round, up to that one."""
    for half in HALVES:
        if half == until:
            return
        getattr(player, half)()


@pytest.fixture
def nobody_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this process has no core, a call that is made again at once is mended soon."""
    monkeypatch.setattr("crossrail.moe.links.notes._MEND_S", LONG_S)


@pytest.mark.parametrize("half", HALVES)
def test_a_call_with_bad_arguments_is_mended_and_nobody_hears_of_it(
    ranks: Ranks, half: str, nobody_is_slow: None
) -> None:
    def run(part: AllToAll, rank: int) -> None:
        player = Player(part, rank)
        for is_bad in (rank == 0, False):
            play(player, until=half)
            if is_bad:
                with pytest.raises(xr.UsageError):
                    getattr(player, half)(is_bad=True)
            for later in HALVES[HALVES.index(half) :]:
                getattr(player, later)()
        if rank == 1:  # it has all of its last round, and so have the others soon
            part.close()

    ranks.each(run)
    ranks.parts[0].close()
    for rank in (2, 3):
        error = error_of(lambda rank=rank: play(Player(ranks.parts[rank], rank)))
        assert isinstance(error, xr.UsageError)
        assert "has closed its AllToAll" in str(error)
        assert "failed" not in str(error)


@pytest.mark.parametrize("by", ["close", "with"])
@pytest.mark.parametrize("half", HALVES)
def test_who_leaves_after_a_call_with_bad_arguments_says_why(ranks: Ranks, half: str, by: str) -> None:
    def run(part: AllToAll, rank: int) -> BaseException | None:
        player = Player(part, rank)
        if rank > 0:
            try:
                play(player)
                play(player)  # whoever fails in its last half has sent all of that round
            except BaseException as error:
                return error
            raise AssertionError("nothing was raised")
        if by == "close":
            play(player, until=half)
            with pytest.raises(xr.UsageError):
                getattr(player, half)(is_bad=True)
            part.close()
        else:
            error = error_of(lambda: leave_by(part, lambda: (play(player, half), getattr(player, half)(is_bad=True))))
            assert isinstance(error, xr.UsageError)
        return None

    for error in ranks.each(run)[1:]:
        assert isinstance(error, xr.UsageError), error
        assert "rank 0 ('rank-0'" in str(error)
        assert "has closed its AllToAll before its" in str(error)
        assert f": its {half} failed: {WHAT_FAILS[half]}" in str(error)


def test_who_leaves_a_with_block_by_an_error_of_its_own_says_which(ranks: Ranks) -> None:
    def run(part: AllToAll, rank: int) -> BaseException | None:
        player = Player(part, rank)
        if rank > 0:
            return error_of(lambda: play(player))

        def break_down() -> None:
            play(player, until="combine_send")
            raise ZeroDivisionError("no\nexpert\N{BELL} of mine")

        with pytest.raises(ZeroDivisionError):
            leave_by(part, break_down)
        return None

    for error in ranks.each(run)[1:]:
        assert isinstance(error, xr.UsageError)
        assert "rank 0 " in str(error)
        assert "its with block failed: ZeroDivisionError: no expert" in str(error)
        assert str(error).isprintable()


@pytest.mark.parametrize("wire", WIRES)
def test_who_leaves_says_why_where_ranks_are_masked_too(wire: str, nothing_leaks: None) -> None:
    engine, node_size = WIRES[wire]
    with Ranks(4, engine, **SIZES, node_size=node_size, timeout_s=LONG_S, on_lost="mask") as ranks:

        def run(part: AllToAll, rank: int) -> BaseException | None:
            player = Player(part, rank)
            if rank > 0:
                return error_of(lambda: play(player))
            play(player, until="combine_send")
            with pytest.raises(xr.UsageError):
                player.combine_send(is_bad=True)
            part.close()
            return None

        for error in ranks.each(run)[1:]:
            assert isinstance(error, xr.UsageError)
            assert "rank 0 " in str(error)
            assert "its combine_send failed: UsageError: y has shape" in str(error)


@pytest.mark.parametrize("half", ["dispatch_recv", "combine_recv"])
def test_a_wait_that_was_interrupted_is_repeated_and_nobody_hears_of_it(
    ranks: Ranks, half: str, monkeypatch: pytest.MonkeyPatch, nobody_is_slow: None
) -> None:
    interrupt(monkeypatch, ranks.parts[0], half)

    def run(part: AllToAll, rank: int) -> None:
        player = Player(part, rank)
        for number in range(2):
            for one in HALVES:
                if rank == 0 and number == 0 and one == half:
                    with pytest.raises(KeyboardInterrupt):
                        getattr(player, one)()
                getattr(player, one)()

    ranks.each(run)


@pytest.mark.parametrize("half", ["dispatch_recv", "combine_recv"])
def test_who_leaves_after_a_wait_that_was_interrupted_says_so(
    ranks: Ranks, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, ranks.parts[0], half)

    def run(part: AllToAll, rank: int) -> BaseException | None:
        player = Player(part, rank)
        if rank > 0:
            return error_of(lambda: (play(player), play(player)))
        with pytest.raises(KeyboardInterrupt), part:
            play(player)
        return None

    for error in ranks.each(run)[1:]:
        assert isinstance(error, xr.UsageError)
        assert str(error).endswith(f"its {half} failed: KeyboardInterrupt")


def interrupt(monkeypatch: pytest.MonkeyPatch, part: AllToAll, half: str) -> None:
    """As Ctrl-C does, once, in that half's wait."""
    name = {"dispatch_recv": "wait_sources", "combine_recv": "wait_results"}[half]
    wait = getattr(part._peers, name)

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(part._peers, name, wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(part._peers, name, interrupted)


@pytest.mark.parametrize("half", ["dispatch_recv", "combine_recv"])
def test_who_leaves_after_a_wait_in_vain_says_for_whom(ranks: Ranks, half: str) -> None:
    """The last of four ranks does not come; the first, which waits for a moment only, owes the others its results, or
    nothing before the next round.
    """
    have_sent, has_left = threading.Barrier(3), threading.Event()

    def run(part: AllToAll, rank: int) -> BaseException | None:
        player = Player(part, rank)
        if rank == 3:
            if half == "combine_recv":
                play(player, until="combine_send")
                assert has_left.wait(WAIT_S)
                player.combine_send()
                player.combine_recv()
            return None
        play(player, until=half)
        have_sent.wait(WAIT_S)
        if rank > 0:
            if half == "combine_recv":
                player.combine_recv()
                return error_of(lambda: play(player))
            return error_of(player.dispatch_recv)
        part.timeout_s = NEVER_S
        with pytest.raises(xr.WaitTimeout), part:
            getattr(player, half)()
        has_left.set()
        return None

    for error in ranks.each(run)[1:3]:
        assert isinstance(error, xr.UsageError)
        assert "rank 0 " in str(error)
        assert "it had waited for rank 3 ('rank-3') in vain" in str(error)


@pytest.mark.parametrize("half", ["dispatch_send", "dispatch_recv", "combine_recv"])
def test_who_loses_a_rank_that_others_still_see_tells_them(
    ranks: Ranks, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody closes anything: what is lost for one is lost for all."""
    part, gone = ranks.parts[0], ranks.engines[3].address

    def lose() -> None:
        if half == "dispatch_send":
            state_of = ranks.engines[0].peer_state
            monkeypatch.setattr(ranks.engines[0], "peer_state", lambda a: "lost" if a == gone else state_of(a))
        elif part._far is None:
            monkeypatch.setattr(part._near, "wait", lambda *_: (Outcome("peer-lost", 3), []))
        else:
            monkeypatch.setattr(part._far, "wait", lambda *_: Outcome("peer-lost", 3))

    def run(part: AllToAll, rank: int) -> BaseException:
        player = Player(part, rank)
        if rank > 0:
            return error_of(lambda: (play(player), play(player)))
        play(player, until=half)
        lose()
        error = error_of(getattr(player, half))
        monkeypatch.undo()
        with pytest.raises(xr.PeerLost, match="rank 3 "):
            player.dispatch_send()
        return error

    errors = ranks.each(run)
    for error in errors:
        assert isinstance(error, xr.PeerLost), error
    for error in errors[:3]:
        assert "rank 3 ('rank-3'" in str(error)
    assert re.match(r"rank [012] .* it lost sight of this rank", str(errors[3]))  # whoever it hears of first


def test_all_hear_of_the_same_rank_where_the_one_that_was_lost_tells_them_first(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank loses sight of the first, which is told so, and leaves before the others look."""
    gone = ranks.engines[0].address
    have_left = threading.Barrier(4)

    def run(part: AllToAll, rank: int) -> BaseException:
        player = Player(part, rank)
        play(player, until="dispatch_recv")
        if rank == 3:
            state_of = part._engine.peer_state
            with monkeypatch.context() as patched:
                patched.setattr(part._engine, "peer_state", lambda a: "lost" if a == gone else state_of(a))
                error = error_of(player.dispatch_send)
        elif rank == 0:
            error = error_of(lambda: (play_on(player), play(player)))
        have_left.wait(WAIT_S)
        return error if rank in (0, 3) else error_of(lambda: (play_on(player), play(player)))

    def play_on(player: Player) -> None:
        player.dispatch_recv()
        player.combine_send()
        player.combine_recv()

    errors = ranks.each(run)
    assert all(isinstance(error, xr.PeerLost) for error in errors), errors
    assert re.match(r"rank 3 .* it lost sight of this rank", str(errors[0]))
    for error in errors[1:]:
        assert re.match(r"rank 0 \('rank-0'", str(error)), error
    for error in errors[1:3]:
        assert re.search(r"(another rank|rank 3) lost sight of it, and has closed its AllToAll", str(error)), error


@pytest.mark.parametrize("ranks", [wire for wire in WIRES if wire != "near"], indirect=True)
@pytest.mark.parametrize("half", ["dispatch_recv", "combine_recv"])
def test_who_finds_that_a_write_has_failed_tells_the_others(
    ranks: Ranks, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = ranks.parts[0]._far

    def run(part: AllToAll, rank: int) -> BaseException:
        player = Player(part, rank)
        if rank > 0:
            return error_of(lambda: (play(player), play(player)))
        play(player, until=half)
        monkeypatch.setattr(far, "wait", lambda *_: Outcome("failed", 3, "the rail broke"))
        return error_of(getattr(player, half))

    errors = ranks.each(run)
    assert type(errors[0]) is xr.TransferError
    for error in errors[1:]:
        assert isinstance(error, xr.UsageError), error
        assert "rank 0 " in str(error)
        assert "a write to rank 3 ('rank-3'" in str(error)
    with pytest.raises(xr.TransferError, match=r"a write to rank 3 .* failed.*the rail broke"):
        play(Player(ranks.parts[0], 0))


def test_who_has_left_is_told_of_while_a_slow_one_is_waited_for(ranks: Ranks) -> None:
    """Whoever comes first in the order of waits is not to hide the others."""
    slow, gone = 0, 3
    ranks.parts[gone].close()
    for rank in (1, 2):
        error = error_of(lambda rank=rank: play(Player(ranks.parts[rank], rank)))
        assert isinstance(error, xr.UsageError)
        assert f"rank {gone} " in str(error)
    assert ranks.parts[slow].open_rounds == ()


def test_who_only_looks_is_told_of_one_that_has_left_while_another_is_slow(ranks: Ranks) -> None:
    """Which of them shares memory with whom makes no difference."""
    gone = 3
    ranks.parts[gone].close()
    for rank in (0, 1, 2):
        part, opened = ranks.parts[rank], Player(ranks.parts[rank], rank).dispatch_send()
        with pytest.raises(PeerFailed, match=f"rank {gone} .* has closed its AllToAll"):
            eventually(lambda part=part, opened=opened: part.advance(opened), "the end of the round")


def test_memory_of_a_peer_that_makes_no_sense_ends_the_round_of_all(nothing_leaks: None) -> None:
    """Counts that one rank alone finds to be none that a rank can have."""
    with Ranks(3, **SIZES, node_size=1, timeout_s=LONG_S) as ranks:
        far = ranks.parts[0]._far
        assert far is not None
        routes_of = far.routes_of
        far.routes_of = lambda number, rank: routes_of(number, rank) - 1000 * (rank == 2)

        def run(part: AllToAll, rank: int) -> BaseException:
            return error_of(lambda: play(Player(part, rank)))

        errors = ranks.each(run)
        for error in errors[1:]:
            assert isinstance(error, xr.UsageError)
            assert "rank 0 " in str(error)
            assert "its dispatch of round 1 failed: " in str(error)
        with pytest.raises(xr.CrossrailError, match="make a new one"):
            play(Player(ranks.parts[0], 0))


def test_a_call_while_another_thread_is_in_one_is_refused_and_the_round_goes_on(nothing_leaks: None) -> None:
    with Ranks(2, **SIZES, timeout_s=LONG_S) as ranks:
        players = [Player(part, rank) for rank, part in enumerate(ranks.parts)]
        players[0].dispatch_send()
        waiting = threading.Thread(target=players[0].dispatch_recv, daemon=True)
        waiting.start()
        refused: list[str] = []

        def is_refused() -> bool:
            try:
                players[0].part.advance(players[0].opened)
            except xr.UsageError as error:
                refused.append(str(error))
            return bool(refused)

        eventually(is_refused, "the other thread is in its call")
        assert refused == ["advance while another thread is in a call of this AllToAll, which is for one at a time"]
        players[1].dispatch_send()
        waiting.join(WAIT_S)

        def finish(part: AllToAll, rank: int) -> None:
            for half in HALVES[1 if rank == 1 else 2 :]:
                getattr(players[rank], half)()

        ranks.each(finish)


def test_a_wait_that_is_closed_meanwhile_says_so_and_blames_no_rank(nothing_leaks: None) -> None:
    with Ranks(2, **SIZES, timeout_s=LONG_S) as ranks:
        player = Player(ranks.parts[0], 0)
        player.dispatch_send()
        caught: list[BaseException] = []
        waiting = threading.Thread(target=lambda: caught.append(error_of(player.dispatch_recv)), daemon=True)
        waiting.start()
        player.part.close()
        waiting.join(WAIT_S)
        assert [type(error) for error in caught] == [xr.UsageError]
        assert re.search("dispatch_recv did not end: .* was closed|this AllToAll is closed", str(caught[0]))


@pytest.mark.parametrize("wire", WIRES)
def test_ranks_of_one_dp_group_that_route_differently_are_named_on_all(wire: str, nothing_leaks: None) -> None:
    engine, node_size = WIRES[wire]

    def run(part: AllToAll, rank: int) -> str:
        player = Player(part, rank // 2)
        if rank == 1:
            player.indices[3] = (player.indices[3] + 1) % 4
        error = error_of(lambda: leave_by(part, lambda: play(player)))
        assert isinstance(error, xr.UsageError)
        return str(error)

    with Ranks(4, engine, **SIZES, node_size=node_size, dp_size=2, timeout_s=LONG_S) as ranks:
        texts = ranks.each(run)
    assert all("indices of round 1 send" in text for text in texts)
    assert any("both must hold the same tokens and route them alike" in text for text in texts[:2])


@pytest.mark.parametrize("proxy", ["caller", "thread"])
@pytest.mark.parametrize("wire", WIRES)
def test_ranks_of_one_dp_group_with_the_same_tokens_in_another_order_are_named(
    wire: str, proxy: str, nothing_leaks: None
) -> None:
    engine, node_size = WIRES[wire]

    def run(part: AllToAll, rank: int) -> str:
        player = Player(part, rank // 2)
        if rank == 1:  # as many to each expert
            player.indices[[0, 1]] = player.indices[[1, 0]]
        error = error_of(lambda: leave_by(part, lambda: play(player)))
        assert isinstance(error, xr.UsageError)
        return str(error)

    with Ranks(4, engine, **SIZES, node_size=node_size, dp_size=2, proxy=proxy, timeout_s=LONG_S) as ranks:
        texts = ranks.each(run)
    what = r"token \d to expert \d where those of rank \d send token \d"
    if node_size == 1:
        what = r"as many tokens to each expert as those of rank \d, and not the same ones"
    assert all("indices of round 1 send" in text for text in texts)  # told on by others, it may be cut
    assert any(re.search(rf"^indices of round 1 send {what}", text) for text in texts[:2])


@pytest.mark.parametrize("wire", WIRES)
def test_ranks_of_one_dp_group_may_have_the_experts_of_a_token_in_another_order(wire: str, nothing_leaks: None) -> None:
    engine, node_size = WIRES[wire]

    def run(part: AllToAll, rank: int) -> Any:
        player = Player(part, rank // 2)
        if rank == 1:
            player.indices, player.weights = (
                np.ascontiguousarray(one[:, ::-1]) for one in (player.indices, player.weights)
            )
        got = part.dispatch(player.x, None, player.indices, player.weights)
        return part.combine((rank + 1) * got.x.astype(np.float32), got)

    with Ranks(4, engine, **SIZES, node_size=node_size, dp_size=2, timeout_s=LONG_S) as ranks:
        sums = ranks.each(run)
    np.testing.assert_array_equal(sums[0], sums[1])
    np.testing.assert_array_equal(sums[2], sums[3])


@pytest.mark.parametrize("wire", WIRES)
def test_arguments_refused_on_one_rank_are_told_to_those_that_wait_for_it(wire: str, nothing_leaks: None) -> None:
    engine, node_size = WIRES[wire]
    options = SIZES | {"node_size": node_size, "timeout_s": LONG_S}
    engines = [xr.Engine(f"rank-{rank}", **engine) for rank in range(4)]
    groups = [EngineGroup(one, [other.address for other in engines]) for one in engines]

    def make(rank: int, **spoilt: Any) -> AllToAll:
        return AllToAll(engines[rank], groups[rank], **options | spoilt)

    try:
        errors = run_ranks(4, lambda rank: error_of(lambda: make(rank, **{"top_k": 5} if rank == 2 else {})))
        parts = run_ranks(4, make)
        players = [Player(part, rank) for rank, part in enumerate(parts)]
        run_ranks(4, lambda rank: play(players[rank]))
        run_ranks(4, lambda rank: parts[rank].close())
    finally:
        for closing in (*groups, *engines):
            closing.close()

    told = re.escape(f"rank 2 ('rank-2') does not take part: UsageError: {errors[2]}")
    for error in errors:
        assert isinstance(error, xr.UsageError)
    for rank in (0, 1, 3):
        assert re.match(told, str(errors[rank])), errors[rank]


def test_a_rank_that_refuses_and_then_knows_better_keeps_nobody_who_comes_later(open_engine: EngineFactory) -> None:
    engines = [open_engine(name) for name in ("a", "b")]
    groups = [EngineGroup(one, [other.address for other in engines]) for one in engines]
    options = SIZES | {"timeout_s": LONG_S}

    def make(rank: int) -> AllToAll:
        if rank == 0:
            with pytest.raises(xr.UsageError, match="top_k"):
                AllToAll(engines[0], groups[0], **options | {"top_k": 5})
            refused.set()
        assert refused.wait(WAIT_S)
        return AllToAll(engines[rank], groups[rank], **options)

    refused = threading.Event()
    parts = run_ranks(2, make)
    run_ranks(2, lambda rank: parts[rank].close())
    for group in groups:
        group.close()

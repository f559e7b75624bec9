"""What ranks are told when another one dies, stands still, goes away or makes other calls: which rank, and in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.moe import AllToAll, CapacityExceeded, Round
from tests.moe.batches import draw
from tests.moe.processes import Meet, meeting
from tests.moe.rank import BLOCK, CONFIG, EXPERTS, HIDDEN, TOKENS, TOP_K, Rank
from tests.moe.ranks import Ranks
from tests.moe.test_rounds import whole_round
from tests.support.limits import NEVER_S, WAIT_S, eventually
from tests.support.node import CommandError
from tests.support.process import PeerProcess

TCP = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 2.0}
WIRES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "near": ({}, {}),
    "far": (TCP, {}),
}


@pytest.fixture(params=WIRES)
def meet(request: pytest.FixtureRequest, nothing_leaks: None) -> Iterator[Meet]:
    """All over one wire."""
    engine, wire = WIRES[request.param]
    with meeting() as start:
        yield partial(start, engine=engine, **wire)


STEPS = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


@pytest.mark.parametrize("step", range(len(STEPS) + 1))
def test_a_rank_killed_after_each_step_is_named_on_all_others(meet: Meet, step: int) -> None:
    here, (doomed, witness) = meet(3)
    for other in (doomed, witness):
        other.start("whole_round")
    assert here.whole_round()
    assert doomed.answer()
    assert witness.answer()
    if step > 0:
        doomed.call("dispatch_send")
    for half in STEPS[1:step]:
        # It may wait for the others in this step; they then fail in a later one, if they are to.
        witness_sends = {"dispatch_recv": "dispatch_send", "combine_recv": "combine_send"}.get(half)
        if witness_sends is not None:
            _send_half(here, witness, witness_sends)
        doomed.call(half, number=2)
    doomed.kill()
    doomed.wait_dead()
    witness.start("go_on", number=2)
    with pytest.raises(xr.PeerLost, match="rank 1 "):
        here.go_on(2)
    with pytest.raises(CommandError, match="PeerLost: rank 1 "):
        witness.answer()


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_rank_killed_in_the_middle_of_each_step_is_named_on_all_others(meet: Meet, step: int) -> None:
    """Of a step that waits, while it waits; of one that sends, wherever it is then (tests/moe/test_sim.py chooses)."""
    here, (doomed, witness) = meet(3)
    if step >= 1:
        here.dispatch_send()
        doomed.call("dispatch_send")
    if step >= 2:
        witness.call("dispatch_send")
        for other in (doomed, witness):
            other.start("dispatch_recv", number=1)
        here.dispatch_recv(1)
        doomed.answer()
        witness.answer()
    if step == 3:
        doomed.call("combine_send", number=1)
    arguments = {} if step == 0 else {"number": 1}
    doomed.start(STEPS[step], **arguments)
    doomed.kill()
    doomed.wait_dead()
    witness.start("go_on", number=1)
    with pytest.raises(xr.PeerLost, match="rank 1 "):
        here.go_on(1)
    with pytest.raises(CommandError, match="PeerLost: rank 1 "):
        witness.answer()


def _send_half(here: Rank, witness: PeerProcess, half: str) -> None:
    if half == "dispatch_send":
        here.dispatch_send()
        witness.call("dispatch_send")
    else:
        for command in ("dispatch_recv", "combine_send"):
            witness.start(command, number=2)
            getattr(here, command)(2)
            witness.answer()


def test_a_rank_that_stands_still_is_named_and_the_wait_can_be_repeated(meet: Meet) -> None:
    here, (other,) = meet(2)
    here.give_up_after(NEVER_S)
    number = here.dispatch_send()
    other.stop()
    with pytest.raises(xr.WaitTimeout, match=r"rank 1 .* has not sent its dispatch of round 1"):
        here.dispatch_recv(number)
    other.resume()
    other.call("dispatch_send")
    here.give_up_after(WAIT_S)
    here.dispatch_recv(number)


def test_of_a_rank_whose_engine_does_not_answer_it_is_said_what_is_known(nothing_leaks: None) -> None:
    with meeting() as start:
        here, (other,) = start(2)
        here.give_up_after(NEVER_S)
        number = here.dispatch_send()
        address = here._part._peers._addresses[1]
        other.stop()
        unanswered = here.engine.submit_send(address, b"for the engine to ask whether it lives")
        eventually(lambda: here.engine.peer_state(address) == "frozen", "the other rank's engine frozen")
        with pytest.raises(xr.WaitTimeout, match=r"its engine is frozen \(process \d+ does not answer: it is stopped"):
            here.dispatch_recv(number)
        unanswered.cancel()
        other.resume()


def test_a_rank_that_dispatches_twice_waits_for_the_others_in_vain(meet: Meet) -> None:
    here, (other,) = meet(2)
    first, second = here.dispatch_send(), here.dispatch_send()
    with pytest.raises(
        xr.UsageError, match=r"round 3 takes the place of round 1 \(after dispatch_send\), which is open"
    ):
        here.dispatch_send()
    other.call("dispatch_send")
    here.dispatch_recv(first)
    here.give_up_after(NEVER_S)
    with pytest.raises(xr.WaitTimeout, match=r"rank 1 .* has not sent its dispatch of round 2"):
        here.dispatch_recv(second)
    here.combine_send(first)
    with pytest.raises(xr.WaitTimeout, match=r"rank 1 .* has not sent its combine of round 1"):
        here.combine_recv(first)


def test_a_rank_that_closes_its_part_is_named(meet: Meet) -> None:
    here, (other,) = meet(2)
    number = here.dispatch_send()
    other.call("close_part")
    with pytest.raises(xr.UsageError, match=r"rank 1 .* has closed its AllToAll before its dispatch of round 1"):
        here.dispatch_recv(number)


@pytest.mark.parametrize("on_lost", ["raise", "mask"])
@pytest.mark.parametrize(("engine", "node_size"), [({}, 1), ({}, 2), ({}, [3, 1]), ({}, 4), (TCP, 1)], ids=str)
def test_a_rank_that_closes_its_part_and_its_engine_at_once_has_left(
    nothing_leaks: None, engine: dict[str, Any], node_size: int | list[int], on_lost: str
) -> None:
    """It is no rank that was lost, and those that are left do not go on without it, or find that they are too few."""
    batches = [draw(np.random.default_rng(rank), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for rank in range(4)]
    with Ranks(4, engine, **CONFIG, node_size=node_size, on_lost=on_lost) as ranks:

        def whole_round(part: AllToAll, rank: int) -> None:
            batch = batches[rank]
            got = part.dispatch(batch.x, batch.scales, batch.indices, batch.weights)
            part.combine(np.zeros((got.rows, HIDDEN), np.float32), got)

        ranks.each(whole_round)
        gone = [ranks.engines[rank].address for rank in range(2)]
        for rank in range(2):
            ranks.parts[rank].close()
            ranks.engines[rank].close()
        for rank in range(2, 4):
            eventually(lambda rank=rank: all(ranks.engines[rank].peer_state(one) == "lost" for one in gone), "the loss")
            with pytest.raises(xr.UsageError, match=r"rank [01] .* has closed its AllToAll"):
                whole_round(ranks.parts[rank], rank)
            assert on_lost == "raise" or ranks.parts[rank].masked == ()


def test_an_engine_closed_in_a_round_ends_the_wait(meet: Meet) -> None:
    here, _ = meet(2)
    number = here.dispatch_send()
    timer = threading.Timer(NEVER_S, here.engine.close)
    timer.start()
    with pytest.raises(xr.EngineClosed, match="rank 1 "):
        here.dispatch_recv(number)
    timer.join(WAIT_S)
    with pytest.raises(xr.EngineClosed):
        here.dispatch_send()


def test_an_engine_that_its_peer_closed_in_a_round_is_lost(meet: Meet) -> None:
    here, (other,) = meet(2)
    number = here.dispatch_send()
    other.call("close_rank_engine")
    with pytest.raises(xr.PeerLost, match=r"rank 1 .*the engine was closed"):
        here.dispatch_recv(number)


@pytest.mark.parametrize(("engine", "node_size"), [({}, 4), ({}, 2), ({}, 1), (TCP, 1)], ids=str)
@pytest.mark.parametrize("ends", [False, True])
def test_who_leaves_since_another_was_lost_says_whom(
    nothing_leaks: None, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], node_size: int, ends: bool
) -> None:
    batches = [draw(np.random.default_rng(rank), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for rank in range(4)]
    with Ranks(4, engine, **CONFIG, node_size=node_size) as ranks:

        def send(rank: int) -> Round:
            batch = batches[rank]
            return ranks.parts[rank].dispatch_send(batch.x, batch.scales, batch.indices, batch.weights)

        last = send(3)
        lost = ranks.engines[3].address
        state_of = ranks.engines[0].peer_state
        monkeypatch.setattr(ranks.engines[0], "peer_state", lambda a: "lost" if a == lost else state_of(a))
        for rank in range(3):  # the first sees it, the second is told by the first, and so on
            with pytest.raises(xr.PeerLost, match=r"rank 3 \('rank-3'"):
                ranks.parts[rank].dispatch_recv(send(rank))
            ranks.parts[rank].close()
            if ends:
                ranks.engines[rank].close()
        with pytest.raises(xr.PeerLost, match="it lost sight of this rank, and has closed its AllToAll"):
            ranks.parts[3].dispatch_recv(last)


@pytest.mark.parametrize(
    ("engine", "node_size", "ends"), [({}, 3, False), ({}, 3, True), ({}, 1, False), (TCP, 1, False)], ids=str
)
def test_who_leaves_since_another_was_late_says_whom(
    nothing_leaks: None, engine: dict[str, Any], node_size: int, ends: bool
) -> None:
    batches = [draw(np.random.default_rng(rank), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for rank in range(3)]
    with Ranks(3, engine, **CONFIG, node_size=node_size) as ranks:

        def send(rank: int) -> Round:
            batch = batches[rank]
            return ranks.parts[rank].dispatch_send(batch.x, batch.scales, batch.indices, batch.weights)

        def finish(rank: int, opened: Round) -> None:
            part = ranks.parts[rank]
            got = part.dispatch_recv(opened)
            part.combine(np.zeros((got.rows, HIDDEN), np.float32), got)

        sent = [send(0), send(1)]
        ranks.parts[0].timeout_s = NEVER_S
        with pytest.raises(xr.WaitTimeout, match="rank 2 "):
            ranks.parts[0].dispatch_recv(sent[0])
        ranks.parts[0].close()
        if ends:
            ranks.engines[0].close()
        last: list[Round] = []
        if not ends:  # else it learns of it here
            last = [send(2)]
        with pytest.raises(xr.UsageError, match=r"rank 0 .*it had waited for rank 2 \('rank-2'\) in vain"):
            finish(1, sent[1])
        with pytest.raises(xr.UsageError, match=r"rank 0 .*it had waited for this rank in vain"):
            finish(2, last[0] if last else send(2))


@pytest.mark.parametrize("engine", [{}, TCP], ids=str)
def test_who_only_looks_at_a_round_that_is_refused_does_not_wait(
    nothing_leaks: None, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]
) -> None:
    options = {"experts": 2, "hidden": 32, "top_k": 1, "max_tokens": 8, "scale_block": None, "capacity_factor": 1.0}
    x, indices = np.zeros((8, 32), np.uint8), np.ones((8, 1), np.int32)
    with Ranks(2, engine, **options, node_size=1) as ranks:
        here, there = ranks.parts
        assert there._far is not None
        send_rows, held = there._far.send_rows, []
        monkeypatch.setattr(there._far, "send_rows", lambda *rows: held.append(rows))  # they come after the routes
        opened, far = (part.dispatch_send(x, None, indices) for part in (here, there))
        here.timeout_s = 100 * WAIT_S
        eventually(lambda: here.advance(opened) or opened.is_refused, "the round is refused")
        send_rows(*held[0])
        with pytest.raises(CapacityExceeded):
            eventually(lambda: here.advance(opened), "the round ends")
        with pytest.raises(CapacityExceeded):
            there.dispatch_recv(far)


# How many share memory; who goes, who waits, and for whom.
GOING = {
    "far, from who waits for a far one": (1, 0, 1, 3),
    "near, from who waits for a far one": (2, 0, 1, 3),
    "far, from who waits for a near one": (2, 2, 1, 0),
}


@pytest.mark.parametrize("case", GOING)
def test_a_rank_that_has_all_of_its_last_round_may_go_before_others_have(
    nothing_leaks: None, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    node_size, goes, waits, late = GOING[case]
    batches = [draw(np.random.default_rng(rank), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for rank in range(4)]
    with Ranks(4, **CONFIG, node_size=node_size) as ranks:

        def play(part: AllToAll, rank: int) -> None:
            batch = batches[rank]
            got = part.dispatch(batch.x, batch.scales, batch.indices, batch.weights)
            if rank == late and late // node_size == waits // node_size:
                monkeypatch.setattr(part._near, "publish", lambda *_: None)
            elif rank == late:
                assert part._far is not None
                part._far.leave_out(waits)
            part.combine_send(np.zeros((got.rows, HIDDEN), np.float32), got)
            if rank == goes:
                part.combine_recv(got)
                part.close()
                ranks.engines[rank].close()
            elif rank == waits:
                part.timeout_s = NEVER_S
                while ranks.engines[rank].peer_state(ranks.engines[goes].address) != "lost":
                    part.advance(got.round)
                with pytest.raises(xr.WaitTimeout, match=f"rank {late} .* has not sent its combine of round 1"):
                    part.combine_recv(got)

        ranks.each(play)


def test_a_farewell_does_not_overtake_results(nothing_leaks: None) -> None:
    tokens, hidden = 8192, 4096  # 128 MiB of results: they take a while
    config = {"experts": 2, "hidden": hidden, "top_k": 1, "max_tokens": tokens, "scale_block": None}
    with Ranks(2, {"transport": "tcp"}, **config, out_dtype="float32", node_size=1) as ranks:

        def play(part: AllToAll, rank: int) -> None:
            sent = [1, tokens][rank]
            x, indices = np.zeros((sent, hidden), np.uint8), np.full((sent, 1), 1 - rank)
            got = part.dispatch(x, None, indices, np.ones((sent, 1), np.float32))
            part.combine_send(np.zeros((got.rows, hidden), np.float32), got)
            if rank == 0:
                part.combine_recv(got)
                part.close()
            else:
                far = part._far
                assert far is not None
                eventually(lambda: far.has_come("farewell", 0, 0), "a farewell", pause_s=0)
                assert far.has_come("results", 1, 0)
                part.combine_recv(got)

        ranks.each(play)


@pytest.mark.parametrize("polling", ["manual", "spin"])
def test_rounds_of_engines_that_are_driven_otherwise(nothing_leaks: None, polling: str) -> None:
    batches = [draw(np.random.default_rng(rank), TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK) for rank in range(2)]
    with Ranks(2, {"polling": polling}, **CONFIG) as ranks:
        ranks.each(lambda part, rank: whole_round(part, rank, batches))


def test_dispatch_and_combine_that_waited_in_vain_are_gone_on_with() -> None:
    x, indices = np.ones((4, 32), np.float32), np.array([[0, 3]] * 4)
    weights = np.ones((4, 2), np.float32)
    plain = {"dtype": "float32", "scale_block": None, "out_dtype": "float32"}
    with Ranks(2, experts=4, hidden=32, top_k=2, max_tokens=4, **plain) as ranks:
        first, second = ranks.parts
        first.timeout_s = 0.05
        with pytest.raises(xr.WaitTimeout, match=r"round 1 \(after dispatch_send\) is open: go on with it by"):
            first.dispatch(x, None, indices)
        theirs = second.dispatch(x, None, indices)
        (opened,) = first.open_rounds
        ours = first.dispatch_recv(opened)
        with pytest.raises(xr.WaitTimeout, match=r"go on by combine_recv\(\), not by combine\(\)"):
            first.combine(ours.x, ours, weights)
        np.testing.assert_array_equal(second.combine(theirs.x, theirs, weights), 2 * x)
        np.testing.assert_array_equal(first.combine_recv(ours, weights), 2 * x)
        assert first.open_rounds == ()

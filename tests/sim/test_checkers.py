"""The checkers pass what is right, and find what was made wrong on purpose."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from crossrail.campaign.books import Piece
from crossrail.campaign.checkers import Arena, CheckFailed, Ledger, ends_within
from tests.support.limits import eventually

NBYTES = 200_000


class Pair:
    """Two engines of one world with an arena each, and a ledger of what they do."""

    def __init__(self, world: sim.World) -> None:
        self.world = world
        self.ledger = Ledger(1)
        self.a, self.b = (world.host(name, nic="2xefa200").engine(name) for name in "ab")
        self.source, self.target = (self.ledger.arena(e, np.zeros(1 << 20, np.uint8)) for e in (self.a, self.b))
        self.pool = self.b.submit_recvs(4, 1000, lambda message: self.ledger.note_message(bytes(message.data)))

    def end(self) -> None:
        assert ends_within(self.ledger, lambda step_s: self.world.run(for_s=step_s), 10)
        self.world.run(for_s=0.1)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with sim.World(seed=3) as world:
        yield Pair(world)


def one_of_each(pair: Pair) -> None:
    ledger = pair.ledger
    ledger.write(pair.source, pair.target, NBYTES, ledger.tally(pair.b))
    ledger.paged_writes(pair.source, pair.target, [0, 1, 2], [2, 0, 1], 512, ledger.tally(pair.b))
    ledger.scatter(pair.source, [pair.target, pair.target], [10, 5000], imm=5)
    ledger.barrier(pair.a, [pair.b], imm=6)
    ledger.read(pair.target, pair.source, 3000)
    ledger.send(pair.a, pair.b, 100)


def test_what_is_right_passes(pair: Pair) -> None:
    one_of_each(pair)
    assert len(pair.ledger.pending) == 6

    pair.end()

    pair.ledger.check_end()
    assert [op.status for op in pair.ledger.ops] == ["done"] * 6


def test_what_is_not_complete_is_found(pair: Pair) -> None:
    one_of_each(pair)

    with pytest.raises(CheckFailed, match="completed 0 times"):
        pair.ledger.check_end()


def test_a_byte_that_changes_after_the_completion_is_found(pair: Pair) -> None:
    one_of_each(pair)
    pair.end()

    pair.target.memory[NBYTES // 2] ^= 1

    with pytest.raises(CheckFailed, match=r"operation 0 .* was touched after its completion, at byte 100000"):
        pair.ledger.check()


def test_a_source_that_is_read_after_the_completion_is_found(pair: Pair) -> None:
    op = pair.ledger.write(pair.source, pair.target, NBYTES)
    assert op is not None
    pair.end()
    op.pieces[0].is_unsure = True  # as if the peer had been given up: not even then

    pair.target.memory[:100] = pair.source.memory[:100]

    with pytest.raises(CheckFailed, match=r"source of operation 0 .* was read"):
        pair.ledger.check()


def test_bytes_that_are_not_what_was_sent_are_found(pair: Pair) -> None:
    op = pair.ledger.write(pair.source, pair.target, NBYTES)
    assert op is not None
    pair.source.memory[77] ^= 0x40  # on its way

    pair.end()

    with pytest.raises(CheckFailed, match="byte 77 of 200000 at its target is not what was sent"):
        pair.ledger.check()


def test_a_count_before_its_bytes_is_found(pair: Pair) -> None:
    tally = pair.ledger.tally(pair.b)
    pair.ledger.write(pair.source, pair.target, NBYTES, tally)
    # Somebody else's immediate of that number, which has no bytes.
    pair.a.submit_barrier(pair.a.add_peer_group([pair.b.address]), tally.counter.imm)

    pair.end()

    with pytest.raises(CheckFailed, match=r"(?s)counted before its bytes.*|counts 2 of immediate"):
        pair.ledger.check_end()


def test_a_count_that_is_missing_is_found(pair: Pair) -> None:
    tally = pair.ledger.tally(pair.b)
    pair.ledger.write(pair.source, pair.target, NBYTES, tally)
    pair.end()

    assert tally.counter.try_consume(1)

    with pytest.raises(CheckFailed, match=r"counts 0 of immediate .* must be 1 to 1"):
        pair.ledger.check_end()


def test_a_message_that_comes_twice_is_found(pair: Pair) -> None:
    op = pair.ledger.send(pair.a, pair.b, 100)
    pair.end()

    pair.ledger.note_message(op.payload)

    with pytest.raises(CheckFailed, match="delivered twice"):
        pair.ledger.check()


def test_a_message_that_nobody_sent_is_found(pair: Pair) -> None:
    pair.ledger.note_message(b"from nowhere")

    with pytest.raises(CheckFailed, match="nobody sent"):
        pair.ledger.check()


def test_memory_touched_after_its_region_was_closed_is_found(pair: Pair) -> None:
    assert pair.ledger.close_arena(pair.target, timeout_s=1)
    pair.ledger.check()

    pair.target.memory[3] = 0

    with pytest.raises(CheckFailed, match="after its region was closed"):
        pair.ledger.check()


def test_revoked_memory_is_left_alone_and_refuses_what_is_late_and_what_is_stale(pair: Pair) -> None:
    ledger = pair.ledger
    landed = ledger.write(pair.source, pair.target, NBYTES, ledger.tally(pair.b))
    pair.end()
    late = ledger.write(pair.source, pair.target, NBYTES, ledger.tally(pair.b))
    read = ledger.read(ledger.arena(pair.a, np.zeros(NBYTES, np.uint8)), pair.target, NBYTES)

    assert ledger.revoke_arena(pair.target, timeout_s=1)
    stale = ledger.write(pair.source, pair.target, 100, ledger.tally(pair.b))
    ledger.renew_arena(pair.target)
    older = ledger.write(pair.source, pair.target, 100, ledger.tally(pair.b), by=pair.target.older[0])
    fresh = ledger.write(pair.source, pair.target, 100, ledger.tally(pair.b))

    pair.end()
    ledger.check_end()
    statuses = [op.status for op in (landed, late, read, stale, older, fresh) if op is not None]
    assert statuses == ["done", *["region-revoked"] * 4, "done"]


def test_a_byte_that_changes_behind_a_fence_is_found(pair: Pair) -> None:
    op = pair.ledger.write(pair.source, pair.target, NBYTES)
    assert op is not None
    assert pair.ledger.revoke_arena(pair.target, timeout_s=1)
    pair.ledger.check()

    op.pieces[0].memory[5] = op.pieces[0].data[5]

    with pytest.raises(CheckFailed, match="touched after its peer was locked out, at byte 5"):
        pair.ledger.check()


def test_a_read_of_what_was_fenced_off_is_found(pair: Pair) -> None:
    op = pair.ledger.read(pair.target, pair.source, NBYTES)
    assert op is not None
    assert pair.ledger.revoke_arena(pair.source, timeout_s=1)

    op.pieces[0].memory[:9] = pair.source.memory[:9]

    with pytest.raises(CheckFailed, match=r"source of .* was read after its peer was locked out"):
        pair.ledger.check()


def test_an_operation_that_was_to_fail_and_is_done_is_found(pair: Pair) -> None:
    for attribute, words in (("is_stale", "descriptor that was revoked"), ("is_spoiled", "had changed on their way")):
        op = pair.ledger.write(pair.source, pair.target, 100)
        assert op is not None
        setattr(op, attribute, True)

        pair.end()

        with pytest.raises(CheckFailed, match=words):
            pair.ledger.check()
        pair.ledger.failures.clear()


def test_a_spoiled_write_fails_and_is_not_counted(pair: Pair) -> None:
    op = pair.ledger.spoiled_write(pair.source, pair.target, NBYTES, pair.ledger.tally(pair.b))
    assert op is not None

    pair.end()

    pair.ledger.check_end()
    assert op.status == "checksum-mismatch"
    (tally,) = op.counts
    pair.a.submit_barrier(
        pair.a.add_peer_group([pair.b.address]), tally.counter.imm
    )  # as if it were counted all the same
    pair.end()
    with pytest.raises(CheckFailed, match=r"counts 1 of immediate .* must be 0 to 0"):
        pair.ledger.check_end()


def test_what_a_lost_peer_promised_is_not_asked(pair: Pair) -> None:
    one_of_each(pair)
    pair.ledger.note_dead(pair.b)
    pair.world.kill(pair.b)

    assert ends_within(pair.ledger, lambda step_s: pair.world.run(for_s=step_s), 60)

    pair.ledger.check_end()
    statuses = {op.status for op in pair.ledger.ops}
    assert statuses <= {"done", "peer-lost", "engine-closed"}, statuses


def test_an_arena_gives_each_range_once() -> None:
    with sim.World(seed=4) as world:
        engine = world.host("a").engine("a")
        memory = np.zeros(100, np.uint8)
        arena = Arena(engine, memory, engine.register(memory))

        assert [arena.take(40), arena.take(40, align=16), arena.take(40)] == [0, 48, None]
        assert arena.take(12) == 88


def test_engines_of_real_transports_can_be_checked_too() -> None:
    ledger = Ledger(2)
    with xr.Engine("a", transport="shm") as a, xr.Engine("b", transport="shm") as b:
        source, target = (ledger.arena(engine, np.zeros(1 << 20, np.uint8)) for engine in (a, b))
        op = ledger.write(source, target, NBYTES, ledger.tally(b))
        assert op is not None
        op.transfer.wait(10)
        for tally in op.counts:
            tally.counter.wait(1, 10)
            tally.counter._give_back(1)

        eventually(lambda: not (ledger.pending or ledger.unsettled()), "everything is complete and counted")
        ledger.check_end()


def test_callbacks_of_two_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(5)
    poisons = threading.Event()

    class Slow:
        """Is set a while after the memory was poisoned, as on a machine that is in no hurry."""

        def __get__(self, piece: Piece, _: type) -> bool:
            return bool(vars(piece)["is_poisoned"])

        def __set__(self, piece: Piece, value: bool) -> None:
            if value:
                poisons.set()
                time.sleep(0.1)
            vars(piece)["is_poisoned"] = value

    with xr.Engine("a", transport="shm") as a, xr.Engine("b", transport="shm") as b:
        source, target = (ledger.arena(engine, np.zeros(1 << 20, np.uint8)) for engine in (a, b))
        imm = b.alloc_imm()

        def hold() -> None:
            assert poisons.wait(10)
            imm._give_back(1)

        imm.on_count(1, hold)  # the ledger's own comes after it
        monkeypatch.setattr(Piece, "is_poisoned", Slow())
        ledger.write(source, target, NBYTES, ledger.tally(b, imm.imm))

        eventually(lambda: not (ledger.pending or ledger.unsettled()), "everything is complete and counted")
        ledger.check_end()

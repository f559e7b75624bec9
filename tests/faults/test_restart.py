"""A peer process that comes back: the same name, another incarnation."""

import pytest

import crossrail as xr
from tests.conftest import PeerFactory
from tests.support.limits import WAIT_S
from tests.support.patterns import CANARY, assert_same_bytes, pattern


def test_restarted_peer_is_reached_and_its_past_is_not(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    src = engine.register(pattern(1, 10_000))
    first = spawn_peer()
    old = first.open(name="phoenix")
    old_memory = old.memory(10_000)
    engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    first.kill()
    first.wait_dead()

    second = spawn_peer()
    new = second.open(name="phoenix")
    new_memory = new.memory(10_000)
    with pytest.raises(xr.PeerLost, match="phoenix"):
        engine.submit_write(src, old_memory.descriptor).wait(WAIT_S)
    assert (new_memory.content() == CANARY).all()
    engine.submit_write(src, new_memory.descriptor, imm=1).wait(WAIT_S)

    new.expect_count(1, 1)
    assert_same_bytes(new_memory.content(), pattern(1, 10_000))
    assert engine.peer_state(old.address) == "lost"
    assert engine.peer_state(new.address) == "connected"


def test_messages_for_the_old_incarnation_never_reach_the_new(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    first = spawn_peer()
    old = first.open(name="phoenix")
    engine.connect(old.address, WAIT_S)
    transfers = [engine.submit_send(old.address, b"for the old one") for _ in range(10)]
    first.kill()
    first.wait_dead()

    new = spawn_peer().open(name="phoenix")
    new.receive(20, 100)
    for transfer in transfers:
        with pytest.raises(xr.PeerLost):
            transfer.wait(WAIT_S)
    engine.submit_send(new.address, b"for the new one").wait(WAIT_S)

    assert new.take()[1] == b"for the new one"


def test_target_that_restarts_here_is_another_to_its_peers(spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    remote = there.memory(100, fill=3)
    with xr.Engine("phoenix") as first:
        target = first.alloc(100)
        there.operate("write", remote, [target.descriptor], imm=1)
        first.imm_counter(1).wait(1, WAIT_S)

    with xr.Engine("phoenix") as second:
        target = second.alloc(100)
        there.operate("write", remote, [target.descriptor], imm=1)
        second.imm_counter(1).wait(1, WAIT_S)

        assert_same_bytes(target.array(), pattern(3, 100))

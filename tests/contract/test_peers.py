"""Peers: found by address, forgotten on request, never mistaken for their successors."""

import pytest

import crossrail as xr
from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import ALL_RAILS, PRIVATE, SOME_MEMORY, setups
from tests.support.limits import DEATH_S, WAIT_S, eventually
from tests.support.patterns import assert_same_bytes


@setups(ALL_RAILS)
def test_connect_warms_a_peer_up(pair: Pair) -> None:
    assert pair.here.peer_state(pair.there.address) == "unknown"

    pair.here.connect(pair.there.address, WAIT_S)

    assert pair.here.peer_state(pair.there.address) == "connected"
    assert pair.there.address in pair.here.peers()


@setups(ALL_RAILS)
def test_explain_maps_every_rail_onto_one_of_the_peer(pair: Pair) -> None:
    pair.here.connect(pair.there.address, WAIT_S)

    explanation = pair.here.explain(pair.there.address)

    assert sorted({rail for rail, _ in explanation.rails}) == list(range(pair.setup.rails_here))
    assert {peer_rail for _, peer_rail in explanation.rails} <= set(range(pair.setup.rails_there))
    if pair.setup.is_network:  # connections go by pairs: every rail of the larger side has its own
        assert len(explanation.rails) == max(pair.setup.rails_here, pair.setup.rails_there)
    else:
        assert len(explanation.rails) == pair.setup.rails_here
    assert explanation.transport == pair.setup.kind
    assert explanation.state == "connected"
    assert pair.there.address.name in str(explanation)


def test_both_sides_may_connect_at_the_same_time(pair: Pair) -> None:
    src, dst = pair.source(1000), pair.target(1000, fill=2)
    mine, remote = pair.memory(1000), pair.target(1000)

    pair.here.submit_write(src, remote.descriptor, imm=1)
    pair.there.operate("write", dst, [mine.descriptor], imm=1)

    pair.there.expect_count(1, 1)
    pair.here.imm_counter(1).wait(1, WAIT_S)


def test_mapped_target_is_written_without_a_private_path(pair: Pair) -> None:
    src, dst = pair.source(1_000_000), pair.there.memory(1_000_000, "mapped")

    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    used = [path for path in pair.here.explain(pair.there.address).paths if path.bytes]
    mapped = "local" if pair.setup.processes == 1 else "mapped"
    assert {path.path for path in used} == {pair.setup.kind if pair.setup.is_network else mapped}
    assert sum(path.bytes for path in used) >= 1_000_000


def test_path_says_what_reads_moved(pair: Pair) -> None:
    dst, src = pair.memory(1_000_000), pair.there.memory(1_000_000, "mapped")

    for _ in range(3):
        pair.here.submit_read(dst, src.descriptor).wait(WAIT_S)

    assert sum(path.bytes for path in pair.here.explain(pair.there.address).paths) == 3_000_000


@setups([(1, 1), (4, 4)], [memory for memory in PRIVATE if memory[:2] == ("private", "private")])
def test_private_path_is_shown_with_its_reason(pair: Pair) -> None:
    expected = {"staged"} if pair.setup.private_path == "staged" else {"cross-memory-attach", "staged"}
    if pair.setup.is_network:
        expected = {pair.setup.kind}
    src, dst = pair.source(1_000_000), pair.target(1_000_000)

    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    used = [path for path in pair.here.explain(pair.there.address).paths if path.bytes]
    assert used and {path.path for path in used} <= expected
    assert all(path.reason for path in used)  # above all when cross-memory attach was asked for and refused


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_forgotten_peer_connects_anew(pair: Pair) -> None:
    src, dst = pair.source(50_000), pair.target(50_000)
    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    pair.there.expect_count(1, 1)

    pair.here.forget_peer(pair.there.address)
    assert pair.here.peer_state(pair.there.address) == "unknown"

    src.array()[:] = 9
    pair.here.submit_write(src, dst.descriptor, imm=2).wait(WAIT_S)
    pair.there.expect_count(2, 1)
    assert_same_bytes(dst.content(), bytes_of(src))


def test_forgetting_ends_pending_transfers_as_peer_lost(pair: Pair) -> None:
    pair.here.connect(pair.there.address, WAIT_S)
    transfer = pair.here.submit_send(pair.there.address, b"nobody receives")

    pair.here.forget_peer(pair.there.address)

    with pytest.raises(xr.PeerLost, match=pair.there.address.name):
        transfer.wait(WAIT_S)


def test_peer_that_left_is_lost(pair: Pair) -> None:
    src, dst = pair.source(1000), pair.target(1000)
    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    pending = pair.here.submit_send(pair.there.address, b"nobody receives")

    pair.there.close()

    with pytest.raises(xr.PeerLost, match=pair.there.address.name):
        pending.wait(WAIT_S)
    eventually(lambda: pair.here.peer_state(pair.there.address) == "lost", "the peer lost", DEATH_S)
    with pytest.raises(xr.PeerLost):
        pair.here.submit_write(src, dst.descriptor).wait(WAIT_S)


def test_same_name_reopened_is_another_incarnation(pair: Pair) -> None:
    first = pair.another("twin", name="twin")
    old = first.memory(1000)
    pair.here.submit_write(pair.source(1000), old.descriptor).wait(WAIT_S)
    first.close()

    second = pair.another("twin", name="twin")
    new = second.memory(1000)
    src = pair.source(1000)
    pair.here.submit_write(src, new.descriptor, imm=1).wait(WAIT_S)

    second.expect_count(1, 1)
    assert_same_bytes(new.content(), bytes_of(src))
    assert first.address.incarnation != second.address.incarnation
    with pytest.raises(xr.PeerLost):
        pair.here.submit_write(src, old.descriptor).wait(WAIT_S)


def test_two_living_engines_of_one_name_are_told_apart(pair: Pair) -> None:
    twins = [pair.another(f"twin-{i}", name="twin") for i in range(2)]
    targets = [twin.memory(100) for twin in twins]

    for i, target in enumerate(targets):
        pair.here.submit_write(pair.source(100, fill=i), target.descriptor, imm=i).wait(WAIT_S)

    for i, (twin, target) in enumerate(zip(twins, targets, strict=True)):
        twin.expect_count(i, 1)
        assert twin.count(1 - i) == 0
        assert_same_bytes(target.content(), bytes_of(pair.source(100, fill=i)))


def test_a_closed_engine_cannot_be_connected(pair: Pair) -> None:
    gone = pair.another("gone")
    gone.close()

    with pytest.raises(xr.PeerLost, match=gone.address.name):
        pair.here.connect(gone.address, WAIT_S)

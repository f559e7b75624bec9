"""Regions as the peer sees them: closed, read-only, registered twice."""

import pytest

import crossrail as xr
from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import SOME_MEMORY, setups
from tests.support.limits import WAIT_S
from tests.support.operations import DATA_KINDS, Operations
from tests.support.patterns import CANARY, assert_same_bytes


@setups([(1, 1), (4, 4)], SOME_MEMORY)
@pytest.mark.parametrize("kind", DATA_KINDS)
def test_closed_region_of_the_peer_refuses(pair: Pair, kind: str) -> None:
    mine, remote, neighbour = pair.source(20_000), pair.target(20_000), pair.target(20_000)
    operations = Operations(pair.here, mine, [remote.descriptor])
    operations.submit(kind).wait(WAIT_S)

    remote.close()

    with pytest.raises(xr.RemoteRegionClosed, match=pair.there.address.name):
        operations.submit(kind).wait(WAIT_S)
    pair.here.submit_write(mine, neighbour.descriptor, imm=1).wait(WAIT_S)  # the peer itself is fine
    pair.there.expect_count(1, 1)


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_region_closed_before_first_use_refuses(pair: Pair) -> None:
    remote = pair.target(1000)
    remote.close()

    transfer = pair.here.submit_write(pair.source(1000), remote.descriptor, imm=1)

    with pytest.raises(xr.RemoteRegionClosed):
        transfer.wait(WAIT_S)
    assert pair.there.count(1) == 0


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_descriptor_of_a_closed_region_never_reaches_its_successor(pair: Pair) -> None:
    old = pair.target(4096)
    old.close()
    new = pair.target(4096)

    with pytest.raises(xr.RemoteRegionClosed):
        pair.here.submit_write(pair.source(4096), old.descriptor).wait(WAIT_S)

    assert old.descriptor != new.descriptor
    assert (new.content() == CANARY).all()


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_peer_cannot_touch_memory_after_its_region_closed(pair: Pair) -> None:
    mine, remote = pair.memory(2_000_000), pair.target(2_000_000, fill=3)
    stream = pair.there.stream("write", remote, [mine.descriptor])
    array = mine.array()  # keeps engine-owned memory mapped, too

    mine.close(WAIT_S)
    array[:] = CANARY
    outcome = pair.there.caller.call("failed_stream", stream=stream)

    assert set(outcome["failures"]) == {"RemoteRegionClosed"}
    assert (array == CANARY).all()


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_peer_cannot_touch_memory_after_its_engine_closed(pair: Pair) -> None:
    mine, remote = pair.memory(2_000_000), pair.target(2_000_000, fill=3)
    stream = pair.there.stream("write", remote, [mine.descriptor])
    array = mine.array()

    pair.here.close()
    array[:] = CANARY
    outcome = pair.there.caller.call("failed_stream", stream=stream)

    assert set(outcome["failures"]) <= {"PeerLost", "RemoteRegionClosed"}
    assert outcome["failures"]
    assert (array == CANARY).all()


@setups([(1, 1), (4, 4)])
def test_read_only_memory_is_no_target(pair: Pair) -> None:
    remote = pair.there.memory(1000, "private", access="read", fill=4)
    before = remote.content()

    with pytest.raises(xr.UsageError, match="access"):
        pair.here.submit_write(pair.source(1000), remote.descriptor)

    assert_same_bytes(remote.content(), before)


@setups([(1, 1), (4, 4)])
def test_local_memory_can_be_neither_read_nor_written(pair: Pair) -> None:
    remote = pair.there.memory(1000, "private", access="local", fill=4)

    with pytest.raises(xr.UsageError, match="access"):
        pair.here.submit_write(pair.source(1000), remote.descriptor)
    with pytest.raises(xr.UsageError, match="access"):
        pair.here.submit_read(pair.memory(1000), remote.descriptor)


@setups([(1, 1), (4, 4)])
def test_local_memory_can_be_a_source(pair: Pair) -> None:
    src = pair.here.register(bytes_of(pair.source(5000)), access="local")
    dst = pair.target(5000)

    pair.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 1)
    assert_same_bytes(dst.content(), bytes_of(src))


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_hundreds_of_regions_are_told_apart(pair: Pair) -> None:
    targets = [pair.target(101) for _ in range(200)]
    src = pair.source(101)

    for i, target in enumerate(targets):
        src.array()[:] = i % 251
        pair.here.submit_write(src, target.descriptor, imm=1).wait(WAIT_S)

    pair.there.expect_count(1, 200)
    for i, target in enumerate(targets):
        assert (target.content() == i % 251).all(), f"region {i}"

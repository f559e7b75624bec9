"""Engine.map: a peer's memory as a view of ours, and what becomes of it."""

import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually


def test_what_either_side_writes_the_other_reads(engine: xr.Engine, other: xr.Engine) -> None:
    with other.alloc(100_000) as region:
        view = engine.map(region.descriptor, WAIT_S)
        assert (len(view), view.format, view.readonly) == (100_000, "B", False)
        view[99_999] = 7
        region.view()[5] = 9
        assert (region.view()[99_999], view[5]) == (7, 9)


def test_memory_of_another_process_outlives_it(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    peer = spawn_peer()
    remote = peer.open()
    memory = remote.memory(8192, kind="mapped", fill=3)
    view = engine.map(memory.descriptor, WAIT_S)
    before = bytes(view)
    view[:4] = b"here"
    assert bytes(memory.content(0, 4)) == b"here"
    peer.kill()
    peer.wait_dead()
    eventually(lambda: engine.peer_state(remote.address) == "lost", "it is lost")
    assert bytes(view[4:]) == before[4:]
    view[0] = 1
    with pytest.raises(xr.PeerLost):
        engine.map(memory.descriptor, WAIT_S)


def test_a_view_outlives_the_region_and_both_engines(open_engine: EngineFactory) -> None:
    ours, theirs = open_engine("ours"), open_engine("theirs")
    region = theirs.alloc(4096)
    region.view()[0] = 5
    view = ours.map(region.descriptor, WAIT_S)
    region.close(WAIT_S)
    theirs.close()
    ours.close()
    assert view[0] == 5


def test_memory_that_was_registered_is_refused(engine: xr.Engine, other: xr.Engine, spawn_peer: PeerFactory) -> None:
    with other.register(bytearray(64)) as region:
        with pytest.raises(xr.UsageError, match=r"engine\.alloc"):
            engine.map(region.descriptor, WAIT_S)
    far = spawn_peer().open().memory(64, kind="private")
    with pytest.raises(xr.UsageError, match=r"engine\.alloc"):
        engine.map(far.descriptor, WAIT_S)


def test_a_peer_reached_by_a_network_is_refused(open_engine: EngineFactory) -> None:
    ours, theirs = open_engine("ours", transport="tcp"), open_engine("theirs", transport="tcp")
    with theirs.alloc(64) as region, pytest.raises(xr.UsageError, match="cannot map"):
        ours.map(region.descriptor, WAIT_S)


def test_closed_and_revoked_regions_are_refused(engine: xr.Engine, other: xr.Engine) -> None:
    region = other.alloc(64)
    descriptor = region.descriptor
    region.revoke(WAIT_S)
    with pytest.raises(xr.RemoteRegionRevoked):
        engine.map(descriptor, WAIT_S)
    again = region.renew()
    assert len(engine.map(again, WAIT_S)) == 64
    region.close(WAIT_S)
    eventually(lambda: _is_refused(engine, again), "the closed region is refused")


def _is_refused(engine: xr.Engine, descriptor: xr.RegionDescriptor) -> bool:
    try:
        engine.map(descriptor, WAIT_S)
    except xr.RemoteRegionClosed:
        return True
    return False


def test_a_closed_engine_maps_nothing(open_engine: EngineFactory, other: xr.Engine) -> None:
    ours = open_engine("ours")
    with other.alloc(64) as region:
        ours.close()
        with pytest.raises(xr.EngineClosed):
            ours.map(region.descriptor, WAIT_S)


def test_an_engine_that_the_caller_drives_maps_too(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    ours = open_engine("ours", polling="manual")
    memory = spawn_peer().open().memory(64, kind="mapped")
    assert len(ours.map(memory.descriptor, WAIT_S)) == 64

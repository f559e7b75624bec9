"""A writer that stands still while its target is fenced off or closed, and then goes on as if nothing had happened."""

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.contract.setups import REAL_TRANSPORTS
from tests.support.limits import NEVER_S, WAIT_S, eventually, never
from tests.support.node import RemoteEngine, RemoteMemory
from tests.support.patterns import CANARY, ByteArray
from tests.support.process import PeerProcess

NBYTES = 2_000_003
IMM = 9
ATTEMPTS = 40  # to stop the writer in the middle of a copy


@dataclass(frozen=True)
class Way:
    """How the writer reaches the memory that is fenced off."""

    transport: str
    memory: str
    private_path: str = "auto"

    def __str__(self) -> str:
        return f"{self.transport}-{self.memory}-{self.private_path}"


SHM = [Way("shm", "mapped"), Way("shm", "private", "staged"), Way("shm", "private", "cma")]
NETWORK = [Way(transport, "private") for transport in REAL_TRANSPORTS if transport != "shm"]
DIRECT = [SHM[0], SHM[2]]  # the writer itself copies into the memory

over_all = pytest.mark.parametrize("way", SHM + NETWORK, ids=str)
over_direct = pytest.mark.parametrize("way", DIRECT, ids=str)


@dataclass
class Scene:
    """A writer in another process, streaming into memory of this one."""

    here: xr.Engine
    child: PeerProcess
    there: RemoteEngine
    memory: RemoteMemory
    region: xr.Region
    array: ByteArray
    stream: int

    def counted(self) -> int:
        return self.here.imm_counter(IMM).poll()

    def outcome(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self.child.call("failed_stream", stream=self.stream)
        return found


@pytest.fixture
def scene(way: Way, open_engine: EngineFactory, spawn_peer: PeerFactory) -> Scene:
    options = {"transport": way.transport, "private_path": way.private_path}
    here, child = open_engine(**options), spawn_peer()
    there = child.open(name="writer", **options)
    memory = there.memory(NBYTES, "private", fill=3)
    region = here.alloc(NBYTES) if way.memory == "mapped" else here.register(np.zeros(NBYTES, np.uint8))
    array = region.array()
    stream = there.stream("write", memory, [region.descriptor], imm=IMM)
    return Scene(here, child, there, memory, region, array, stream)


def stop_in_a_copy(scene: Scene) -> None:
    """Stops the writer, again and again, until it stands still in the middle of something: then the fence says so."""
    for _ in range(ATTEMPTS):
        scene.child.stop()
        try:
            scene.region.revoke(0.05)
        except xr.WaitTimeout as error:
            assert "'writer'" in str(error), error
            return
        scene.child.resume()
        descriptor = scene.region.renew()
        assert set(scene.outcome()["failures"]) == {"RemoteRegionRevoked"}
        scene.stream = scene.there.stream("write", scene.memory, [descriptor], imm=IMM)
    pytest.fail(f"in {ATTEMPTS} attempts the writer was never stopped in a copy")


@over_all
def test_frozen_writer_that_was_revoked_lands_and_counts_nothing_after_thawing(scene: Scene) -> None:
    scene.child.stop()
    quarantined = False
    try:
        scene.region.revoke(1.0)
    except xr.WaitTimeout:
        quarantined = scene.region.quarantined
        assert quarantined
        scene.child.resume()
        scene.region.revoke(WAIT_S)
    assert not scene.region.quarantined
    scene.array[:] = CANARY
    counted = scene.counted()

    scene.child.resume()

    outcome = scene.outcome()
    assert set(outcome["failures"]) == {"RemoteRegionRevoked"}
    assert (scene.array == CANARY).all()
    assert quarantined or scene.counted() == counted


@over_all
def test_successor_of_a_frozen_writer_uses_the_renewed_region_undisturbed(
    scene: Scene, way: Way, spawn_peer: PeerFactory
) -> None:
    scene.child.stop()
    with contextlib.suppress(xr.WaitTimeout):
        scene.region.revoke(1.0)
    if scene.region.quarantined:
        with pytest.raises(xr.UsageError, match="revoke"):
            scene.region.renew()
        scene.child.kill()
        scene.region.revoke(WAIT_S)
    descriptor = scene.region.renew()
    scene.array[:] = CANARY
    successor = spawn_peer().open(name="successor", transport=way.transport, private_path=way.private_path)
    mine = successor.memory(NBYTES, "private", fill=8)

    successor.operate("write", mine, [descriptor], imm=IMM + 1)
    scene.child.resume()

    scene.here.imm_counter(IMM + 1).wait(1, WAIT_S)
    if scene.child.alive:
        assert set(scene.outcome()["failures"]) == {"RemoteRegionRevoked"}
    assert (scene.array == mine.content()).all()


@over_direct
def test_writer_stopped_in_a_copy_quarantines_the_region_until_it_moves(scene: Scene) -> None:
    stop_in_a_copy(scene)

    assert scene.region.quarantined
    with pytest.raises(xr.WaitTimeout, match="'writer'"):
        scene.region.close(0.05)
    assert scene.region.quarantined
    scene.child.resume()
    scene.region.close(WAIT_S)

    assert not scene.region.quarantined
    scene.array[:] = CANARY
    assert set(scene.outcome()["failures"]) == {"RemoteRegionRevoked"}
    assert (scene.array == CANARY).all()


@over_direct
def test_closing_the_engine_does_not_free_what_a_frozen_writer_is_at(scene: Scene) -> None:
    stop_in_a_copy(scene)

    scene.here.close(0.2)

    assert scene.region.quarantined
    with pytest.raises(xr.WaitTimeout, match="'writer'"):
        scene.region.close(0.05)
    scene.child.resume()
    scene.region.close(WAIT_S)
    scene.array[:] = CANARY
    assert set(scene.outcome()["failures"]) <= {"RemoteRegionRevoked", "PeerLost"}
    assert (scene.array == CANARY).all()


@over_direct
def test_writer_that_dies_in_a_copy_holds_nobody_up(scene: Scene) -> None:
    stop_in_a_copy(scene)
    scene.here.close(0.2)

    scene.child.kill()

    scene.region.close(WAIT_S)
    assert not scene.region.quarantined


@over_all
def test_engine_closes_in_time_while_its_writer_is_frozen(scene: Scene) -> None:
    scene.child.stop()

    scene.here.close(0.2)  # the test's own time limit is what it must stay within

    assert scene.here.closed
    scene.child.resume()


@over_all
def test_engine_closes_in_time_while_its_target_is_frozen(scene: Scene) -> None:
    source = scene.here.register(np.zeros(NBYTES, np.uint8))
    scene.here.connect(scene.there.address, WAIT_S)
    scene.child.stop()
    transfers = [scene.here.submit_write(source, scene.memory.descriptor) for _ in range(20)]

    scene.here.close(0.2)

    assert all(transfer.done for transfer in transfers)
    source.close(WAIT_S)
    scene.child.resume()


@over_all
def test_undrained_close_of_a_source_of_a_frozen_target_waits_only_for_what_is_begun(scene: Scene) -> None:
    source = scene.here.register(np.zeros(NBYTES, np.uint8))
    scene.here.connect(scene.there.address, WAIT_S)
    scene.child.stop()
    transfers = [scene.here.submit_write(source, scene.memory.descriptor, imm=1) for _ in range(20)]

    with contextlib.suppress(xr.WaitTimeout):
        source.close(0.5, drain=False)
    scene.child.resume()
    source.close(WAIT_S)

    assert {transfer.status for transfer in transfers} <= {"done", "cancelled"}
    done = sum(transfer.status == "done" for transfer in transfers)
    eventually(lambda: scene.there.count(1) == done, f"{done} counts")
    never(lambda: scene.there.count(1) > done, "a cancelled write counted", NEVER_S)

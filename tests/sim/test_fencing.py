"""A writer that is late - frozen, cut off, killed, given up - and the fence that was put up meanwhile."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from crossrail.sim import NicProfile
from tests.support.patterns import CANARY, pattern

NBYTES = 3_000_000
IMM = 9

# At 1 GB/s, so that a write takes milliseconds and a fault falls into its middle.
ORDERED = NicProfile("ordered", gbps=8.0, latency_us=20.0, completion_us=20.0, jitter_us=30.0, ordered=True)
UNORDERED = dataclasses.replace(ORDERED, name="unordered", ordered=False, jitter_us=200.0)
NAMELESS = dataclasses.replace(UNORDERED, name="nameless", names_imm_paths=False)
KINDS = [ORDERED, UNORDERED, NAMELESS]

over_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
over_rails = pytest.mark.parametrize("rails", [1, 3])


class Scene:
    """A writer with writes under way into memory of an owner."""

    def __init__(self, world: sim.World, kind: NicProfile, rails: int) -> None:
        self.world = world
        self.hosts = [world.host(name, nic=[kind] * rails) for name in ("owner", "writer", "successor")]
        self.owner, self.writer = (host.engine(host.name, peer_timeout_s=2.0) for host in self.hosts[:2])
        self.memory = np.zeros(NBYTES, np.uint8)
        self.region = self.owner.register(self.memory)
        self.old = self.region.descriptor
        self.source = self.writer.register(pattern(3, NBYTES))
        self.transfers = [self.write()]
        self.transfers[0].wait(60.0)
        self.transfers += [self.write() for _ in range(3)]
        world.run(0.001)  # into their middle

    def write(self) -> xr.Transfer:
        return self.writer.submit_write(self.source, self.old, imm=IMM)

    def fence(self) -> xr.RegionDescriptor:
        """Locks the writer out, and makes the memory somebody else's."""
        self.region.revoke(60.0)
        self.memory[:] = CANARY
        return self.region.renew()

    def is_untouched(self) -> bool:
        return bool((self.memory == CANARY).all())

    def endings(self) -> set[str]:
        self.world.run(60.0)
        return {transfer.status for transfer in self.transfers}


@pytest.fixture
def scene(kind: NicProfile, rails: int) -> Iterator[Scene]:
    with sim.World(seed=5) as world:
        yield Scene(world, kind, rails)


@over_rails
@over_kinds
def test_what_is_under_way_lands_before_the_fence_or_never(scene: Scene) -> None:
    assert any(not transfer.done for transfer in scene.transfers)

    scene.fence()

    assert scene.endings() == {"done", "region-revoked"}
    assert scene.is_untouched()
    done = sum(transfer.status == "done" for transfer in scene.transfers)
    assert scene.owner.imm_counter(IMM).poll() >= done


@over_rails
@over_kinds
@pytest.mark.parametrize("how", ["frozen", "cut off", "given up"])
def test_a_late_writer_that_comes_back_finds_the_door_shut(scene: Scene, how: str) -> None:
    if how == "frozen":
        scene.world.freeze(scene.writer, for_s=1.0)
    elif how == "cut off":
        scene.world.partition(scene.hosts[:1], scene.hosts[1:2], for_s=1.0)
    else:
        scene.owner.forget_peer(scene.writer.address)
    descriptor = scene.fence()
    assert scene.world.now_s < 1.0  # the fence did not wait for the writer

    assert "pending" not in scene.endings()
    late = scene.writer.submit_write(scene.source, scene.old, imm=IMM + 1)
    with pytest.raises(xr.TransferError):
        late.wait(60.0)

    assert scene.is_untouched()
    assert scene.owner.imm_counter(IMM + 1).poll() == 0
    if scene.writer.peer_state(scene.owner.address) == "lost":
        scene.writer.forget_peer(scene.owner.address)
    scene.writer.submit_write(scene.source, descriptor, imm=IMM + 2).wait(60.0)
    scene.owner.imm_counter(IMM + 2).wait(1, 60.0)
    assert np.array_equal(scene.memory, scene.source.array())


@over_rails
@over_kinds
def test_what_left_a_killed_writer_does_not_pass_the_fence(scene: Scene) -> None:
    scene.world.kill(scene.writer)
    scene.fence()

    scene.world.run(60.0)

    assert scene.is_untouched()
    assert not scene.region.quarantined


@over_rails
@over_kinds
def test_the_successor_of_a_frozen_writer_is_undisturbed(scene: Scene) -> None:
    scene.world.freeze(scene.writer, for_s=1.5)
    successor = scene.hosts[2].engine()
    mine = successor.register(pattern(8, NBYTES))

    successor.submit_write(mine, scene.fence(), imm=IMM + 1).wait(60.0)
    scene.owner.imm_counter(IMM + 1).wait(1, 60.0)

    assert "pending" not in scene.endings()
    assert np.array_equal(scene.memory, mine.array())


@over_kinds
@pytest.mark.parametrize("rails", [2])
def test_the_owners_own_writes_go_on_through_a_fence(scene: Scene) -> None:
    target = scene.writer.register(np.zeros(NBYTES, np.uint8))
    own = [scene.owner.submit_write(scene.region, target.descriptor, 100_000, imm=1) for _ in range(30)]

    scene.region.revoke(60.0)
    own += [scene.owner.submit_write(scene.region, target.descriptor, 100_000, imm=1) for _ in range(30)]

    for transfer in own:
        transfer.wait(60.0)
    scene.writer.imm_counter(1).wait(60, 60.0)
    assert np.array_equal(target.array()[:100_000], scene.memory[:100_000])


@over_kinds
@pytest.mark.parametrize("rails", [3])
def test_the_number_of_a_write_that_was_fenced_off_in_its_middle_is_in_quarantine(scene: Scene) -> None:
    """It left shares of a count: nobody else is given that number, nor does release() let it go unasked."""
    halves = 0
    for _ in range(20):
        counter = scene.owner.alloc_imm()
        transfer = scene.writer.submit_write(scene.source, scene.region.descriptor, 600_000, imm=counter.imm)
        units_before = scene.owner.stats()["imm_units_received"]
        while scene.owner.stats()["imm_units_received"] == units_before and not transfer.done:
            scene.world.run(10e-6)
        scene.fence()
        scene.world.run(60.0)
        if transfer.status == "done" or scene.owner.stats()["imm_units_received"] % 48 == 0:
            continue
        halves += 1
        assert counter.poll() == 0
        with pytest.raises(xr.UsageError, match="of a count have arrived"):
            counter.release()
        assert scene.owner.alloc_imm().imm != counter.imm
        counter.release(force=True)
        break

    assert halves


@over_kinds
@pytest.mark.parametrize("rails", [2])
def test_who_waits_for_a_region_in_vain_is_told_for_whom(scene: Scene) -> None:
    """No NIC tells who is at a region; those that have a path to it are named."""
    target = scene.writer.register(np.zeros(NBYTES, np.uint8))
    scene.world.withhold_completions(scene.hosts[0], for_s=1.0)
    scene.owner.submit_write(scene.region, target.descriptor, 1000)

    with pytest.raises(xr.WaitTimeout, match=r"by 1 transfers of our own, as far as is known by peer 'writer'\."):
        scene.region.close(0.5)

    scene.region.close(60.0)


@over_kinds
@pytest.mark.parametrize("rails", [2])
def test_a_fence_whose_registration_fails_changes_nothing(scene: Scene) -> None:
    for transfer in scene.transfers:
        transfer.wait(60.0)
    scene.world.fail_registrations(scene.hosts[0], 1)

    with pytest.raises(xr.TransportError, match="fail_registrations"):
        scene.region.revoke(60.0)

    assert not scene.region.revoked
    assert scene.region.descriptor == scene.old
    scene.write().wait(60.0)
    scene.owner.imm_counter(IMM).wait(5, 60.0)

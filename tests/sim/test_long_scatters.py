"""Targets of a scatter that are longer than a slice: each waits for its own slices, and counts only what is there."""

import numpy as np

import crossrail as xr
from crossrail import sim
from tests.support.patterns import assert_same_bytes, pattern

MIB = 1 << 20
TARGETS = 8
NBYTES = 3 * MIB + 5


class Star:
    """A writer, and owners of a region each."""

    def __init__(self, world: sim.World) -> None:
        self.writer = world.host("writer", nic="2xefa200").engine()
        self.owners = [world.host(f"owner{i}", nic="2xefa200").engine() for i in range(TARGETS)]
        self.source = self.writer.register(pattern(1, TARGETS * NBYTES))
        self.memory = [np.zeros(NBYTES, np.uint8) for _ in self.owners]
        self.targets = [owner.register(memory) for owner, memory in zip(self.owners, self.memory, strict=True)]
        for owner in self.owners:
            self.writer.connect(owner.address)

    def scatter(self, imm: int) -> xr.Transfer:
        descriptors = [target.descriptor for target in self.targets]
        starts = [i * NBYTES for i in range(TARGETS)]
        return self.writer.submit_scatter(
            self.source, descriptors, lengths=NBYTES, src_offsets=starts, dst_offsets=0, imm=imm
        )


def test_no_target_waits_for_another() -> None:
    """Virtual time: that of as many writes, and not a round trip more for each."""
    with sim.World(seed=1) as world:
        star = Star(world)
        began_s = world.now_s
        writes = [
            star.writer.submit_write(star.source, target.descriptor, NBYTES, src_offset=i * NBYTES, imm=1)
            for i, target in enumerate(star.targets)
        ]
        for write in writes:
            write.wait(10)
        took_s, began_s = world.now_s - began_s, world.now_s

        star.scatter(2).wait(10)

        assert world.now_s - began_s < 1.25 * took_s  # 1.15; 1.47 when last slices waited for all that was posted
        for i, memory in enumerate(star.memory):
            assert_same_bytes(memory, pattern(1, TARGETS * NBYTES)[i * NBYTES : (i + 1) * NBYTES])
        world.run(1.0)  # the last one's owner hears of it when its writer does, or a little later
        for owner in star.owners:
            assert [owner.imm_counter(imm).poll() for imm in (1, 2)] == [1, 1]


def test_what_lost_a_slice_is_not_counted() -> None:
    """A region is revoked in the middle: the scatter says so, its owner counts nothing, all others do."""
    for moment_us in range(40, 400, 40):
        with sim.World(seed=moment_us) as world:
            star = Star(world)
            scatter = star.scatter(1)
            world.run(moment_us * 1e-6)
            refusing = star.targets[3]
            refusing.revoke()
            world.run(10.0)

            assert scatter.status in ("done", "region-revoked")
            counts = [owner.imm_counter(1).poll() for owner in star.owners]
            assert counts == [1, 1, 1, int(scatter.status == "done"), 1, 1, 1, 1]

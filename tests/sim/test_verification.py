"""Checked operations when peers come and go: each is counted once, and its answer heard, whatever gets lost."""

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from tests.support.patterns import pattern

NBYTES = 50_000


class Two:
    """A writer, and an owner of memory, who may forget each other."""

    def __init__(self, world: sim.World) -> None:
        self.world = world
        self.hosts = [world.host(name, nic="2xplain") for name in ("writer", "owner")]
        self.writer, self.owner = (host.engine(peer_timeout_s=3.0) for host in self.hosts)
        self.source = self.writer.register(pattern(3, NBYTES))
        self.target = self.owner.register(np.zeros(NBYTES, np.uint8))

    def write(self) -> xr.Transfer:
        return self.writer.submit_write(self.source, self.target.descriptor, imm=1, verify=True)


@pytest.mark.parametrize("moment_us", range(2, 40, 2))
def test_who_is_forgotten_before_the_answer_gets_it_and_is_counted_once(moment_us: int) -> None:
    with sim.World(seed=moment_us) as world:
        two = Two(world)
        two.writer.connect(two.owner.address)
        transfer = two.write()
        world.run(moment_us * 1e-6)

        two.owner.forget_peer(two.writer.address)
        world.run(30.0)

        assert transfer.status in ("done", "peer-lost")
        counted = two.owner.imm_counter(1).poll()
        assert counted == 1 if transfer.status == "done" else counted <= 1


def test_a_peer_that_stands_still_answers_when_it_moves() -> None:
    with sim.World(seed=5) as world:
        two = Two(world)
        two.writer.connect(two.owner.address)
        transfer = two.write()
        world.run(1e-6)
        world.freeze(two.owner, for_s=2.5)

        transfer.wait(60)

        assert world.now_s > 2.5
        two.owner.imm_counter(1).wait(1, 60)
        assert two.owner.imm_counter(1).poll() == 0

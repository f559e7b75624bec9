"""Works that the peer's NIC refuses one by one, while their path lives on: on NICs without order, as EFA's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from crossrail.sim import NicProfile

ORDERED = NicProfile("ordered", gbps=100.0, latency_us=20.0, completion_us=20.0, jitter_us=30.0, ordered=True)
UNORDERED = dataclasses.replace(ORDERED, name="unordered", ordered=False, jitter_us=100.0)
PAGE = 512
NBYTES = 4096 * PAGE


class Two:
    """a writes small pages to regions of b, of which one is closed to it and one never is."""

    def __init__(self, world: sim.World, kind: NicProfile) -> None:
        self.world = world
        self.a, self.b = (world.host(name, nic=[kind]).engine(name) for name in "ab")
        self.source = self.a.register(np.zeros(NBYTES, np.uint8))
        self.regions = [self.b.register(np.zeros(NBYTES, np.uint8)) for _ in range(3)]
        self.revoked, self.closed, self.open = (region.descriptor for region in self.regions)
        self.write(self.revoked).wait(5)

    def write(self, target: xr.RegionDescriptor, *pages: int) -> xr.Transfer:
        indices = np.array(pages or [0], np.int32)
        turned = indices[::-1].copy()  # so that no two are neighbours on both sides: each is a work of its own
        return self.a.submit_paged_writes(self.source, indices, target, turned, PAGE)

    def refuse(self) -> None:
        self.regions[0].revoke(5)
        self.regions[1].close(5)


@pytest.mark.parametrize("kind", [ORDERED, UNORDERED], ids=lambda kind: kind.name)
def test_each_refused_work_is_told_what_is_wrong_with_its_own_region(kind: NicProfile) -> None:
    with sim.World(seed=7) as world:
        two = Two(world, kind)
        two.refuse()

        transfers = [two.write(target, i) for i in range(40) for target in (two.revoked, two.closed)]
        world.run(20)

        assert [transfer.status for transfer in transfers] == ["region-revoked", "region-closed"] * 40


def test_a_thousand_refusals_told_at_once_do_not_cost_the_peer() -> None:
    with sim.World(seed=7) as world:
        two = Two(world, UNORDERED)
        two.refuse()

        transfers = [two.write(two.revoked, i) for i in range(1000)]
        world.run(20e-6)
        world.freeze(two.a, for_s=0.02)  # its NIC collects what it is told
        world.run(1)

        assert {transfer.status for transfer in transfers} == {"region-revoked"}
        assert two.a.peer_state(two.b.address) == "connected"


def test_answers_about_a_forgotten_link_say_nothing_of_the_next() -> None:
    for delay_us in range(0, 400, 10):
        with sim.World(seed=delay_us) as world:
            two = Two(world, UNORDERED)
            two.b.connect(two.a.address)  # a's forgetting b ends no session: b has a link, too
            two.refuse()

            for i in range(8):
                two.write(two.revoked, i)
            world.run(delay_us * 1e-6)
            two.a.forget_peer(two.b.address)
            transfers = [two.write(two.closed, i) for i in range(8)]
            world.run(5)

            assert {transfer.status for transfer in transfers} == {"region-closed"}, delay_us


@pytest.mark.parametrize("pages", [1024, 4096])
def test_refused_pages_leave_room_for_others_at_once(pages: int) -> None:
    with sim.World(seed=5) as world:
        two = Two(world, UNORDERED)
        two.refuse()

        refused, innocent = two.write(two.revoked, *range(pages)), two.write(two.open)
        world.run(0.1)

        assert refused.status == "region-revoked"
        assert innocent.status == "done"

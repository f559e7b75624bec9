"""A trainer whose link is slow, on simulated hosts: the next update asks less of it, and every bit arrives."""

from __future__ import annotations

from dataclasses import replace

import crossrail as xr
from crossrail import sim
from crossrail.sim.profiles import CX7
from crossrail.weights.planning.speeds import moved_bytes
from tests.support.seeds import Seed
from tests.weights.fleet import OPTIONS, PATIENCE_S, Fleet

TARGETS = range(8)  # from 2 on whole ones in fp8: what a trainer has goes to six of them
SLOW = replace(CX7, gbps=0.02)


def fleet_in(world: sim.World, straggler_ratio: float | None) -> Fleet:
    def engine(name: str) -> xr.Engine:
        nic = SLOW if name == "trainer-1" else replace(CX7, gbps=1.0)
        return world.host(name, nic).engine(name, peer_timeout_s=PATIENCE_S)

    return Fleet(engine, mapped=False, options=replace(OPTIONS, straggler_ratio=straggler_ratio))


def test_slow_trainer_has_less_to_send_from_the_next_update_on(seed: Seed) -> None:
    async def main(world: sim.World) -> None:
        fleet = fleet_in(world, 1.5)
        controller = await fleet.start(TARGETS)

        first = await fleet.update(1)
        assert controller.plan is not None
        before = moved_bytes(controller.plan)[1]
        second = await fleet.update(2)
        await fleet.assert_holds(2)
        third = await fleet.update(3)
        await fleet.assert_holds(3)

        assert first.speeds == {}
        assert list(second.speeds) == [1]
        assert second.speeds[1] < 0.5
        assert second.plan_s > 0
        assert moved_bytes(controller.plan)[1] < before / 2
        assert second.transfer_s < first.transfer_s
        assert list(third.speeds) == [1]
        await fleet.close()

    sim.run(main, seed=seed.number(), limit_s=20 * PATIENCE_S)


def test_plan_stays_when_nothing_is_measured(seed: Seed) -> None:
    async def main(world: sim.World) -> None:
        fleet = fleet_in(world, None)
        await fleet.start(TARGETS)

        await fleet.update(1)
        second = await fleet.update(2)

        assert second.speeds == {}
        assert second.plan_s == 0
        await fleet.close()

    sim.run(main, seed=seed.number(), limit_s=20 * PATIENCE_S)

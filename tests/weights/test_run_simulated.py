"""On simulated hosts: somebody dies or freezes at any moment of an update, and no rank takes torn weights for whole."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

import crossrail as xr
from crossrail import sim
from crossrail.control.wire import Unreachable
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.services import messages as m
from crossrail.weights.services.reports import ControllerOptions
from crossrail.weights.services.versions import State
from tests.support.seeds import Seed
from tests.weights.fleet import PATIENCE_S, Fleet, unanswered

DEADLINE_S = 5.0
FAR_S = 1000.0
MOMENTS = 3  # of one kind of fault, drawn anew each time
OPTIONS = ControllerOptions(abort_s=3.0, evict_s=30.0)


def fleet_in(world: sim.World, peer_timeout_s: float = 1.0) -> Fleet:
    return Fleet(
        lambda name: world.host(name).engine(name, peer_timeout_s=peer_timeout_s), mapped=False, options=OPTIONS
    )


async def undisturbed(world: sim.World) -> float:
    """How long a second update takes."""
    fleet = fleet_in(world)
    await fleet.start()
    await fleet.update(1)
    report = await fleet.update(2)
    await fleet.assert_holds(2)
    await fleet.close()
    return report.total_s


async def fail_at(world: sim.World, kind: str, role: str, moment_s: float, rng: random.Random) -> None:
    """One update during which something goes wrong; afterwards the ranks left have the old or the new version whole."""
    fleet = fleet_in(world)
    controller = await fleet.start()
    await fleet.update(1)
    names = [name for name in fleet.engines if name.startswith(role)]
    victim = rng.choice(names)
    rank = int(victim.rpartition("-")[2])
    loop = asyncio.get_running_loop()
    begun = loop.time()
    if kind == "kill":
        world.kill(fleet.engines[victim], at_s=begun + moment_s)
    else:
        world.freeze(fleet.engines[victim], at_s=begun + moment_s)
    offers = [asyncio.ensure_future(fleet.publish(2, [each], 2 * DEADLINE_S)) for each in fleet.trainers]
    try:
        await controller.update(2, DEADLINE_S)
        came_through = True
    except xr.CrossrailError:
        came_through = False
    assert loop.time() - begun < DEADLINE_S + OPTIONS.abort_s + 1.0
    outcomes = dict(zip(fleet.trainers, await asyncio.gather(*offers, return_exceptions=True), strict=True))
    assert loop.time() - begun < 2 * DEADLINE_S + OPTIONS.abort_s + 1.0
    alive = [each for each in fleet.receivers if role != "target" or each != rank]
    assert all(fleet.receivers[each].version == (2 if came_through else 1) for each in alive)
    if came_through:  # and so did publish(), after ranks had switched
        lost = {rank} if role == "trainer" else set()
        assert not [outcome for each, outcome in outcomes.items() if each not in lost and outcome is not None], outcomes
    else:
        assert all(isinstance(outcome, xr.CrossrailError) for outcome in outcomes.values()), outcomes
    await fleet.assert_holds(2 if came_through else 1, alive)
    # Another takes its place, and all goes on.
    await replace(fleet, role, rank)
    await fleet.update(3)
    await fleet.assert_holds(3)


async def replace(fleet: Fleet, role: str, rank: int) -> None:
    if role == "trainer":
        gone = fleet.trainers.pop(rank)
        del fleet.sources[rank]
        await fleet.add_trainer(rank, f"another-trainer-{rank}")
    else:
        gone = fleet.receivers.pop(rank)
        del fleet.sinks[rank]
        await fleet.add_target(rank, f"another-target-{rank}")
    assert gone is not None


@pytest.mark.parametrize("role", ["trainer", "target"])
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_somebody_is_lost_at_any_moment(kind: str, role: str, seed: Seed) -> None:
    rng = random.Random(seed.number())
    length_s = sim.run(undisturbed, seed=seed.number(0))
    for index in range(MOMENTS):
        moment_s = length_s * rng.uniform(0.0, 1.1)
        main = partial(fail_at, kind=kind, role=role, moment_s=moment_s, rng=rng)
        sim.run(main, seed=seed.number(1, index), limit_s=10 * PATIENCE_S)


@pytest.mark.parametrize("role", ["trainer", "target"])
@pytest.mark.parametrize("peer_timeout_s", [60.0, 1.0], ids=["kept by engines", "given up by engines"])
def test_one_that_thaws_joins_again_by_itself(role: str, peer_timeout_s: float, seed: Seed) -> None:
    async def main(world: sim.World) -> None:
        fleet = fleet_in(world, peer_timeout_s=peer_timeout_s)
        controller = await fleet.start()
        await fleet.update(1)
        loop = asyncio.get_running_loop()
        world.freeze(fleet.engines[f"{role}-1"], at_s=loop.time(), for_s=DEADLINE_S + OPTIONS.abort_s + 5.0)
        offers = asyncio.gather(
            *(fleet.publish(2, [rank], 2 * DEADLINE_S) for rank in fleet.trainers), return_exceptions=True
        )
        with pytest.raises(xr.CrossrailError):
            await controller.update(2, DEADLINE_S)
        assert 1 not in controller.ranks(role)
        await offers
        await controller.ready(range(4), range(3), 5 * PATIENCE_S)
        await fleet.update(3)
        await fleet.assert_holds(3)

    sim.run(main, seed=seed.number(), limit_s=10 * PATIENCE_S)


def test_one_that_trainers_gave_up_while_it_was_frozen_is_tried_anew(seed: Seed) -> None:
    async def main(world: sim.World) -> None:
        patience_s = {"trainer": 1.0, "target": 60.0, "controller": 60.0}
        fleet = Fleet(
            lambda name: world.host(name).engine(name, peer_timeout_s=patience_s[name.partition("-")[0]]),
            mapped=False,
            options=OPTIONS,
        )
        controller = await fleet.start()
        await fleet.update(1)
        frozen = fleet.engines["target-1"]
        world.freeze(frozen, at_s=asyncio.get_running_loop().time(), for_s=DEADLINE_S + OPTIONS.abort_s + 5.0)
        trainer = fleet.engines["trainer-0"]
        region = fleet.receivers[1].memory.inventory().regions[0]
        told = trainer.submit_send(frozen.address, b"are you there")
        with pytest.raises(xr.PeerLost):
            await told
        assert trainer.peer_state(xr.RegionDescriptor.from_bytes(region.descriptor).owner) == "lost"
        await fleet.failing_update(2, DEADLINE_S)
        await controller.ready(range(4), range(3), 5 * PATIENCE_S)
        await fleet.update(3)
        await fleet.assert_holds(3)

    sim.run(main, seed=seed.number(), limit_s=10 * PATIENCE_S)


@pytest.mark.parametrize("role", ["trainer", "target"])
def test_one_that_gave_its_controller_up_while_it_was_frozen_joins_it_when_told_to(role: str, seed: Seed) -> None:
    async def main(world: sim.World) -> None:
        fleet = fleet_in(world)
        controller = await fleet.start()
        await fleet.update(1)
        member = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
        loop = asyncio.get_running_loop()
        thaws_at_s = loop.time() + DEADLINE_S
        world.freeze(fleet.engines["controller"], at_s=loop.time(), for_s=DEADLINE_S)
        with pytest.raises(Unreachable, match=f"{member._membership._who}: its controller cannot be reached: .*Next: "):
            await member.join(controller.address, DEADLINE_S)
        assert fleet.engines[f"{role}-1"].peer_state(fleet.engines["controller"].address) == "lost"
        await asyncio.sleep(thaws_at_s + 1.0 - loop.time())
        await member.join(controller.address, DEADLINE_S)
        await fleet.update(2)
        await fleet.assert_holds(2)

    sim.run(main, seed=seed.number(), limit_s=10 * PATIENCE_S)


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("stands_at", ["open", "barrier", "commit"])
def test_members_in_the_middle_of_an_update_hear_that_their_controller_is_gone(
    stands_at: str, spare: bool, seed: Seed
) -> None:
    """As soon as their engines know: nobody waits for deadlines, which are far away here."""

    async def main(world: sim.World) -> None:
        fleet = fleet_in(world, peer_timeout_s=0.5)
        fleet.spare = spare
        controller = await fleet.start()
        await fleet.update(1)
        if stands_at == "barrier":
            fleet.mailboxes["trainer-1"].handle(m.Go, unanswered)  # the others wait for it
        elif stands_at == "commit":
            fleet.mailboxes["target-0"].handle(m.Commit, unanswered)
        update = asyncio.ensure_future(controller.update(2, FAR_S))
        offers = {0: asyncio.ensure_future(fleet.publish(2, [0], FAR_S))}
        rank = fleet.receivers[0]
        received = asyncio.ensure_future(rank.receive(2, FAR_S))
        if stands_at == "commit":
            offers |= {each: asyncio.ensure_future(fleet.publish(2, [each], FAR_S)) for each in fleet.trainers if each}
        while not has_come_to(fleet, stands_at):
            await asyncio.sleep(0.001)
        world.kill(fleet.engines["controller"])
        for offer in offers.values():
            with pytest.raises(UpdateFailed, match=r"trainer \d: the controller is gone: .*Next: join\(\)"):
                await offer
        with pytest.raises(UpdateFailed, match="the controller is gone: "):
            await received
        assert rank._updates.attempt is None and rank.state is (State.WHOLE if spare else State.TORN)
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)

    sim.run(main, seed=seed.number(), limit_s=FAR_S / 2)


def has_come_to(fleet: Fleet, stands_at: str) -> bool:
    attempt = fleet.receivers[0]._updates.attempt
    if stands_at == "commit":
        return attempt is not None and attempt.is_whole and fleet.receivers[1].version == 2
    if stands_at == "barrier":
        step = fleet.trainers[0]._step
        return fleet.trainers[0]._going is not None and step is not None
    return attempt is not None and fleet.trainers[0]._going is not None


def test_inference_rank_to_which_writes_do_not_get_is_named_though_it_answers(seed: Seed) -> None:
    async def main(world: sim.World) -> None:
        fleet = fleet_in(world, peer_timeout_s=FAR_S)
        controller = await fleet.start()
        await fleet.update(1)
        hosts = {host.name: host for host in world.hosts}
        world.silence([hosts[f"trainer-{rank}"] for rank in fleet.trainers], [hosts["target-1"]])
        offers = [asyncio.ensure_future(fleet.publish(2, [each], FAR_S)) for each in fleet.trainers]
        held_up = r"trainer 0 is not done \(\d+ writes to inference rank 1 under way\), trainer 1 is not done \("
        with pytest.raises(UpdateFailed, match=rf"not complete within 5 s: {held_up}"):
            await controller.update(2, DEADLINE_S)
        await asyncio.gather(*offers, return_exceptions=True)

    sim.run(main, seed=seed.number(), limit_s=FAR_S)

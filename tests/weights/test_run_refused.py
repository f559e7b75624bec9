"""A publish() that is refused at the call: the others hear at once who refused it, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import crossrail as xr
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.services import messages as m
from crossrail.weights.services.trainer import WeightTrainer
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, Fleet, unanswered, until

MOVED = "up: its tensor lies elsewhere"
WHY = rf"trainer 1: (Go: )?its publish\(1\) was refused: {MOVED}$"


@contextmanager
def moved(trainer: WeightTrainer) -> Iterator[None]:
    """Meanwhile one of its tensors lies elsewhere."""

    def refuse() -> None:
        raise xr.UsageError(MOVED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.memory, "check_in_place", refuse)
        yield


def refuse(trainer: WeightTrainer, version: int = 1) -> None:
    with moved(trainer), pytest.raises(xr.UsageError, match=MOVED):
        trainer.publish(version, PATIENCE_S)


async def offer_of(fleet: Fleet, rank: int) -> asyncio.Future[None]:
    offer = asyncio.ensure_future(fleet.publish(1, [rank], 2 * PATIENCE_S))
    await until(lambda: fleet.trainers[rank]._offer)
    return offer


async def ends_soon(*offers: asyncio.Future[Any], why: str = WHY) -> None:
    for offer in offers:
        with pytest.raises(UpdateFailed, match=why):
            await asyncio.wait_for(offer, PATIENCE_S / 2)


async def test_publish_that_is_refused_fails_the_update_that_waits_for_it(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    offer = await offer_of(fleet, 0)
    update = await fleet.begun_update(1, 2 * PATIENCE_S)

    await asyncio.to_thread(refuse, fleet.trainers[1])  # the call may be made on any thread

    await ends_soon(update, offer)
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_publish_that_was_refused_before_fails_the_update_before_ranks_are_written_to(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    controller = await fleet.start(targets=[0])
    fleet.mailboxes["controller"].handle(m.Refusing, unanswered)
    await fleet.update(0)
    offer = await offer_of(fleet, 0)
    refuse(fleet.trainers[1])

    update = asyncio.ensure_future(controller.update(1, 2 * PATIENCE_S))

    await ends_soon(update, offer)
    await fleet.assert_holds(0)
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_publish_that_is_refused_while_ranks_get_ready_leaves_their_weights(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    controller = await fleet.start(targets=[0])
    await fleet.update(0)
    offer = await offer_of(fleet, 0)
    async with fleet.receivers[0].reading():
        update = asyncio.ensure_future(controller.update(1, 2 * PATIENCE_S))
        await until(lambda: fleet.receivers[0]._updates.attempt, update)

        refuse(fleet.trainers[1])

        await ends_soon(update, offer)
    await fleet.assert_holds(0)


async def test_offers_that_no_update_has_asked_for_end_with_one_that_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=3)
    await fleet.start(targets=[0])
    offers = [await offer_of(fleet, rank) for rank in (0, 2)]

    refuse(fleet.trainers[1])

    await ends_soon(*offers)
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_publish_of_another_version_that_is_refused_is_no_reason(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    offer = await offer_of(fleet, 0)

    refuse(fleet.trainers[1], 3)
    await fleet.mailboxes["trainer-1"].ask(controller.address, m.Refusing(), m.Taken, PATIENCE_S)

    other = await offer_of(fleet, 1)
    await controller.update(1, PATIENCE_S)
    await asyncio.gather(offer, other)
    await fleet.assert_holds(1)


async def test_publish_after_one_that_was_refused_counts(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    fleet.mailboxes["controller"].handle(m.Refusing, unanswered)
    refuse(fleet.trainers[1])
    await asyncio.sleep(0)
    assert fleet.trainers[1]._refused is not None

    offers = [await offer_of(fleet, rank) for rank in range(2)]
    fleet.mailboxes["controller"].handle(m.Refusing, controller._refusals._on_refusing)  # it comes late
    await fleet.mailboxes["trainer-1"].ask(controller.address, m.Refusing(), m.Taken, PATIENCE_S)
    await controller.update(1, PATIENCE_S)

    await asyncio.gather(*offers)
    await fleet.assert_holds(1)


async def test_second_publish_that_is_refused_leaves_the_first(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    offers = [await offer_of(fleet, rank) for rank in range(2)]

    refuse(fleet.trainers[1])
    await controller.update(1, PATIENCE_S)

    await asyncio.gather(*offers)
    await fleet.assert_holds(1)


async def test_publish_that_is_refused_before_join_tells_nobody(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    box = fleet.mailbox("new")
    trainer = WeightTrainer(box, fleet.memory("new", "trainer", 1)[0])
    refuse(trainer)
    await trainer.close()
    await fleet.update(1)
    await fleet.assert_holds(1)

"""What trainers offer is what is sent: another version, none at all, and one too late."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.services import messages as m
from crossrail.weights.services.trainer import WeightTrainer
from tests.support.limits import NEVER_S
from tests.weights import small_model as small
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, until


async def test_trainer_that_offers_another_version(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    offers = [asyncio.ensure_future(fleet.publish(7 + rank, [rank])) for rank in range(2)]
    with pytest.raises(UpdateFailed, match="trainer 1 offers version 8, asked for is 7"):
        await fleet.controller.update(7, PATIENCE_S)
    refused = await asyncio.gather(*offers, return_exceptions=True)
    assert all(isinstance(each, UpdateFailed) for each in refused)
    assert [(each.version, each.asked_for) for each in refused] == [(7, None), (8, 7)]
    await fleet.update(9)
    await fleet.assert_holds(9)


async def test_trainer_that_lags_behind_learns_what_to_offer(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    update = asyncio.ensure_future(fleet.controller.update(2, PATIENCE_S))
    # Trainer 1 has missed that version 1 is done.
    told = await asyncio.gather(fleet.publish(2, [0]), fleet.publish(1, [1]), return_exceptions=True)
    with pytest.raises(UpdateFailed, match="trainer 1 offers version 1, asked for is 2"):
        await update
    assert [isinstance(each, UpdateFailed) and (each.version, each.asked_for) for each in told] == [(2, None), (1, 2)]
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_trainer_that_offers_nothing_fails_the_update_in_time(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    offer = asyncio.ensure_future(fleet.publish(1, [0]))
    fleet.run_out_of_time(fleet.has_begun)
    with pytest.raises(UpdateFailed, match=r"trainer 1 has not called publish\(\)"):
        await fleet.controller.update(1, PATIENCE_S)
    with pytest.raises(UpdateFailed):
        await offer
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_who_keeps_a_trainer_waiting_until_its_time_is_up_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=4)
    await fleet.start(targets=[0])
    offer = asyncio.ensure_future(fleet.publish(1, [2]))
    update = await fleet.begun_update(1)

    with pytest.raises(UpdateFailed, match=r"not complete within 0\.3 s"):
        await fleet.publish(1, [0], 0.3)

    why = (
        r"trainer 0: Go: its step was stopped: its publish\(\) was out of time, which was 0.3 s; "
        r"trainer 1 has not called publish\(\), trainer 3 has not called publish\(\)$"
    )
    for ended in (update, offer):
        with pytest.raises(UpdateFailed, match=why):
            await ended
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_trainer_that_fails_names_nobody_else(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    update = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    with pytest.raises(UpdateFailed, match=r"offers version 2, asked for is 1$"):
        await fleet.publish(2, [0])
    with pytest.raises(UpdateFailed, match=r"trainer 0: Go: trainer 0 offers version 2, asked for is 1$"):
        await update


async def test_trainer_whose_step_is_stopped_says_so_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    trainer = fleet.trainers[0]
    updating = await fleet.begun_update(1)

    await trainer._stop_step("it joins again")  # as join() does

    why = "its step was stopped: it joins again"
    with pytest.raises(UpdateFailed, match=f"^weight update 1 failed: trainer 0: Go: {why}$"):
        await updating


async def test_offer_that_was_withdrawn_before_the_update_began_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start()
    withdrawn = asyncio.ensure_future(fleet.publish(1, [0]))
    await until(lambda: fleet.trainers[0]._offer)
    withdrawn.cancel()
    await asyncio.gather(withdrawn, return_exceptions=True)
    other = asyncio.ensure_future(fleet.publish(1, [1]))
    fleet.run_out_of_time(fleet.has_begun)
    with pytest.raises(UpdateFailed, match=r"trainer 0 has called publish\(\), and that was cancelled or out of time"):
        await fleet.controller.update(1, PATIENCE_S)
    with pytest.raises(UpdateFailed):
        await other
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_offer_of_another_version_that_was_withdrawn_is_no_reason(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start()
    with pytest.raises(UpdateFailed, match="the controller has not asked this trainer for it"):
        await fleet.trainers[0].publish(1, 0.05)
    fleet.run_out_of_time(fleet.has_begun)
    with pytest.raises(UpdateFailed, match=r"trainer 0 has not called publish\(\)"):
        await fleet.controller.update(5, PATIENCE_S)


async def test_late_commit_is_not_taken_for_what_is_offered_since(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    trainer, come, hold = fleet.trainers[0], asyncio.Event(), asyncio.Event()
    commit = trainer._on_commit

    async def late(sender: bytes, message: m.Commit) -> object:
        come.set()
        await hold.wait()
        return await commit(sender, message)

    fleet.mailboxes["trainer-0"].handle(m.Commit, late)
    offer = asyncio.ensure_future(fleet.publish(1))
    update = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))
    await asyncio.wait_for(come.wait(), PATIENCE_S)
    offer.cancel()
    await asyncio.gather(offer, return_exceptions=True)
    fleet.sources[0].load(small.weights_of(7))
    again = asyncio.ensure_future(trainer.publish(1, PATIENCE_S))
    await until(lambda: trainer._offer)
    hold.set()
    await update
    await fleet.assert_holds(1)
    assert not again.done(), "nobody has sent these"
    await fleet.controller.update(1, PATIENCE_S)
    await again
    async with fleet.receivers[0].reading(PATIENCE_S) as reading:
        for key, wanted in fleet.sinks[0].expected(small.weights_of(7)).items():
            assert np.array_equal(reading.like(fleet.sinks[0].arrays[key]), wanted)


@pytest.mark.parametrize("version", ["1", 1.0, -1, 1 << 63, None, True])
async def test_version_that_is_none_is_refused_at_the_call(make_fleet: MakeFleet, version: Any) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start()
    with pytest.raises(xr.UsageError, match=f"version is {version!r}, must be"):
        await fleet.controller.update(version)
    with pytest.raises(xr.UsageError, match=f"version is {version!r}, must be"):
        await fleet.trainers[0].publish(version)
    for timeout_s in (None, "1", -1.0, float("nan")):
        with pytest.raises(xr.UsageError, match=r"timeout_s (is|must be)"):
            await fleet.controller.update(1, timeout_s)  # type: ignore[arg-type]
        with pytest.raises(xr.UsageError, match=r"timeout_s (is|must be)"):
            await fleet.trainers[0].publish(1, timeout_s)  # type: ignore[arg-type]
    published = asyncio.ensure_future(fleet.publish(np.int64(1), timeout_s=float("inf")))
    await fleet.controller.update(np.int64(1), float("inf"))
    await published
    await fleet.assert_holds(1)


async def test_publish_of_a_trainer_that_is_closed_ends(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    trainer = fleet.trainers[0]
    offered = asyncio.ensure_future(trainer.publish(1, 10 * PATIENCE_S))
    await asyncio.sleep(0.05)

    await trainer.close()

    with pytest.raises(UpdateFailed, match="trainer 0 is closing"):
        await asyncio.wait_for(offered, PATIENCE_S)
    with pytest.raises(xr.UsageError, match="trainer 0 is closed"):
        await trainer.publish(2, PATIENCE_S)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("alone", r"it has joined no controller\. Next: join\(\)"),
        ("unasked", "the controller has not asked this trainer for it"),
        ("asked", "the controller has asked for it, and has not said that all inference ranks have it"),
        ("gone", r"the controller is gone: .* Next: join\(\) one that is there"),
    ],
)
async def test_publish_whose_time_is_up_says_what_the_controller_did(
    make_fleet: MakeFleet, what: str, why: str
) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    trainer = fleet.trainers[0]
    updating: list[asyncio.Future[Any]] = []
    if what == "alone":
        box = fleet.mailbox("new")
        trainer = WeightTrainer(box, fleet.memory("new", "trainer", 2)[0])
    elif what == "asked":  # and waits for trainer 1
        updating.append(await fleet.begun_update(1))
    elif what == "gone":
        fleet.engines.pop("controller").close()
        await fleet.mailboxes.pop("controller").close()
        await until(lambda: trainer._mailbox.wire.is_lost(fleet.controller.address))

    with pytest.raises(UpdateFailed, match=f"not complete within 0.3 s: {why}"):
        await trainer.publish(1, 0.3)

    for update in updating:
        update.cancel()
    await asyncio.gather(*updating, return_exceptions=True)
    if what == "alone":
        await trainer.close()


async def test_offer_that_is_made_before_the_abort_comes_is_for_the_next_attempt(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    trainer = fleet.trainers[0]
    update = await fleet.begun_update(1)
    with pytest.raises(UpdateFailed, match=f"not complete within {NEVER_S} s: the controller has asked for it"):
        await fleet.publish(1, [0], NEVER_S)  # trainer 1 offers nothing
    again = asyncio.ensure_future(trainer.publish(1, PATIENCE_S))
    why = rf"its step was stopped: its publish\(\) was out of time, which was {NEVER_S} s"
    with pytest.raises(UpdateFailed, match=why):
        await update
    assert not again.done()
    other = asyncio.ensure_future(fleet.publish(1, [1]))
    await fleet.controller.update(1, PATIENCE_S)
    await asyncio.gather(again, other)
    await fleet.assert_holds(1)


@pytest.mark.parametrize("offers", ["before", "behind"])
async def test_offer_that_an_attempt_waits_for_ends_with_it(make_fleet: MakeFleet, offers: str) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    offer = asyncio.ensure_future(fleet.publish(1, [0])) if offers == "before" else None
    update = await fleet.begun_update(1)
    offer = offer or asyncio.ensure_future(fleet.publish(1, [0]))
    await until(lambda: fleet.trainers[0]._offer)
    update.cancel()
    with pytest.raises(UpdateFailed, match="the update was cancelled"):
        await asyncio.wait_for(offer, PATIENCE_S / 2)
    await asyncio.gather(update, return_exceptions=True)


async def test_abort_that_is_late_ends_nothing_of_the_attempt_that_has_begun_since(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    await fleet.update(1)
    offer = asyncio.ensure_future(fleet.publish(2, [0]))
    update = await fleet.begun_update(2)
    failures = fleet.receivers[0].failures
    for member in (fleet.trainers[0], fleet.receivers[0]):
        late = m.Abort(controller._attempt - 1, "late")
        await fleet.mailboxes["controller"].ask(member._mailbox.address, late, m.Aborted, PATIENCE_S)
    other = asyncio.ensure_future(fleet.publish(2, [1]))
    await update
    await asyncio.gather(offer, other)
    assert fleet.receivers[0].failures == failures
    await fleet.assert_holds(2)

"""Writers are out before an update ends: also those that are frozen, whoever leaves or closes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import crossrail as xr
from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import NoAnswer
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.services import messages as m
from crossrail.weights.services import receiver as module
from crossrail.weights.services.versions import State
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, unanswered, until


async def test_close_behind_a_frozen_writer_says_so_and_may_be_repeated(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    receiver, revoke = fleet.receivers[0], xr.Region.revoke
    offered = asyncio.ensure_future(fleet.publish(1, [0]))
    update = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))
    await until(lambda: receiver._buffers.versions.is_receiving)
    given: list[float] = []

    def revoke_behind_a_frozen_writer(_: xr.Region, timeout_s: float) -> None:
        given.append(timeout_s)
        raise xr.WaitTimeout("trainer-1 (pid 4) is in the middle of a copy")

    monkeypatch.setattr(xr.Region, "revoke", revoke_behind_a_frozen_writer)
    with pytest.raises(xr.WaitTimeout, match=r"rank 0 cannot be closed yet.*trainer-1 \(pid 4\).*close\(\) again"):
        await receiver.close(2.5)
    assert 2.4 < sum(given) <= 2.5
    monkeypatch.setattr(xr.Region, "revoke", revoke)
    await receiver.close()
    assert not receiver._buffers.versions.is_receiving
    update.cancel()
    outcomes = await asyncio.gather(offered, update, return_exceptions=True)
    assert isinstance(outcomes[0], UpdateFailed)


async def test_close_keeps_its_time_while_leave_still_tries_to_fence_a_frozen_writer(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    await fleet.start(targets=[0])
    receiver, revoke = fleet.receivers[0], xr.Region.revoke
    offered = asyncio.ensure_future(fleet.publish(1, [0]))
    update = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))
    await until(lambda: receiver._buffers.versions.is_receiving)
    has_thawed = threading.Event()

    def revoke_behind_a_frozen_writer(region: xr.Region, timeout_s: float) -> None:
        if not has_thawed.wait(timeout_s):
            raise xr.WaitTimeout("trainer-1 (pid 4) is in the middle of a copy")
        revoke(region, timeout_s)

    monkeypatch.setattr(xr.Region, "revoke", revoke_behind_a_frozen_writer)
    await receiver.leave(0.5)
    begun = time.monotonic()
    with pytest.raises(xr.WaitTimeout, match=r"cannot be closed yet.*trainer-1 \(pid 4\)"):
        await receiver.close(1.0)
    assert time.monotonic() - begun < 8.0
    closing = asyncio.ensure_future(receiver.close(PATIENCE_S))
    await asyncio.sleep(0.1)
    closing.cancel()  # its turn, if it has it, goes on
    has_thawed.set()
    await receiver.close(PATIENCE_S)
    assert receiver._updates.attempt is None and receiver.state is State.TORN and receiver.failures == 1
    assert not receiver.memory.regions[0].revoked
    update.cancel()
    await asyncio.gather(offered, update, closing, return_exceptions=True)


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_leaves_in_the_middle_of_an_update_knows_that_it_has_ended(
    make_fleet: MakeFleet, role: Role, spare: bool
) -> None:
    fleet = make_fleet(trainer_count=2, spare=spare)
    controller = await fleet.start()
    await fleet.update(1)
    offered = asyncio.ensure_future(fleet.publish(2, [0], 2 * PATIENCE_S))
    updating = asyncio.ensure_future(controller.update(2, 2 * PATIENCE_S))
    receiver = fleet.receivers[1]
    await until(lambda: receiver._buffers.versions.is_receiving and fleet.trainers[0]._step)
    await (fleet.trainers[0] if role == "trainer" else receiver).leave()
    with pytest.raises(UpdateFailed, match="trainer 0 has left" if role == "trainer" else "inference rank 1"):
        await asyncio.wait_for(offered, 5.0)
    with pytest.raises(UpdateFailed, match=r"it left"):
        await updating
    if role == "target":
        assert (receiver.failures, receiver._buffers.versions.is_receiving) == (1, False)
        assert receiver.state is (State.WHOLE if spare else State.TORN)
        await receiver.join(controller.address, PATIENCE_S)
    else:
        assert fleet.trainers[0]._going is None
        await fleet.trainers[0].join(controller.address, PATIENCE_S)
    await fleet.update(3)
    await fleet.assert_holds(3)


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_left_without_being_heard_is_in_no_update(make_fleet: MakeFleet, role: Role) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    controller = await fleet.start()
    await fleet.update(1)
    fleet.mailboxes["controller"].handle(m.Leave, unanswered)
    await (fleet.trainers[1] if role == "trainer" else fleet.receivers[1]).leave(0.1)
    assert controller.ranks(role)[1] == 1
    if role == "trainer":
        with pytest.raises(UpdateFailed, match="trainer 1 has left"):  # nobody else has its shards
            await controller.update(2, PATIENCE_S)
    else:
        assert (await fleet.update(2)).left_out == ["inference rank 1"]
        assert fleet.receivers[1].version == 1
    assert 1 not in controller.ranks(role)


async def test_fence_that_a_nic_refuses_is_tried_again(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(trainer_count=2, spare=False)
    controller = await fleet.start(targets=[0])
    receiver, revoke = fleet.receivers[0], xr.Region.revoke
    offered = asyncio.ensure_future(fleet.publish(1, [0]))
    updating = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    await until(lambda: receiver._buffers.versions.is_receiving)
    refused: list[float] = []

    def refuses_once(region: xr.Region, timeout_s: float) -> None:
        if not refused:
            refused.append(timeout_s)
            raise xr.TransportError("ibv_reg_mr", 12, "no memory", "raise ulimit -l")
        revoke(region, timeout_s)

    monkeypatch.setattr(xr.Region, "revoke", refuses_once)
    await receiver.leave()
    assert len(refused) == 1 and receiver._updates.attempt is None and receiver.state is State.TORN
    await asyncio.gather(offered, updating, return_exceptions=True)


async def test_fence_takes_one_thread_and_a_region_that_stands_still_does_not_keep_the_others(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2, spare=False, mapped=False)
    controller = await fleet.start(targets=[0])
    receiver, revoke = fleet.receivers[0], xr.Region.revoke
    regions = list(receiver.memory.regions)
    before = [bytes(region.descriptor) for region in regions]
    assert len(regions) > 2
    offered = asyncio.ensure_future(fleet.publish(1, [0]))
    updating = asyncio.ensure_future(controller.update(1, PATIENCE_S))
    await until(lambda: receiver._buffers.versions.is_receiving)
    tried: list[tuple[threading.Thread, xr.Region, float]] = []

    def second_stands_still_once(region: xr.Region, timeout_s: float) -> None:
        tried.append((threading.current_thread(), region, timeout_s))
        if region is regions[1] and len(tried) <= len(regions):
            raise xr.WaitTimeout("region 1: trainer-1 (pid 4) is in the middle of a copy")
        revoke(region, timeout_s)

    monkeypatch.setattr(xr.Region, "revoke", second_stands_still_once)
    with pytest.raises(xr.WaitTimeout, match="region 1: trainer-1"):
        await receiver._updates.fail("a test", 0.5)
    assert [region for _, region, _ in tried] == regions and len({thread for thread, _, _ in tried}) == 1
    assert [timeout_s > 0 for _, _, timeout_s in tried] == [True, True] + [False] * (len(regions) - 2)
    await receiver._updates.fail("a test", 0.5)
    assert [region for _, region, _ in tried[len(regions) :]] == [regions[1]]
    assert receiver._updates.attempt is None and receiver.state is State.TORN
    assert not {bytes(region.descriptor) for region in regions} & set(before)
    updating.cancel()
    await asyncio.gather(offered, updating, return_exceptions=True)


async def test_who_leaves_waits_for_one_time_in_all(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(trainer_count=1, spare=False)
    await fleet.start(targets=[0])
    receiver, now_s, skew_s, may_end = fleet.receivers[0], loop_time_s, 0.0, asyncio.Event()

    async def deaf(_to: bytes, _question: object, _answer: object, timeout_s: float) -> object:
        nonlocal skew_s
        skew_s += timeout_s
        raise NoAnswer("all of the time is over")

    async def stands_still(_why: str) -> None:
        await may_end.wait()

    with monkeypatch.context() as patched:
        patched.setattr(module, "loop_time_s", lambda: now_s() + skew_s)
        patched.setattr(receiver._mailbox, "ask", deaf)
        patched.setattr(receiver._updates, "fail_persistently", stands_still)
        await asyncio.wait_for(receiver.leave(3600.0), PATIENCE_S)
    may_end.set()

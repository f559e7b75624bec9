"""Who joins, leaves, is left out and comes back is in the right plans, whatever order words come in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.weights.errors import MemberRefused, UpdateFailed
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.services import members
from crossrail.weights.services import messages as m
from crossrail.weights.services.members import next_word
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.reports import UpdateReport
from crossrail.weights.services.trainer import WeightTrainer
from crossrail.weights.services.versions import State
from tests.weights import small_model as small
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET, Fleet, until


async def test_rank_that_never_joins_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    await controller.ready([0, 1], [0], PATIENCE_S)
    with pytest.raises(xr.WaitTimeout, match=r"not there within 0\.1 s: trainer 2, inference rank 1$"):
        await controller.ready(range(3), range(2), 0.1)
    with pytest.raises(xr.WaitTimeout, match=r": trainer 2, .*, trainer 17, and 3 more$"):
        await controller.ready(range(20), range(2), 0.1)


async def test_wrong_secret_gets_no_answer(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, secret_of=lambda name: b"another" if name == "target-1" else SECRET)
    controller = await fleet.start(targets=[0])
    box = fleet.mailbox("target-1")
    memory, allocate = fleet.memory("target-1", "target", 1)
    memory.add("norm", allocate(96).view(np.uint16), dtype="bfloat16")
    receiver = WeightReceiver(box, memory)
    with pytest.raises(NoAnswer, match=r"inference rank 1: no answer to Join within 1 s\. Next: .* same secret"):
        await receiver.join(controller.address, 1.0)
    assert controller.ranks("target") == [0]
    await receiver.close()
    memory.close()


async def noticed_as_lost(fleet: Fleet, address: bytes) -> None:
    """The controller's engine knows that it is gone."""
    await until(lambda: fleet.mailboxes["controller"].wire.is_lost(address))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_rank_that_died_between_two_updates_does_not_fail_the_next(make_fleet: MakeFleet, transport: str) -> None:
    fleet = make_fleet(transport, spare=False)
    controller = await fleet.start()
    await fleet.update(1)
    await fleet.mailboxes.pop("target-1").close()
    died = bytes(fleet.engines["target-1"].address)
    fleet.engines.pop("target-1").close()
    await noticed_as_lost(fleet, died)
    await fleet.update(2)
    assert controller.ranks("target") == [0, 2]
    await fleet.assert_holds(2, [0, 2])
    await fleet.add_target(1, "another-target-1")
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_trainer_that_died_between_two_updates_is_named_where_nobody_holds_its_shards(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet()
    await fleet.start()
    await fleet.update(1)
    died = bytes(fleet.engines["trainer-1"].address)
    await fleet.drop_trainer(1)
    await noticed_as_lost(fleet, died)
    for _ in range(2):
        why = await fleet.failing_update(2)
        assert re.search(
            r"^weight update 2 failed: .* is held by no trainer, in mesh 'fsdp'\. "
            r"Gone since the last plan: trainer 1 \(it died, closed, or",
            why,
        )
    await fleet.add_trainer(1, "another-trainer-1")
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_who_lives_and_is_left_out_is_named_in_the_report(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    assert (await fleet.update(1)).left_out == []
    box, address = fleet.mailboxes["controller"], controller._roster.members["target", 1].address
    ask = box.ask

    async def unless_given_up(to: bytes, question: Any, *more: Any) -> Any:
        if to == address and isinstance(question, m.RollCall):
            raise Unreachable("our engine has given it up")
        return await ask(to, question, *more)

    async def never(*_: Any) -> None:
        pass

    with monkeypatch.context() as patched:
        patched.setattr(box, "ask", unless_given_up)
        patched.setattr(
            controller._roster, "_tell_evicted", never
        )  # else it joins again before the update goes on, or after
        assert (await fleet.update(2)).left_out == ["inference rank 1"]
    assert (
        "the update to version 2 goes on without inference rank 1: it is gone: our engine has given it up"
        in caplog.text
    )
    await fleet.assert_holds(1, [1])
    await fleet.receivers[1].join(controller.address, PATIENCE_S)
    assert (await fleet.update(3)).left_out == []
    await fleet.assert_holds(3)


async def test_who_joins_again_at_once_is_not_left_out(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = make_fleet(trainer_count=1)
    controller = await fleet.start()
    roll_call = controller._roll_call

    async def and_come_back(left_s: float, report: UpdateReport) -> None:
        await roll_call(left_s, report)
        controller._leave_out(controller._roster.members["target", 1], "nobody answers", report)
        await controller.ready([0], [0, 1, 2], PATIENCE_S)

    monkeypatch.setattr(controller, "_roll_call", and_come_back)
    assert (await fleet.update(1)).left_out == []
    await fleet.assert_holds(1)


async def test_no_roll_call_goes_on_behind_one_that_fails(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=1)
    controller = await fleet.start()
    box, address = fleet.mailboxes["controller"], controller._roster.members["target", 1].address
    ask, calls, seen = box.ask, set[bytes](), list[int]()

    async def or_fail(to: bytes, question: Any, *more: Any) -> Any:
        if isinstance(question, m.Abort):
            seen.append(len(calls))
        if not isinstance(question, m.RollCall):
            return await ask(to, question, *more)
        calls.add(to)
        try:
            await asyncio.sleep(0.01 if to == address else PATIENCE_S)
            raise xr.CrossrailError("the engine is closing")
        finally:
            calls.remove(to)

    monkeypatch.setattr(box, "ask", or_fail)
    with pytest.raises(UpdateFailed, match="the engine is closing"):
        await controller.update(1, PATIENCE_S)
    assert seen == [0] * 4


async def test_holdings_that_do_not_fit_together_are_no_failed_update_because_somebody_went(
    make_fleet: MakeFleet,
) -> None:
    """Whoever tries again after an UpdateFailed would do so for ever."""
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    await fleet.update(1)
    await fleet.trainers[1].leave()
    box = fleet.mailbox("target-1")
    memory, allocate = fleet.memory("target-1", "target", 1)
    memory.add("norm", allocate(192).view(np.int32), dtype="int32")
    receiver = WeightReceiver(box, memory)
    await receiver.join(controller.address, PATIENCE_S)
    with pytest.raises(xr.UsageError, match="'norm': inference rank 1 wants int32, trainers have bfloat16"):
        await controller.update(2, PATIENCE_S)
    await receiver.close()
    memory.close()


async def test_mailbox_and_memory_of_two_engines_are_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    box = fleet.mailbox("second")
    with pytest.raises(xr.UsageError, match=r"this mailbox is not of 'trainer-0', the engine of the memory\. Next: "):
        WeightTrainer(box, fleet.trainers[0].memory)
    with pytest.raises(xr.UsageError, match="this mailbox is not of 'target-0', the engine of the memory"):
        WeightReceiver(box, fleet.receivers[0].memory)
    await WeightTrainer(box, fleet.memory("second", "trainer", 1)[0]).close()  # the mailbox is free as before


async def test_ready_refuses_what_are_no_ranks(make_fleet: MakeFleet) -> None:
    controller = await make_fleet(trainer_count=1).start(targets=[0])
    for none in (1, None):
        with pytest.raises(xr.UsageError, match=f"trainers is {none}, must be ranks, such as "):
            await controller.ready(none, [0], PATIENCE_S)  # type: ignore[arg-type]
    for rank in ("0", -1, 0.5):
        with pytest.raises(xr.UsageError, match=f"rank={rank!r} must be a whole number"):
            await controller.ready([0], [rank], PATIENCE_S)  # type: ignore[list-item]
    await controller.ready(range(1), iter([0]), PATIENCE_S)


async def test_version_to_wait_for_is_a_whole_number(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    receiver = fleet.receivers[0]
    for wait in (receiver.wait_version, receiver.receive):
        with pytest.raises(xr.UsageError, match="version must be a whole number, not str"):
            await wait("1", PATIENCE_S)  # type: ignore[arg-type]


async def test_mailbox_of_another_one_is_refused_until_that_is_closed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    box, first = fleet.mailboxes["trainer-0"], fleet.trainers[0]
    memory, _ = fleet.memory("trainer-0", "target", 7)
    with pytest.raises(xr.UsageError, match=r"this mailbox is trainer 0's\. Next: an engine and a mailbox for each"):
        WeightReceiver(box, memory)
    with pytest.raises(xr.UsageError, match="this mailbox is trainer 0's"):
        WeightTrainer(box, first.memory)
    await fleet.update(1)
    await fleet.assert_holds(1)
    await first.close()
    fleet.trainers[0] = WeightTrainer(box, first.memory)
    await fleet.trainers[0].join(fleet.controller.address, PATIENCE_S)
    await fleet.update(2)
    await fleet.assert_holds(2)


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_left_does_not_join_again_when_told_that_it_was_left_out(make_fleet: MakeFleet, role: Role) -> None:
    """The controller had begun to tell it before, when it was frozen, say."""
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    member = controller._roster.members[role, 1]
    leaving = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    told = m.Evicted("it did not answer")
    await leaving.leave()
    await fleet.mailboxes["controller"].ask(member.address, told, m.Taken, PATIENCE_S)
    await asyncio.sleep(0.3)
    assert 1 not in controller.ranks(role)
    await leaving.join(controller.address)
    joined = controller._roster.members[role, 1]
    await fleet.mailboxes["controller"].ask(member.address, told, m.Taken, PATIENCE_S)
    await until(lambda: controller._roster.members[role, 1] is not joined)


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_last_word_counts_in_whatever_order_they_come(make_fleet: MakeFleet, role: Role) -> None:
    """Messages overtake each other: a Join of many packets comes behind the Leave of a few bytes that followed it."""
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    member = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    box = member._mailbox
    joined = m.Join(next_word(box), m.packed(member.memory.inventory().to_bytes()))
    left = m.Leave(next_word(box))
    await member.leave()

    with pytest.raises(NoAnswer, match="it has left, or joined again, since it asked"):
        await box.ask(controller.address, joined, m.Joined, PATIENCE_S)
    assert 1 not in controller.ranks(role)

    await member.join(controller.address)
    await box.ask(controller.address, left, m.Taken, PATIENCE_S)
    assert 1 in controller.ranks(role)


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_second_of_the_same_rank_takes_its_place_and_the_first_is_told(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    first: Any = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    who = f"{'trainer' if role == 'trainer' else 'inference rank'} 1"
    waiting = asyncio.ensure_future(first.publish(1) if role == "trainer" else first.receive(1, PATIENCE_S))
    await (fleet.add_trainer if role == "trainer" else fleet.add_target)(1, "second")
    with pytest.raises(UpdateFailed, match=f"another {who} has joined. Next: a rank of its own for each"):
        await waiting
    await until(lambda: "joined from two places" in caplog.text)
    assert f"{who} joined from two places: the first one is alive, and takes no part any more" in caplog.text
    assert f"{who} takes no part in updates any more: another {who} has joined" in caplog.text
    await fleet.update(1)
    await fleet.assert_holds(1)
    assert not first._membership._takes_part
    with pytest.raises(xr.UsageError, match=f"{who} takes no part in updates any more: another {who} has joined"):
        await (first.publish(2) if role == "trainer" else first.receive(2, PATIENCE_S))  # at once
    if role == "target":
        with pytest.raises(MemberRefused, match="another inference rank 1 has joined"):
            await first.join(controller.address, PATIENCE_S, displaces=False)

    # What another one says late does not end a membership that was begun since.
    number = first._membership._join_number
    await first.join(controller.address, PATIENCE_S)
    late = m.Evicted("late", displaced=number)
    await fleet.mailboxes["controller"].ask(first._mailbox.address, late, m.Taken, PATIENCE_S)
    assert first._membership._takes_part and "late" not in caplog.text
    await first.close()


def waiting_for(member: Any, version: int) -> list[asyncio.Future[Any]]:
    """Everything of this trainer or inference rank that waits for an update to this version."""
    if isinstance(member, WeightTrainer):
        return [asyncio.ensure_future(member.publish(version, 2 * PATIENCE_S))]
    waits = (member.wait_version(version, 2 * PATIENCE_S), member.receive(version, 2 * PATIENCE_S))
    return [asyncio.ensure_future(wait) for wait in waits]


async def assert_told(waiting: list[asyncio.Future[Any]], why: str) -> None:
    for outcome in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S):
        assert isinstance(outcome, xr.UsageError | UpdateFailed) and why in str(outcome), outcome


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_waits_for_an_update_hears_that_its_rank_was_refused(make_fleet: MakeFleet, role: Role) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    member: Any = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]

    async def refuse(_sender: bytes, _join: m.Join) -> m.JoinRefused:
        return m.JoinRefused("it does not fit")

    fleet.mailboxes["controller"].handle(m.Join, refuse)
    waiting = waiting_for(member, 1)
    with pytest.raises(MemberRefused, match="it does not fit"):
        await member.join(controller.address, PATIENCE_S)
    await assert_told(waiting, "takes no part in updates: it was refused: it does not fit. Next: join()")


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_joins_again_by_itself_displaces_nobody(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    """It was frozen, say, and left out, and another was started under its rank."""
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    first: Any = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    member = controller._roster.members[role, 1]
    controller._roster._remove(member, "it did not answer")
    await (fleet.add_trainer if role == "trainer" else fleet.add_target)(1, "second")
    second = controller._roster.members[role, 1]
    waiting = waiting_for(first, 1)
    told = m.Evicted("it did not answer")
    await fleet.mailboxes["controller"].ask(member.address, told, m.Taken, PATIENCE_S)
    await asyncio.wait_for(asyncio.shield(first._membership._joining), PATIENCE_S)
    await assert_told(waiting, f"another {member} has joined since it was left out")
    assert controller._roster.members[role, 1] is second
    assert re.search(
        r"1 takes no part in updates: it could not join again: .* was refused: another .* 1 has", caplog.text
    )
    await fleet.update(1)
    await fleet.assert_holds(1)
    await first.close()


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_join_is_not_overtaken_by_word_of_an_earlier_one(make_fleet: MakeFleet, role: str) -> None:
    fleet = make_fleet(trainer_count=1)
    controller = await fleet.start(targets=[0])
    member = fleet.trainers[0] if role == "trainer" else fleet.receivers[0]
    roster = controller._roster
    join, member_before = fleet.mailboxes["controller"]._handlers[m.Join], roster.members[role, 0]  # type: ignore[index]

    async def late_word(sender: bytes, question: m.Join) -> object:
        fleet.mailboxes["controller"].handle(m.Join, join)
        told = m.Evicted("it did not answer Abort")  # sent before it joined again, and slow
        await fleet.mailboxes["controller"].ask(member_before.address, told, m.Taken, PATIENCE_S)
        await asyncio.sleep(0.05)
        return await join(sender, question)

    fleet.mailboxes["controller"].handle(m.Join, late_word)
    await member.join(controller.address, PATIENCE_S)
    again = member._membership._joining
    assert again is not None
    await asyncio.wait_for(asyncio.shield(again), PATIENCE_S)
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_who_has_not_joined_cannot_leave(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    receiver = WeightReceiver(fleet.mailbox("target"), fleet.memory("target", "target", np.int64(1))[0])
    trainer_memory = fleet.memory(fleet.mailbox("trainer") and "trainer", "trainer", 1)[0]
    for limit in (1e9, -1, None, True):
        with pytest.raises(xr.UsageError, match="tmp_bytes_max"):
            WeightTrainer(fleet.mailboxes["trainer"], trainer_memory, tmp_bytes_max=limit)  # type: ignore[arg-type]
    trainer = WeightTrainer(fleet.mailboxes["trainer"], trainer_memory)
    for member in (receiver, trainer):
        with pytest.raises(xr.UsageError, match=r"(trainer|inference rank) 1 has joined no controller that it could"):
            await member.leave()
        await member.close()


async def test_join_that_raised_has_not_joined(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    box, (memory, allocate) = fleet.mailbox("target"), fleet.memory("target", "target", 1)
    fleet.sinks[1] = small.Target(memory, allocate)
    receiver = fleet.receivers[1] = WeightReceiver(box, memory)
    trainer = WeightTrainer(fleet.mailbox("trainer"), fleet.memory("trainer", "trainer", 1)[0])
    for member in (receiver, trainer):
        with pytest.raises(xr.UsageError, match="address bytes are malformed"):
            await member.join(b"junk", 1)
        with pytest.raises(xr.UsageError, match="has joined no controller that it could leave"):
            await member.leave()
    with pytest.raises(UpdateFailed, match=r"it has joined no controller\. Next: join\(\)"):
        await trainer.publish(1, 0.1)
    await trainer.close()
    with pytest.raises(NoAnswer):
        await receiver.join(fleet.mailbox("nobody").address, 0.2)

    with pytest.raises(xr.UsageError, match="has not joined yet"):
        async with receiver.reading():
            pass

    await receiver.join(fleet.controller.address)
    with pytest.raises(xr.UsageError, match="malformed"):
        await receiver.join(b"junk", 1)
    async with receiver.reading() as reading:
        assert reading.version == -1
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_publish_may_be_called_before_join(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    box, (memory, allocate) = fleet.mailbox("again"), fleet.memory("again", "trainer", 0)
    fleet.sources[0] = small.Trainer(memory, 1, allocate, fleet.dtype)
    await fleet.trainers[0].leave()
    await fleet.trainers[0].close()
    fleet.trainers[0] = WeightTrainer(box, memory)
    offer = asyncio.ensure_future(fleet.publish(1))
    await asyncio.sleep(0.05)
    assert not offer.done()

    await fleet.trainers[0].join(fleet.controller.address)
    await fleet.controller.update(1, PATIENCE_S)

    await offer
    await fleet.assert_holds(1)


async def _left_out(join: Callable[[bytes, float], Awaitable[None]], wire: Any) -> list[str]:
    """Returns when it has joined again, or gives up: why, then, as it is told."""
    tasks: list[asyncio.Future[None]] = []
    mailbox: Any = SimpleNamespace(wire=wire, spawn=lambda work, _: tasks.append(asyncio.ensure_future(work)))
    told: list[str] = []
    membership = members.Membership("trainer 0", mailbox, join, str, str, lambda: told.append(membership.out_why))
    membership.begin(b"controller")
    membership.left_out(m.Evicted("it did not answer"), b"controller")
    await asyncio.gather(*tasks)
    return told


async def test_who_was_left_out_looks_for_its_controller_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_AGAIN_S", 0.001)
    looked_for: list[bytes] = []
    wire = SimpleNamespace(revive=looked_for.append)
    lefts: list[float] = []

    async def join(controller: bytes, left_s: float) -> None:
        lefts.append(left_s)
        if len(lefts) < 3:
            raise Unreachable("frozen")

    assert not await _left_out(join, wire)
    assert looked_for == [b"controller"] * 2
    assert 500 < lefts[2] <= lefts[0] <= 600


async def test_who_cannot_join_again_says_so_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    async def join(_controller: bytes, _left_s: float) -> None:
        raise NoAnswer("no answer to Join within 600 s")

    told = await _left_out(join, SimpleNamespace())
    assert len(told) == 1 and told[0].startswith("trainer 0 takes no part in updates: it could not join again: no ans")
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)] * 2
    assert "trainer 0 takes no part in updates: it could not join again: no answer" in caplog.text


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_join_that_overtakes_the_automatic_one_is_the_only_one(
    make_fleet: MakeFleet, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    member = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    box = fleet.mailboxes["controller"]
    held, overtaken = asyncio.Event(), asyncio.Event()

    async def join(sender: bytes, question: m.Join) -> object:
        if not held.is_set():
            held.set()
            await asyncio.wait_for(overtaken.wait(), PATIENCE_S)
        return await controller._roster._on_join(sender, question)

    box.handle(m.Join, join)
    await box.ask(controller._roster.members[role, 1].address, m.Evicted("it did not answer"), m.Taken, PATIENCE_S)
    await asyncio.wait_for(held.wait(), PATIENCE_S)

    await member.join(controller.address, PATIENCE_S)
    overtaken.set()

    await fleet.update(1)
    await fleet.assert_holds(1)
    assert member._membership._joining.done()
    assert "takes no part" not in caplog.text


@pytest.mark.parametrize("spare", [True, False])
async def test_rank_that_could_not_be_fenced_joins_again_once_it_can(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    fleet = make_fleet(spare=spare, trainer_count=2)
    await fleet.start(targets=[0, 1])
    await fleet.update(1)
    receiver, revoke = fleet.receivers[0], xr.Region.revoke
    monkeypatch.setattr("crossrail.weights.services.updates._FENCE_AGAIN_S", 0.05)
    standing_still = {"copies": 4}

    def revoke_behind_a_frozen_writer(region: xr.Region, timeout_s: float) -> None:
        mine = receiver._updates.attempt is not None and region in receiver._buffers.back
        if mine and standing_still["copies"]:
            standing_still["copies"] -= 1
            raise xr.WaitTimeout("trainer 1 is in the middle of a copy")
        revoke(region, timeout_s)

    monkeypatch.setattr(xr.Region, "revoke", revoke_behind_a_frozen_writer)
    offer = asyncio.ensure_future(fleet.publish(2, [0]))
    fleet.run_out_of_time(lambda: receiver._updates.attempt is not None and fleet.trainers[0]._going is not None)
    with pytest.raises(UpdateFailed):
        await fleet.controller.update(2, PATIENCE_S)
    with pytest.raises(UpdateFailed):
        await offer
    await fleet.controller.ready(range(2), [0, 1], PATIENCE_S)
    assert standing_still["copies"] == 0
    if spare:
        await fleet.assert_holds(1)
    else:
        assert receiver.state is State.TORN
    await fleet.update(3)
    await fleet.assert_holds(3)

"""What goes wrong fails on all sides, says whose fault it is, and the next attempt succeeds."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.control.mailbox import NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.weights.errors import TornWeights, UpdateFailed
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.planning.planner import PlanOptions
from crossrail.weights.services import members
from crossrail.weights.services import messages as m
from crossrail.weights.services.controller import ControllerOptions, WeightController
from crossrail.weights.services.members import next_word
from crossrail.weights.services.receiver import WeightReceiver
from crossrail.weights.services.versions import State
from tests.weights import small_model as small
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S, SECRET


async def test_rank_that_never_joins_is_named(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    await controller.ready([0, 1], [0], PATIENCE_S)
    with pytest.raises(xr.WaitTimeout, match=r"not there within 0\.1 s: trainer 2, target 1$"):
        await controller.ready(range(3), range(2), 0.1)


async def test_wrong_secret_gets_no_answer(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, secret_of=lambda name: b"another" if name == "target-1" else SECRET)
    controller = await fleet.start(targets=[0])
    box = fleet.mailbox("target-1")
    memory, allocate = fleet.memory("target-1", "target", 1)
    memory.add("norm", allocate(96).view(np.uint16), dtype="bfloat16")
    receiver = WeightReceiver(box, memory)
    with pytest.raises(NoAnswer):
        await receiver.join(controller.address, 1.0)
    assert controller.ranks("target") == [0]
    await receiver.close()
    memory.close()


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_left_does_not_join_again_when_told_that_it_was_left_out(make_fleet: MakeFleet, role: Role) -> None:
    """The controller had begun to tell it before, when it was frozen, say."""
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start()
    member = controller._members[role, 1]
    leaving = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    told = m.Evicted("it did not answer")
    await leaving.leave()
    await fleet.mailboxes["controller"].ask(member.address, told, m.Taken, PATIENCE_S)
    await asyncio.sleep(0.3)
    assert 1 not in controller.ranks(role)
    await leaving.join(controller.address)
    joined = controller._members[role, 1]
    await fleet.mailboxes["controller"].ask(member.address, told, m.Taken, PATIENCE_S)
    while controller._members[role, 1] is joined:
        await asyncio.sleep(0.01)


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

    with pytest.raises(NoAnswer, match="it has left, or joined anew, since it asked"):
        await box.ask(controller.address, joined, m.Joined, PATIENCE_S)
    assert 1 not in controller.ranks(role)

    await member.join(controller.address)
    await box.ask(controller.address, left, m.Taken, PATIENCE_S)
    assert 1 in controller.ranks(role)


async def test_who_was_left_out_looks_for_its_controller_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_AGAIN_S", 0.001)
    looked_for: list[bytes] = []
    wire = SimpleNamespace(try_anew=looked_for.append)
    lefts: list[float] = []

    async def join(controller: bytes, left_s: float) -> None:
        lefts.append(left_s)
        if len(lefts) < 3:
            raise Unreachable("frozen")

    await members.join_again("trainer 0", join, b"controller", wire)  # type: ignore[arg-type]
    assert looked_for == [b"controller"] * 2
    assert 500 < lefts[2] <= lefts[0] <= 600


async def test_who_cannot_join_again_says_so_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    async def join(_controller: bytes, _left_s: float) -> None:
        raise NoAnswer("no answer to Join within 600 s")

    await members.join_again("trainer 0", join, b"controller", SimpleNamespace())  # type: ignore[arg-type]
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]
    assert "trainer 0 takes no part in updates: it could not join again: no answer" in caplog.text


async def test_who_is_late_is_named(make_fleet: MakeFleet) -> None:
    """By the controller, and so at every trainer; those who only wait for it are not."""
    fleet = make_fleet(trainer_count=3)
    controller = await fleet.start()
    published = [asyncio.ensure_future(fleet.publish(1, [rank])) for rank in (0, 2)]
    with pytest.raises(
        UpdateFailed,
        match=r"1 failed: (not complete within 1 s: trainer 1 has not called publish\(\)|"
        r"trainer 1: .*did not offer it in)[^,]*$",
    ):
        await controller.update(1, 1.0)
    for outcome in await asyncio.gather(*published, return_exceptions=True):
        assert isinstance(outcome, UpdateFailed)
        assert "trainer 1" in str(outcome)
    await fleet.update(2)
    await fleet.assert_holds(2)


@pytest.mark.parametrize("role", ["trainer", "target"])
async def test_who_does_not_answer_is_named(make_fleet: MakeFleet, role: Role) -> None:
    fleet = make_fleet(trainer_count=3)
    controller = await fleet.start()
    await fleet.update(1)
    member = fleet.trainers[1] if role == "trainer" else fleet.receivers[1]
    handlers = dict(member._mailbox._handlers)

    async def silent(_sender: bytes, _question: object) -> object:
        return await asyncio.get_running_loop().create_future()

    for kind in handlers:
        member._mailbox.handle(kind, silent)
    published = [asyncio.ensure_future(fleet.publish(2, [rank])) for rank in (0, 2)]
    with pytest.raises(UpdateFailed) as raised:
        await controller.update(2, 1.0)
    name = "trainer 1 does not answer" if role == "trainer" else "inference rank 1 has not answered Open"
    assert str(raised.value) == f"weight update 2 failed: not complete within 1 s: {name}"
    for outcome in await asyncio.gather(*published, return_exceptions=True):
        assert name in str(outcome)


@pytest.mark.parametrize("missing", ["q", "down"])
async def test_parameter_that_trainers_lack_is_named(make_fleet: MakeFleet, missing: str) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start()
    for sink in fleet.sinks.values():
        assert any(holding.name == missing for holding in sink.memory.inventory().holdings)
    member = fleet.controller._members["trainer", 0]
    inventory = member.inventory
    kept = [holding for holding in inventory.holdings if holding.name != missing]
    member.inventory = type(inventory).of("trainer", 0, inventory.regions, kept)
    why = await fleet.failing_update(1)
    assert repr(missing) in why
    assert all(receiver.version == -1 for receiver in fleet.receivers.values())


async def test_watermark_too_small_says_what_is_needed(make_fleet: MakeFleet) -> None:
    options = PlanOptions(gather="full")
    fleet = make_fleet(plan_options=options, trainer_options={"tmp_bytes_max": 4096})
    await fleet.start()
    why = await fleet.failing_update(1)
    (needed,) = {int(number) for number in re.findall(r"set it to at least (\d+)", why)}
    assert "watermark is 4096 bytes, preparing" in why
    # Each trainer says what it needs; the largest suffices for all.
    enough = 8 * needed
    again = make_fleet(plan_options=options, trainer_options={"tmp_bytes_max": enough})
    await again.start()
    await again.update(1)
    await again.assert_holds(1)


async def test_nan_is_named_and_the_next_version_comes_through(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    await fleet.update(1)
    load = fleet.sources[2].load

    def load_and_break(weights: dict[str, np.ndarray]) -> None:
        load(weights)
        fleet.sources[2].shards["up"][1][3, 5] = 0x7FC0

    fleet.sources[2].load = load_and_break
    why = await fleet.failing_update(2)
    assert re.search(r"up\[\d+, 5\] is nan", why)
    await fleet.assert_holds(1)
    fleet.sources[2].load = load
    await fleet.update(3)
    await fleet.assert_holds(3)


async def test_target_memory_that_is_closed(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=True)
    await fleet.start()
    await fleet.update(1)  # into the spare memory
    fleet.sinks[1].memory.regions[0].close()
    why = await fleet.failing_update(2)
    assert "target-1" in why and "region" in why
    assert fleet.controller.ranks("target") == [0, 2]  # it could not be fenced: it is left out
    await fleet.assert_holds(1, [0, 2])
    await fleet.update(3)
    await fleet.assert_holds(3, [0, 2])


@pytest.mark.parametrize("spare", [True, False])
async def test_rank_that_could_not_be_fenced_joins_again_once_it_can(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    fleet = make_fleet(spare=spare, trainer_count=2)
    await fleet.start(targets=[0, 1])
    await fleet.update(1)
    receiver, revoke = fleet.receivers[0], xr.Region.revoke
    monkeypatch.setattr("crossrail.weights.services.receiver._FENCE_AGAIN_S", 0.05)
    standing_still = {"copies": 4}

    def revoke_behind_a_frozen_writer(region: xr.Region, timeout_s: float) -> None:
        mine = receiver._attempt is not None and region in receiver._buffers[receiver._versions.back]
        if mine and standing_still["copies"]:
            standing_still["copies"] -= 1
            raise xr.WaitTimeout("trainer 1 is in the middle of a copy")
        revoke(region, timeout_s)

    monkeypatch.setattr(xr.Region, "revoke", revoke_behind_a_frozen_writer)
    offer = asyncio.ensure_future(fleet.publish(2, [0]))
    with pytest.raises(UpdateFailed):
        await fleet.controller.update(2, 1.0)
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


async def test_close_behind_a_frozen_writer_says_so_and_may_be_repeated(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=2)
    await fleet.start(targets=[0])
    receiver, revoke = fleet.receivers[0], xr.Region.revoke
    offered = asyncio.ensure_future(fleet.publish(1, [0]))
    update = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))

    async def until_it_receives() -> None:
        while not receiver._versions.is_receiving:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(until_it_receives(), PATIENCE_S)
    given: list[float] = []

    def revoke_behind_a_frozen_writer(_: xr.Region, timeout_s: float) -> None:
        given.append(timeout_s)
        raise xr.WaitTimeout("trainer-1 (pid 4) is in the middle of a copy")

    monkeypatch.setattr(xr.Region, "revoke", revoke_behind_a_frozen_writer)
    with pytest.raises(xr.WaitTimeout, match=r"rank 0 cannot be closed yet.*trainer-1 \(pid 4\).*close\(\) again"):
        await receiver.close(2.5)
    assert given == [2.5]
    monkeypatch.setattr(xr.Region, "revoke", revoke)
    await receiver.close()
    assert not receiver._versions.is_receiving
    update.cancel()
    outcomes = await asyncio.gather(offered, update, return_exceptions=True)
    assert isinstance(outcomes[0], UpdateFailed)


async def test_update_in_place_that_fails_leaves_torn_weights_until_the_next(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(spare=False)
    await fleet.start()
    await fleet.update(1)
    await fleet.drop_trainer(1)
    await fleet.failing_update(2)
    for receiver in fleet.receivers.values():
        # The one whose Open was not sent before the loss was noticed still has its old weights.
        if receiver.state is State.TORN:
            with pytest.raises(TornWeights, match="after version 1"):
                async with receiver.reading(1.0):
                    pass
        else:
            assert receiver.version == 1
    await fleet.add_trainer(1, "another-trainer-1")
    await fleet.update(3)
    await fleet.assert_holds(3)


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
    with pytest.raises(UpdateFailed, match=r"within 1 s|in 1(\.\d+)? s|in 0\.\d+ s"):
        await fleet.controller.update(1, 1.0)
    with pytest.raises(UpdateFailed):
        await offer
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_counts_of_a_barrier_that_a_trainer_never_came_to_are_let_go(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0])
    first = int.from_bytes(fleet.mailboxes["controller"].wire.identity(controller.address)[:8], "little")

    def counted(attempt: int) -> int:
        number = fleet.options.imm_first + 2 * ((first + attempt) % (1 << 19)) + 1
        return fleet.engines["trainer-1"].imm_counter(number).poll()

    offered = asyncio.ensure_future(fleet.publish(1, [0], 2 * PATIENCE_S))
    updating = asyncio.ensure_future(controller.update(1, 2 * PATIENCE_S))
    while not counted(1):  # trainer 0 waits there for trainer 1, which offers nothing
        await asyncio.sleep(0.01)
    updating.cancel()
    await asyncio.gather(offered, updating, return_exceptions=True)

    await fleet.update(2)

    assert counted(1) == 0


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
    while trainer._offer is None:
        await asyncio.sleep(0)
    hold.set()
    await update
    await fleet.assert_holds(1)
    assert not again.done(), "nobody has sent these"
    await fleet.controller.update(1, PATIENCE_S)
    await again
    async with fleet.receivers[0].reading(PATIENCE_S) as reading:
        for key, wanted in fleet.sinks[0].expected(small.weights_of(7)).items():
            assert np.array_equal(reading.like(fleet.sinks[0].arrays[key]), wanted)


async def test_progress_that_raises_ends_the_update_everywhere(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    offered = asyncio.ensure_future(fleet.publish(1))

    def broken(stage: str, *_: int) -> None:
        if stage == "write":
            raise LookupError("no such bar")

    with pytest.raises(LookupError, match="no such bar"):
        await fleet.controller.update(1, PATIENCE_S, broken)
    with pytest.raises(UpdateFailed, match="LookupError: no such bar"):
        await offered
    assert fleet.controller.totals.failed == 1
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_progress_that_raises_between_stages_ends_the_update_everywhere(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    offered = asyncio.ensure_future(fleet.publish(1, [0]))  # the others offer nothing: trainers are asked how far

    def broken(stage: str, *_: int) -> None:
        calls.append(stage)
        if calls.count("write") == 2:
            raise LookupError("no such bar")

    calls: list[str] = []
    with pytest.raises(LookupError, match="no such bar"):
        await fleet.controller.update(1, PATIENCE_S, broken)
    with pytest.raises(UpdateFailed, match="LookupError: no such bar"):
        await offered
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_trainer_that_does_not_say_how_far_it_is_does_not_end_the_telling(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(options=ControllerOptions(abort_s=8.0, progress_s=0.01))
    controller = await fleet.start()
    calls: list[str] = []
    ask, refusals = controller._all, iter(range(2))

    async def ask_all(members: list[Any], question: Any, answer: type, *more: Any) -> list[Any]:
        if answer is m.Progress and next(refusals, None) is not None:
            raise NoAnswer("it is busy")
        return await ask(members, question, answer, *more)

    monkeypatch.setattr(controller, "_all", ask_all)
    update = asyncio.ensure_future(controller.update(1, PATIENCE_S, lambda stage, *_: calls.append(stage)))
    while calls.count("write") < 3 and not update.done():
        await asyncio.sleep(0.005)
    await fleet.publish(1)
    await update
    assert calls.count("write") >= 3 and next(refusals, None) is None


@pytest.mark.parametrize("version", ["1", 1.0, -1, 1 << 63, None])
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


async def test_second_update_at_the_same_time_is_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await fleet.start()
    first = asyncio.ensure_future(fleet.controller.update(1, PATIENCE_S))
    await asyncio.sleep(0)
    with pytest.raises(xr.UsageError, match="update to version 1 is under way"):
        await fleet.controller.update(2, PATIENCE_S)
    offer = asyncio.ensure_future(fleet.publish(1))
    while fleet.trainers[0]._offer is None:
        await asyncio.sleep(0)
    with pytest.raises(xr.UsageError, match="offers version 1 already"):
        await fleet.trainers[0].publish(2)
    await first
    await offer
    await fleet.assert_holds(1)


async def test_another_controller_is_refused(make_fleet: MakeFleet) -> None:
    fleet, other = make_fleet(trainer_count=1), make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    await other.start(targets=[0])
    other.controller._members.update(fleet.controller._members)
    with pytest.raises(UpdateFailed, match="belongs to another controller"):
        await other.controller.update(1, PATIENCE_S)
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_controller_that_is_made_anew_on_its_mailbox_goes_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    for version in (1, 2):
        await fleet.update(version)

    fleet.controller = WeightController(fleet.mailboxes["controller"])
    for member in (fleet.trainers[0], fleet.receivers[0]):
        await member.join(fleet.controller.address, PATIENCE_S)

    await fleet.update(3)
    await fleet.assert_holds(3)


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


async def test_inference_rank_that_is_not_there_has_no_weights(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1, spare=False)
    await fleet.start(targets=[0])
    box = fleet.mailbox("new")
    new = WeightReceiver(box, fleet.memory("new", "target", 1)[0])
    with pytest.raises(xr.UsageError, match="inference rank 1 has not joined yet"):
        async with new.reading():
            pass

    receiver = fleet.receivers[0]
    waits = [receiver.wait_version(1, 10 * PATIENCE_S), receiver.receive(1, 10 * PATIENCE_S)]
    waiting = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.sleep(0.05)
    await receiver.close()

    for each in waiting:
        with pytest.raises(xr.UsageError, match="inference rank 0 is closed"):
            await asyncio.wait_for(each, PATIENCE_S)
    with pytest.raises(xr.UsageError, match="inference rank 0 is closed"):
        async with receiver.reading():
            pass


async def test_surplus_count_is_no_whole_version(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start(targets=[0])
    await fleet.update(1)
    receiver, engine = fleet.receivers[0], fleet.engines["trainer-0"]
    imm = fleet.controller._imm_of(fleet.controller._attempt + 1)
    group = engine.add_peer_group([fleet.engines["target-0"].address])
    commit = receiver._on_await

    async def after_another_count(sender: bytes, question: object) -> object:
        await engine.submit_barrier(group, imm)
        while receiver._attempt.counter.poll() <= receiver._attempt.expected:
            await asyncio.sleep(0.01)
        return await commit(sender, question)

    fleet.mailboxes["target-0"].handle(m.Await, after_another_count)
    assert "1 more writes than" in await fleet.failing_update(2)
    fleet.mailboxes["target-0"].handle(m.Await, commit)
    await fleet.update(3)
    await fleet.assert_holds(3)


@pytest.mark.parametrize("spare", [True, False])
async def test_another_controller_takes_over_in_the_middle_of_an_update(make_fleet: MakeFleet, spare: bool) -> None:
    fleet = make_fleet(spare=spare, trainer_count=2)
    first = await fleet.start()
    await fleet.update(1)
    # Trainer 1 offers nothing, so this one stands still after Open, and its controller dies there.
    update = asyncio.ensure_future(first.update(2, PATIENCE_S))
    offer = asyncio.ensure_future(fleet.publish(2, [0]))
    while any(receiver._attempt is None for receiver in fleet.receivers.values()):
        await asyncio.sleep(0.01)
    fleet.engines.pop("controller").close()
    await fleet.mailboxes.pop("controller").close()
    await asyncio.gather(update, return_exceptions=True)
    fleet.controller = WeightController(fleet.mailbox("second"), fleet.plan_options, fleet.options)
    for member in [*fleet.trainers.values(), *fleet.receivers.values()]:
        await member.join(fleet.controller.address, PATIENCE_S)
    offer.cancel()
    await asyncio.gather(offer, return_exceptions=True)
    if spare:
        await fleet.assert_holds(1)
    else:
        assert all(receiver.state is State.TORN for receiver in fleet.receivers.values())
    await fleet.update(3)
    await fleet.assert_holds(3)


@pytest.mark.parametrize("offered", [[], [0], [0, 1]], ids=str)
async def test_update_that_is_cancelled_ends_everywhere(make_fleet: MakeFleet, offered: list[int]) -> None:
    fleet = make_fleet(trainer_count=2)
    controller = await fleet.start(targets=[0, 1])
    await fleet.update(1)
    offers = [asyncio.ensure_future(fleet.publish(2, [rank])) for rank in offered]
    update = asyncio.ensure_future(controller.update(2, PATIENCE_S))
    while not update.done() and any(receiver._attempt is None for receiver in fleet.receivers.values()):
        await asyncio.sleep(0.001)
    update.cancel()
    outcomes = await asyncio.gather(update, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert all(receiver._attempt is None for receiver in fleet.receivers.values())
    for outcome in await asyncio.gather(*offers, return_exceptions=True):
        # The last answers of a whole update may have come before the cancellation: then it was committed.
        assert outcome is None if controller.version == 2 else "the update was cancelled" in str(outcome)
    await fleet.assert_holds(controller.version)
    await fleet.update(3)
    await fleet.assert_holds(3)

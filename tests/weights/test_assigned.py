"""Trainers make their part of a plan ready in a thread: meanwhile they answer, tell how far they are, and can stop."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

import crossrail as xr
from crossrail.weights import UpdateFailed
from crossrail.weights.planning.plan import Plan
from crossrail.weights.services import assigned
from crossrail.weights.services import messages as m
from crossrail.weights.step.task import ReadyTask
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S

Held = Callable[[int], None]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, trainer 0 stops behind the first task that it has made ready."""
    go_on = threading.Event()
    make = assigned.ready_tasks

    def slowly(plan: Plan, trainer: int, far: Collection[int] = ()) -> Iterator[ReadyTask]:
        for index, task in enumerate(make(plan, trainer, far)):
            if trainer == 0 and index == 1:
                assert go_on.wait(PATIENCE_S)
            yield task

    monkeypatch.setattr(assigned, "ready_tasks", slowly)
    yield go_on
    go_on.set()


async def test_trainer_tells_how_far_it_is(make_fleet: MakeFleet, hold: threading.Event) -> None:
    fleet = make_fleet()
    controller = await fleet.start()
    ready: list[int] = []

    def show(stage: str, done: int, whole: int) -> None:
        if stage == "ready":
            assert controller.plan is not None
            others = len(controller.plan.tasks) - len(controller.plan.of_trainer(0).tasks)
            ready.append(done)
            if done == others + 1:  # it answers while it stands still there
                hold.set()

    await fleet.update(1, on_progress=show)
    assert hold.is_set()
    assert ready == sorted(ready)
    await fleet.assert_holds(1)


async def test_update_that_is_aborted_meanwhile_leaves_nothing(make_fleet: MakeFleet, hold: threading.Event) -> None:
    fleet = make_fleet()
    await fleet.start()
    published = asyncio.ensure_future(fleet.publish(1))
    with pytest.raises(UpdateFailed):  # by its own clock, or that of the question
        await fleet.controller.update(1, 3.0)
    outcome: Any = (await asyncio.gather(published, return_exceptions=True))[0]
    assert isinstance(outcome, xr.CrossrailError)
    hold.set()
    await fleet.update(1)
    await fleet.assert_holds(1)


async def test_assignment_that_is_longer_than_a_message_comes_in_pieces(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "PIECE_BYTES", 700)
    fleet = make_fleet()
    await fleet.start()
    came: dict[int, list[tuple[int, int]]] = {rank: [] for rank in fleet.trainers}
    for rank, trainer in fleet.trainers.items():

        async def assigned(sender: bytes, assign: m.Assign, rank: int = rank, trainer: Any = trainer) -> object:
            came[rank].append((assign.piece, assign.pieces))
            return await trainer._on_assign(sender, assign)

        fleet.mailboxes[f"trainer-{rank}"].handle(m.Assign, assigned)
    await fleet.update(1)
    await fleet.assert_holds(1)
    counts = [len(pieces) for pieces in came.values()]
    assert min(counts) > 1 and all(
        pieces == [(at, len(pieces)) for at in range(len(pieces))] for pieces in came.values()
    )


def test_pieces_of_another_attempt_are_not_put_together() -> None:
    pieces = assigned.Pieces()

    def piece(attempt: int, at: int, count: int = 2) -> bytes | None:
        return pieces.add(m.Assign("plan", attempt, at, count, f"{attempt}.{at} ".encode()))

    assert piece(3, 0) is None
    assert piece(4, 1) is None
    with pytest.raises(xr.UsageError, match="attempt 3 is over: 4 has begun"):
        piece(3, 1)
    for at, count in ((2, 3), (2, 2), (0, 1)):
        with pytest.raises(xr.UsageError, match=f"piece {at} of {count} of an assignment in 2"):
            piece(4, at, count)
    assert piece(4, 0) == b"4.0 4.1 "
    pieces.clear(4)
    with pytest.raises(xr.UsageError, match="attempt 3 is over"):
        piece(3, 1)
    assert piece(5, 1) is None
    pieces.clear(5)
    assert piece(5, 0) is None
    pieces.clear(4)  # an Abort that is late
    assert piece(5, 1) == b"5.0 5.1 "


async def test_assignment_of_an_attempt_that_is_over_is_refused(make_fleet: MakeFleet) -> None:
    """It was overtaken by its Abort: it would take the place of the plan that came since."""
    fleet = make_fleet(trainer_count=1)
    controller = await fleet.start()
    await fleet.update(1)
    trainer = fleet.trainers[0]
    plan = trainer._assigned
    update = await fleet.begun_update(2)
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)
    with pytest.raises(xr.UsageError, match="attempt 2 is over"):
        await trainer._on_assign(controller.address, m.Assign("late", 2, 0, 1, b""))
    assert trainer._assigned is plan
    await fleet.update(2)
    await fleet.assert_holds(2)


async def test_assignment_that_is_too_long_names_the_trainer(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet(trainer_count=1)
    controller = await fleet.start()
    with monkeypatch.context() as patched:
        patched.setattr(m, "PIECE_BYTES", 8)
        patched.setattr(m, "PIECES_MAX", 4)
        with pytest.raises(xr.UsageError, match=r"^trainer 0: its part of the plan, \d+ regions .*at most 32 are sent"):
            await controller.update(1, PATIENCE_S)
    await fleet.update(1)


def test_data_is_cut_into_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(1).randbytes(4096)
    monkeypatch.setattr(m, "PIECE_BYTES", 8)
    monkeypatch.setattr(m, "PIECES_MAX", 4)
    with pytest.raises(xr.UsageError, match=r"^4\d\d\d bytes, at most 32 are sent$"):
        m.in_pieces(m.packed(noise))
    assert b"".join(m.in_pieces(noise[:32])) == noise[:32]
    assert m.in_pieces(b"") == [b""]


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xc1", b"junk"])
def test_data_that_is_no_assignment_is_refused(data: bytes) -> None:
    for sent in (data, m.packed(data)):
        with pytest.raises(xr.UsageError, match=r"not a valid assignment|nothing that was packed|cut off"):
            assigned.Assigned("plan", 1, sent, 0).open()

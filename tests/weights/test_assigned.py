"""Trainers make their part of a plan ready in a thread: meanwhile they answer, tell how far they are, and can stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import crossrail as xr
from crossrail.weights import UpdateFailed
from crossrail.weights.planning.plan import Plan
from crossrail.weights.services import assigned
from crossrail.weights.step.task import ReadyTask
from tests.weights.conftest import MakeFleet
from tests.weights.fleet import PATIENCE_S

Held = Callable[[int], None]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, trainer 0 stops behind the first task that it has made ready."""
    go_on = threading.Event()
    make = assigned.ready_tasks

    def slowly(plan: Plan, trainer: int) -> Iterator[ReadyTask]:
        for index, task in enumerate(make(plan, trainer)):
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

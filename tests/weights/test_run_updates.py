"""Updates among real engines in one process: every version arrives bit for bit, and nothing else is ever read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

import crossrail as xr
from tests.weights.fleet import Fleet

MakeFleet = Callable[..., Fleet]


@pytest_asyncio.fixture
async def make_fleet() -> AsyncIterator[MakeFleet]:
    made: list[Fleet] = []

    def make(transport: str = "shm", **options: Any) -> Fleet:
        made.append(Fleet(lambda name: xr.Engine(name, transport=transport), **options))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("spare", "mapped"), [(True, True), (False, False)])
async def test_versions_arrive_bit_for_bit(make_fleet: MakeFleet, transport: str, spare: bool, mapped: bool) -> None:
    fleet = make_fleet(transport, spare=spare, mapped=mapped)
    await fleet.start()
    for version in range(1, 6):
        report = await fleet.update(version)
        await fleet.assert_holds(version)
        assert (report.plan_s > 0) == (version == 1)
        assert sorted(report.steps) == list(range(4))
        assert report.written_bytes == int(fleet.controller.plan.writes["nbytes"].sum())


async def test_float32_masters_with_all_gathered(make_fleet: MakeFleet) -> None:
    from crossrail.weights.planner import PlanOptions

    fleet = make_fleet(dtype="float32", plan_options=PlanOptions(gather="full"))
    await fleet.start()
    report = await fleet.update(1)
    await fleet.assert_holds(1)
    assert sum(step.gathered_bytes for step in report.steps.values()) > 0

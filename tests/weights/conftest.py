"""Fleets of real engines, closed at the end of the test; and a GPU for their weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

import crossrail as xr
from crossrail.weights import gpu as weights_gpu
from tests.support.fake_gpu import FakeGpu
from tests.weights.fleet import Fleet
from tests.weights.gpu_world import GpuWorld

MakeFleet = Callable[..., Fleet]


@pytest_asyncio.fixture
async def make_fleet(nothing_leaks: None) -> AsyncIterator[MakeFleet]:
    """make_fleet(transport="shm", **fields of Fleet)"""
    made: list[Fleet] = []

    def make(transport: str = "shm", **options: Any) -> Fleet:
        made.append(Fleet(lambda name: xr.Engine(name, transport=transport), **options))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.close()


@pytest.fixture
def gpu_world(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> GpuWorld:
    """A GPU, of whose memory more comes from it than from torch. To be asked for before make_fleet."""
    world = GpuWorld(gpu)
    monkeypatch.setattr(weights_gpu, "alloc", world.alloc)
    return world

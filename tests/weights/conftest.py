"""Fleets of real engines, closed at the end of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest_asyncio

import crossrail as xr
from tests.weights.fleet import Fleet

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

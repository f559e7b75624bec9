"""What updates allocate once there has been one: by Python, and of engines."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import crossrail as xr
from crossrail import weights
from tests.weights.fleet import PATIENCE_S, Fleet

_FRAMES = [tracemalloc.Filter(True, f"{Path(weights.__file__).parent}/*")]  # numpy's arrays are of who calls it


async def update_as_they_are(fleet: Fleet, version: int) -> None:
    """Without new weights, which it takes memory to make."""
    published = (trainer.publish(version, PATIENCE_S) for trainer in fleet.trainers.values())
    await asyncio.gather(fleet.controller.update(version, PATIENCE_S), *published)


@contextmanager
def no_engine_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where an engine allocates or registers any meanwhile."""
    taken: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("alloc", "register"):
            patch.setattr(xr.Engine, name, _told(taken, name))
        yield
    assert not taken


def _told(taken: list[str], name: str) -> Callable[..., Any]:
    call = getattr(xr.Engine, name)

    def told(engine: xr.Engine, *arguments: Any, **more: Any) -> Any:
        taken.append(f"{name} of {engine!r}")
        return call(engine, *arguments, **more)

    return told


async def python_bytes(fleet: Fleet, versions: range) -> tuple[int, int]:
    """Of crossrail.weights: what is left of these updates; of all Python: the most that one of them took."""
    tracemalloc.start()
    try:
        await update_as_they_are(fleet, versions[0] - 1)  # what it lets go was not seen as it was made
        gc.collect()
        before = tracemalloc.take_snapshot()
        most = 0
        for version in versions:
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            await update_as_they_are(fleet, version)
            most = max(most, tracemalloc.get_traced_memory()[1] - held)
        gc.collect()
        grown = tracemalloc.take_snapshot().filter_traces(_FRAMES).compare_to(before.filter_traces(_FRAMES), "filename")
    finally:
        tracemalloc.stop()
    return sum(each.size_diff for each in grown), most

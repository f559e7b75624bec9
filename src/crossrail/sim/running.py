"""Runs one coroutine in one world, from beginning to end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from crossrail.sim.loop import check_limit, run_on
from crossrail.sim.world import World

_T = TypeVar("_T")


def run(
    main: Callable[[World], Coroutine[Any, Any, _T]],
    *,
    seed: int = 0,
    world: World | None = None,
    limit_s: float | None = None,
) -> _T:
    """Runs main(world) as asyncio.run() would, on the clock of a new world of that seed, or of the one given.

    A new world is the current one meanwhile, and closed afterwards. limit_s: virtual seconds since the world began
    after which the run is given up with WaitTimeout; the clock stops there. Raises what main raises, and SimulationIdle
    when nothing can ever wake it. Blocks; not from inside a running event loop's tasks.
    """
    check_limit(limit_s)
    if world is not None:
        return run_on(world, main(world), limit_s=limit_s)
    with World(seed=seed) as new:
        return run_on(new, main(new), limit_s=limit_s)

"""Whole systems in one process, on simulated hosts, NICs and faults, with a virtual clock: docs/simulator.md.

Engines in a world are ordinary engines: the same class, the same calls. A test writes
`with sim.World(seed=7) as world: ...`, opens engines, breaks things on purpose, and sees the same every time.
"""

from typing import TYPE_CHECKING

from crossrail._lazy import lazily, listed

if TYPE_CHECKING:
    from crossrail.errors import SimulationIdle
    from crossrail.sim.loop import SimEventLoop
    from crossrail.sim.profiles import LocalProfile, NicProfile, Rails, from_bench
    from crossrail.sim.running import run
    from crossrail.sim.world import Host, World, current

__all__ = [
    "Host",
    "LocalProfile",
    "NicProfile",
    "Rails",
    "SimEventLoop",
    "SimulationIdle",
    "World",
    "current",
    "from_bench",
    "run",
]

# `crossrail sim --help` should not have to import numpy. Hidden from type checkers, as in crossrail itself.
if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "Host": "world",
            "LocalProfile": "profiles",
            "NicProfile": "profiles",
            "Rails": "profiles",
            "SimEventLoop": "loop",
            "SimulationIdle": "loop",
            "World": "world",
            "current": "world",
            "from_bench": "profiles",
            "run": "running",
        },
        modules=["loop", "profiles", "running", "world"],
    )


__dir__ = listed(__name__, __all__)

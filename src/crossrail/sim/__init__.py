"""Whole systems in one process, on simulated hosts, NICs and faults, with a virtual clock: docs/simulator.md.

Engines in a world are ordinary engines: the same class, the same calls. A test writes
`with sim.World(seed=7) as world: ...`, opens engines, breaks things on purpose, and sees the same every time.
"""

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

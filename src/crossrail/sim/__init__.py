"""Whole systems in one process, on simulated hosts, NICs and faults, with a virtual clock: docs/simulator.md.

Engines in a world are ordinary engines: the same class, the same calls. A test writes
`with sim.World(seed=7) as world: ...`, opens engines, breaks things on purpose, and sees the same every time.
"""

from crossrail.errors import SimulationIdle
from crossrail.sim.profiles import LocalProfile, NicProfile
from crossrail.sim.world import Host, World, current

__all__ = ["Host", "LocalProfile", "NicProfile", "SimulationIdle", "World", "current"]

"""A weight update of hundreds of GPUs on simulated NICs: real plans and engines, no bytes, simulated time for the GPUs.

Each trainer is a pipeline of lanes, each busy with one task at a time: host to device, prepare (gather, fuse,
quantise), submit. The costs of the lanes are the times of one rank in the paper's Table 5, divided by its bytes: see
Costs. The wire, its sharing at both ends and the counting are the simulator's.
"""

from crossrail.cli.weights.simulate.outcome import Outcome, Span
from crossrail.cli.weights.simulate.run import adapted, simulate
from crossrail.cli.weights.simulate.setting import Costs, Setting
from crossrail.cli.weights.simulate.works import collective_works, hulls_of

__all__ = ["Costs", "Outcome", "Setting", "Span", "adapted", "collective_works", "hulls_of", "simulate"]

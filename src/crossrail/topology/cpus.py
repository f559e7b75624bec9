"""Which cores should drive the chosen rails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from crossrail.topology.model import CpuId, NumaNode, Topology
from crossrail.topology.rails import RailChoice
from crossrail.topology.sysfs import format_cpu_list


@dataclass(frozen=True)
class WorkerCpus:
    """cpus: in order; empty only when nothing is known and no affinity was given. reason: one line for people."""

    cpus: tuple[CpuId, ...]
    reason: str


def worker_cpus(topology: Topology, choice: RailChoice, affinity: Iterable[int] | None = None) -> WorkerCpus:
    """The cores of the rails' NUMA nodes, as far as this process may use them. Pure.

    affinity: the result of os.sched_getaffinity(0); None ignores it. If it contains none of the cores near the rails,
    or the rails' location is unknown, the affinity itself is returned, and the reason says so.
    """
    allowed = None if affinity is None else frozenset(affinity)
    anywhere = topology.cpus if allowed is None else tuple(CpuId(cpu) for cpu in sorted(allowed))
    if not choice.rails:
        return WorkerCpus(anywhere, "no rails: any core")
    nodes = {node.id: node for rail in choice.rails if (node := topology.node_of(rail.nic)) is not None}
    near = {cpu for node in nodes.values() for cpu in _cpus_near(topology, node)}
    if not near:
        return WorkerCpus(anywhere, "the rails' NUMA node is unknown: any core")
    names = ", ".join(nodes[id_].name for id_ in sorted(nodes))
    usable = near if allowed is None else near & allowed
    if not usable:
        text = format_cpu_list(tuple(sorted(near)))
        return WorkerCpus(anywhere, f"the rails are on {names}, but this process may use none of its cores {text}")
    return WorkerCpus(tuple(sorted(usable)), f"the rails are on {names}")


def _cpus_near(topology: Topology, node: NumaNode) -> tuple[CpuId, ...]:
    """The node's cores; for a node with memory only, those of the nearest node that has any."""
    if node.cpus:
        return node.cpus
    others = [other for other in topology.numa_nodes if other.cpus]
    nearest = min(others, key=lambda other: node.distance_to(other.id) or 255, default=None)
    return nearest.cpus if nearest is not None else ()

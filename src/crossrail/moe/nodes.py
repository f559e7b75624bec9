"""Which ranks share memory: those of a node do, as asked for or as found."""

from __future__ import annotations

from collections.abc import Sequence, Set

from crossrail.errors import UsageError

Nodes = tuple[int, ...]  # the node of each rank, as a number; ranks of one number share memory


def nodes_of(world: int, node_size: int | Sequence[int]) -> Nodes:
    """Consecutive ranks: so many on each node, or as many as it says, node by node."""
    sizes = [node_size] * (world // node_size) if isinstance(node_size, int) else node_size
    return tuple(node for node, size in enumerate(sizes) for _ in range(size))


def nodes_found(mapped: Sequence[Set[int]]) -> Nodes:
    """The same on all ranks: each joins the first node whose ranks all share memory with it, consecutive or not.

    mapped: of each rank, those whose memory it has mapped.
    """
    nodes: list[list[int]] = []
    of_rank: list[int] = []
    for rank, mates in enumerate(mapped):
        fits = (i for i, node in enumerate(nodes) if all(one in mates and rank in mapped[one] for one in node))
        found = next(fits, len(nodes))
        if found == len(nodes):
            nodes.append([])
        nodes[found].append(rank)
        of_rank.append(found)
    return tuple(of_rank)


def check_nodes(nodes: Nodes, mapped: Sequence[Set[int]], node_size: object) -> None:
    """UsageError for ranks of one node that cannot map each other's memory. node_size: as it was given."""
    for rank, node in enumerate(nodes):
        for other, its_node in enumerate(nodes):
            if node == its_node and other != rank and other not in mapped[rank]:
                raise UsageError(
                    f"node_size is {node_size}, and rank {rank} cannot map the memory of rank {other}. Next: see "
                    f"engine.explain(address) there, or leave out node_size, with which ranks that can share memory do"
                )

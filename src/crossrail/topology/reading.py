"""Builds a Topology from a sysfs and a procfs tree."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from crossrail.errors import UsageError
from crossrail.topology.model import CpuId, NumaId, NumaNode, Topology
from crossrail.topology.nics import assemble_nics, read_net_devices, read_rdma_devices
from crossrail.topology.pci import PciReader, read_gpus
from crossrail.topology.sysfs import Tree


def read_topology(
    root: str | os.PathLike[str], proc: str | os.PathLike[str] | None, addresses: Mapping[str, Sequence[str]]
) -> Topology:
    """See Topology.read."""
    top = Path(root)
    if not top.is_dir():
        raise UsageError(f"root {str(top)!r} is not a directory; give a sysfs tree such as /sys")
    notes: list[str] = []
    sys_tree = Tree(top, notes)
    proc_tree = Tree(sys_tree.root.parent / "proc" if proc is None else Path(proc), notes)
    if not any((sys_tree.root / name).is_dir() for name in ("class", "bus", "devices")):
        notes.append("no class, bus or devices directory: this is no sysfs, or an empty one")

    pci = PciReader(sys_tree)
    functions = pci.all()
    net_devices = read_net_devices(sys_tree, pci, addresses)
    rdma_devices = read_rdma_devices(sys_tree, pci, net_devices)
    nodes = _numa_nodes(sys_tree)
    cpus = sys_tree.cpu_list(sys_tree.root / "devices/system/cpu/online")
    if cpus is None:
        cpus = tuple(sorted({cpu for node in nodes for cpu in node.cpus}))
    return Topology(
        root=str(sys_tree.root),
        cpus=tuple(CpuId(cpu) for cpu in cpus),
        numa_nodes=tuple(nodes),
        gpus=tuple(read_gpus(functions, proc_tree)),
        nics=tuple(assemble_nics(functions, net_devices, rdma_devices)),
        net_devices=tuple(net_devices),
        rdma_devices=tuple(rdma_devices),
        notes=tuple(notes),
    )


def _numa_nodes(tree: Tree) -> list[NumaNode]:
    names = tree.names("devices", "system", "node")
    ids = [NumaId(int(name[4:])) for name in names if name.startswith("node") and name[4:].isdecimal()]
    nodes = []
    for node in ids:
        directory = tree.root / f"devices/system/node/node{node}"
        cpus = tree.cpu_list(directory / "cpulist") or ()
        distances = _distances(tree, directory / "distance", ids)
        nodes.append(NumaNode(node, tuple(CpuId(cpu) for cpu in cpus), distances))
    return nodes


def _distances(tree: Tree, path: Path, ids: Sequence[NumaId]) -> tuple[tuple[NumaId, int], ...]:
    """Parses "10 21": 10 to the first node, 21 to the second."""
    text = tree.text(path)
    if text is None:
        return ()
    words = text.split()
    if len(words) != len(ids) or not all(word.isdecimal() and len(word) <= 5 for word in words):
        tree.junk(path, text, f"{len(ids)} distances")
        return ()
    return tuple(zip(ids, map(int, words), strict=True))

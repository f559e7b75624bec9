"""A topology and its choices of rails as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from crossrail.topology.cpus import worker_cpus
from crossrail.topology.model import Device, Gpu, Host, NetDevice, Nic, NumaNode, PciFunction, RdmaDevice, Topology
from crossrail.topology.rails import Candidate, Need, RailChoice, choose_rails
from crossrail.topology.sysfs import format_cpu_list

# Raised when a field changes its meaning or goes; new fields may come without.
VERSION = 1


def usual_devices(topology: Topology) -> list[Device]:
    """The devices that rails are usually chosen for: GPUs that this process may use, and each NUMA node's host memory.

    On a machine with one node the only entry for host memory is Host.
    """
    nodes = [node for node in topology.numa_nodes if node.cpus]
    return [*(gpu for gpu in topology.gpus if gpu.index is not None), *(nodes if len(nodes) > 1 else [Host()])]


def describe(
    topology: Topology,
    devices: Sequence[Device] | None = None,
    *,
    need: Need | None = None,
    affinity: Iterable[int] | None = None,
) -> dict[str, Any]:
    """Everything as dicts, lists, strings and numbers; None is unknown. Pure.

    devices: for which to choose rails, by default every GPU and host memory. need, affinity: as for choose_rails and
    worker_cpus. CPUs are written as the kernel writes them, "0-47,96-143"; speeds are gigabits per second.
    """
    allowed = None if affinity is None else frozenset(affinity)
    choices = [choose_rails(topology, d, need=need) for d in (usual_devices(topology) if devices is None else devices)]
    return {
        "version": VERSION,
        "root": topology.root,
        "cpus": format_cpu_list(topology.cpus),
        "numa_nodes": [_node(node) for node in topology.numa_nodes],
        "gpus": [_gpu(topology, gpu) for gpu in topology.gpus],
        "nics": [_nic(topology, nic) for nic in topology.nics],
        "choices": [_choice(topology, choice, allowed) for choice in choices],
        "notes": list(topology.notes),
    }


def _node(node: NumaNode) -> dict[str, Any]:
    distances = {str(other): distance for other, distance in node.distances}
    return {"id": node.id, "cpus": format_cpu_list(node.cpus), "distances": distances}


def _gpu(topology: Topology, gpu: Gpu) -> dict[str, Any]:
    fields = {"name": gpu.name, "index": gpu.index, "model": gpu.model, "uuid": gpu.uuid}
    return {**fields, "numa": _numa(topology, gpu), "pci": _pci(gpu.pci)}


def _nic(topology: Topology, nic: Nic) -> dict[str, Any]:
    return {
        "name": nic.name,
        "kind": nic.kind,
        "up": nic.up,
        "state": nic.state,
        "speed_gbps": nic.speed_gbps,
        "numa": _numa(topology, nic),
        "pci": None if nic.pci is None else _pci(nic.pci),
        "rdma": None if nic.rdma is None else _rdma(nic.rdma),
        "net_devices": [_net_device(device) for device in nic.net_devices],
    }


def _numa(topology: Topology, what: Gpu | Nic) -> int | None:
    node = topology.node_of(what)
    return None if node is None else node.id


def _pci(function: PciFunction) -> dict[str, Any]:
    return {
        "address": str(function.address),
        "root": function.root,
        "bridges": [str(bridge) for bridge in function.bridges],
        "vendor": f"{function.vendor:04x}",
        "device": f"{function.device:04x}",
        "driver": function.driver,
        "physfn": None if function.physfn is None else str(function.physfn),
        "vf_count": function.vf_count,
    }


def _rdma(device: RdmaDevice) -> dict[str, Any]:
    ports = [
        {
            "number": port.number,
            "state": port.state,
            "phys_state": port.phys_state,
            "link_layer": port.link_layer,
            "rate_gbps": port.rate_gbps,
            "gid_count": port.gid_count,
        }
        for port in device.ports
    ]
    return {"name": device.name, "driver": device.driver, "uverbs": device.uverbs, "ports": ports}


def _net_device(device: NetDevice) -> dict[str, Any]:
    return {
        "name": device.name,
        "kind": device.kind,
        "flavour": device.flavour,
        "driver": device.driver,
        "operstate": device.operstate,
        "carrier": device.carrier,
        "speed_gbps": device.speed_gbps,
        "mtu": device.mtu,
        "mac": device.mac,
        "master": device.master,
        "ip_addresses": list(device.ip_addresses),
    }


def _choice(topology: Topology, choice: RailChoice, affinity: frozenset[int] | None) -> dict[str, Any]:
    workers = worker_cpus(topology, choice, affinity)
    return {
        "device": choice.device.name,
        "reason": choice.reason,
        "rails": [_candidate(candidate) for candidate in choice.rails],
        "rejected": [_candidate(candidate) for candidate in choice.rejected],
        "worker_cpus": {"cpus": format_cpu_list(workers.cpus), "reason": workers.reason},
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {"nic": candidate.nic.name, "distance": candidate.distance.name, "reason": candidate.reason}

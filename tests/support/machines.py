"""Machines that are made up, in place of this one."""

import os
from collections.abc import Sequence

import pytest

from crossrail.topology import (
    CpuId,
    NetDevice,
    Nic,
    NumaId,
    NumaNode,
    PciAddress,
    PciFunction,
    RdmaDevice,
    RdmaPort,
    Topology,
    addresses,
)

NODES = (NumaNode(NumaId(0), (CpuId(0), CpuId(1))), NumaNode(NumaId(1), (CpuId(2), CpuId(3))))


def nic(
    name: str, *, ip: str = "", speed: float | None = 100.0, numa: int | None = None, kind: str = "ethernet"
) -> Nic:
    pci = PciFunction(PciAddress(0, int(name[-1]), 0, 0), "", numa=None if numa is None else NumaId(numa))
    ips = (ip,) if ip else ()
    device = NetDevice(name, kind, pci=pci, operstate="up", speed_gbps=speed, ip_addresses=ips)
    return Nic(name, kind, pci, net_devices=(device,))


def machine(*nics: Nic, nodes: tuple[NumaNode, ...] = NODES) -> Topology:
    cpus = tuple(cpu for node in nodes for cpu in node.cpus)
    devices = tuple(device for one in nics for device in one.net_devices)
    return Topology("/made-up", cpus, nodes, nics=nics, net_devices=devices)


def pretend(monkeypatch: pytest.MonkeyPatch, topology: Topology, affinity: Sequence[int] = range(4)) -> None:
    monkeypatch.setattr(addresses, "read_this_machine", lambda: topology)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(affinity))


def rdma_nic(
    name: str, *, speed: float = 400.0, numa: int | None = None, kind: str = "roce", state: str = "ACTIVE"
) -> Nic:
    """With one port, and without a net device."""
    pci = PciFunction(PciAddress(1, int(name[-1]), 0, 0), "", numa=None if numa is None else NumaId(numa))
    port = RdmaPort(1, state=state, rate_gbps=speed)
    return Nic(name, kind, pci, RdmaDevice(name, kind, pci, ports=(port,)))

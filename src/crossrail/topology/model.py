"""The parts of a machine, as immutable values. Read by reading.py, judged by rails.py."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias

from crossrail.errors import UsageError

NumaId = NewType("NumaId", int)
CpuId = NewType("CpuId", int)

_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class PciAddress:
    """The name that every tool and driver agrees on, unlike GPU numbers, which CUDA_VISIBLE_DEVICES renumbers."""

    domain: int
    bus: int
    device: int
    function: int

    @classmethod
    def parse(cls, text: str) -> PciAddress | None:
        """Parses "0000:53:00.0" or "53:00.0"; None for anything else."""
        match = _ADDRESS.fullmatch(text.strip())
        if match is None:
            return None
        domain, bus, device, function = match.groups()
        return cls(int(domain or "0", 16), int(bus, 16), int(device, 16), int(function))

    def __str__(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.{self.function}"


class Distance(enum.IntEnum):
    """The distance between two devices, in the terms of `nvidia-smi topo`. Smaller is nearer."""

    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5

    @property
    def words(self) -> str:
        """The distance in words, for people."""
        return _DISTANCE_WORDS[self]


_DISTANCE_WORDS = {
    Distance.PIX: "same PCIe switch",
    Distance.PXB: "same PCIe root port",
    Distance.PHB: "same PCIe host bridge",
    Distance.NODE: "same NUMA node",
    Distance.SYS: "another NUMA node",
}


@dataclass(frozen=True)
class PciFunction:
    """One PCI function and its path.

    root: its host bridge as the kernel names it ("pci0000:44"); bridges: from the root port down, without the function
    itself: [root port, switch upstream port, switch downstream port, ...]; empty on a flat (often virtual) bus. numa:
    None if the kernel says -1, as in virtual machines. driver: "" if none is bound. physfn: of a virtual function, the
    physical one it belongs to. vf_count: number of virtual functions enabled on this one.
    """

    address: PciAddress
    root: str
    bridges: tuple[PciAddress, ...] = ()
    class_code: int = 0
    vendor: int = 0
    device: int = 0
    driver: str = ""
    numa: NumaId | None = None
    physfn: PciAddress | None = None
    vf_count: int = 0

    @property
    def switches(self) -> tuple[PciAddress, ...]:
        """Upstream ports of the switches on the way, from the root down.

        A switch shows as two bridges, an upstream port common to all below it and a downstream port for each.
        """
        return self.bridges[1:-1:2]


def pci_distance(one: PciFunction, other: PciFunction) -> Distance | None:
    """PIX, PXB or PHB by the common way from the root; None when they share no host bridge."""
    if not one.root or one.root != other.root:
        return None
    ways = zip(one.bridges, other.bridges, strict=False)
    shared = next((i for i, (a, b) in enumerate(ways) if a != b), min(len(one.bridges), len(other.bridges)))
    if shared == 0:
        return Distance.PHB
    # Below the last common bridge each way may pass one port of the same switch; more means a further switch.
    further = max(len(one.bridges), len(other.bridges)) - shared
    return Distance.PIX if further <= 1 else Distance.PXB


# efa: AWS; infiniband, roce, rdma (link layer unknown): other RDMA hardware; soft-rdma: rxe or siw on some net device.
# The rest carries IP alone. usb: also the link to a server's management controller. veth: a container's way out (veth,
# macvlan, ipvlan). representor: the switch side of a virtual function. no-driver: a PCI function of class network that
# this process sees neither a net device nor an RDMA device of.
NicKind: TypeAlias = Literal[
    "efa", "infiniband", "roce", "rdma", "soft-rdma", "ethernet", "bond", "wireless", "usb",
    "veth", "virtual", "loopback", "representor", "no-driver",
]  # fmt: skip
NetKind: TypeAlias = Literal["ethernet", "bond", "wireless", "usb", "veth", "virtual", "loopback", "representor"]
RDMA_KINDS: frozenset[NicKind] = frozenset({"efa", "infiniband", "roce", "rdma"})
UPPER_KINDS: frozenset[NicKind] = frozenset(
    {"bond", "virtual", "veth"}
)  # the place of one is that of what it stands on


@dataclass(frozen=True)
class NetDevice:
    """One entry of class/net.

    flavour: more exactly what a virtual one is ("bridge", "vlan", "ifb" ...), may be empty. speed_gbps: None when the
    driver does not say (virtio, Wi-Fi, a link that is down). operstate: as in RFC 2863, "unknown" when the file is
    missing or holds junk. master, lowers: names of the device above (bond, bridge) and of those below.
    ip_addresses: what the caller of Topology.read gave; sysfs does not know them.
    """

    name: str
    kind: NetKind
    flavour: str = ""
    pci: PciFunction | None = None
    driver: str = ""
    operstate: str = "unknown"
    carrier: bool | None = None
    speed_gbps: float | None = None
    mtu: int | None = None
    mac: str = ""
    master: str = ""
    lowers: tuple[str, ...] = ()
    ip_addresses: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        """True when it can carry packets. Some drivers never leave "unknown": then the carrier decides."""
        return self.operstate == "up" or (self.operstate == "unknown" and self.carrier is True)


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device. state: "ACTIVE", "DOWN", "INIT", "ARMED", "ACTIVE_DEFER" or "unknown".

    gid_count: GIDs that are set; without one a RoCE or EFA port has no address. net_devices: names, from the GID table.
    """

    number: int
    state: str = "unknown"
    phys_state: str = "unknown"
    link_layer: str = "unknown"
    rate_gbps: float | None = None
    gid_count: int = 0
    net_devices: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        """True when it can carry traffic."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class RdmaDevice:
    """One entry of class/infiniband. uverbs: its character device ("uverbs0"), "" when the kernel made none."""

    name: str
    kind: NicKind
    pci: PciFunction | None = None
    driver: str = ""
    uverbs: str = ""
    ports: tuple[RdmaPort, ...] = ()

    @property
    def port(self) -> RdmaPort | None:
        """The port that would carry a rail: the fastest one that is up, else the first."""
        best = sorted(self.ports, key=lambda p: (not p.up, -(p.rate_gbps or 0), p.number))
        return best[0] if best else None


@dataclass(frozen=True)
class Nic:
    """A possible rail: one RDMA device with its net devices, or one net device without RDMA.

    name: of the RDMA device if there is one, else of the net device, else the PCI address. Unique in a Topology. pci:
    its location; for a bond, or a device stacked on another, the first location below; None if that is no PCI device.
    """

    name: str
    kind: NicKind
    pci: PciFunction | None = None
    rdma: RdmaDevice | None = None
    net_devices: tuple[NetDevice, ...] = ()

    @property
    def rdma_up(self) -> bool:
        """True when RDMA traffic can flow."""
        return self.rdma is not None and any(port.up for port in self.rdma.ports)

    @property
    def net_up(self) -> bool:
        """True when IP traffic can flow."""
        return any(device.up for device in self.net_devices)

    @property
    def up(self) -> bool:
        """True when any traffic can flow."""
        return self.rdma_up or self.net_up

    @property
    def speed_gbps(self) -> float | None:
        """Gigabits per second of the port that would carry a rail; None when nobody says."""
        port = self.rdma.port if self.rdma is not None else None
        if port is not None and port.rate_gbps is not None:
            return port.rate_gbps
        known = [d.speed_gbps for d in self.net_devices if d.speed_gbps is not None]
        return max(known, default=None)

    @property
    def state(self) -> str:
        """Its state in words: "up", or what is wrong."""
        if self.up:
            return "up"
        if self.kind == "no-driver":
            return f"driver {self.pci.driver}" if self.pci is not None and self.pci.driver else "no driver"
        port = self.rdma.port if self.rdma is not None else None
        if port is not None and port.state != "unknown":
            return f"port {port.state}" if port.phys_state == "unknown" else f"port {port.state}, {port.phys_state}"
        states = {d.operstate for d in self.net_devices} - {"unknown"} if port is None else set()
        return ", ".join(sorted(states)) or "state unknown"

    @property
    def names(self) -> frozenset[str]:
        """Every name it goes by: RDMA device, net devices, PCI address."""
        place = {str(self.pci.address)} if self.pci is not None and self.kind not in UPPER_KINDS else set()
        return frozenset({self.name, *(d.name for d in self.net_devices), *place})


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    index: its number among those this process may use, in PCI order, as nvidia-smi counts; None for one that a
    container hides. CUDA's own numbers may differ (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER): ask it for the PCI
    address.
    """

    pci: PciFunction
    index: int | None = None
    model: str = ""
    uuid: str = ""

    @property
    def name(self) -> str:
        """For example "gpu0"; the PCI address of a hidden one."""
        return str(self.pci.address) if self.index is None else f"gpu{self.index}"


@dataclass(frozen=True)
class NumaNode:
    """cpus: empty for nodes that are memory alone. distances: to each node; the firmware's figures, 10 = itself."""

    id: NumaId
    cpus: tuple[CpuId, ...] = ()
    distances: tuple[tuple[NumaId, int], ...] = ()

    @property
    def name(self) -> str:
        """For example "numa0"."""
        return f"numa{self.id}"

    def distance_to(self, other: NumaId) -> int | None:
        """10 is the node itself; None when the firmware does not say."""
        return dict(self.distances).get(other, 10 if other == self.id else None)


@dataclass(frozen=True)
class Cpu:
    """One processor, standing for the memory near it."""

    id: CpuId

    @property
    def name(self) -> str:
        """For example "cpu12"."""
        return f"cpu{self.id}"


@dataclass(frozen=True)
class Host:
    """Host memory of which nobody says on which node it is."""

    @property
    def name(self) -> str:
        """Always "host"."""
        return "host"


Device: TypeAlias = Gpu | NumaNode | Cpu | Host


@dataclass(frozen=True)
class Topology:
    """One machine at one moment.

    gpus, numa_nodes: in order of address and id. nics: in order of kind of location and address. cpus: those online.
    net_devices, rdma_devices: all of them, even those not represented by a Nic. notes: entries that could not be
    parsed.

    Invariant: every Nic has a unique name; every Nic.net_devices is part of net_devices.
    """

    root: str
    cpus: tuple[CpuId, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    rdma_devices: tuple[RdmaDevice, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def read(
        root: str | os.PathLike[str] = "/sys",
        *,
        proc: str | os.PathLike[str] | None = None,
        addresses: Mapping[str, Sequence[str]] | None = None,
    ) -> Topology:
        """Read a sysfs tree, this machine's or a recorded one. Any thread; takes milliseconds, tens on large machines.

        proc: the procfs beside it, by default `proc` in the directory that holds root; it need not exist.
        addresses: IP addresses by net device, if the caller knows them.
        Raises UsageError when root is no directory, and nothing else: what cannot be read is None and may be a note.
        """
        from crossrail.topology.reading import read_topology  # it needs this module

        return read_topology(root, proc, addresses or {})

    def device(self, text: str) -> Device:
        """The device of that name: "gpu0", a GPU's PCI address or UUID, "numa1", "cpu12" or "host". Else UsageError."""
        name = text.strip().lower()
        address = PciAddress.parse(name)
        for gpu in self.gpus:
            if name == gpu.name or (gpu.uuid and name == gpu.uuid.lower()) or address == gpu.pci.address:
                return gpu
        for node in self.numa_nodes:
            if name == node.name:
                return node
        for cpu in self.cpus:
            if name == f"cpu{cpu}":
                return Cpu(cpu)
        if name == "host":
            return Host()
        known = [*(gpu.name for gpu in self.gpus), *(node.name for node in self.numa_nodes)]
        known += [f"cpu{cpu}, ..." for cpu in self.cpus[:1]]
        raise UsageError(f"device {text!r} is not known here; there are: {', '.join([*known, 'host'])}")

    def node(self, numa: NumaId | None) -> NumaNode | None:
        """The node of that id. On a machine of one node that is where everything is, also what says -1."""
        if numa is None and len(self.numa_nodes) == 1:
            return self.numa_nodes[0]
        return next((node for node in self.numa_nodes if node.id == numa), None)

    def node_of(self, device: Device | Nic) -> NumaNode | None:
        """The NUMA node of the device; None if the kernel does not say, and for Host."""
        if isinstance(device, NumaNode):
            return self.node(device.id)
        if isinstance(device, Cpu):
            return next((node for node in self.numa_nodes if device.id in node.cpus), None)
        if isinstance(device, Host) or device.pci is None:
            return self.node(None)
        return self.node(device.pci.numa)

    def numa_distance(self, device: Device, nic: Nic) -> int | None:
        """The firmware's figure between their nodes (10 = the same node); None when a node or the figure is unknown."""
        here, there = self.node_of(device), self.node_of(nic)
        return None if here is None or there is None else here.distance_to(there.id)

    def distance(self, device: Device, nic: Nic) -> Distance:
        """The distance to the NIC. A CPU or NUMA node is NODE from everything on its node; Host is NODE from
        everything.

        A device of unknown location counts as SYS, unless there is at most one NUMA node.
        """
        if isinstance(device, Host):
            return Distance.NODE
        if isinstance(device, Gpu) and nic.pci is not None:
            near = pci_distance(device.pci, nic.pci)
            if near is not None:
                return near
        if len(self.numa_nodes) <= 1:
            return Distance.NODE
        here, there = self.node_of(device), self.node_of(nic)
        return Distance.NODE if here is not None and there is not None and here.id == there.id else Distance.SYS

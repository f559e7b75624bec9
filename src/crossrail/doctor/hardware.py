"""Facts about devices that several checks need, read from sysfs. Nothing is judged here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from crossrail.errors import UsageError
from crossrail.topology import Topology
from crossrail.topology.rails import left_out

if TYPE_CHECKING:
    from crossrail.doctor.host import Host

INFINIBAND = "/sys/class/infiniband"
NET = "/sys/class/net"
PCI = "/sys/bus/pci/devices"

_VENDOR_NVIDIA = 0x10DE
_VENDOR_MELLANOX = 0x15B3
_VENDOR_AMAZON = 0x1D0F
_EFA_DEVICES = range(0xEFA0, 0xEFB0)
_CLASS_DISPLAY = 0x03
_CLASS_NETWORK = 0x02

_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_GIDS_MAX = 512
_P_KEY = re.compile(r"0x[0-9a-fA-F]{1,4}")


@dataclass(frozen=True)
class Gid:
    """An entry of a port's table. kind: "RoCE v2", "IB/RoCE v1". netdev: empty when it has none in this namespace."""

    index: int
    address: str
    kind: str
    netdev: str

    @property
    def is_link_local(self) -> bool:
        """fe80::, which no router forwards."""
        return self.address.startswith("fe80:")


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. state, physical: words of sysfs ("ACTIVE", "LinkUp"). gbit_per_s: None: unknown."""

    device: str
    number: int
    state: str
    physical: str
    link_layer: str
    gbit_per_s: float | None
    netdevs: tuple[str, ...]

    @property
    def name(self) -> str:
        """mlx5_0/1, as the tools of rdma-core write it."""
        return f"{self.device}/{self.number}"

    @property
    def path(self) -> str:
        """Its directory in sysfs."""
        return f"{INFINIBAND}/{self.device}/ports/{self.number}"

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class RdmaDevice:
    """kind: "efa", "mlx5", "rxe", "siw", or the driver's name. pci: its address, empty for software devices."""

    name: str
    kind: str
    pci: str
    firmware: str
    ports: tuple[Port, ...]

    @property
    def is_software(self) -> bool:
        """Soft-RoCE and the like: for tests."""
        return self.kind in ("rxe", "siw")


@dataclass(frozen=True)
class PciDevice:
    """A function on a PCI bus."""

    address: str
    vendor: int
    device: int
    class_code: int
    driver: str

    @property
    def path(self) -> str:
        """Its directory in sysfs."""
        return f"{PCI}/{self.address}"

    @property
    def is_gpu(self) -> bool:
        """An NVIDIA GPU; their audio functions are no GPUs."""
        return self.vendor == _VENDOR_NVIDIA and self.class_code >> 16 == _CLASS_DISPLAY

    @property
    def is_efa(self) -> bool:
        """An AWS Elastic Fabric Adapter."""
        return self.vendor == _VENDOR_AMAZON and self.device in _EFA_DEVICES

    @property
    def is_connectx(self) -> bool:
        """An NVIDIA (Mellanox) network function."""
        return self.vendor == _VENDOR_MELLANOX and self.class_code >> 16 == _CLASS_NETWORK


@dataclass(frozen=True)
class Interface:
    """A network interface. physical: it has hardware below. mbit_per_s: None when the driver does not say."""

    name: str
    physical: bool
    up: bool
    mtu: int
    mbit_per_s: int | None
    duplex: str


class Hardware:
    """The machine's devices. Each kind is read once, on first use."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @cached_property
    def rdma(self) -> list[RdmaDevice]:
        """RDMA devices that have a driver."""
        return [self._rdma_device(name) for name in self._host.names(INFINIBAND)]

    @cached_property
    def nics(self) -> list[RdmaDevice]:
        """The devices that are hardware."""
        return [device for device in self.rdma if not device.is_software]

    @cached_property
    def ports(self) -> list[Port]:
        """The ports of all RDMA devices."""
        return [port for device in self.rdma for port in device.ports]

    @cached_property
    def left_out(self) -> dict[str, str]:
        """RDMA devices that no engine takes by itself beside the others, by the topology, each with its reason."""
        try:
            topology = Topology.read(self._host.path("/sys"), proc=self._host.path("/proc"))
        except (UsageError, OSError):  # there is no /sys
            return {}
        ours = {device.name for device in self.rdma}
        return {name: reason for name, reason in left_out(topology).items() if name in ours}

    @cached_property
    def rail_ports(self) -> list[Port]:
        """Ports of the RDMA devices that engines take, or of all devices if they would take none."""
        return [port for port in self.ports if port.device not in self.left_out] or self.ports

    @cached_property
    def pci(self) -> list[PciDevice]:
        """The devices on the PCI buses that this machine (or container) sees."""
        return [self._pci_device(address) for address in self._host.names(PCI)]

    @cached_property
    def gpus(self) -> list[PciDevice]:
        """NVIDIA GPUs on the bus."""
        return [device for device in self.pci if device.is_gpu]

    @cached_property
    def gpu_nodes(self) -> list[str]:
        """/dev/nvidia0 and so on."""
        return [f"/dev/{name}" for name in self._host.names("/dev") if re.fullmatch(r"nvidia\d+", name)]

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU, by bus, driver or device file: containers may hide any of them."""
        return bool(self.gpus or self.gpu_nodes or self._host.names("/proc/driver/nvidia/gpus"))

    @cached_property
    def interfaces(self) -> list[Interface]:
        """Network interfaces but loopback."""
        return [self._interface(name) for name in self._host.names(NET) if name not in ("lo", "bonding_masters")]

    @cached_property
    def rails(self) -> list[Interface]:
        """The interfaces that carry transfers: those of the RDMA ports that are rails, else the physical ones that are
        up.
        """
        of_ports = {name for port in self.rail_ports for name in port.netdevs}
        rails = [interface for interface in self.interfaces if interface.name in of_ports]
        of_others = {name for port in self.ports if port not in self.rail_ports for name in port.netdevs}
        return rails or [i for i in self.interfaces if i.physical and i.up and i.name not in of_others]

    def gids(self, port: Port) -> list[Gid]:
        """Entries of its table that are in use."""
        found = []
        for text in self._host.names(f"{port.path}/gids")[:_GIDS_MAX]:
            address = self._host.read(f"{port.path}/gids/{text}") or _NO_GID
            if text.isdecimal() and address != _NO_GID:
                kind = self._host.read(f"{port.path}/gid_attrs/types/{text}") or ""
                netdev = self._host.read(f"{port.path}/gid_attrs/ndevs/{text}") or ""
                found.append(Gid(int(text), address, kind, netdev))
        return found

    def partitions(self, port: Port) -> list[int]:
        """P_Keys of its table that are in use, in its order."""
        names = [text for text in self._host.names(f"{port.path}/pkeys") if text.isdecimal()]
        texts = [self._host.read(f"{port.path}/pkeys/{text}") or "" for text in sorted(names, key=int)]
        keys = [int(text, 16) for text in texts if _P_KEY.fullmatch(text)]
        return [key for key in keys if key & 0x7FFF]

    def numa_node(self, pci: str) -> int:
        """The NUMA node of a PCI device; -1 if the firmware does not say."""
        node = self._host.read_int(f"{PCI}/{pci}/numa_node")
        return -1 if node is None else node

    def _rdma_device(self, name: str) -> RdmaDevice:
        base = f"{INFINIBAND}/{name}"
        pci = self._host.target_name(f"{base}/device")
        ports = tuple(
            self._port(name, int(number)) for number in self._host.names(f"{base}/ports") if number.isdecimal()
        )
        firmware = self._host.read(f"{base}/fw_ver") or ""
        return RdmaDevice(name, self._kind(name), pci, firmware, ports)

    def _kind(self, name: str) -> str:
        base = f"{INFINIBAND}/{name}"
        driver = self._host.target_name(f"{base}/device/driver")
        if driver:
            return "mlx5" if driver == "mlx5_core" else driver
        if not self._host.exists(f"{base}/device"):  # rxe and siw hang on no bus
            return "siw" if name.startswith("siw") else "rxe"
        return "unknown"

    def _port(self, device: str, number: int) -> Port:
        path = f"{INFINIBAND}/{device}/ports/{number}"
        netdev = self._host.read(f"{path}/gid_attrs/ndevs/0") or self._host.read(f"{INFINIBAND}/{device}/parent")
        # The PCI function's own list also names switchdev representors: use it only for InfiniBand, whose GIDs name
        # none.
        names = [netdev] if netdev else self._host.names(f"{INFINIBAND}/{device}/device/net")
        rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", self._host.read(f"{path}/rate") or "")
        return Port(
            device,
            number,
            _word(self._host.read(f"{path}/state")),
            _word(self._host.read(f"{path}/phys_state")),
            self._host.read(f"{path}/link_layer") or "",
            float(rate[1]) if rate else None,
            tuple(names),
        )

    def _pci_device(self, address: str) -> PciDevice:
        base = f"{PCI}/{address}"
        driver = self._host.target_name(f"{base}/driver")
        numbers = [self._host.read_int(f"{base}/{name}") or 0 for name in ("vendor", "device", "class")]
        return PciDevice(address, numbers[0], numbers[1], numbers[2], driver)

    def _interface(self, name: str) -> Interface:
        base = f"{NET}/{name}"
        state = self._host.read(f"{base}/operstate") or ""
        speed = self._host.read_int(f"{base}/speed")
        # "unknown" is what drivers without link detection say; the carrier tells then.
        up = state == "up" or (state == "unknown" and self._host.read(f"{base}/carrier") == "1")
        return Interface(
            name,
            self._host.exists(f"{base}/device"),
            up,
            self._host.read_int(f"{base}/mtu") or 0,
            speed if speed is not None and speed > 0 else None,
            self._host.read(f"{base}/duplex") or "",
        )


def _word(text: str | None) -> str:
    """4: ACTIVE -> ACTIVE."""
    return (text or "").partition(":")[2].strip() or (text or "unknown")

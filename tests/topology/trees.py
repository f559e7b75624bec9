"""Made-up sysfs trees, modelled after public descriptions of machines.

Sources: the listings in aws-ofi-nccl (topology/p5.48xl-topo.xml, p4d-24xl-topo.xml) and of p5 in abcdabcd987's
libfabric-efa-demo; the AWS user guide (32 x 100 Gb/s on p5, 16 x 200 Gb/s on p5en); the DGX H100 user guide and
`nvidia-smi topo -m` in vllm #6746 (GPU and its ConnectX-7 PXB, storage ports NODE) and #22372 (two and two per switch);
Azure's ndv5 topology file for NCCL. Bus numbers of switches, and all of p5en's, are invented.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ETHERNET, INFINIBAND, WIFI = 0x020000, 0x020700, 0x028000
GPU_3D, BRIDGE = 0x030200, 0x060400
NVIDIA, MELLANOX, AMAZON, INTEL, VIRTIO = 0x10DE, 0x15B3, 0x1D0F, 0x8086, 0x1AF4


def scratch() -> tempfile.TemporaryDirectory[str]:
    """In memory where possible: thousands of small files, again and again."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@dataclass(frozen=True)
class Place:
    """A directory below /sys/devices."""

    path: str
    numa: int = -1

    def __truediv__(self, part: str) -> Place:
        return Place(f"{self.path}/{part}", self.numa)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def root(name: str, numa: int = -1) -> Place:
    """A host bridge: root("0000:44", 0) is pci0000:44."""
    return Place(f"pci{name}", numa)


class Machine:
    """Writes sys/ and proc/ below a directory."""

    def __init__(self, top: Path) -> None:
        self.sys = top / "sys"
        self.proc = top / "proc"
        for name in ("class/net", "bus/pci/devices", "devices"):
            (self.sys / name).mkdir(parents=True)
        self._interfaces = 0

    # --- files ---

    def write(self, path: Path, **files: object) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name).write_text(f"{content}\n")
        return path

    def link(self, path: Path, target: Path | str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def dir(self, place: Place) -> Path:
        return self.sys / "devices" / place.path

    # --- the machine ---

    def cpus(self, cpu_list: str) -> None:
        self.write(self.sys / "devices/system/cpu", online=cpu_list)

    def numa(self, *cpu_lists: str, far: int = 21) -> None:
        """One node for each list."""
        for node, cpu_list in enumerate(cpu_lists):
            distances = " ".join("10" if other == node else str(far) for other in range(len(cpu_lists)))
            self.write(self.sys / f"devices/system/node/node{node}", cpulist=cpu_list, distance=distances)
        self.cpus(",".join(cpu_lists))

    def pci(self, place: Place, class_code: int, vendor: int, device: int = 1, driver: str = "") -> Place:
        path = self.write(
            self.dir(place),
            **{"class": f"0x{class_code:06x}"},
            vendor=f"0x{vendor:04x}",
            device=f"0x{device:04x}",
            numa_node=place.numa,
        )
        if driver:
            self.link(path / "driver", f"/bus/pci/drivers/{driver}")
        self.link(self.sys / "bus/pci/devices" / place.name, path)
        return place

    def bridge(self, place: Place) -> Place:
        return self.pci(place, BRIDGE, 0x1000, driver="pcieport")

    def switch(self, place: Place, *ports: str) -> list[Place]:
        """An upstream port at `place`, whose parent is a root port or another switch's port; its downstream ports."""
        self.bridge(place)
        return [self.bridge(place / port) for port in ports]

    def gpu(self, place: Place, model: str = "") -> Place:
        self.pci(place, GPU_3D, NVIDIA, 0x2330, "nvidia")
        if model:
            self.driver_shows(place.name, model)
        return place

    def driver_shows(self, address: str, model: str = "NVIDIA H100 80GB HBM3") -> None:
        uuid = f"GPU-{int(address[5:7], 16):08x}-0000-4000-8000-000000000000"
        text = f"Model: \t\t {model}\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nDevice Minor: \t 0"
        self.write(self.proc / "driver/nvidia/gpus" / address, information=text)

    def net(
        self,
        name: str,
        place: Place | None = None,
        *,
        speed: int | None = None,
        state: str = "up",
        type_: int = 1,
        master: str = "",
        lowers: Sequence[str] = (),
        **files: object,
    ) -> Path:
        """A net device, of the hardware at `place` or virtual. speed: Mb/s. files: further ones, or other content."""
        self._interfaces += 1
        above = self.sys / "devices/virtual" if place is None else self.dir(place)
        usual: dict[str, object] = {
            "operstate": state,
            "type": type_,
            "mtu": 1500,
            "address": f"02:00:00:00:00:{self._interfaces:02x}",
            "ifindex": self._interfaces,
            "iflink": self._interfaces,
        }
        if state in ("up", "unknown"):
            usual["carrier"] = 1
        path = self.write(above / "net" / name, **(usual | files))
        if speed is not None:
            self.write(path, speed=speed)
        if place is not None:
            self.link(path / "device", self.dir(place))
        if master:
            self.link(path / "master", above.parent / "net" / master)
        for lower in lowers:
            self.link(path / f"lower_{lower}", self.sys / "class/net" / lower)
        self.link(self.sys / "class/net" / name, path)
        return path

    def lo(self) -> None:
        self.net("lo", state="unknown", type_=772)

    def rdma(
        self,
        name: str,
        place: Place | None,
        *,
        layer: str = "InfiniBand",
        gbps: float = 400,
        state: str = "4: ACTIVE",
        net: str = "",
        **files: object,
    ) -> Path:
        """An RDMA device with one port. net: the net device that its GID table names."""
        above = self.sys / "devices/virtual" if place is None else self.dir(place)
        path = self.write(above / "infiniband" / name, **files)
        phys = "5: LinkUp" if "ACTIVE" in state else "3: Disabled"
        port = self.write(
            path / "ports/1", state=state, phys_state=phys, link_layer=layer, rate=f"{gbps:g} Gb/sec (4X)"
        )
        self.write(port / "gids", **{"0": "fe80:0000:0000:0000:0200:00ff:fe00:0001", "1": ":".join(["0000"] * 8)})
        if net:
            self.write(port / "gid_attrs/ndevs", **{"0": net})
        if place is not None:
            self.link(path / "device", self.dir(place))
        count = len(list((self.sys / "class/infiniband").glob("*"))) if (self.sys / "class/infiniband").exists() else 0
        self.write(self.sys / "class/infiniband_verbs" / f"uverbs{count}", ibdev=name)
        self.link(self.sys / "class/infiniband" / name, path)
        return path

    def efa(self, name: str, place: Place, gbps: float = 100) -> None:
        self.pci(place, ETHERNET, AMAZON, 0xEFA2, "efa")
        self.rdma(name, place, layer="Unspecified", gbps=gbps)

    def connectx(self, name: str, place: Place, net: str = "", gbps: int = 400, **options: str) -> None:
        """A ConnectX port, InfiniBand unless options say otherwise; net: its net device, made too."""
        layer = options.get("layer", "InfiniBand")
        up = options.get("state", "4: ACTIVE") == "4: ACTIVE"
        self.pci(place, INFINIBAND if layer == "InfiniBand" else ETHERNET, MELLANOX, 0x1021, "mlx5_core")
        self.rdma(name, place, gbps=gbps, net=net if layer == "Ethernet" else "", **options)  # type: ignore[arg-type]
        if net:
            speed = gbps * 1000 if up else -1
            self.net(net, place, speed=speed, state="up" if up else "down", type_=32 if layer == "InfiniBand" else 1)


# --- machines ---


def aws_group(machine: Machine, numa: int, bus: int, nics: int, model: str) -> tuple[Place, list[Place]]:
    """One of AWS's groups: a switch at bus+1 with an ENA at bus+3, EFA places from bus+11 and a GPU behind them."""
    top = machine.bridge(root(f"0000:{bus:02x}", numa) / f"0000:{bus:02x}:00.0")
    ports = machine.switch(
        top / f"0000:{bus + 1:02x}:00.0", *(f"0000:{bus + 2:02x}:{i:02x}.0" for i in range(nics + 2))
    )
    ena = machine.pci(ports[0] / f"0000:{bus + 3:02x}:00.0", ETHERNET, AMAZON, 0xEC20, "ena")
    machine.net(f"enp{bus + 3}s0", ena)
    gpu = machine.gpu(ports[-1] / f"0000:{bus + 11 + nics:02x}:00.0", model)
    return gpu, [port / f"0000:{bus + 11 + i:02x}:00.0" for i, port in enumerate(ports[1:-1])]


def p5(machine: Machine, nics: int = 4, gbps: float = 100, model: str = "NVIDIA H100 80GB HBM3") -> None:
    """AWS p5.48xlarge: 8 groups of a GPU and 4 EFA devices of 100 Gb/s. GPUs at 53, 64, 75, 86, 97, a8, b9, ca."""
    machine.numa("0-47,96-143", "48-95,144-191", far=32)
    machine.lo()
    primary = machine.pci(root("0000:00", 0) / "0000:00:05.0", ETHERNET, AMAZON, 0xEC20, "ena")
    machine.net("ens5", primary)
    for group in range(8):
        _, places = aws_group(machine, group // 4, 0x44 + 0x11 * group, nics, model)
        for place in places:
            bus = int(place.name[5:7], 16)
            machine.efa(f"rdmap{bus}s0", place, gbps)


def p5en(machine: Machine) -> None:
    """AWS p5en.48xlarge: 8 groups of an H200 and 2 EFA devices of 200 Gb/s."""
    p5(machine, nics=2, gbps=200, model="NVIDIA H200")


def p4d(machine: Machine) -> None:
    """AWS p4d.24xlarge: 4 flat root buses, each with 2 A100 and an EFA device of 100 Gb/s."""
    machine.numa("0-23,48-71", "24-47,72-95")
    machine.lo()
    for index, bus in enumerate(("10", "20", "90", "a0")):
        top = root(f"0000:{bus}", index // 2)
        ena = machine.pci(top / f"0000:{bus}:00.0", ETHERNET, AMAZON, 0xEC20, "ena")
        machine.net(f"ens{32 + index}", ena)
        machine.efa(f"rdmap{int(bus, 16)}s27", top / f"0000:{bus}:1b.0")
        machine.gpu(top / f"0000:{bus}:1c.0")
        machine.gpu(top / f"0000:{bus}:1d.0")


DGX_COMPUTE = {"18": "1b", "40": "43", "4f": "52", "5e": "61", "9a": "9d", "c0": "c3", "ce": "d1", "dc": "df"}
DGX_NAMES = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")


def dgx(machine: Machine, down: Sequence[str] = ()) -> None:
    """DGX H100 or H200: each GPU with its ConnectX-7 below cascaded switches, two dual-port storage cards elsewhere."""
    machine.numa("0-55,112-167", "56-111,168-223")
    machine.lo()
    for index, (nic_bus, gpu_bus) in enumerate(DGX_COMPUTE.items()):
        name = DGX_NAMES[index]
        base = int(nic_bus, 16) - 3
        top = machine.bridge(root(f"0000:{base:02x}", index // 4) / f"0000:{base:02x}:01.0")
        to_nic, to_gpu = machine.switch(
            top / f"0000:{base + 1:02x}:00.0", f"0000:{base + 2:02x}:00.0", f"0000:{base + 2:02x}:01.0"
        )
        state = "1: DOWN" if name in down else "4: ACTIVE"
        nic_net = f"ibp{int(nic_bus, 16)}s0"
        machine.connectx(name, to_nic / f"0000:{nic_bus}:00.0", nic_net, 400, state=state)
        (inner,) = machine.switch(to_gpu / f"0000:{base + 4:02x}:00.0", f"0000:{base + 5:02x}:00.0")
        machine.gpu(inner / f"0000:{gpu_bus}:00.0", "NVIDIA H100 80GB HBM3")
    for numa, bus, names in ((0, "29", ("mlx5_1", "mlx5_2")), (1, "aa", ("mlx5_7", "mlx5_8"))):
        top = machine.bridge(root(f"0000:{int(bus, 16) - 1:02x}", numa) / f"0000:{int(bus, 16) - 1:02x}:01.0")
        for function, name in enumerate(names):
            net = f"ibp{int(bus, 16)}s0f{function}"
            machine.connectx(name, top / f"0000:{bus}:00.{function}", net, 400)
    onboard = machine.bridge(root("0000:00", 0) / "0000:00:1c.5")
    machine.net("eno3", machine.pci(onboard / "0000:05:00.0", ETHERNET, INTEL, 0x1563, "ixgbe"), speed=10000)
    bmc = machine.pci(root("0000:00", 0) / "0000:00:14.0", 0x0C0330, INTEL, 0x1BCD, "xhci_hcd")
    machine.net("enxb03af2b6059f", bmc / "usb1/1-14/1-14.3/1-14.3:2.0", speed=425)


def hgx_pairs(machine: Machine) -> None:
    """Two GPUs and two NICs on every switch, all PIX to each other."""
    machine.numa("0-55,112-167", "56-111,168-223")
    for index, bus in enumerate((0x10, 0x30, 0x80, 0xA0)):
        top = machine.bridge(root(f"0000:{bus:02x}", index // 2) / f"0000:{bus:02x}:01.0")
        ports = machine.switch(top / f"0000:{bus + 1:02x}:00.0", *(f"0000:{bus + 2:02x}:{i:02x}.0" for i in range(4)))
        for i in range(2):
            machine.gpu(ports[i] / f"0000:{bus + 3 + i:02x}:00.0")
            machine.connectx(f"mlx5_{2 * index + i}", ports[2 + i] / f"0000:{bus + 5 + i:02x}:00.0")


def azure_ndv5(machine: Machine) -> None:
    """Azure ND H100 v5: every function in a PCI domain of its own behind vmbus; NUMA is known, no more."""
    machine.numa("0-47", "48-95")
    machine.lo()
    for index in range(8):
        gpu_bus, nic_bus = root(f"{index + 1:04x}:00", index // 4), root(f"01{index + 1:02x}:00", index // 4)
        vmbus = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00"
        machine.gpu(Place(f"{vmbus}/guid-{index}a/{gpu_bus.path}/{index + 1:04x}:00:00.0", gpu_bus.numa))
        nic = Place(f"{vmbus}/guid-{index}b/{nic_bus.path}/01{index + 1:02x}:00:00.0", nic_bus.numa)
        machine.connectx(f"mlx5_ib{index}", nic)
    synthetic = Place("LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/guid-eth")
    machine.net("eth0", synthetic, speed=100000, lowers=("enP1",))
    slave = Place("LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/guid-vf/pci0f00:00/0f00:00:00.0", 0)
    machine.connectx("mlx5_an0", slave, "enP1", 80, layer="Ethernet")
    machine.link(machine.dir(slave) / "net/enP1/master", machine.dir(synthetic) / "net/eth0")


def cloud_vm(machine: Machine, kind: str = "virtio") -> None:
    """One NIC on a flat bus; the kernel knows neither its speed nor its node."""
    machine.numa("0-3")
    machine.lo()
    place = machine.pci(root("0000:00") / "0000:00:03.0", ETHERNET, VIRTIO, 0x1041, "virtio-pci")
    machine.net("eth0", place / "virtio2" if kind == "virtio" else place, speed=-1)
    machine.net("docker0", state="down", uevent="DEVTYPE=bridge")


def flat_vm(machine: Machine, gpus: int = 2, speeds: Sequence[int] = (400, 400, 100)) -> None:
    """GPUs and RoCE NICs passed through to a virtual machine that says nothing of where they are."""
    machine.cpus("0-31")
    for index in range(gpus):
        machine.gpu(root("0000:00") / f"0000:00:{0x10 + index:02x}.0")
    for index, speed in enumerate(speeds):
        place = root("0000:00") / f"0000:00:{0x04 + index:02x}.0"
        machine.connectx(f"mlx5_{index}", place, f"ens{4 + index}", speed, layer="Ethernet")


def sriov_host(machine: Machine, pf_up: bool = True) -> None:
    """Two ports; the first has three virtual functions: two in use here, one bound to vfio for a guest."""
    machine.numa("0-15", "16-31")
    machine.lo()
    port = machine.bridge(root("0000:3a", 0) / "0000:3a:00.0")
    state = "4: ACTIVE" if pf_up else "1: DOWN"
    pf = port / "0000:3b:00.0"
    machine.connectx("mlx5_0", pf, "ens1f0np0", 200, layer="Ethernet", state=state)
    machine.connectx("mlx5_1", port / "0000:3b:00.1", "ens1f1np1", 200, layer="Ethernet", state="1: DOWN")
    for index in range(3):
        vf = port / f"0000:3b:00.{2 + index}"
        if index < 2:
            machine.connectx(f"mlx5_{2 + index}", vf, f"ens1f0v{index}", 200, layer="Ethernet")
        else:
            machine.pci(vf, ETHERNET, MELLANOX, 0x101E, "vfio-pci")
        machine.link(machine.dir(vf) / "physfn", f"../{pf.name}")
        machine.link(machine.dir(pf) / f"virtfn{index}", f"../{vf.name}")
    machine.net("ens1f0npf0vf2", pf, speed=200000, phys_port_name="pf0vf2")


def apart(machine: Machine) -> None:
    """GPUs below one switch, NICs below another, on both sockets; and one NIC straight below a root port."""
    machine.numa("0-31", "32-63", far=20)
    for numa, bus in ((0, 0x10), (1, 0x80)):
        host = root(f"0000:{bus:02x}", numa)
        up = machine.bridge(host / f"0000:{bus:02x}:01.0") / f"0000:{bus + 1:02x}:00.0"
        for i, port in enumerate(machine.switch(up, f"0000:{bus + 2:02x}:00.0", f"0000:{bus + 2:02x}:01.0")):
            machine.gpu(port / f"0000:{bus + 3 + i:02x}:00.0")
        up = machine.bridge(host / f"0000:{bus:02x}:02.0") / f"0000:{bus + 6:02x}:00.0"
        for i, port in enumerate(machine.switch(up, f"0000:{bus + 7:02x}:00.0", f"0000:{bus + 7:02x}:01.0")):
            machine.connectx(f"mlx5_{2 * numa + i}", port / f"0000:{bus + 8 + i:02x}:00.0", gbps=200)
    lone = machine.bridge(root("0000:40", 0) / "0000:40:01.0") / "0000:41:00.0"
    machine.connectx("mlx5_9", lone, gbps=200)


def laptop(machine: Machine) -> None:
    """Wi-Fi, an Ethernet socket without a cable, docker's bridge with a veth."""
    machine.numa("0-7")
    machine.lo()
    wifi = machine.pci(
        machine.bridge(root("0000:00") / "0000:00:1c.0") / "0000:01:00.0", WIFI, INTEL, 0x2723, "iwlwifi"
    )
    (machine.net("wlp1s0", wifi, uevent="DEVTYPE=wlan\nINTERFACE=wlp1s0") / "wireless").mkdir()
    wired = machine.pci(root("0000:00") / "0000:00:1f.6", ETHERNET, INTEL, 0x15BE, "e1000e")
    machine.net("enp0s31f6", wired, speed=-1, state="down")
    (machine.net("docker0", uevent="DEVTYPE=bridge") / "bridge").mkdir()
    machine.net("veth1a2b3c", master="docker0", iflink=99)


def container(machine: Machine) -> None:
    """What a pod sees: a veth, and half of the GPUs."""
    machine.numa("0-7")
    machine.lo()
    machine.net("eth0", speed=10000, iflink=77)
    for index in range(4):
        port = machine.bridge(root(f"0000:{index}0", 0) / f"0000:{index}0:01.0")
        machine.gpu(port / f"0000:{index}1:00.0")
        machine.pci(
            machine.bridge(root(f"0000:{index}0", 0) / f"0000:{index}0:02.0") / f"0000:{index}2:00.0",
            ETHERNET, MELLANOX, 0x1021, "mlx5_core",
        )  # fmt: skip
    for address in ("0000:21:00.0", "0000:31:00.0"):
        machine.driver_shows(address)


def bonded(machine: Machine, lag: bool = True) -> None:
    """One dual-port card, bonded; with lag, one RDMA device stands for both ports. A VLAN and a bridge on top."""
    machine.numa("0-31")
    machine.lo()
    port = machine.bridge(root("0000:16", 0) / "0000:16:00.0")
    for function in range(2):
        place = machine.pci(port / f"0000:17:00.{function}", ETHERNET, MELLANOX, 0x101D, "mlx5_core")
        machine.net(f"enp23s0f{function}np{function}", place, speed=100000, master="bond0")
    members = ("enp23s0f0np0", "enp23s0f1np1")
    (machine.net("bond0", speed=200000, lowers=members, uevent="DEVTYPE=bond") / "bonding").mkdir()
    machine.net("bond0.100", speed=200000, uevent="DEVTYPE=vlan", lowers=("bond0",))
    if lag:
        machine.rdma("mlx5_bond_0", port / "0000:17:00.0", layer="Ethernet", gbps=200, net="bond0")
    machine.rdma("rxe0", None, layer="Ethernet", gbps=2.5, parent="enp23s0f0np0")


def garbage(machine: Machine) -> None:
    """A machine whose files hold nonsense: numbers that are none, states nobody knows, links in circles."""
    machine.write(machine.sys / "devices/system/node/node0", cpulist="all of them", distance="near far")
    machine.write(machine.sys / "devices/system/node/nodeX", cpulist="0")
    machine.write(machine.sys / "devices/system/cpu", online="0-99999999999")
    gpu = machine.gpu(root("0000:00") / "0000:00:04.0")
    machine.write(machine.dir(gpu), numa_node="\x00\xff\x1b[31m", device="0x")
    machine.write(machine.proc / "driver/nvidia/gpus/0000:00:04.0", information="Model\nGPU UUID: \x1b]0;x\x07")
    machine.write(machine.proc / "driver/nvidia/gpus/not-an-address", information="")
    nic = machine.pci(root("0000:00") / "0000:00:05.0", ETHERNET, MELLANOX, driver="mlx5_core")
    machine.net("ens5", nic, state="up and away", carrier=7, mtu="big", address="here")
    machine.write(machine.dir(nic) / "net/ens5", speed="fast", carrier="maybe", type="-")
    machine.rdma("mlx5_0", nic, layer="Aether", state="ACTIVE!")
    machine.write(machine.dir(nic) / "infiniband/mlx5_0/ports/1", rate="\x80\x81", phys_state="9")
    machine.write(machine.dir(nic) / "infiniband/mlx5_0/ports/one", rate="1")
    machine.write(machine.dir(nic) / "infiniband/mlx5_0/ports/1/gids", **{"0": "zzz"})
    net = machine.sys / "class/net"
    (net / "loop").symlink_to("loop")
    (net / "outside").symlink_to("/")
    (net / "bonding_masters").write_text("")
    (net / "bad\x1b[2J name").mkdir()
    (net / "empty").mkdir()
    (machine.sys / "bus/pci/devices/0000:00:0z.0").symlink_to("/nowhere")
    (machine.sys / "class/infiniband/ghost").symlink_to("../../devices/gone")

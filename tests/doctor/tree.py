"""Machines made of files. `Tree` writes them, `FakeHost` is the doctor's view of one."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from crossrail.doctor.finding import Finding, Severity
from crossrail.doctor.host import Host, Space
from crossrail.doctor.probes import Library, Selftest, TransportTest

CAP_IPC_LOCK, CAP_SYS_PTRACE = 1 << 14, 1 << 19
GIB = 1 << 30


class FakeHost(Host):
    """A Host below a folder. What no file answers is an attribute that tests set."""

    def __init__(self, root: Path, environ: dict[str, str] | None = None) -> None:
        super().__init__(root, environ or {})
        self.limits: dict[int, tuple[int | None, int | None]] = {
            resource.RLIMIT_MEMLOCK: (None, None),
            resource.RLIMIT_NOFILE: (65536, 65536),
            resource.RLIMIT_NPROC: (None, None),
            resource.RLIMIT_AS: (None, None),
        }
        self.closed: set[str] = set()
        self.shm: Space | None = Space(16 * GIB, 15 * GIB)
        self.libraries: dict[str, Library] = {}
        self.attach: int | None = 0
        self.clock_ns = 50.0
        self.cores = frozenset(range(8))
        self.page = 4096
        self.user = 0
        self.python_version = (3, 11, 7)
        self.selftest = Selftest(
            version="1.0", installed_version="1.0", file="/x/crossrail/__init__.py", native_file="/x/_core.so",
            transports=[TransportTest("shm", "ok", "", 12.0)],
        )  # fmt: skip
        self.sites: list[Path] = []
        self.brought: list[Path] = []

    @property
    def uid(self) -> int:
        return self.user

    def rlimit(self, kind: int) -> tuple[int | None, int | None]:
        return self.limits[kind]

    def cpus(self) -> frozenset[int]:
        return self.cores

    @property
    def page_bytes(self) -> int:
        return self.page

    @property
    def python(self) -> tuple[int, int, int]:
        return self.python_version

    def space(self, path: str) -> Space | None:
        return self.shm

    def can_open(self, path: str) -> bool:
        return self.exists(path) and path not in self.closed

    def site_folders(self) -> list[Path]:
        return self.sites

    def libfabrics_of_packages(self) -> list[Path]:
        return self.brought

    def open_libraries(self, names: Sequence[str]) -> dict[str, Library]:
        missing = "cannot open shared object file: No such file or directory"
        return {name: self.libraries.get(name, Library(name, f"{name}: {missing}")) for name in names}

    def attach_errno(self) -> int | None:
        return self.attach

    def run_selftest(self, transports: Sequence[str]) -> Selftest:
        return self.selftest

    def clock_read_ns(self) -> float:
        return self.clock_ns


class Tree:
    """Writes the files. Paths are absolute, as on the machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, content: str | int | bytes) -> Tree:
        """Makes folders as needed; text ends in a newline, as in sysfs."""
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
        return self

    def remove(self, path: str) -> Tree:
        self.path(path).unlink()
        return self

    def link(self, path: str, target: str) -> Tree:
        """A relative symbolic link, as in sysfs. target: absolute path on the machine."""
        place = self.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.path(target), place.parent))
        return self

    # ---- devices

    def pci(self, address: str, vendor: int, device: int, class_code: int, driver: str, node: int = 0) -> str:
        """A function below a root port. Returns its directory."""
        bus = address.split(":")[1]
        base = f"/sys/devices/pci0000:00/0000:00:{bus}.0/{address}"
        for name, value in (("vendor", vendor), ("device", device), ("class", class_code)):
            self.write(f"{base}/{name}", f"{value:#x}")
        self.write(f"{base}/numa_node", node)
        for name, speed in (("current", "32.0"), ("max", "32.0")):
            self.write(f"{base}/{name}_link_speed", f"{speed} GT/s PCIe").write(f"{base}/{name}_link_width", 16)
        self.link(f"/sys/bus/pci/devices/{address}", base)
        if driver:
            self.path(f"/sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{base}/driver", f"/sys/bus/pci/drivers/{driver}")
        return base

    def netdev(self, name: str, pci: str = "", *, mtu: int = 9000, speed: int = 400_000, state: str = "up") -> Tree:
        """pci: directory of the function below; none makes it virtual."""
        base = f"{pci}/net/{name}" if pci else f"/sys/devices/virtual/net/{name}"
        values = {
            "operstate": state,
            "mtu": mtu,
            "speed": speed,
            "duplex": "full",
            "carrier": 1,
            "ifindex": 3,
            "iflink": 3,
        }
        for key, value in values.items():
            self.write(f"{base}/{key}", value)
        if pci:
            self.link(f"{base}/device", pci)
        return self.link(f"/sys/class/net/{name}", base)

    def gid(self, port: str, index: int, address: str, kind: str, netdev: str) -> Tree:
        self.write(f"{port}/gids/{index}", address)
        self.write(f"{port}/gid_attrs/types/{index}", kind)
        return self.write(f"{port}/gid_attrs/ndevs/{index}", netdev)

    def rdma(
        self, name: str, pci: str, netdev: str = "", *, layer: str = "Ethernet", rate: str = "400 Gb/sec (4X NDR)"
    ) -> str:
        """An active device of one port with a routable GID. Returns the port's directory."""
        index = len(list(self.path("/sys/class/infiniband").glob("*")))
        base = f"{pci}/infiniband/{name}" if pci else f"/sys/devices/virtual/infiniband/{name}"
        if pci:
            self.link(f"{base}/device", pci)
        else:
            self.write(f"{base}/parent", netdev)
        self.link(f"/sys/class/infiniband/{name}", base)
        self.write(f"{base}/fw_ver", "28.43.1014")
        port = f"{base}/ports/1"
        self.write(f"{port}/state", "4: ACTIVE").write(f"{port}/phys_state", "5: LinkUp")
        self.write(f"{port}/link_layer", layer).write(f"{port}/rate", rate)
        if netdev:
            self.gid(port, 0, "fe80:0000:0000:0000:0a00:00ff:fe00:0001", "RoCE v2", netdev)
            self.gid(port, 1, "0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2", netdev)
        for counter in ("counters/link_downed", "hw_counters/packet_seq_err"):
            self.write(f"{port}/{counter}", 0)
        self.write(f"/sys/class/infiniband_verbs/uverbs{index}/ibdev", name)
        self.write(f"/dev/infiniband/uverbs{index}", "")
        self.write("/sys/module/ib_uverbs/refcnt", 1)
        return port

    def connectx(self, number: int) -> str:
        """mlx5_N with netdev railN. Returns the port's directory."""
        pci = self.pci(f"0000:{number + 1:02x}:00.0", 0x15B3, 0x1021, 0x020000, "mlx5_core")
        self.netdev(f"rail{number}", pci)
        return self.rdma(f"mlx5_{number}", pci, f"rail{number}")

    def virtual_function(self, number: int, of: str, *, netdev: str = "", state: str = "4: ACTIVE") -> str:
        """mlx5_N of the physical function at a PCI address. netdev: none where a guest has it. Returns the port's
        directory.
        """
        pci = self.pci(f"{of[:-4]}{number // 8:02x}.{number % 8}", 0x15B3, 0x101E, 0x020000, "mlx5_core")
        self.link(f"{pci}/physfn", f"/sys/bus/pci/devices/{of}")
        if netdev:
            self.netdev(netdev, pci)
        port = self.rdma(f"mlx5_{number}", pci, netdev)
        self.write(f"{port}/state", state)
        return port

    def efa(self, number: int) -> str:
        """Returns the port's directory."""
        pci = self.pci(f"0000:{number + 0x20:02x}:00.0", 0x1D0F, 0xEFA1, 0x020000, "efa")
        return self.rdma(f"efa_{number}", pci, layer="Unspecified", rate="100 Gb/sec (4X EDR)")

    def gpu(self, number: int, *, is_open: bool = True) -> str:
        """With driver and device files. Returns its PCI directory."""
        base = self.pci(f"0000:{number + 0x40:02x}:00.0", 0x10DE, 0x2330, 0x030200, "nvidia")
        self.write(f"{base}/resource", "0x0 0x0 0x0\n0x0000380000000000 0x0000381fffffffff 0x000000000014220c")
        for name in (f"nvidia{number}", "nvidiactl", "nvidia-uvm"):
            self.write(f"/dev/{name}", "")
        kind = "Open Kernel Module for x86_64" if is_open else "x86_64 Kernel Module"
        self.write("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX {kind}  570.86.15  Release Build")
        self.write(f"/proc/driver/nvidia/gpus/{base.rpartition('/')[2]}/information", "Model: NVIDIA H100")
        return base

    # ---- whole machines

    def plain(self) -> Tree:
        """A healthy server with one NIC, no RDMA, no GPU."""
        settings = {
            "/proc/sys/kernel/osrelease": "6.8.0-45-generic",
            "/proc/sys/kernel/numa_balancing": 0,
            "/proc/sys/kernel/yama/ptrace_scope": 0,
            "/proc/sys/vm/overcommit_memory": 0,
            "/proc/sys/net/core/rmem_max": 16 << 20,
            "/proc/sys/net/core/wmem_max": 16 << 20,
            "/proc/sys/net/core/somaxconn": 4096,
            "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t33554432",
            "/proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t16777216",
            "/proc/sys/net/ipv4/tcp_mem": "383868\t511824\t767736",
            "/proc/sys/net/ipv4/tcp_window_scaling": 1,
            "/proc/sys/net/ipv4/tcp_slow_start_after_idle": 0,
            "/proc/sys/net/ipv4/tcp_congestion_control": "cubic",
            "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
            "/proc/net/sockstat": "sockets: used 100\nTCP: inuse 5 orphan 0 tw 0 alloc 7 mem 3",
            "/proc/net/softnet_stat": "00338750 00000000 00000005\n00247686 00000000 0000000b",
            "/proc/net/route": "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
            "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0",
            "/proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\nSeccomp:\t0",
            "/proc/self/uid_map": "         0          0 4294967295",
            "/proc/self/cgroup": "0::/user.slice",
            "/proc/1/cgroup": "0::/init.scope",
            "/sys/fs/cgroup/cgroup.procs": 1,
            "/proc/meminfo": "MemTotal:       65536000 kB\nCommitLimit:    32768000 kB\nCommitted_AS:    1000000 kB",
            "/proc/loadavg": "0.10 0.20 0.30 1/100 1234",
            "/proc/stat": "cpu  1000 0 500 9000 10 0 5 0 0 0\ncpu0 1 2 3",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
            "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
            "/sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet acpi_pm",
            "/sys/devices/system/cpu/online": "0-7",
            "/sys/devices/system/node/node0/cpulist": "0-7",
            "/etc/os-release": 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"',
            "/dev/shm/.keep": "",
        }
        for path, value in settings.items():
            self.write(path, value)
        self.netdev("eth0", self.pci("0000:f0:00.0", 0x8086, 0x1572, 0x020000, "i40e"), mtu=1500, speed=10_000)
        return self

    def gpu_server(self, nics: int = 2, gpus: int = 2) -> Tree:
        """A healthy server with ConnectX cards and GPUs."""
        self.plain()
        for number in range(nics):
            self.connectx(number)
        for number in range(gpus):
            self.gpu(number)
        self.write("/dev/gdrdrv", "").write("/sys/module/gdrdrv/refcnt", 0)
        return self


def severities(findings: Iterable[Finding]) -> dict[str, Severity]:
    """The worst of each check."""
    found: dict[str, Severity] = {}
    for finding in findings:
        if finding.check not in found or finding.severity.rank < found[finding.check].rank:
            found[finding.check] = finding.severity
    return found


def the(findings: Iterable[Finding], check: str) -> Finding:
    """The worst finding of that name."""
    return min((f for f in findings if f.check == check), key=lambda finding: finding.severity.rank)


Setup = Callable[[Tree, FakeHost], object]

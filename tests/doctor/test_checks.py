"""Every check on a made-up machine, healthy and not. One row: what is changed, and what must be said of it.

The healthy machines are Tree.plain() and Tree.gpu_server(); on them no check may find a warning or an error.
"""

import resource
import struct
from pathlib import Path

import pytest

from crossrail.doctor.finding import Severity
from crossrail.doctor.host import Space
from crossrail.doctor.probes import Library, RdmaPort, Selftest, TransportTest
from crossrail.doctor.report import run_checks
from crossrail.doctor.topics import TOPICS
from tests.doctor.tree import CAP_IPC_LOCK, GIB, FakeHost, Setup, Tree, severities, the

OK, NOTE, WARNING, ERROR = Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR
MEMLOCK, NOFILE = resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE
RP = "/proc/sys/net/ipv4/conf"
THP = "/sys/kernel/mm/transparent_hugepage"
CPU = "/sys/devices/system/cpu"
CLOCK = "/sys/devices/system/clocksource/clocksource0"
PORT0 = "/sys/class/infiniband/mlx5_0/ports/1"
PORT1 = "/sys/class/infiniband/mlx5_1/ports/1"
NIC0 = "/sys/bus/pci/devices/0000:01:00.0"
GPU0 = "/sys/bus/pci/devices/0000:40:00.0"

SUBNET = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n"
    "rail0\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\n"
    "rail1\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0"
)


def opened(host: FakeHost, name: str, **fields: object) -> None:
    host.libraries[name] = Library(name, path=f"/usr/lib/{name}.1.2", **fields)  # type: ignore[arg-type]


def equip(host: FakeHost, *devices: str) -> None:
    """All libraries of a server with RDMA and GPUs."""
    opened(host, "libibverbs.so.1", devices=devices)
    opened(host, "libmlx5.so.1")
    opened(host, "libefa.so.1")
    opened(host, "libcuda.so.1", version=(12, 8))
    opened(host, "libgdrapi.so.2", version=(2, 5))
    opened(host, "libfabric.so.1", version=(2, 5))


def write(path: str, content: str | int | bytes) -> Setup:
    return lambda tree, host: tree.write(path, content)


def transport(name: str, state: str, rate: float = 0.0) -> Setup:
    def set_up(tree: Tree, host: FakeHost) -> None:
        host.selftest = Selftest(
            version="1.0", installed_version="1.0", transports=[TransportTest(name, state, "because", rate)]
        )

    return set_up


def rails(*ports: RdmaPort) -> Setup:
    def set_up(tree: Tree, host: FakeHost) -> None:
        host.selftest = Selftest(version="1.0", installed_version="1.0", ports=list(ports), chosen=("mlx5_0:1",))

    return set_up


def attribute(name: str, value: object) -> Setup:
    return lambda tree, host: setattr(host, name, value)


def environment(**values: str) -> Setup:
    return lambda tree, host: setattr(host, "environ", values)


def limit(kind: int, soft: int | None, hard: int | None = None) -> Setup:
    def set_up(tree: Tree, host: FakeHost) -> None:
        host.limits[kind] = (soft, hard)

    return set_up


def library(name: str, error: str = "", **fields: object) -> Setup:
    def set_up(tree: Tree, host: FakeHost) -> None:
        host.libraries[name] = Library(name, error, "" if error else f"/usr/lib/{name}.9", **fields)  # type: ignore[arg-type]

    return set_up


def acs(control: int) -> bytes:
    """Configuration space of a bridge: one extended capability, then ACS."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)
    struct.pack_into("<IHH", config, 0x140, 0x000D | 1 << 16, 0, control)
    return bytes(config)


def bridge(config: bytes) -> Setup:
    def set_up(tree: Tree, host: FakeHost) -> None:
        base = tree.pci("0000:70:00.0", 0x1000, 0xC010, 0x060400, "pcieport")
        tree.write(f"{base}/config", config)

    return set_up


class Case:
    """name: what is the case. check, severity: what must be said; None: the check must be silent. changes: in order."""

    def __init__(self, name: str, check: str, severity: Severity | None, *changes: Setup) -> None:
        self.name = name
        self.check = check
        self.severity = severity
        self._changes = changes

    def apply(self, tree: Tree, host: FakeHost) -> None:
        for change in self._changes:
            change(tree, host)

    @property
    def topic(self) -> str:
        return self.check.partition(".")[0]


def over(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


# --- healthy machines ---


def test_plain_server_is_healthy(tree: Tree, host: FakeHost) -> None:
    report = run_checks(host)

    assert report.count(ERROR) == report.count(WARNING) == 0, report.findings
    notes = {finding.check for finding in report.findings if finding.severity is NOTE}
    assert notes == {"libraries.libibverbs", "libraries.libfabric", "rdma.devices", "environment.secret"}


def test_gpu_server_is_healthy(root: Path) -> None:
    Tree(root).gpu_server()
    host = FakeHost(root)
    equip(host, "mlx5_0", "mlx5_1")
    host.selftest = Selftest(
        version="1.0",
        installed_version="1.0",
        transports=[TransportTest(name, "ok", "", 10.0) for name in ("shm", "tcp", "verbs")],
    )

    report = run_checks(host)

    bad = [finding for finding in report.findings if finding.severity in (ERROR, WARNING)]
    assert bad == []


def test_every_check_that_is_not_ok_says_what_was_seen(tree: Tree, host: FakeHost) -> None:
    for finding in run_checks(host).findings:
        if finding.severity is not OK:
            assert finding.seen, finding


# --- a plain server with one thing changed ---

PLAIN = [
    # crossrail
    Case("shm works", "crossrail.shm", OK, transport("shm", "ok", 20.0)),
    Case("shm is slow", "crossrail.shm", WARNING, transport("shm", "ok", 0.3)),
    Case("shm fails", "crossrail.shm", ERROR, transport("shm", "failed")),
    Case("shm hangs", "crossrail.shm", ERROR, transport("shm", "unfinished")),
    Case("tcp fails", "crossrail.tcp", ERROR, transport("tcp", "failed")),
    Case("Python files of another build", "crossrail.native", ERROR, transport("shm", "misfit")),
    Case("tcp not built", "crossrail.tcp", WARNING, transport("tcp", "absent")),
    Case(
        "Soft-RoCE as a rail", "crossrail.rails", OK, rails(RdmaPort("verbs", "rxe0:1", "eth0", "10.0.0.1", "", True))
    ),
    Case("verbs not built, no NIC", "crossrail.absent", NOTE, transport("verbs", "absent")),
    Case("verbs does not open, no NIC", "crossrail.verbs", NOTE, transport("verbs", "failed")),
    Case(
        "native module broken",
        "crossrail.native",
        ERROR,
        attribute("selftest", Selftest(error="ImportError: GLIBC_2.38")),
    ),
    Case(
        "stale native module",
        "crossrail.version",
        WARNING,
        attribute("selftest", Selftest(version="1.0", installed_version="2.0")),
    ),
    Case("old Python", "crossrail.python", ERROR, attribute("python_version", (3, 9, 2))),
    # libraries
    Case("libfabric too old", "libraries.libfabric", NOTE, library("libfabric.so.1", version=(1, 17))),
    Case("libfabric new", "libraries.libfabric", OK, library("libfabric.so.1", version=(2, 1))),
    Case(
        "libibverbs broken",
        "libraries.libibverbs",
        WARNING,
        library("libibverbs.so.1", "libibverbs.so.1: undefined symbol: x"),
    ),
    Case(
        "a dependency of libibverbs missing",
        "libraries.libibverbs",
        WARNING,
        library("libibverbs.so.1", "libnl-3.so.200: cannot open shared object file: No such file or directory"),
    ),
    Case("libibverbs there", "libraries.libibverbs", OK, library("libibverbs.so.1", devices=())),
    Case("libcuda without a GPU", "libraries.libcuda", OK, library("libcuda.so.1", version=(12, 4))),
    # rdma
    Case(
        "EFA without driver",
        "rdma.efa-driver",
        ERROR,
        lambda tree, host: tree.pci("0000:20:00.0", 0x1D0F, 0xEFA1, 0x020000, ""),
    ),
    Case(
        "ConnectX without RDMA driver",
        "rdma.mlx5-driver",
        ERROR,
        lambda tree, host: tree.pci("0000:01:00.0", 0x15B3, 0x1021, 0x020000, "mlx5_core"),
    ),
    Case("Soft-RoCE", "rdma.software", NOTE, lambda tree, host: tree.rdma("rxe0", "", "eth0", rate="10 Gb/sec (4X)")),
    # gpu
    Case(
        "GPU without driver",
        "gpu.devices",
        WARNING,
        lambda tree, host: tree.pci("0000:40:00.0", 0x10DE, 0x2330, 0x030200, ""),
    ),
    Case(
        "GPU's audio function",
        "gpu.devices",
        OK,
        lambda tree, host: tree.pci("0000:40:00.1", 0x10DE, 0x22BA, 0x040300, ""),
    ),
    # network
    Case("eth0 down", "network.interfaces", NOTE, write("/sys/class/net/eth0/operstate", "down")),
    Case(
        "driver without link state",
        "network.interfaces",
        OK,
        write("/sys/class/net/eth0/operstate", "unknown"),
        write("/sys/class/net/eth0/carrier", 1),
    ),
    Case("half duplex", "network.duplex", WARNING, write("/sys/class/net/eth0/duplex", "half")),
    Case(
        "second NIC down",
        "network.down",
        NOTE,
        lambda tree, host: tree.netdev(
            "eth1", tree.pci("0000:f1:00.0", 0x8086, 0x1572, 0x020000, "i40e"), state="down"
        ),
    ),
    Case(
        "MTU mismatch",
        "network.mtu",
        WARNING,
        lambda tree, host: tree.netdev(
            "eth1", tree.pci("0000:f1:00.0", 0x8086, 0x1572, 0x020000, "i40e"), mtu=9000, speed=10_000
        ),
    ),
    Case(
        "speed mismatch",
        "network.speed",
        WARNING,
        lambda tree, host: tree.netdev(
            "eth1", tree.pci("0000:f1:00.0", 0x8086, 0x1572, 0x020000, "i40e"), mtu=1500, speed=1000
        ),
    ),
    Case("100 Gb/s with MTU 1500", "network.tcp-mtu", NOTE, write("/sys/class/net/eth0/speed", 100_000)),
    Case("backlog drops", "network.drops", NOTE, write("/proc/net/softnet_stat", "00338750 0000001f 00000005")),
    Case(
        "conntrack nearly full",
        "network.conntrack",
        WARNING,
        write("/proc/sys/net/netfilter/nf_conntrack_count", 900),
        write("/proc/sys/net/netfilter/nf_conntrack_max", 1000),
    ),
    Case(
        "conntrack empty",
        "network.conntrack",
        OK,
        write("/proc/sys/net/netfilter/nf_conntrack_count", 9),
        write("/proc/sys/net/netfilter/nf_conntrack_max", 1000),
    ),
    # tcp
    Case("tiny send buffers", "tcp.tcp-wmem", WARNING, write("/proc/sys/net/ipv4/tcp_wmem", "4096 16384 262144")),
    Case("small receive buffers", "tcp.tcp-rmem", NOTE, write("/proc/sys/net/ipv4/tcp_rmem", "4096 16384 2097152")),
    Case("no window scaling", "tcp.window-scaling", WARNING, write("/proc/sys/net/ipv4/tcp_window_scaling", 0)),
    Case("default rmem_max", "tcp.buffer-caps", OK, write("/proc/sys/net/core/rmem_max", 212992)),
    Case("little memory for TCP", "tcp.memory", NOTE, write("/proc/sys/net/ipv4/tcp_mem", "1000 2000 4000")),
    Case(
        "TCP's memory in use",
        "tcp.memory",
        WARNING,
        write("/proc/net/sockstat", "TCP: inuse 5 orphan 0 tw 0 alloc 7 mem 600000"),
    ),
    Case("bbr", "tcp.congestion-control", NOTE, write("/proc/sys/net/ipv4/tcp_congestion_control", "bbr")),
    Case("dctcp", "tcp.congestion-control", OK, write("/proc/sys/net/ipv4/tcp_congestion_control", "dctcp")),
    Case(
        "slow start after idle",
        "tcp.slow-start-after-idle",
        NOTE,
        write("/proc/sys/net/ipv4/tcp_slow_start_after_idle", 1),
    ),
    Case("small accept queue", "tcp.somaxconn", NOTE, write("/proc/sys/net/core/somaxconn", 128)),
    Case("few local ports", "tcp.ports", WARNING, write("/proc/sys/net/ipv4/ip_local_port_range", "50000 51000")),
    # limits
    Case("locked memory limited, no RDMA", "limits.memlock", OK, limit(MEMLOCK, 8 << 20)),
    Case("1,024 open files", "limits.open-files", WARNING, limit(NOFILE, 1024, 524288)),
    Case("1,024 open files, no more to have", "limits.open-files", WARNING, limit(NOFILE, 1024, 1024)),
    Case("open files unlimited", "limits.open-files", OK, limit(NOFILE, None)),
    Case("docker's /dev/shm", "limits.dev-shm", NOTE, attribute("shm", Space(64 << 20, 64 << 20))),
    Case("/dev/shm full", "limits.dev-shm", NOTE, attribute("shm", Space(16 * GIB, 1 << 20))),
    Case("no /dev/shm", "limits.dev-shm", NOTE, attribute("shm", None)),
    Case(
        "no huge pages for memfd",
        "limits.huge-pages-shared",
        NOTE,
        write(f"{THP}/shmem_enabled", "always within_size advise [never] deny force"),
    ),
    Case("no huge pages", "limits.huge-pages", NOTE, write(f"{THP}/enabled", "always madvise [never]")),
    Case("strict accounting", "limits.overcommit", NOTE, write("/proc/sys/vm/overcommit_memory", 2)),
    Case(
        "memory limit, v2",
        "limits.memory-group",
        WARNING,
        write("/sys/fs/cgroup/user.slice/memory.max", 4 * GIB),
        write("/sys/fs/cgroup/user.slice/memory.current", 3 * GIB),
    ),
    Case("memory limit of a parent group", "limits.memory-group", WARNING, write("/sys/fs/cgroup/memory.max", 1 * GIB)),
    Case("memory limit with room", "limits.memory-group", OK, write("/sys/fs/cgroup/user.slice/memory.max", 64 * GIB)),
    Case("no memory limit, v2", "limits.memory-group", OK, write("/sys/fs/cgroup/user.slice/memory.max", "max")),
    Case(
        "memory limit, v1 in a container",
        "limits.memory-group",
        WARNING,
        write("/proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc"),
        write("/sys/fs/cgroup/memory/memory.limit_in_bytes", GIB),
    ),
    Case(
        "no memory limit, v1",
        "limits.memory-group",
        OK,
        write("/proc/self/cgroup", "4:memory:/a"),
        write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 9223372036854771712),
    ),
    # container
    Case("docker", "container.kind", OK, write("/.dockerenv", "")),
    Case(
        "bridge network",
        "container.network",
        NOTE,
        lambda tree, host: (
            tree.remove("/sys/class/net/eth0"),
            tree.netdev("eth0"),
            tree.write("/sys/class/net/eth0/iflink", 17),
        ),
    ),
    Case("yama", "container.attach", NOTE, attribute("attach", 1), write("/proc/sys/kernel/yama/ptrace_scope", 1)),
    Case("seccomp", "container.attach", NOTE, attribute("attach", 1), write("/proc/self/status", "Seccomp:\t2")),
    Case(
        "pairs of interfaces within this namespace",
        "container.network",
        None,
        lambda tree, host: tree.remove("/sys/class/net/eth0"),
        lambda tree, host: (tree.netdev("nic0"), tree.netdev("port0")),
        write("/sys/class/net/nic0/ifindex", 5),
        write("/sys/class/net/nic0/iflink", 6),
        write("/sys/class/net/port0/ifindex", 6),
        write("/sys/class/net/port0/iflink", 5),
    ),
    Case("attach not answered", "container.attach", NOTE, attribute("attach", None)),
    Case("kernel 5.10", "container.kernel", NOTE, write("/proc/sys/kernel/osrelease", "5.10.0-8-amd64")),
    Case("kernel 4.18", "container.kernel", WARNING, write("/proc/sys/kernel/osrelease", "4.18.0-553.el8")),
    # cpu
    Case("one core", "cpu.count", WARNING, attribute("cores", frozenset({3}))),
    Case("busy machine", "cpu.load", NOTE, write("/proc/loadavg", "40.10 20.2 10.3 1/100 1")),
    Case("quota of half a core", "cpu.quota", NOTE, write("/sys/fs/cgroup/user.slice/cpu.max", "50000 100000")),
    Case(
        "quota, throttled",
        "cpu.quota",
        WARNING,
        write("/sys/fs/cgroup/user.slice/cpu.max", "800000 100000"),
        write("/sys/fs/cgroup/user.slice/cpu.stat", "usage_usec 5\nnr_periods 100\nnr_throttled 7\nthrottled_usec 9"),
    ),
    Case(
        "quota, v1",
        "cpu.quota",
        NOTE,
        write("/proc/self/cgroup", "3:cpu,cpuacct:/docker/abc"),
        write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", 100000),
        write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", 100000),
    ),
    Case(
        "no quota, v1",
        "cpu.quota",
        OK,
        write("/proc/self/cgroup", "3:cpu,cpuacct:/"),
        write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1),
        write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100000),
    ),
    Case("governor powersave", "cpu.governor", NOTE, write(f"{CPU}/cpu0/cpufreq/scaling_governor", "powersave")),
    Case(
        "governor powersave of intel_pstate",
        "cpu.governor",
        OK,
        write(f"{CPU}/cpu0/cpufreq/scaling_governor", "powersave"),
        write(f"{CPU}/cpu0/cpufreq/scaling_driver", "intel_pstate"),
    ),
    Case("governor performance", "cpu.governor", OK, write(f"{CPU}/cpu0/cpufreq/scaling_governor", "performance")),
    Case(
        "deep sleep",
        "cpu.sleep-states",
        NOTE,
        write(f"{CPU}/cpu0/cpuidle/state3/latency", 133),
        write(f"{CPU}/cpu0/cpuidle/state3/name", "C6"),
    ),
    Case(
        "deep sleep switched off",
        "cpu.sleep-states",
        OK,
        write(f"{CPU}/cpu0/cpuidle/state3/latency", 133),
        write(f"{CPU}/cpu0/cpuidle/state3/disable", 1),
        write(f"{CPU}/cpu0/cpuidle/state1/latency", 2),
    ),
    Case("clock hpet", "cpu.clock", WARNING, write(f"{CLOCK}/current_clocksource", "hpet")),
    Case("clock tsc, and yet slow", "cpu.clock", WARNING, attribute("clock_ns", 900.0)),
    Case("clock of KVM", "cpu.clock", OK, write(f"{CLOCK}/current_clocksource", "kvm-clock")),
    Case("NUMA balancing on one node", "cpu.numa", OK, write("/proc/sys/kernel/numa_balancing", 1)),
    Case(
        "NUMA balancing",
        "cpu.numa-balancing",
        NOTE,
        write("/proc/sys/kernel/numa_balancing", 1),
        write("/sys/devices/system/node/node1/cpulist", "8-15"),
    ),
    Case("stolen time", "cpu.steal", NOTE, write("/proc/stat", "cpu  1000 0 500 9000 10 0 5 2000 0 0")),
    # environment
    Case("no secret", "environment.secret", NOTE, environment()),
    Case("a good secret", "environment.secret", OK, environment(CROSSRAIL_SECRET="0123456789abcdef" * 4)),
    Case("a short secret", "environment.secret", WARNING, environment(CROSSRAIL_SECRET="hunter2")),
    Case("a secret too long", "environment.secret", ERROR, environment(CROSSRAIL_SECRET="x" * 1025)),
    Case("a secret with a newline", "environment.secret", WARNING, environment(CROSSRAIL_SECRET="abcdef" * 8 + "\n")),
    Case("FI_PROVIDER", "environment.fi-provider", NOTE, environment(FI_PROVIDER="tcp")),
    Case("EFA's RDMA off", "environment.fi-efa-rdma", WARNING, environment(FI_EFA_USE_DEVICE_RDMA="0")),
    Case("libfabric's interface", "environment.fi-tcp-iface", NOTE, environment(FI_TCP_IFACE="eth0")),
    Case("libfabric logs", "environment.fi-log", NOTE, environment(FI_LOG_LEVEL="Debug")),
    Case("fork safety", "environment.fork-safe", NOTE, environment(RDMAV_FORK_SAFE="1")),
    Case("NCCL's variables", "environment.foreign", NOTE, environment(NCCL_IB_HCA="mlx5_0")),
    Case("LD_PRELOAD of what is not there", "environment.ld-preload", NOTE, environment(LD_PRELOAD="/opt/gone.so")),
    Case("LD_PRELOAD of libvma", "environment.ld-preload", WARNING, environment(LD_PRELOAD="libvma.so")),
    Case("LD_PRELOAD of an allocator", "environment.ld-preload", NOTE, environment(LD_PRELOAD="libjemalloc.so.2")),
    Case("LD_LIBRARY_PATH", "environment.ld-library-path", NOTE, environment(LD_LIBRARY_PATH="/opt/lib")),
    Case(
        "expandable segments",
        "environment.expandable-segments",
        NOTE,
        environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments: True"),
    ),
    Case("blocking launches", "environment.cuda-blocking", NOTE, environment(CUDA_LAUNCH_BLOCKING="1")),
    Case("Python's debugging", "environment.python-debug", NOTE, environment(PYTHONASYNCIODEBUG="1")),
    Case("CUDA_VISIBLE_DEVICES without a GPU", "environment.cuda-visible", None, environment(CUDA_VISIBLE_DEVICES="0")),
]


@over(PLAIN)
def test_plain_server(tree: Tree, host: FakeHost, case: Case) -> None:
    case.apply(tree, host)

    found = severities(run_checks(host, [case.topic]).findings)

    assert found.pop(case.check, None) is case.severity
    assert {check: s for check, s in found.items() if s in (WARNING, ERROR)} == {}, "nothing else is wrong"


# --- a server with two ConnectX cards and two GPUs, with one thing changed ---

GPU_SERVER = [
    # crossrail
    Case("verbs not built", "crossrail.verbs", WARNING, transport("verbs", "absent")),
    Case("verbs fails", "crossrail.verbs", ERROR, transport("verbs", "failed")),
    Case("ports are rails", "crossrail.rails", OK, rails(RdmaPort("verbs", "mlx5_0:1", "rail0", "10.77.0.1"))),
    Case(
        "a port that is no rail",
        "crossrail.no-rail",
        WARNING,
        rails(RdmaPort("verbs", "mlx5_0:1"), RdmaPort("verbs", "mlx5_1:1", trouble="port down")),
    ),
    Case(
        "a port that only the other transport can use",
        "crossrail.no-rail",
        None,
        rails(RdmaPort("verbs", "efa_0:1", trouble="EFA"), RdmaPort("ofi", "efa_0-rdm")),
    ),
    Case("ofi not built, no EFA", "crossrail.absent", NOTE, transport("ofi", "absent")),
    # libraries
    Case("no libibverbs", "libraries.libibverbs", ERROR, lambda tree, host: host.libraries.pop("libibverbs.so.1")),
    Case(
        "libibverbs lists nothing",
        "libraries.verbs-devices",
        ERROR,
        lambda tree, host: opened(host, "libibverbs.so.1", devices=()),
    ),
    Case("no libmlx5", "libraries.libmlx5", ERROR, lambda tree, host: host.libraries.pop("libmlx5.so.1")),
    Case("no libcuda", "libraries.libcuda", ERROR, lambda tree, host: host.libraries.pop("libcuda.so.1")),
    Case("no libgdrapi", "libraries.libgdrapi", NOTE, lambda tree, host: host.libraries.pop("libgdrapi.so.2")),
    # rdma
    Case(
        "one port down",
        "rdma.ports",
        WARNING,
        write(f"{PORT1}/state", "1: DOWN"),
        write(f"{PORT1}/phys_state", "3: Disabled"),
    ),
    Case("all ports down", "rdma.ports", ERROR, write(f"{PORT0}/state", "1: DOWN"), write(f"{PORT1}/state", "1: DOWN")),
    Case(
        "no subnet manager",
        "rdma.ports",
        WARNING,
        write(f"{PORT1}/state", "2: INIT"),
        write(f"{PORT1}/link_layer", "InfiniBand"),
    ),
    Case("degraded rate", "rdma.rates", WARNING, write(f"{PORT1}/rate", "100 Gb/sec (4X EDR)")),
    Case("only link-local GIDs", "rdma.gids", WARNING, lambda tree, host: tree.remove(f"{PORT0}/gids/1")),
    Case(
        "only RoCE v1",
        "rdma.gids",
        ERROR,
        write(f"{PORT0}/gid_attrs/types/0", "IB/RoCE v1"),
        write(f"{PORT0}/gid_attrs/types/1", "IB/RoCE v1"),
    ),
    Case(
        "no GID",
        "rdma.gids",
        ERROR,
        lambda tree, host: (tree.remove(f"{PORT0}/gids/0"), tree.remove(f"{PORT0}/gids/1")),
    ),
    Case("no device file", "rdma.device-files", ERROR, lambda tree, host: tree.remove("/dev/infiniband/uverbs1")),
    Case("device file closed", "rdma.device-files", ERROR, attribute("closed", {"/dev/infiniband/uverbs0"})),
    Case(
        "ib_uverbs not loaded",
        "rdma.uverbs-module",
        ERROR,
        lambda tree, host: (tree.remove("/sys/module/ib_uverbs/refcnt"), tree.path("/sys/module/ib_uverbs").rmdir()),
    ),
    Case(
        "interface in another namespace",
        "rdma.namespace",
        ERROR,
        lambda tree, host: tree.remove("/sys/class/net/rail1"),
    ),
    Case("flapped link", "rdma.counters", NOTE, write(f"{PORT0}/counters/link_downed", 3)),
    Case("resent packets", "rdma.counters", NOTE, write(f"{PORT0}/hw_counters/packet_seq_err", 12)),
    Case("two firmwares", "rdma.firmware", NOTE, write("/sys/class/infiniband/mlx5_1/fw_ver", "28.39.1002")),
    Case("PCIe x8", "rdma.pcie-links", WARNING, write(f"{NIC0}/current_link_width", 8)),
    Case("PCIe gen 3", "rdma.pcie-links", WARNING, write(f"{NIC0}/current_link_speed", "8.0 GT/s PCIe")),
    Case("idle GPU at low PCIe speed", "rdma.pcie-links", OK, write(f"{GPU0}/current_link_speed", "2.5 GT/s PCIe")),
    Case("GPU with fewer lanes", "rdma.pcie-links", WARNING, write(f"{GPU0}/current_link_width", 4)),
    Case("a virtual function does not say", "rdma.pcie-links", OK, write(f"{NIC0}/current_link_speed", "Unknown")),
    Case("IOMMU translates", "rdma.iommu", WARNING, write(f"{NIC0}/iommu_group/type", "DMA-FQ")),
    Case("IOMMU passes through", "rdma.iommu", OK, write(f"{NIC0}/iommu_group/type", "identity")),
    Case("ACS redirects", "rdma.acs", WARNING, bridge(acs(0x001D))),
    Case("ACS off", "rdma.acs", OK, bridge(acs(0x0000))),
    Case("ACS unreadable", "rdma.acs", NOTE, bridge(bytes(64))),
    # gpu
    Case(
        "no device files",
        "gpu.devices",
        ERROR,
        lambda tree, host: (tree.remove("/dev/nvidia0"), tree.remove("/dev/nvidia1")),
    ),
    Case("device file closed to us", "gpu.devices", ERROR, attribute("closed", {"/dev/nvidia1"})),
    Case("proprietary driver, no peermem", "gpu.direct", ERROR, lambda tree, host: tree.gpu(7, is_open=False)),
    Case(
        "proprietary driver with peermem",
        "gpu.direct",
        OK,
        lambda tree, host: (tree.gpu(7, is_open=False), tree.write("/sys/module/nvidia_peermem/refcnt", 0)),
    ),
    Case("old kernel, no peermem", "gpu.direct", ERROR, write("/proc/sys/kernel/osrelease", "5.10.0")),
    Case("no gdrdrv", "gpu.gdrcopy", NOTE, lambda tree, host: tree.remove("/dev/gdrdrv")),
    Case("gdrdrv closed", "gpu.gdrcopy", NOTE, attribute("closed", {"/dev/gdrdrv"})),
    Case("small BAR", "gpu.bar", WARNING, write(f"{GPU0}/resource", "0x0000000000000000 0x000000000fffffff 0x14220c")),
    # network
    Case(
        "RoCE on MTU 1500",
        "network.roce-mtu",
        WARNING,
        write("/sys/class/net/rail0/mtu", 1500),
        write("/sys/class/net/rail1/mtu", 1500),
    ),
    Case("rails with different MTUs", "network.mtu", WARNING, write("/sys/class/net/rail1/mtu", 4300)),
    Case(
        "one subnet, strict filter",
        "network.one-subnet",
        WARNING,
        write("/proc/net/route", SUBNET),
        write(f"{RP}/all/rp_filter", 1),
        write(f"{RP}/all/arp_ignore", 1),
    ),
    Case(
        "one subnet, loose filter wins",
        "network.one-subnet",
        None,
        write("/proc/net/route", SUBNET),
        write(f"{RP}/all/rp_filter", 2),
        write(f"{RP}/rail0/rp_filter", 1),
        write(f"{RP}/all/arp_ignore", 1),
    ),
    Case("one subnet, ARP", "network.arp", WARNING, write("/proc/net/route", SUBNET), write(f"{RP}/all/rp_filter", 0)),
    # limits
    Case("8 MiB of locked memory", "limits.memlock", ERROR, limit(MEMLOCK, 8 << 20, 8 << 20)),
    Case("16 GiB of locked memory", "limits.memlock", WARNING, limit(MEMLOCK, 16 * GIB, None)),
    Case(
        "8 MiB, but CAP_IPC_LOCK",
        "limits.memlock",
        OK,
        limit(MEMLOCK, 8 << 20),
        write("/proc/self/status", f"CapEff:\t{CAP_IPC_LOCK:016x}"),
    ),
    Case(
        "CAP_IPC_LOCK of a user namespace",
        "limits.memlock",
        ERROR,
        limit(MEMLOCK, 8 << 20),
        write("/proc/self/status", f"CapEff:\t{CAP_IPC_LOCK:016x}"),
        write("/proc/self/uid_map", "0 1000 1"),
    ),
    # cpu
    Case(
        "NUMA node unknown",
        "cpu.numa-unknown",
        WARNING,
        write(f"{NIC0}/numa_node", -1),
        write("/sys/devices/system/node/node1/cpulist", "8-15"),
    ),
    Case("NUMA node unknown, but only one", "cpu.numa-unknown", None, write(f"{NIC0}/numa_node", -1)),
    Case(
        "cores on the far node",
        "cpu.numa-far",
        WARNING,
        attribute("cores", frozenset({8, 9})),
        write("/sys/devices/system/node/node1/cpulist", "8-15"),
    ),
    # environment
    Case("CUDA_VISIBLE_DEVICES empty", "environment.cuda-visible", NOTE, environment(CUDA_VISIBLE_DEVICES="")),
    Case(
        "CUDA_VISIBLE_DEVICES past the end",
        "environment.cuda-visible",
        WARNING,
        environment(CUDA_VISIBLE_DEVICES="0,5"),
    ),
    Case("CUDA_VISIBLE_DEVICES fine", "environment.cuda-visible", OK, environment(CUDA_VISIBLE_DEVICES="1")),
    Case(
        "CUDA_VISIBLE_DEVICES by UUID", "environment.cuda-visible", OK, environment(CUDA_VISIBLE_DEVICES="GPU-8932f937")
    ),
    Case(
        "expandable segments with NICs",
        "environment.expandable-segments",
        WARNING,
        environment(PYTORCH_ALLOC_CONF="expandable_segments:True"),
    ),
]


@over(GPU_SERVER)
def test_gpu_server(root: Path, case: Case) -> None:
    tree, host = Tree(root).gpu_server(), FakeHost(root)
    equip(host, "mlx5_0", "mlx5_1")
    case.apply(tree, host)

    found = severities(run_checks(host, [case.topic]).findings)

    assert found.pop(case.check, None) is case.severity
    assert {check: s for check, s in found.items() if s in (WARNING, ERROR)} == {}, "nothing else is wrong"


# --- an instance with EFA ---

EFA = [
    Case("fine", "libraries.libfabric", OK, lambda tree, host: None),
    Case("libfabric too old", "libraries.libfabric", ERROR, library("libfabric.so.1", version=(1, 22))),
    Case("libfabric with faults", "libraries.libfabric", NOTE, library("libfabric.so.1", version=(2, 1))),
    Case("no libfabric", "libraries.libfabric", ERROR, lambda tree, host: host.libraries.pop("libfabric.so.1")),
    Case(
        "two libfabrics",
        "libraries.libfabric-twice",
        WARNING,
        lambda tree, host: (
            tree.write("/opt/amazon/efa/lib/libfabric.so.1", ""),
            opened(host, "/opt/amazon/efa/lib/libfabric.so.1", version=(2, 3)),
        ),
    ),
    Case(
        "the installer's libfabric broken",
        "libraries.libfabric-broken",
        WARNING,
        lambda tree, host: (
            tree.write("/opt/amazon/efa/lib/libfabric.so.1", ""),
            library("/opt/amazon/efa/lib/libfabric.so.1", "undefined symbol")(tree, host),
        ),
    ),
    Case("FI_PROVIDER without efa", "environment.fi-provider", ERROR, environment(FI_PROVIDER="tcp")),
    Case("FI_PROVIDER=^efa", "environment.fi-provider", ERROR, environment(FI_PROVIDER="^efa")),
    Case("FI_PROVIDER=efa", "environment.fi-provider", NOTE, environment(FI_PROVIDER="efa")),
    Case("ofi fails", "crossrail.ofi", ERROR, transport("ofi", "failed")),
    Case("verbs cannot be opened", "crossrail.verbs", NOTE, transport("verbs", "failed")),
    Case("no GIDs wanted", "rdma.ports", OK, lambda tree, host: None),
]


@over(EFA)
def test_efa_instance(root: Path, case: Case) -> None:
    tree, host = Tree(root).plain(), FakeHost(root)
    tree.efa(0)
    equip(host, "efa_0")
    case.apply(tree, host)

    found = severities(run_checks(host, [case.topic]).findings)

    assert found.get(case.check) is case.severity


def test_tables_cover_every_topic() -> None:
    assert {case.topic for case in PLAIN} == set(TOPICS)


# --- what is said, where it matters ---


def test_memlock_names_the_ways_out_of_this_machine(root: Path) -> None:
    tree, host = Tree(root).gpu_server(), FakeHost(root)
    host.limits[MEMLOCK] = (8 << 20, 8 << 20)
    host.user = 1000

    finding = the(run_checks(host, ["limits"]).findings, "limits.memlock")

    commands = " ".join(fix.command for fix in finding.fixes)
    assert "ENOMEM" in finding.cost and "8 MiB" in finding.title
    assert "docker run --ulimit memlock" in commands and "IPC_LOCK" in commands and "sudo tee /etc/security" in commands
    assert "LimitMEMLOCK=infinity" in " ".join(fix.where for fix in finding.fixes)

    tree.write("/proc/1/cgroup", "0::/kubepods.slice/pod1")
    host = FakeHost(root)
    host.limits[MEMLOCK] = (8 << 20, 8 << 20)
    commands = " ".join(fix.command for fix in the(run_checks(host, ["limits"]).findings, "limits.memlock").fixes)
    assert "docker" not in commands and "IPC_LOCK" in commands


def test_load_error_is_shown_in_full(root: Path) -> None:
    Tree(root).gpu_server()
    host = FakeHost(root)
    equip(host, "mlx5_0", "mlx5_1")
    text = "/usr/lib/libibverbs.so.1: version `IBVERBS_1.14' not found (required by x)"
    host.libraries["libibverbs.so.1"] = Library("libibverbs.so.1", text, messages="libibverbs: Warning: no userspace")

    finding = the(run_checks(host, ["libraries"]).findings, "libraries.libibverbs")

    assert text in finding.seen and "no userspace" in finding.seen


def test_fixes_speak_the_distributions_language(tree: Tree, host: FakeHost) -> None:
    assert the(run_checks(host, ["libraries"]).findings, "libraries.libibverbs").fixes[0].command.startswith("apt-get")

    tree.write("/etc/os-release", 'ID="rocky"\nID_LIKE="rhel centos fedora"')
    host = FakeHost(host.root)
    host.user = 1000
    fix = the(run_checks(host, ["libraries"]).findings, "libraries.libibverbs").fixes[0]
    assert fix.command == "sudo dnf install libibverbs"


def test_old_distributions_are_not_sent_to_packages_that_are_too_old(tree: Tree, host: FakeHost) -> None:
    (fix,) = the(run_checks(host, ["libraries"]).findings, "libraries.libfabric").fixes
    assert "pip install mpich" in fix.command

    tree.write("/etc/os-release", 'ID=debian\nVERSION_ID="13"')
    (fix,) = the(run_checks(FakeHost(host.root), ["libraries"]).findings, "libraries.libfabric").fixes
    assert fix.command == "apt-get install libfabric1"


def test_values_of_foreign_variables_are_not_shown(host: FakeHost) -> None:
    host.environ = {"MC_REDIS_PASSWORD": "hunter2"}

    finding = the(run_checks(host, ["environment"]).findings, "environment.foreign")

    assert "hunter2" not in str(finding) and "MC_REDIS_PASSWORD" in finding.title


def test_the_secret_is_not_shown(host: FakeHost) -> None:
    for value in ("hunter2", "hunter2-hunter2-hunter2", " hunter2"):
        host.environ = {"CROSSRAIL_SECRET": value}
        assert "hunter2" not in str(run_checks(host, ["environment"]).findings)


def test_bundled_libraries_are_found(host: FakeHost, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "mooncake.libs").mkdir(parents=True)
    (site / "mooncake.libs" / "libfabric-1a2b.so.1").touch()
    host.sites = [site]

    finding = the(run_checks(host, ["libraries"]).findings, "libraries.bundled")

    assert "mooncake.libs" in finding.title

"""Reads cases.txt: rows of what is changed on a made-up machine, and what the doctor must say of it.

A change is a verb and its arguments, separated by blanks:

write PATH TEXT      remove PATH...       virtual NETDEV...    nic NETDEV KEY=VALUE... (a wired one more)
mode PATH OCTAL
pci ADDRESS VENDOR:DEVICE CLASS [DRIVER]  bridge [acs=BITS]    soft-roce DEVICE NETDEV   [proprietary-]gpu NUMBER
library NAME [version=TUPLE | devices=TUPLE] (opens)           broken NAME ERROR         forget NAME
transport NAME STATE [GB_PER_S] (of the selftest)              unloadable ERROR          stale VERSION INSTALLED
rails verbs|ofi PORT KEY=VALUE... (one more that the transport sees)
limit memlock|nofile|nproc|as SOFT [HARD]          shm TOTAL FREE       env [NAME=VALUE]          host ATTRIBUTE LITERAL
"""

import ast
import re
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crossrail.doctor.finding import Severity
from crossrail.doctor.host import Space
from crossrail.doctor.probes import Library, RdmaPort, Selftest, TransportTest
from tests.doctor.tree import CAP_IPC_LOCK, GIB, FakeHost, Tree

TABLE = Path(__file__).with_name("cases.txt")
SUBNET = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n"
    "rail0\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\n"
    "rail1\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0"
)
ZEROCONF = (
    SUBNET.replace("00004D0A", "0000FEA9").replace("00FFFFFF", "0000FFFF")
    + "\nrail0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0"
)
CONSTANTS = {
    "RP": "/proc/sys/net/ipv4/conf",
    "THP": "/sys/kernel/mm/transparent_hugepage",
    "CPU": "/sys/devices/system/cpu",
    "CLOCK": "/sys/devices/system/clocksource/clocksource0",
    "PORT0": "/sys/class/infiniband/mlx5_0/ports/1",
    "PORT1": "/sys/class/infiniband/mlx5_1/ports/1",
    "NIC0": "/sys/bus/pci/devices/0000:01:00.0",
    "GPU0": "/sys/bus/pci/devices/0000:40:00.0",
    "EFA_LIBFABRIC": "/opt/amazon/efa/lib/libfabric.so.1",
    "SUBNET": SUBNET,
    "ZEROCONF": ZEROCONF,
    "IPC_LOCK": f"{CAP_IPC_LOCK:016x}",
    "X1025": "x" * 1025,
    **{f"{count}G": str(count * GIB) for count in (1, 3, 4, 64)},
}
SEVERITIES = {"silent": None, **{severity.value: severity for severity in Severity}}
LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC,
    "as": resource.RLIMIT_AS,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row. severity: of what must be said; None: the check must be silent. changes: as written, in order."""

    name: str
    check: str
    severity: Severity | None
    changes: list[str]

    @property
    def topic(self) -> str:
        return self.check.partition(".")[0]

    def apply(self, tree: Tree, host: FakeHost) -> None:
        for change in self.changes:
            verb, _, rest = change.partition(" ")
            VERBS[verb](tree, host, expand(rest))


def read_cases() -> dict[str, list[Case]]:
    """By the machine that is changed."""
    sections: dict[str, list[Case]] = {}
    for line in TABLE.read_text().splitlines():
        if line.startswith("["):
            cases = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            name, check, word, change = (column.strip() for column in line.split("|", 3))
            if name:
                cases.append(Case(name, check, SEVERITIES[word], []))
            cases[-1].changes.extend([change] if change else [])
    return sections


def expand(text: str) -> str:
    """With constants for their $NAMES, and the ends of lines and tabs that are written as in C."""
    named = re.sub(r"\$(\w+)", lambda match: CONSTANTS[match[1]], text)
    return named.replace("\\n", "\n").replace("\\t", "\t")


def pairs(words: list[str]) -> dict[str, object]:
    """Of KEY=VALUE, whose values are literals or else texts."""
    return {key: literal(value) for key, _, value in (word.partition("=") for word in words)}


def literal(text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return frozenset(value) if isinstance(value, set) else value


def nbytes(text: str) -> int:
    return int(text[:-1]) << {"M": 20, "G": 30}[text[-1]] if text[-1] in "MG" else int(text)


# --- verbs ---


def write(tree: Tree, host: FakeHost, rest: str) -> None:
    path, _, text = rest.partition(" ")
    tree.write(path, text)


def remove(tree: Tree, host: FakeHost, rest: str) -> None:
    for path in rest.split():
        place = tree.path(path)
        if place.is_dir() and not place.is_symlink():
            place.rmdir()
        else:
            tree.remove(path)


def virtual(tree: Tree, host: FakeHost, rest: str) -> None:
    for name in rest.split():
        tree.netdev(name)


def nic(tree: Tree, host: FakeHost, rest: str) -> None:
    name, *options = rest.split()
    tree.netdev(name, tree.pci("0000:f1:00.0", 0x8086, 0x1572, 0x020000, "i40e"), **pairs(options))  # type: ignore[arg-type]


def pci(tree: Tree, host: FakeHost, rest: str) -> None:
    address, kind, class_code, *driver = rest.split()
    vendor, device = (int(number, 16) for number in kind.split(":"))
    tree.pci(address, vendor, device, int(class_code, 16), *driver or [""])


def bridge(tree: Tree, host: FakeHost, rest: str) -> None:
    """Its configuration space: unreadable past the header, or with one extended capability and then ACS."""
    config = bytearray(4096 if rest else 64)
    if rest:
        struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)
        struct.pack_into("<IHH", config, 0x140, 0x000D | 1 << 16, 0, int(rest.removeprefix("acs="), 16))
    base = tree.pci("0000:70:00.0", 0x1000, 0xC010, 0x060400, "pcieport")
    tree.write(f"{base}/config", bytes(config))


def soft_roce(tree: Tree, host: FakeHost, rest: str) -> None:
    device, netdev = rest.split()
    tree.rdma(device, "", netdev, rate="10 Gb/sec (4X)")


def library(tree: Tree, host: FakeHost, rest: str) -> None:
    name, _, fields = rest.partition(" ")
    host.libraries[name] = Library(name, path=f"/usr/lib/{name}.9", **pairs([fields] if fields else []))  # type: ignore[arg-type]


def broken(tree: Tree, host: FakeHost, rest: str) -> None:
    name, _, error = rest.partition(" ")
    host.libraries[name] = Library(name, error)


def transport(tree: Tree, host: FakeHost, rest: str) -> None:
    name, state, *rate = rest.split()
    test = TransportTest(name, state, "because", float(rate[0]) if rate else 0.0)
    host.selftest = Selftest(version="1.0", installed_version="1.0", transports=[test])


def rails(tree: Tree, host: FakeHost, rest: str) -> None:
    transport, name, *fields = rest.split()
    port = RdmaPort(transport, name, **pairs(fields))  # type: ignore[arg-type]
    ports = [*host.selftest.ports, port]
    host.selftest = Selftest(version="1.0", installed_version="1.0", ports=ports, chosen=("mlx5_0:1",))


def stale(tree: Tree, host: FakeHost, rest: str) -> None:
    version, installed = rest.split()
    host.selftest = Selftest(version=version, installed_version=installed)


def limit(tree: Tree, host: FakeHost, rest: str) -> None:
    kind, *bounds = rest.split()
    soft, hard = (None if bound == "unlimited" else nbytes(bound) for bound in [*bounds, "unlimited"][:2])
    host.limits[LIMITS[kind]] = (soft, hard)


def shm(tree: Tree, host: FakeHost, rest: str) -> None:
    total, free = rest.split()
    host.shm = Space(nbytes(total), nbytes(free))


def env(tree: Tree, host: FakeHost, rest: str) -> None:
    name, _, value = rest.partition("=")
    host.environ = {name: value} if name else {}


def set_attribute(tree: Tree, host: FakeHost, rest: str) -> None:
    name, _, value = rest.partition(" ")
    assert hasattr(host, name), name
    setattr(host, name, literal(value))


VERBS: dict[str, Callable[[Tree, FakeHost, str], object]] = {
    "write": write,
    "mode": lambda tree, host, rest: tree.path(rest.split()[0]).chmod(int(rest.split()[1], 8)),
    "remove": remove,
    "virtual": virtual,
    "nic": nic,
    "pci": pci,
    "bridge": bridge,
    "soft-roce": soft_roce,
    "gpu": lambda tree, host, number: tree.gpu(int(number)),
    "proprietary-gpu": lambda tree, host, number: tree.gpu(int(number), is_open=False),
    "library": library,
    "broken": broken,
    "forget": lambda tree, host, name: host.libraries.pop(name),
    "transport": transport,
    "unloadable": lambda tree, host, error: setattr(host, "selftest", Selftest(error=error)),
    "stale": stale,
    "rails": rails,
    "limit": limit,
    "shm": shm,
    "env": env,
    "host": set_attribute,
}

"""Several hosts on one machine: network namespaces, joined by virtual cables and switches.

A host is a namespace with netdevs rail0, rail1 ...; a test's own thread may enter one, and children run in others.
Cables can be pulled, limited in speed, and made long and lossy. Needs root, the kernel's veth and bridge, and iproute2.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.support.limits import PROGRAM_S, WAIT_S
from tests.support.process import REPOSITORY, PeerProcess

CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
# How the reason of a skip begins that CI allows any number of (tests/conftest.py).
FORBIDDEN = "this machine forbids network namespaces"
SYSCTLS = {
    "ipv4/conf/all/arp_ignore": "1",  # answer for the netdev's own address only
    "ipv4/conf/all/arp_announce": "2",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv6/conf/all/keep_addr_on_down": "1",
    "ipv6/conf/default/accept_dad": "0",
    "ipv6/conf/default/accept_ra": "0",
}

_numbers = itertools.count()


class Host:
    """One namespace. Made by Hosts; rail i has the netdev `rail<i>` and one address of each family."""

    def __init__(self, name: str, namespace: str, rails: int, index: int, subnets: Sequence[int]) -> None:
        self.name = name
        self.namespace = namespace
        self.netdevs = [f"rail{i}" for i in range(rails)]
        # All rails in one subnet, or one subnet for each: see Hosts.
        own = [index + 1 if len(subnets) > 1 else 16 * (index + 1) + i for i in range(rails)]
        self.subnets = [subnets[i % len(subnets)] for i in range(rails)]
        self.addresses = [f"10.{subnet + 1}.0.{number}" for subnet, number in zip(self.subnets, own, strict=True)]
        self.addresses6 = [f"fd00:{subnet + 1:x}::{number:x}" for subnet, number in zip(self.subnets, own, strict=True)]

    def rails(self, by: str = "netdev", count: int | None = None) -> list[str]:
        """The `rails` option for an engine on this host: by "netdev", "address" or "address6"."""
        names = {"netdev": self.netdevs, "address": self.addresses, "address6": self.addresses6}[by]
        return names[:count]

    def limit(self, rail: int, mbit: int) -> None:
        """Limits the rate of outgoing traffic on this rail; packets queue for at most 200 ms."""
        shape(self.namespace, f"rail{rail}", mbit)

    def down(self, rail: int) -> None:
        """Pulls the plug: nothing comes or goes, and only this host and the other end of the cable notice."""
        run(f"ip -n {self.namespace} link set rail{rail} down")

    def up(self, rail: int) -> None:
        run(f"ip -n {self.namespace} link set rail{rail} up")
        self._route(rail)

    def sent_bytes(self, rail: int) -> int:
        return self._statistics(rail)["tx"]

    def received_bytes(self, rail: int) -> int:
        return self._statistics(rail)["rx"]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Meanwhile this thread, and threads that it starts, are on this host. Sockets that they open stay on it
        afterwards.
        """
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with open(NAMESPACES / self.namespace) as namespace:
                enter(namespace.fileno())
            yield
        finally:
            enter(home)
            os.close(home)

    def set_up(self, source_routes: bool) -> None:
        with self.entered():
            for name, value in SYSCTLS.items():
                Path("/proc/sys/net", name).write_text(value)
        lines = ["link set lo up"]
        for netdev, v4, v6 in zip(self.netdevs, self.addresses, self.addresses6, strict=True):
            lines += [f"address add {v4}/24 dev {netdev}", f"address add {v6}/64 dev {netdev} nodad"]
            lines += [f"link set {netdev} up"]
        batch(self.namespace, lines)
        if not source_routes:
            return
        rules = [f"rule add from {address} table {100 + i}" for i, address in enumerate(self.addresses)]
        batch(self.namespace, rules)
        rules6 = [f"rule add from {address} table {100 + i}" for i, address in enumerate(self.addresses6)]
        batch(self.namespace, rules6, "-6 ")
        for rail in range(len(self.netdevs)):
            self._route(rail)

    def _route(self, rail: int) -> None:
        # Traffic from a rail's address leaves by its netdev, even if several are in one subnet.
        subnet = self.subnets[rail] + 1
        batch(
            self.namespace,
            [
                f"route replace 10.{subnet}.0.0/24 dev rail{rail} table {100 + rail}",
                f"route replace fd00:{subnet:x}::/64 dev rail{rail} table {100 + rail}",
            ],
        )

    def _statistics(self, rail: int) -> dict[str, int]:
        told = json.loads(run(f"ip -n {self.namespace} -s -j link show rail{rail}"))
        counts = told[0]["stats64"]
        return {way: int(counts[way]["bytes"]) for way in ("rx", "tx")}


class Hosts:
    """Hosts and the network between them. A context manager.

    rails: netdevs of each host, or a number for each. one_subnet: all netdevs of all hosts on one switch; else a
    network for each rail number, which is a cable if there are two hosts. delay_ms, loss: each cable's one-way delay
    and share of lost packets (with two hosts, each rail is a cable). mtu: cables silently drop longer packets.
    source_routes: traffic from a rail's address leaves by its netdev, as on carefully configured hosts with several
    netdevs in one subnet.

    Owner: namespaces, and children of spawn(), end with the context. Leftovers of a killed test run are removed at the
    next run's start.
    """

    def __init__(
        self,
        rails: int | Mapping[str, int] = 1,
        *,
        names: Sequence[str] = ("a", "b"),
        one_subnet: bool = False,
        delay_ms: float = 0,
        loss: float = 0,
        mtu: int = 1500,
        source_routes: bool = True,
    ) -> None:
        self._source_routes = source_routes
        counts = rails if isinstance(rails, Mapping) else dict.fromkeys(names, rails)
        self._prefix = f"{own_prefix()}{next(_numbers)}-"
        subnets = [0] if one_subnet else range(max(counts.values()))
        # One rail in one subnet and one rail in a subnet for each are the same thing.
        self._hosts = {
            name: Host(name, f"{self._prefix}{name}", counts[name], index, subnets) for index, name in enumerate(names)
        }
        self._switches = [] if not one_subnet and len(names) == 2 else list(subnets)
        self._cable = (delay_ms, loss, mtu) if delay_ms or loss or mtu < 1500 else None
        self._children: list[PeerProcess] = []
        self._relays: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __enter__(self) -> "Hosts":
        remove_stale()
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.close()
        for relay in self._relays:
            relay.kill()
            relay.wait(WAIT_S)
            if relay.stdout is not None:
                relay.stdout.close()
        remove(namespace for namespace in namespaces() if namespace.startswith(self._prefix))

    def spawn(self, name: str) -> PeerProcess:
        """A peer in a process of its own on this host."""
        self._children.append(PeerProcess(prefix=on_host(self._hosts[name].namespace)))
        return self._children[-1]

    def limit_incoming(self, name: str, rail: int, mbit: int) -> None:
        """Limits incoming traffic to this rail of a host, like Host.limit(). On switches only."""
        shape(f"{self._prefix}net", f"port{list(self._hosts).index(name)}-{rail}", mbit)

    def _make(self) -> None:
        middle = f"{self._prefix}net"
        hosts = list(self._hosts.values())
        for namespace in [middle, *(host.namespace for host in hosts)]:
            run(f"ip netns add {namespace}")
        with Host("middle", middle, 0, 0, [0]).entered():
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
        if self._cable is not None:
            self._lay_cables(middle, hosts)
        elif self._switches:
            self._plug_into_switches(middle, hosts)
        else:
            one, two = hosts
            cables = min(len(one.netdevs), len(two.netdevs))
            batch(
                one.namespace,
                [f"link add rail{i} type veth peer name rail{i} netns {two.namespace}" for i in range(cables)],
            )
            for host in hosts:  # ends in nothing
                spare = range(cables, len(host.netdevs))
                batch(host.namespace, [f"link add rail{i} type veth peer name spare{i} netns {middle}" for i in spare])
        for host in hosts:
            host.set_up(self._source_routes)

    def _plug_into_switches(self, middle: str, hosts: Sequence[Host]) -> None:
        lines = [f"link add switch{n} type bridge" for n in self._switches]
        lines += [f"link set switch{n} up" for n in self._switches]
        for number, host in enumerate(hosts):
            for i, subnet in enumerate(host.subnets):
                port = f"port{number}-{i}"
                lines.append(f"link add {port} type veth peer name rail{i} netns {host.namespace}")
                lines += [f"link set {port} master switch{subnet}", f"link set {port} up"]
        batch(middle, lines)

    def _lay_cables(self, middle: str, hosts: Sequence[Host]) -> None:
        assert self._cable is not None
        lines = []
        ends = []
        for i in range(len(hosts[0].netdevs)):
            for number, host in enumerate(hosts):
                end = f"end{i}-{number}"
                lines.append(f"link add {end} type veth peer name rail{i} netns {host.namespace}")
                lines.append(f"link set {end} up")
            ends.append((f"end{i}-0", f"end{i}-1"))
        batch(middle, lines)
        for host in hosts:
            batch(host.namespace, [f"link set {netdev} gso_max_segs 1" for netdev in host.netdevs])
        for number, pair in enumerate(ends):
            words = [*map(str, self._cable), str(number), *pair]
            command = [*on_host(middle), sys.executable, "-m", "tests.support.cable", *words]
            relay = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            self._relays.append(relay)
            assert relay.stdout is not None
            assert relay.stdout.readline() == b"ready\n"


@functools.cache
def why_not() -> str:
    """Why this machine has no room for several hosts; empty when it has."""
    if os.geteuid() != 0:
        return f"{FORBIDDEN}: they need root"
    name = f"{own_prefix()}probe"
    try:
        run(f"ip netns add {name}")
        batch(name, ["link add one type veth peer name two", "link add three type bridge"])
        run(f"tc -n {name} qdisc add dev one root tbf rate 1mbit burst 64kb latency 20ms")
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        is_forbidden = re.search("not permitted|denied", str(error))
        return f"{FORBIDDEN if is_forbidden else 'no network namespaces here'}: {error}"
    finally:
        remove([name])
    return ""


def shape(namespace: str, netdev: str, mbit: int) -> None:
    run(f"tc -n {namespace} qdisc replace dev {netdev} root tbf rate {mbit}mbit burst 64kb latency 200ms")


def on_host(namespace: str) -> list[str]:
    """The prefix of a command that runs it there. It execs the command: same process."""
    return ["ip", "netns", "exec", namespace]


def enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def run(command: str, text: str | None = None) -> str:
    done = subprocess.run(command.split(), input=text, capture_output=True, text=True, timeout=PROGRAM_S)
    assert done.returncode == 0, f"{command}: {done.stderr.strip()}\n{text or ''}"
    return done.stdout


def batch(namespace: str, lines: Sequence[str], options: str = "") -> None:
    if lines:
        run(f"ip {options}-n {namespace} -batch -", "\n".join(lines))


# --- names: who made them, so that they can go when he is gone ---


def own_prefix() -> str:
    return f"xr-{os.getpid()}-{start_time(os.getpid())}-"


def start_time(pid: int) -> str:
    """Together with the pid this identifies a process uniquely. Empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def namespaces() -> list[str]:
    return sorted(entry.name for entry in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []


def remove_stale() -> None:
    made = [(name, re.match(r"xr-(\d+)-(\d+)-", name)) for name in namespaces()]
    remove(name for name, maker in made if maker and start_time(int(maker[1])) != maker[2])


def remove(names: Iterator[str] | Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError, AssertionError):  # another run cleans up, too
            run(f"ip netns delete {name}")

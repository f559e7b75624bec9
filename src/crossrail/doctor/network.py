"""Network interfaces: are they up, do the rails match, and does routing make each rail answer for itself?"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from crossrail.doctor.finding import Finding, Fix, note, ok, warning
from crossrail.doctor.hardware import NET, Interface
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import listing, sudo, sysctl

_JUMBO_MTU = 4200  # what a RoCE path MTU of 4096 needs
_FAST_MBIT_PER_S = 25_000
_RP_STRICT = 1
_GLOBAL_SCOPE = "00"  # of if_inet6


def interfaces(host: Host) -> Iterator[Finding]:
    """Something that is up."""
    check = "network.interfaces"
    everything = host.hardware.interfaces
    up = [interface for interface in everything if interface.up]
    if not up:
        yield note(
            check,
            "no network interface is up but loopback",
            f"{NET}: {listing([interface.name for interface in everything]) or 'nothing else'}",
            "other hosts cannot be reached; processes of this host can",
            Fix(sudo(host, f"ip link set {everything[0].name} up")) if everything else Fix("ip link"),
        )
        return
    yield ok(check, f"up: {listing([_describe(interface) for interface in up])}", f"{NET}/*/operstate, speed, mtu")
    if not _has_addresses(host):
        yield warning(
            "network.addresses",
            f"no address that other hosts could use: {listing([interface.name for interface in up])}",
            "/proc/net/route, /proc/net/if_inet6; link-local addresses (fe80::) cannot be rails",
            "an engine's tcp listens at 127.0.0.1: other hosts are refused; an engine that opens before the network is "
            "set up stays that way",
            Fix("ip address", "what there is"),
            Fix("systemctl is-active network-online.target", "start the job After=network-online.target"),
        )
    down = [interface.name for interface in everything if interface.physical and not interface.up]
    if down:
        yield note(
            "network.down",
            f"down: {listing(down)}",
            f"{NET}/*/operstate",
            "unused bandwidth, if a cable is plugged in",
            Fix(sudo(host, f"ip link set {down[0]} up")),
        )
    half = [interface.name for interface in up if interface.duplex == "half"]
    if half:
        yield warning(
            "network.duplex",
            f"half duplex: {listing(half)}",
            f"{NET}/*/duplex",
            "sending and receiving exclude each other, and collide",
            Fix(sudo(host, f"ethtool -s {half[0]} autoneg on")),
        )


def _has_addresses(host: Host) -> bool:
    """Whether an interface but loopback has one that is not of its link alone; True where nobody tells."""
    v4, v6 = host.read("/proc/net/route"), host.read("/proc/net/if_inet6")
    if v4 is None:
        return True
    routes = [words for words in map(str.split, v4.splitlines()[1:]) if len(words) > 1]
    if any(words[0] != "lo" and not _is_zeroconf(words[1]) for words in routes):
        return True
    addresses = [words for words in map(str.split, (v6 or "").splitlines()) if len(words) == 6]
    return any(words[5] != "lo" and words[3] == _GLOBAL_SCOPE for words in addresses)


def _describe(interface: Interface) -> str:
    speed = f"{interface.mbit_per_s / 1000:g} Gb/s" if interface.mbit_per_s else "speed unknown"
    return f"{interface.name} ({speed}, MTU {interface.mtu})"


def rails_alike(host: Host) -> Iterator[Finding]:
    """Do all rails have one MTU and one speed?"""
    rails = host.hardware.rails
    mtus = {rail.mtu for rail in rails}
    if len(mtus) > 1:
        most = max(mtus)
        low = [rail for rail in rails if rail.mtu < most]
        yield warning(
            "network.mtu",
            f"rails with different MTUs: {listing([f'{rail.name} {rail.mtu}' for rail in rails])}",
            f"{NET}/*/mtu",
            "a RoCE pair takes the smaller of both path MTUs and differs per rail; where a switch in between "
            "disagrees, small messages pass and bulk data stalls",
            *(Fix(sudo(host, f"ip link set {rail.name} mtu {most}"), "if the switch allows it") for rail in low[:4]),
        )
    speeds = {rail.mbit_per_s for rail in rails if rail.mbit_per_s}
    if len(speeds) > 1:
        yield warning(
            "network.speed",
            "rails of different speed: "
            f"{listing([f'{rail.name} {(rail.mbit_per_s or 0) / 1000:g} Gb/s' for rail in rails])}",
            f"{NET}/*/speed",
            "a write split evenly ends with the slowest rail; a management port may have got among the rails",
            Fix(
                f"ethtool {next(rail.name for rail in rails if rail.mbit_per_s == min(speeds))}", "what was negotiated"
            ),
        )
    of_roce = {name for port in host.hardware.rail_ports if port.link_layer == "Ethernet" for name in port.netdevs}
    short = [rail for rail in rails if rail.mtu < _JUMBO_MTU and rail.name in of_roce]
    if short:
        yield warning(
            "network.roce-mtu",
            f"RoCE on MTU {short[0].mtu}: {listing([rail.name for rail in short])}",
            f"{NET}/*/mtu",
            f"path MTU {_path_mtu(short[0].mtu)} instead of 4096: four times the packets; on Soft-RoCE we "
            "measured half the bandwidth (42 instead of 93 MB/s), NICs lose less",
            *(Fix(sudo(host, f"ip link set {rail.name} mtu 9000"), "if the switch allows it") for rail in short[:4]),
        )
    slow = [
        rail for rail in rails if rail.mtu <= 1500 and (rail.mbit_per_s or 0) >= _FAST_MBIT_PER_S and rail not in short
    ]
    if slow:
        yield note(
            "network.tcp-mtu",
            f"MTU 1500 at {(slow[0].mbit_per_s or 0) / 1000:g} Gb/s: {listing([rail.name for rail in slow])}",
            f"{NET}/*/mtu",
            "TCP at such speeds costs less CPU per byte with MTU 9000",
            *(Fix(sudo(host, f"ip link set {rail.name} mtu 9000"), "if the switch allows it") for rail in slow[:4]),
        )
    if len(rails) > 1 and len(mtus) == 1 and len(speeds) <= 1:
        yield ok("network.rails", f"{len(rails)} rails of one MTU ({rails[0].mtu}) and speed", f"{NET}/*/mtu, speed")


def _path_mtu(mtu: int) -> int:
    """The largest of the five RoCE sizes that fits with its headers."""
    return next((size for size in (4096, 2048, 1024, 512) if size + 60 <= mtu), 256)


def routing(host: Host) -> Iterator[Finding]:
    """Several interfaces in one subnet: the kernel answers ARP on any of them, and drops what comes by a wrong one."""
    check = "network.one-subnet"
    subnets: dict[tuple[str, str], list[str]] = {}
    for line in (host.read("/proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        # Zeroconf's route stands at any number of interfaces, with or without an address there; nobody's rails use it.
        if len(words) >= 8 and words[1] != "00000000" and words[2] == "00000000" and not _is_zeroconf(words[1]):
            subnets.setdefault((words[1], words[7]), []).append(words[0])
    shared = [sorted(set(names)) for names in subnets.values() if len(set(names)) > 1]
    if not shared:
        return
    names = shared[0]
    filters = [_setting(host, name, "rp_filter") for name in names]
    ignore = [_setting(host, name, "arp_ignore") for name in names]
    if any(value == _RP_STRICT for value in filters):
        yield warning(
            check,
            f"{listing(names)} are in one subnet, and the kernel filters by reverse path",
            f"net.ipv4.conf rp_filter: {listing([f'{n} {v}' for n, v in zip(names, filters, strict=True)])}",
            "packets that arrive by another rail than the kernel's choice are dropped: some rail pairs connect, others "
            "time out",
            *sysctl(host, "net.ipv4.conf.all.rp_filter", "2"),
        )
    if any(value == 0 for value in ignore):
        yield warning(
            "network.arp",
            f"{listing(names)} are in one subnet, and answer ARP for each other",
            f"net.ipv4.conf arp_ignore: {listing([f'{n} {v}' for n, v in zip(names, ignore, strict=True)])}",
            "traffic for one rail arrives at another: their bandwidth does not add up; Soft-RoCE took 1 s more "
            "to connect in 5 of 14 runs",
            *sysctl(host, "net.ipv4.conf.all.arp_ignore", "1"),
            *sysctl(host, "net.ipv4.conf.all.arp_announce", "2"),
        )


def _is_zeroconf(destination: str) -> bool:
    """Whether an address as /proc/net/route writes it, in this machine's byte order, is in 169.254/16."""
    if re.fullmatch(r"[0-9A-Fa-f]{8}", destination) is None:
        return False
    return int(destination, 16).to_bytes(4, sys.byteorder)[:2] == bytes((169, 254))


def _setting(host: Host, interface: str, name: str) -> int:
    """The kernel takes the larger of an interface's value and that of "all"."""
    values = [host.read_int(f"/proc/sys/net/ipv4/conf/{where}/{name}") or 0 for where in ("all", interface)]
    return max(values)


def drops(host: Host) -> Iterator[Finding]:
    """Packets thrown away before anyone saw them."""
    check = "network.drops"
    columns = [line.split() for line in (host.read("/proc/net/softnet_stat") or "").splitlines()]
    try:
        dropped = sum(int(words[1], 16) for words in columns)
    except (IndexError, ValueError):
        return
    if dropped:
        yield note(
            check,
            f"the kernel dropped {dropped:,} received packets: its backlog was full",
            "/proc/net/softnet_stat, second column, since boot",
            "TCP resends them after a pause; bursts to this host run at a fraction of the link's speed",
            *sysctl(host, "net.core.netdev_max_backlog", "65536"),
        )
    elif columns:
        yield ok(check, "no packet dropped for a full backlog", "/proc/net/softnet_stat")


def connection_tracking(host: Host) -> Iterator[Finding]:
    """A full table refuses connections."""
    check = "network.conntrack"
    count = host.read_int("/proc/sys/net/netfilter/nf_conntrack_count")
    most = host.read_int("/proc/sys/net/netfilter/nf_conntrack_max")
    if count is None or not most:
        return
    if count > 0.8 * most:
        yield warning(
            check,
            f"the firewall's connection table is {count / most:.0%} full",
            f"nf_conntrack_count {count:,} of nf_conntrack_max {most:,}",
            "when it is full, new connections are dropped without a word: connecting times out",
            *sysctl(host, "net.netfilter.nf_conntrack_max", str(most * 4)),
        )
    else:
        yield ok(check, f"connection tracking: {count:,} of {most:,} entries used", "nf_conntrack_count")

"""RDMA devices: are they there, up and accessible to this process, with an address that others can route to?"""

from __future__ import annotations

from collections.abc import Iterator

from crossrail.doctor.finding import Finding, Fix, error, note, ok, warning
from crossrail.doctor.hardware import INFINIBAND, NET, Port, RdmaDevice
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import listing, sudo

_SOFT_ROCE = "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {netdev}"


def devices(host: Host) -> Iterator[Finding]:
    """Devices with a driver, and devices on the bus without one."""
    check = "rdma.devices"
    hardware = host.hardware
    idle_efa = [device.address for device in hardware.pci if device.is_efa and device.driver != "efa"]
    if idle_efa:
        yield error(
            "rdma.efa-driver",
            f"{len(idle_efa)} EFA device(s) without the efa driver",
            f"PCI {listing(idle_efa)}; driver efa is not bound",
            "this instance pays for EFA and sends everything over TCP, at a few per cent of the bandwidth",
            Fix(sudo(host, "modprobe efa")),
            Fix("curl -O https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz", "if there is no module"),
        )
    if any(device.is_connectx and device.driver == "mlx5_core" for device in hardware.pci) and not any(
        device.kind == "mlx5" for device in hardware.rdma
    ):
        yield error(
            "rdma.mlx5-driver",
            "ConnectX network cards, but no RDMA device of theirs",
            "PCI vendor 15b3 with driver mlx5_core, nothing of mlx5 in /sys/class/infiniband",
            "verbs cannot be used: everything goes over TCP",
            Fix(sudo(host, "modprobe mlx5_ib")),
            Fix("docker run --network=host --device=/dev/infiniband ...", "in a container"),
        )
    if not hardware.rdma:
        yield note(
            check,
            "no RDMA device",
            f"{INFINIBAND} is {'empty' if host.exists(INFINIBAND) else 'not there'}",
            "between hosts bytes go over TCP; within this host over shared memory, which needs none",
            Fix(sudo(host, _SOFT_ROCE.format(netdev=_any_netdev(host))), "to try verbs without hardware"),
        )
        return
    kinds = [
        f"{device.name} ({device.kind}{', fw ' + device.firmware if device.firmware else ''})"
        for device in hardware.rdma
    ]
    yield ok(check, f"{len(hardware.rdma)} RDMA device(s): {listing(kinds)}", INFINIBAND)
    soft = [device.name for device in hardware.rdma if device.is_software]
    if soft:
        yield note(
            "rdma.software",
            f"software devices: {listing(soft)}",
            f"{INFINIBAND}: no device below, driver rdma_rxe or siw",
            "right for tests; slower than TCP, so do not measure with them",
        )


def _any_netdev(host: Host) -> str:
    return next((interface.name for interface in host.hardware.rails), "eth0")


def ports(host: Host) -> Iterator[Finding]:
    """Each must be active: one dead rail of eight fails whatever is spread over eight."""
    check = "rdma.ports"
    every = host.hardware.rail_ports
    if not every:
        return
    down = [port for port in every if not port.is_active]
    if not down:
        seen = f"{INFINIBAND}/*/ports/*/state{_not_counted(host)}"
        yield ok(check, f"{len(every)} of {len(every)} ports active", seen)
        return
    seen = "; ".join(f"{port.name}: {port.state}, {port.physical}, {port.link_layer}" for port in down)
    seen += _not_counted(host)
    fixes = tuple(dict.fromkeys(fix for port in down for fix in _port_fixes(host, port)))
    if len(down) == len(every):
        yield error(
            check, f"none of {len(every)} ports is active", seen, "no RDMA at all: everything goes over TCP", *fixes
        )
        return
    share = len(down) / len(every)
    yield warning(
        check,
        f"{len(down)} of {len(every)} ports not active: {listing([port.name for port in down])}",
        seen,
        f"{share:.0%} of the bandwidth is missing, and peers that pair rails by index reach nothing through these",
        *fixes,
    )


def _not_counted(host: Host) -> str:
    """Devices that no engine takes: what is wrong with them costs nothing, and what they could do is no bandwidth."""
    names = [f"{name} ({reason})" for name, reason in host.hardware.left_out.items()]
    return f"; not counted: {listing(names, 4)}" if names else ""


def _port_fixes(host: Host, port: Port) -> Iterator[Fix]:
    if port.physical in ("Polling", "Disabled", "Sleep", "LinkErrorRecovery"):
        yield Fix(f"mlxlink -d {port.device} -p {port.number}", "cable or switch port: no light")
    if port.link_layer == "InfiniBand" and port.state in ("INIT", "ARMED"):
        yield Fix(
            sudo(host, "systemctl start opensm"),
            "no subnet manager answers; on one host of the fabric, or at the switch",
        )
    for netdev in port.netdevs:
        if port.link_layer == "Ethernet":
            yield Fix(sudo(host, f"ip link set {netdev} up"), "if it was only switched off")


def rates(host: Host) -> Iterator[Finding]:
    """Ports of one kind should run at one rate."""
    check = "rdma.rates"
    by_kind: dict[str, list[Port]] = {}
    counted = set(host.hardware.rail_ports)
    for device in host.hardware.nics:
        members = [port for port in device.ports if port in counted and port.is_active and port.gbit_per_s]
        by_kind.setdefault(device.kind, []).extend(members)
    for kind, members in by_kind.items():
        rates = {port.gbit_per_s or 0.0 for port in members}
        if not rates:
            continue
        total = sum(port.gbit_per_s or 0.0 for port in members)
        if len(rates) == 1:
            yield ok(
                check,
                f"{kind}: {len(members)} x {rates.pop():g} Gb/s = {total / 8:.0f} GB/s",
                f"{INFINIBAND}/*/ports/*/rate{_not_counted(host)}",
            )
            continue
        slow = [port for port in members if (port.gbit_per_s or 0.0) < max(rates)]
        yield warning(
            check,
            f"{kind} ports run at different rates: {listing([port.name for port in slow])} below {max(rates):g} Gb/s",
            "; ".join(f"{port.name}: {port.gbit_per_s:g} Gb/s" for port in members) + _not_counted(host),
            f"a write split evenly ends with the slowest rail: {len(members) * min(rates) / 8:.0f} instead of "
            f"{len(members) * max(rates) / 8:.0f} GB/s",
            *(Fix(f"mlxlink -d {port.device} -p {port.number}", "what was negotiated, and why") for port in slow[:2]),
        )


def gids(host: Host) -> Iterator[Finding]:
    """RoCE addresses: version 2, and one that a router forwards."""
    check = "rdma.gids"
    good = []
    for port in host.hardware.rail_ports:
        if port.link_layer != "Ethernet" or not port.is_active:
            continue
        table = host.hardware.gids(port)
        routable = [gid for gid in table if gid.kind == "RoCE v2" and not gid.is_link_local]
        netdev = port.netdevs[0] if port.netdevs else "NETDEV"
        seen = f"{port.path}/gids: " + (
            listing([f"{gid.index}: {gid.kind}, {gid.address}" for gid in table], 4) or "all zero"
        )
        address = Fix(
            sudo(host, f"ip addr add 10.77.0.1/24 dev {netdev}"), "an address of your network in place of this one"
        )
        if routable:
            good.append(f"{port.name} index {routable[0].index}")
        elif any(gid.kind == "RoCE v2" for gid in table):
            yield warning(
                check,
                f"{port.name} has only a link-local RoCE v2 GID",
                seen,
                "reaches peers on the same Ethernet segment only; through a router, and on most leaf-spine fabrics, "
                "connecting times out",
                address,
            )
        elif table:
            yield warning(
                check,
                f"{port.name} has no RoCE v2 GID",
                seen,
                "RoCE v1 is not routed: this rail reaches only peers on the same Ethernet segment that use v1, too",
                Fix(sudo(host, f"cma_roce_mode -d {port.device} -p {port.number} -m 2"), "ConnectX-3"),
                address,
            )
        else:
            yield error(
                check,
                f"{port.name} has no GID",
                seen,
                "no queue pair can be connected over this rail",
                Fix(sudo(host, f"ip link set {netdev} up")),
                address,
            )
    if good:
        yield ok(check, f"routable RoCE v2 GIDs: {listing(good)}", f"{INFINIBAND}/*/ports/*/gids, gid_attrs/types")


def partitions(host: Host) -> Iterator[Finding]:
    """InfiniBand's P_Keys: one that this port is a full member of."""
    check = "rdma.partitions"
    good = []
    for port in host.hardware.rail_ports:
        if port.link_layer != "InfiniBand" or not port.is_active:
            continue
        keys = host.hardware.partitions(port)
        full = [key for key in keys if key & 0x8000]
        if full:
            good.append(f"{port.name} {full[0]:#06x}")
        elif keys:
            yield warning(
                check,
                f"{port.name} is in no partition as a full member",
                f"{port.path}/pkeys: {listing([f'{key:#06x}' for key in keys], 4)}",
                "limited members do not hear each other: a peer that is also one cannot be reached over this rail",
                Fix("member=full for this port's GUID in the subnet manager's partitions.conf", "the network's owner"),
            )
    if good:
        yield ok(
            check, f"partitions: {listing(good)}", f"{INFINIBAND}/*/ports/*/pkeys; rdma=RdmaOptions(partition=...)"
        )


def device_files(host: Host) -> Iterator[Finding]:
    """/dev/infiniband/uverbsN of each device: there, and open to this user."""
    check = "rdma.device-files"
    if not host.hardware.rdma:
        return
    if not host.exists("/sys/module/ib_uverbs"):
        yield error(
            "rdma.uverbs-module",
            "kernel module ib_uverbs is not loaded",
            "/sys/module/ib_uverbs is not there",
            "no program can use the RDMA devices",
            Fix(sudo(host, "modprobe ib_uverbs")),
        )
        return
    nodes = {
        host.read(f"/sys/class/infiniband_verbs/{name}/ibdev") or "": f"/dev/infiniband/{name}"
        for name in host.names("/sys/class/infiniband_verbs")
        if name.startswith("uverbs")
    }
    missing = [
        nodes.get(device.name, device.name) for device in host.hardware.rdma if not _has_node(host, device, nodes)
    ]
    closed = [
        nodes[device.name]
        for device in host.hardware.rdma
        if _has_node(host, device, nodes) and not host.can_open(nodes[device.name])
    ]
    if missing:
        yield error(
            check,
            f"no device file for {len(missing)} of {len(host.hardware.rdma)} RDMA devices",
            f"missing: {listing(missing)}",
            "the kernel shows the device, and no program here can open it"
            + ("; in a container this is the usual cause of a silent fall-back to TCP" if host.container else ""),
            Fix("docker run --device=/dev/infiniband --ulimit memlock=-1 --network=host ...", "docker, podman"),
            Fix("resources: {limits: {rdma/hca: 1}}", "kubernetes, with an RDMA device plugin"),
            Fix(sudo(host, "udevadm trigger --subsystem-match=infiniband_verbs"), "on the host itself"),
        )
    if closed:
        yield error(
            check,
            f"no permission to open {listing(closed)}",
            f"user {host.uid} may not read and write it",
            "the devices cannot be used by this user",
            Fix(
                'echo \'SUBSYSTEM=="infiniband_verbs", KERNEL=="uverbs*", MODE="0666"\' | '
                + sudo(host, "tee /etc/udev/rules.d/90-crossrail-rdma.rules")
            ),
            Fix(sudo(host, f"chmod 0666 {closed[0]}"), "until the next boot"),
        )
    if not missing and not closed:
        yield ok(check, "device files of all RDMA devices can be opened", "/dev/infiniband/uverbs*")


def _has_node(host: Host, device: RdmaDevice, nodes: dict[str, str]) -> bool:
    return device.name in nodes and host.exists(nodes[device.name])


def namespace(host: Host) -> Iterator[Finding]:
    """RoCE takes its addresses from a network interface, which must be in our network namespace."""
    check = "rdma.namespace"
    ours = set(host.names(NET))
    strange = [
        port
        for port in host.hardware.rail_ports
        if port.link_layer == "Ethernet" and not ours.intersection(port.netdevs)
    ]
    strange = [port for port in strange if port.is_active]
    if strange:
        yield error(
            check,
            f"the network interface of {listing([port.name for port in strange])} is in another network namespace",
            f"gid_attrs/ndevs names none of {listing(sorted(ours))}",
            "the device can be opened, and connecting a queue pair fails (ENODEV, or a time-out)",
            Fix("docker run --network=host ...", "docker, podman"),
            Fix("hostNetwork: true", "kubernetes, or an SR-IOV/host-device CNI that moves the interface too"),
        )


def counters(host: Host) -> Iterator[Finding]:
    """Errors since the counters were reset: cables, congestion, flaps."""
    check = "rdma.counters"
    looked = False
    for port in host.hardware.ports:
        found = []
        for folder, names in _ERROR_COUNTERS.items():
            for name in names:
                value = host.read_int(f"{port.path}/{folder}/{name}")
                looked = looked or value is not None
                if value:
                    found.append(f"{name} {value:,}")
        if found:
            yield note(
                check,
                f"{port.name} counted errors: {listing(found)}",
                f"{port.path}/counters and hw_counters, since the driver was loaded",
                "a count that grows during a run means lost packets and resends; a rail that flapped (link_downed) is "
                "often seen as one that became slow",
                Fix(f"watch -d grep . {port.path}/hw_counters/*", "does it grow?"),
                Fix(f"mlxlink -d {port.device} -p {port.number} -c", "ConnectX: state of cable and signal"),
            )
    if looked and not any(True for port in host.hardware.ports for _ in _nonzero(host, port)):
        yield ok(check, "no link or retransmission errors counted", f"{INFINIBAND}/*/ports/*/counters, hw_counters")


def _nonzero(host: Host, port: Port) -> Iterator[str]:
    for folder, names in _ERROR_COUNTERS.items():
        yield from (name for name in names if host.read_int(f"{port.path}/{folder}/{name}"))


_ERROR_COUNTERS = {
    "counters": (
        "link_downed",
        "symbol_error",
        "port_rcv_errors",
        "link_error_recovery",
        "excessive_buffer_overrun_errors",
    ),
    "hw_counters": (
        "local_ack_timeout_err",
        "packet_seq_err",
        "out_of_sequence",
        "rnr_nak_retry_err",
        "roce_adp_retrans_to",
    ),
}


def firmware(host: Host) -> Iterator[Finding]:
    """NICs of one kind with different firmware behave differently under the same load."""
    by_kind: dict[str, dict[str, list[str]]] = {}
    for device in host.hardware.nics:
        if device.firmware:
            by_kind.setdefault(device.kind, {}).setdefault(device.firmware, []).append(device.name)
    for kind, versions in by_kind.items():
        if len(versions) > 1:
            yield note(
                "rdma.firmware",
                f"{kind} devices run {len(versions)} firmware versions",
                "; ".join(f"{version}: {listing(names)}" for version, names in versions.items()),
                "normal for cards of two models; for twins it makes one rail differ from the others",
                Fix("mlxfwmanager --query", "ConnectX"),
            )

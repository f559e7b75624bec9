"""Net devices and RDMA devices of a sysfs tree, and the NICs that they belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from crossrail.topology.model import NetDevice, NetKind, Nic, NicKind, PciAddress, PciFunction, RdmaDevice, RdmaPort
from crossrail.topology.pci import CLASS_NETWORK, PciReader
from crossrail.topology.sysfs import Tree, natural

_ARPHRD_LOOPBACK = 772
_OPERSTATES = frozenset({"unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up"})
_PORT_STATES = frozenset({"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"})
_PORT_PHYS_STATES = frozenset(
    {"No state change", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp",
     "LinkErrorRecovery", "Phy Test", "<unknown>"}
)  # fmt: skip
_LINK_LAYERS = frozenset({"InfiniBand", "Ethernet", "Unknown", "Unspecified"})
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")
_VETH_LIKE = frozenset({"veth", "macvlan", "ipvlan"})
_GIDS_MAX = 1024
_GIDS_UNSET_MAX = 16

# --- net devices ---


def read_net_devices(tree: Tree, pci: PciReader, addresses: Mapping[str, Sequence[str]]) -> list[NetDevice]:
    """All of class/net, in natural order."""
    found = []
    for name in tree.names("class", "net"):
        directory = tree.directory(tree.root / "class/net" / name)
        if directory is not None:  # class/net/bonding_masters is a file
            found.append(_net_device(tree, pci, directory, name, tuple(addresses.get(name, ()))))
    return found


def _net_device(tree: Tree, pci: PciReader, directory: Path, name: str, ip_addresses: tuple[str, ...]) -> NetDevice:
    hardware = tree.directory(directory / "device")
    kind, flavour = _net_kind(tree, directory, name, hardware)
    carrier = tree.integer(directory / "carrier", at_least=0, at_most=1)
    mbps = tree.integer(directory / "speed", at_least=-1, at_most=2**32)
    entries = tree.names(*directory.relative_to(tree.root).parts)
    return NetDevice(
        name=name,
        kind=kind,
        flavour=flavour,
        pci=pci.of(hardware) if hardware is not None else None,
        driver=tree.link_name(hardware / "driver") if hardware is not None else "",
        operstate=tree.word(directory / "operstate", _OPERSTATES) or "unknown",
        carrier=None if carrier is None else bool(carrier),
        # -1, or 2**32 - 1 of some drivers, says that nobody knows.
        speed_gbps=mbps / 1000 if mbps is not None and 0 < mbps < 2**31 else None,
        mtu=tree.integer(directory / "mtu", at_least=0, at_most=2**31),
        mac=_mac(tree, directory / "address"),
        master=tree.link_name(directory / "master"),
        lowers=tuple(entry.removeprefix("lower_") for entry in entries if entry.startswith("lower_")),
        ip_addresses=ip_addresses,
    )


def _net_kind(tree: Tree, directory: Path, name: str, hardware: Path | None) -> tuple[NetKind, str]:
    uevent = tree.text(directory / "uevent") or ""
    flavour = next((line[8:] for line in uevent.splitlines() if re.fullmatch(r"DEVTYPE=[a-z0-9_]{1,32}", line)), "")
    arp_type = tree.integer(directory / "type", at_least=0, at_most=65535)
    if name == "lo" or arp_type == _ARPHRD_LOOPBACK:
        return "loopback", ""
    if hardware is None:
        return _virtual_kind(tree, directory, flavour)
    if (directory / "wireless").is_dir() or (directory / "phy80211").exists() or flavour == "wlan":
        return "wireless", ""
    if any(re.fullmatch(r"usb\d+", part) for part in hardware.parts):
        return "usb", ""
    if _REPRESENTOR.fullmatch(tree.text(directory / "phys_port_name") or ""):
        return "representor", ""
    return "ethernet", flavour


def _virtual_kind(tree: Tree, directory: Path, flavour: str) -> tuple[NetKind, str]:
    if (directory / "bonding").is_dir() or flavour == "bond":
        return "bond", ""
    if (directory / "bridge").is_dir():
        return "virtual", "bridge"
    if (directory / "tun_flags").exists():
        return "virtual", "tun"
    if flavour in _VETH_LIKE:
        return "veth", flavour
    here = tree.integer(directory / "ifindex", at_least=1, at_most=2**31)
    peer = tree.integer(directory / "iflink", at_least=0, at_most=2**31)
    if not flavour and here is not None and peer not in (None, 0, here):
        return "veth", "veth"  # what it is linked to is elsewhere, and a veth is all that says no more of itself
    return "virtual", flavour


def _mac(tree: Tree, path: Path) -> str:
    text = tree.text(path)
    if text is None or re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5,31}", text):
        return text or ""
    tree.junk(path, text, "a hardware address")
    return ""


# --- RDMA devices ---


def read_rdma_devices(tree: Tree, pci: PciReader, net_devices: Iterable[NetDevice]) -> list[RdmaDevice]:
    """All of class/infiniband, in natural order."""
    uverbs = _uverbs_by_device(tree)
    known = {device.name for device in net_devices}
    found = []
    for name in tree.names("class", "infiniband"):
        directory = tree.directory(tree.root / "class/infiniband" / name)
        if directory is not None:
            found.append(_rdma_device(tree, pci, directory, uverbs.get(name, ""), known))
    return found


def _rdma_device(tree: Tree, pci: PciReader, directory: Path, uverbs: str, net_names: set[str]) -> RdmaDevice:
    hardware = tree.directory(directory / "device")
    function = pci.of(hardware) if hardware is not None else None
    driver = tree.link_name(hardware / "driver") if hardware is not None else ""
    ports = tuple(
        _port(tree, directory / "ports" / number, int(number))
        for number in tree.names(*directory.relative_to(tree.root).parts, "ports")
        if re.fullmatch(r"\d{1,3}", number)
    )
    if function is None:  # rxe and siw say which net device they use, as `parent` or as the GID table's
        parent = tree.text(directory / "parent")
        if parent in net_names and ports and not ports[0].net_devices:
            ports = (_with_net_device(ports[0], parent), *ports[1:])
    return RdmaDevice(directory.name, _rdma_kind(driver, function, ports), function, driver, uverbs, ports)


def _with_net_device(port: RdmaPort, name: str) -> RdmaPort:
    return RdmaPort(port.number, port.state, port.phys_state, port.link_layer, port.rate_gbps, port.gid_count, (name,))


def _rdma_kind(driver: str, function: PciFunction | None, ports: Sequence[RdmaPort]) -> NicKind:
    if function is None:
        return "soft-rdma"
    if driver == "efa":
        return "efa"
    layers = {port.link_layer for port in ports}
    if "InfiniBand" in layers:
        return "infiniband"
    return "roce" if "Ethernet" in layers else "rdma"


def _uverbs_by_device(tree: Tree) -> dict[str, str]:
    found = {}
    for name in tree.names("class", "infiniband_verbs"):
        device = tree.text(tree.root / "class/infiniband_verbs" / name / "ibdev")
        if device is not None:
            found[device] = name
    return found


def _port(tree: Tree, directory: Path, number: int) -> RdmaPort:
    return RdmaPort(
        number=number,
        state=_numbered_word(tree, directory / "state", _PORT_STATES),
        phys_state=_numbered_word(tree, directory / "phys_state", _PORT_PHYS_STATES),
        link_layer=tree.word(directory / "link_layer", _LINK_LAYERS) or "unknown",
        rate_gbps=_rate(tree, directory / "rate"),
        gid_count=_gid_count(tree, directory / "gids"),
        net_devices=_gid_net_devices(tree, directory / "gid_attrs" / "ndevs"),
    )


def _numbered_word(tree: Tree, path: Path, allowed: frozenset[str]) -> str:
    """The word in "4: ACTIVE"."""
    text = tree.text(path)
    if text is None:
        return "unknown"
    match = re.fullmatch(r"\d+: ?(.+)", text)
    if match is None or match[1] not in allowed:
        tree.junk(path, text, "a state we know")
        return "unknown"
    return match[1]


def _rate(tree: Tree, path: Path) -> float | None:
    """The number in "400 Gb/sec (4X NDR)"."""
    text = tree.text(path)
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec(?: \(.*\))?", text)
    if match is None:
        tree.junk(path, text, "a rate")
        return None
    return float(match[1]) or None


def _gid_count(tree: Tree, directory: Path) -> int:
    return len(list(_slots(tree, directory, _is_gid_set)))


def _gid_net_devices(tree: Tree, directory: Path) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_slots(tree, directory, bool)))


def _slots(tree: Tree, directory: Path, is_set: Callable[[str], bool]) -> Iterator[str]:
    """The entries of a port's GID table that are set. It has up to 1024 slots, a file each, and few are set: after
    some unset ones in a row there are no more."""
    unset = 0
    for index in range(_GIDS_MAX):
        text = tree.text(directory / str(index))
        if text is not None and is_set(text):
            unset = 0
            yield text
        elif (unset := unset + 1) == _GIDS_UNSET_MAX:
            return


def _is_gid_set(gid: str) -> bool:
    """A slot that was never set reads as all zeros, or as a link-local prefix with no identifier behind it."""
    return any(c not in "0:" for c in gid) and not gid.endswith(":0000" * 4)


# --- NICs ---


def assemble_nics(
    functions: Sequence[PciFunction], net_devices: Sequence[NetDevice], rdma_devices: Sequence[RdmaDevice]
) -> list[Nic]:
    """All possible rails: RDMA devices with their net devices, net devices alone, PCI functions with neither.

    Ordered by PCI address, then name; anything that is not a PCI device comes last.
    """
    by_name = {device.name: device for device in net_devices}
    nics: list[Nic] = []
    taken: set[str] = set()
    for rdma in rdma_devices:
        owned = [by_name[name] for name in _net_names_of(rdma, net_devices) if name in by_name]
        nics.append(Nic(rdma.name, rdma.kind, rdma.pci or _place(owned, by_name), rdma, tuple(owned)))
        if rdma.kind != "soft-rdma":
            taken.update(device.name for device in owned)
    for device in net_devices:
        if device.name not in taken:
            nics.append(Nic(device.name, device.kind, _place([device], by_name), None, (device,)))
    nics.extend(_without_driver(functions, nics))
    return sorted(_uniquely_named(nics), key=_order)


def _net_names_of(rdma: RdmaDevice, net_devices: Sequence[NetDevice]) -> list[str]:
    """By the GID table, which names bonds too; and by the PCI function, which covers InfiniBand (IPoIB)."""
    named = [name for port in rdma.ports for name in port.net_devices]
    if rdma.pci is not None:
        here = rdma.pci.address
        beside = [d for d in net_devices if d.pci is not None and d.pci.address == here and d.kind == "ethernet"]
        named += [device.name for device in beside if device.master not in named]
    uppers = {d.name for d in net_devices if d.kind in ("virtual", "veth")}  # a VLAN has its own GIDs in the table
    return [name for name in dict.fromkeys(named) if name not in uppers]


def _place(devices: Sequence[NetDevice], by_name: Mapping[str, NetDevice]) -> PciFunction | None:
    """The hardware's location: for a bond or a stacked device, such as a VLAN, the first location below."""
    seen: set[str] = set()
    left = list(devices)
    while left:
        device = left.pop(0)
        if device.pci is not None:
            return device.pci
        seen.add(device.name)
        left[:0] = [by_name[name] for name in device.lowers if name in by_name and name not in seen]
    return None


def _without_driver(functions: Sequence[PciFunction], nics: Sequence[Nic]) -> list[Nic]:
    """Network hardware that this process sees no device of. Virtual functions are left out: they are guests' mostly."""
    seen: set[PciAddress] = {nic.pci.address for nic in nics if nic.pci is not None}
    seen |= {device.pci.address for nic in nics for device in nic.net_devices if device.pci is not None}
    return [
        Nic(str(function.address), "no-driver", function)
        for function in functions
        if function.class_code >> 8 == CLASS_NETWORK and function.address not in seen and function.physfn is None
    ]


def _uniquely_named(nics: Sequence[Nic]) -> list[Nic]:
    """An RDMA device may have the name of a net device. The RDMA device comes first, and keeps it."""
    names: set[str] = set()
    kept = []
    for nic in nics:
        name = nic.name if nic.name not in names else f"{nic.name}.net"
        if name not in names:
            names.add(name)
            kept.append(nic if name == nic.name else Nic(name, nic.kind, nic.pci, nic.rdma, nic.net_devices))
    return kept


def _order(nic: Nic) -> tuple[bool, PciAddress, list[tuple[int, int | str]]]:
    nowhere = PciAddress(0, 0, 0, 0)
    return nic.pci is None, nic.pci.address if nic.pci is not None else nowhere, natural(nic.name)

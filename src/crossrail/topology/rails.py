"""Which NICs serve which device. Pure functions over a Topology.

The order of judgement, each step keeping some and giving the rest a reason:

1. what cannot carry traffic (down, no driver, not what `need` asks for);
2. what is not hardware of its own (bridges, VLANs, members of a bond, virtual functions beside their physical one);
3. the best sort there is: RDMA, else wired, else wireless or USB, else a container's veth, else what is virtual
   and has an address (a tunnel), else loopback;
4. what is slower than a quarter of the fastest: management ports, wherever they are;
5. what is farther than need be, and what the other GPUs of the same switch get (sharing.py);
6. `limit`.

`only` names the NICs itself and so replaces steps 2 to 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from crossrail.errors import UsageError
from crossrail.topology.model import (
    RDMA_KINDS,
    UPPER_KINDS,
    Cpu,
    Device,
    Distance,
    Gpu,
    Host,
    NetDevice,
    Nic,
    NumaNode,
    Topology,
)
from crossrail.topology.sharing import Reach, Shares, deal, fastest, reach, speed_of

Need: TypeAlias = Literal["efa", "verbs", "ip"]
_NEEDS: dict[str, str] = {"efa": "no EFA device", "verbs": "no verbs RDMA device", "ip": "no net device"}

# NICs below this share of the fastest NIC's speed are for management. 4: a GPU's own 100 Gb/s NIC is still better than
# a 400 Gb/s one behind the CPU; a 25 Gb/s onboard port is not.
_SLOW_DIVISOR = 4


@dataclass(frozen=True)
class Candidate:
    """One NIC and the verdict on it. reason: one line for people."""

    nic: Nic
    distance: Distance
    reason: str


@dataclass(frozen=True)
class RailChoice:
    """rails: best first, nearest, then fastest; rejected: all other NICs, each with its reason. reason: in one line.

    Invariant: every NIC of the topology is in exactly one of the two; every rail's NIC is up.
    """

    device: Device
    rails: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    reason: str


def choose_rails(
    topology: Topology,
    device: Device | str,
    *,
    limit: int | None = None,
    only: Iterable[str] | None = None,
    need: Need | None = None,
) -> RailChoice:
    """The NICs that should carry the traffic of a device's memory. Pure: the same topology gives the same choice.

    device: one of the topology, or its name as for Topology.device. Every GPU's choice takes the other GPUs into
    account, also hidden ones, so processes that choose for themselves do not collide.
    limit: most rails, at least 1. only: names (RDMA device, net device or PCI address) of the NICs to use, exactly
    those, as far as they are up; also the way to storage NICs and other things left out by default. need: "efa",
    "verbs" (RDMA that is not EFA) or "ip" (net devices; RDMA is no advantage then, and a net device without an address
    is none if the topology was read with addresses: a VLAN or bridge above that has one stands in); None takes RDMA
    before IP.
    Raises UsageError for a name that is not there or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit={limit} must be at least 1")
    if need is not None and need not in _NEEDS:
        raise UsageError(f"need={need!r} must be one of {', '.join(_NEEDS)}")
    if isinstance(device, str):
        device = topology.device(device)
    elif not isinstance(device, (Gpu, NumaNode, Cpu, Host)):
        raise UsageError(f"device must be one of the topology, or its name as text, not {type(device).__name__}")
    chooser = _Chooser(topology, device, need)
    if only is None:
        chooser.choose()
    else:
        chooser.take(frozenset([only] if isinstance(only, str) else only))
    return chooser.verdict(limit)


def left_out(topology: Topology) -> dict[str, str]:
    """By name, NICs that are rails of no device by default while others are, each with its reason. Pure.

    They are not hardware of their own, of a poorer sort, of another model and far slower than the fastest, or under no
    GPU's switch where others are (steps 2 to 4, and strays). Not what may be missed: a rail of a faster one's model,
    which has trained at a low rate, and what is down, unless it is no hardware of its own.
    """
    return _Chooser(topology, Host(), None).left_out()


class _Chooser:
    """The NICs still under consideration, and the reasons why the others are not."""

    def __init__(self, topology: Topology, device: Device, need: Need | None) -> None:
        self._topology = topology
        self._device = device
        self._need = need
        self._left = list(topology.nics)
        self._reasons: dict[str, str] = {}
        self._summary = ""

    def choose(self) -> None:
        """Steps 1 to 5."""
        self._drop(self._unusable)
        loopback = [nic for nic in self._left if nic.kind == "loopback"]
        virtual = [nic for nic in self._left if nic.kind == "virtual" and any(d.ip_addresses for d in nic.net_devices)]
        self._drop(self._not_hardware)
        self._drop(self._shared_port())
        self._keep_best_sort()
        self._drop_slow()
        if not self._left and virtual:  # as in rootless podman, whose containers have a tap device
            self._left = virtual
            for nic in virtual:
                del self._reasons[nic.name]
        elif not self._left and loopback:
            self._left = loopback
            self._explain(loopback, "loopback: nothing else is up, so peers on this host alone")
            return
        self._keep_near()

    def left_out(self) -> dict[str, str]:
        """Steps 2 to 4 and strays, without what drops rails that are down or have trained at a low rate."""
        working = [nic for nic in self._left if nic.up and (nic.rdma_up or nic.kind not in RDMA_KINDS)]
        self._left.sort(key=lambda nic: nic not in working)  # of two that share a port, the one that works
        self._drop(self._not_hardware)
        self._drop(self._shared_port())
        self._left = [nic for nic in self._left if nic in working]
        self._keep_best_sort()
        self._drop_slow(even_of_one_model=False)
        if self._left:
            shares = deal(self._topology, self._left)
            self._drop(lambda nic: "under no GPU's switch, unlike others" if shares.is_stray(nic) else None)
        return self._reasons

    def take(self, names: frozenset[str]) -> None:
        """Exactly those, if they are up."""
        known = frozenset(name for nic in self._topology.nics for name in nic.names)
        unknown = sorted(names - known)
        if unknown:
            raise UsageError(f"only={', '.join(unknown)}: no such NIC; there are: {', '.join(sorted(known)) or 'none'}")
        self._drop(lambda nic: None if nic.names & names else "not among those named")
        self._drop(self._unusable)
        self._explain(self._left, "named")
        self._summary = "as named"

    def verdict(self, limit: int | None) -> RailChoice:
        """Rank what is left, and put every NIC on one of the two lists."""
        self._left.sort(key=self._rank)  # stable: the order of addresses stays
        if limit is not None and len(self._left) > limit:
            for nic in self._left[limit:]:
                self._reasons[nic.name] = f"past the limit of {limit}"
            self._left = self._left[:limit]
        chosen = {nic.name for nic in self._left}
        rejected = sorted((nic for nic in self._topology.nics if nic.name not in chosen), key=self._rank)
        return RailChoice(
            self._device,
            tuple(self._candidate(nic) for nic in self._left),
            tuple(self._candidate(nic) for nic in rejected),
            self._in_one_line(),
        )

    def _candidate(self, nic: Nic) -> Candidate:
        return Candidate(nic, self._distance(nic), self._reasons[nic.name])

    def _distance(self, nic: Nic) -> Distance:
        return self._topology.distance(self._device, nic)

    def _reach(self, nic: Nic) -> Reach:
        return reach(self._topology, self._device, nic)

    def _rank(self, nic: Nic) -> tuple[Reach, float]:
        return self._reach(nic), -speed_of(nic)

    def _in_one_line(self) -> str:
        if not self._left:
            return "no NIC to use" if self._topology.nics else "there is no NIC"
        return self._summary or self._reasons[self._left[0].name]

    def _drop(self, reason_of: Callable[[Nic], str | None]) -> None:
        for nic in self._left:
            reason = reason_of(nic)
            if reason is not None:
                self._reasons[nic.name] = reason
        self._left = [nic for nic in self._left if nic.name not in self._reasons]

    def _explain(self, nics: Iterable[Nic], reason: str) -> None:
        for nic in nics:
            self._reasons[nic.name] = reason

    # --- step 1 ---

    def _unusable(self, nic: Nic) -> str | None:
        if nic.kind == "no-driver":
            return f"{nic.state}, but no device visible here" if nic.pci and nic.pci.driver else nic.state
        if not nic.up:
            return _down(nic)
        if self._need is None:
            return None
        if self._need == "ip":
            return self._without_ip(nic)
        fits = nic.kind in RDMA_KINDS | {"soft-rdma"} and (nic.kind == "efa") == (self._need == "efa")
        if not fits:
            return _NEEDS[self._need]
        return None if nic.rdma_up else _down(nic)

    def _without_ip(self, nic: Nic) -> str | None:
        if not nic.net_devices:
            return _NEEDS["ip"]
        if not nic.net_up:
            return "its net device is down"
        known = any(device.ip_addresses for device in self._topology.net_devices)
        return "no IP address" if known and not any(device.ip_addresses for device in nic.net_devices) else None

    # --- step 2 ---

    def _not_hardware(self, nic: Nic) -> str | None:
        if nic.kind == "loopback":
            return "loopback"
        if nic.kind == "soft-rdma":
            below = nic.net_devices[0].name if nic.net_devices else "a net device"
            return f"software RDMA on {below}"
        if nic.kind == "representor":
            return "switch side of a virtual function"
        if self._stands_in(nic):
            first = next(n for n in self._topology.nics if n.pci == nic.pci and n.up and self._stands_in(n))
            return None if first is nic else f"on the same port as {first.name}"
        if nic.kind == "virtual" or (nic.kind == "veth" and self._sees_hardware()):
            flavour = nic.net_devices[0].flavour
            return f"virtual ({flavour})" if flavour else "virtual"
        return self._covered(nic)

    def _stands_in(self, nic: Nic) -> bool:
        """True for a VLAN or bridge that has the address which IP asks for, and on hardware that has none itself."""
        if self._need != "ip" or nic.kind != "virtual" or nic.pci is None:
            return False
        device = nic.net_devices[0]
        addressed = bool(device.ip_addresses) and device.flavour in ("vlan", "bridge")
        return addressed and not any(below.ip_addresses for below in self._below(device))

    def _below(self, device: NetDevice) -> Iterable[NetDevice]:
        """Everything that it stands on, also by way of others."""
        by_name = {other.name: other for other in self._topology.net_devices}
        found: dict[str, NetDevice] = {}
        left = list(device.lowers)
        while left:
            name = left.pop()
            if name in by_name and name not in found:
                found[name] = by_name[name]
                left += by_name[name].lowers
        return found.values()

    def _sees_hardware(self) -> bool:
        """False in a container that has only a veth: then that is the way out, beside RDMA devices if it has any."""
        return any(d.kind in ("ethernet", "bond", "wireless", "usb") for d in self._topology.net_devices)

    def _covered(self, nic: Nic) -> str | None:
        """IP traffic of a net device may be another's: of a bond's member, or of the bond that an RDMA device uses."""
        if not nic.net_devices or (nic.rdma is not None and self._need != "ip"):
            return None
        master = nic.net_devices[0].master
        cover = next((n for n in self._topology.nics if n.up and master in {d.name for d in n.net_devices}), None)
        if not master or cover is None or cover.kind == "virtual":
            return None  # a bridge above changes nothing about the wire
        return f"part of {cover.name}" if cover.name == master else f"part of {master}, which {cover.name} uses"

    def _shared_port(self) -> Callable[[Nic], str | None]:
        """A virtual function shares the wire of its physical one; of several, one is enough."""
        users = {
            nic.pci.address: nic for nic in reversed(self._left) if nic.pci is not None and nic.kind not in UPPER_KINDS
        }
        first: dict[object, Nic] = {}

        def reason(nic: Nic) -> str | None:
            parent = nic.pci.physfn if nic.pci is not None else None
            if parent is None:
                return None
            user = users.get(parent)
            if user is None or self._sort(user) > self._sort(nic):
                user = first.setdefault(parent, nic)
            return None if user is nic else f"virtual function: shares the port of {user.name}, which is used"

        return reason

    # --- steps 3 and 4 ---

    def _keep_best_sort(self) -> None:
        best = min((self._sort(nic) for nic in self._left), default=0)
        lacking = {"wireless": "Wi-Fi, wired NICs are up", "usb": "USB, wired NICs are up"} if best > 0 else {}
        self._drop(
            lambda nic: None if self._sort(nic) == best else lacking.get(nic.kind, "no RDMA, other NICs have it")
        )

    def _sort(self, nic: Nic) -> int:
        if nic.kind in RDMA_KINDS and self._need != "ip" and nic.rdma_up:
            return 0
        if nic.kind == "veth":
            return 3
        return 2 if nic.kind in ("wireless", "usb") else 1

    def _drop_slow(self, even_of_one_model: bool = True) -> None:
        top = max((speed_of(nic) for nic in self._left), default=0.0)
        slow = {nic.name for nic in self._left if nic.speed_gbps is not None and nic.speed_gbps * _SLOW_DIVISOR < top}
        quick_models = set() if even_of_one_model else {_model(nic) for nic in self._left if nic.name not in slow}
        self._drop(
            lambda nic: (
                f"{_speed(nic)}, where the fastest has {top:g}"
                if nic.name in slow and _model(nic) not in quick_models
                else None
            )
        )

    # --- step 5 ---

    def _keep_near(self) -> None:
        if not self._left:
            return
        shares = deal(self._topology, self._left)
        if isinstance(self._device, Gpu):
            self._keep_share(shares, self._device)
        else:
            self._keep_on_node(shares)

    def _keep_share(self, shares: Shares, gpu: Gpu) -> None:
        mine = shares.of(gpu)
        farthest = max(self._reach(nic) for nic in mine)
        slowest = min(speed_of(nic) for nic in mine)

        def reason(nic: Nic) -> str | None:
            if nic in mine:
                return None
            if self._reach(nic) > farthest:
                stray = "; under no GPU's switch" if shares.is_stray(nic) else ""
                return f"{_farther(self._reach(nic), farthest)}{stray}"
            if speed_of(nic) < slowest:
                return f"{_speed(nic)}, where the others here have {slowest:g}"
            if shares.is_stray(nic):
                return "under no GPU's switch, unlike others: for storage or management, by its place"
            return f"left to {shares.users_text(nic)}" if shares.users_text(nic) else "as near, but not needed"

        self._drop(reason)
        for nic in self._left:
            others = shares.users_text(nic, but=gpu)
            self._reasons[nic.name] = f"{self._distance(nic).words}{f', shared with {others}' if others else ''}"
        if shares.flat and len(self._topology.gpus) > 1:
            self._summary = f"no topology to go by: every GPU uses {'all of them' if len(self._left) > 1 else 'it'}"
        else:
            self._summary = f"{farthest[0].words}, {_together(self._left)}"
        self._add_remarks(farthest)

    def _add_remarks(self, nearest: Reach) -> None:
        """Adds remarks about the choice for people."""
        poor = next((_POOR[nic.kind] for nic in self._left if nic.kind in _POOR), "")
        rdma = any(nic.kind in RDMA_KINDS for nic in self._left)
        kinds = {"no-driver", *RDMA_KINDS, *(() if rdma else ("ethernet", "bond"))}
        missed = [nic for nic in self._topology.nics if nic.kind in kinds and not nic.up]
        nearer = [nic.name for nic in missed if self._reach(nic) < nearest]
        if poor:
            self._summary += f"; {poor}"
        if nearer:
            more = f" and {len(nearer) - 2} more" if len(nearer) > 2 else ""
            self._summary += f"; nearer, but not usable: {', '.join(nearer[:2])}{more}"

    def _keep_on_node(self, shares: Shares) -> None:
        nearest = min(self._reach(nic) for nic in self._left)
        self._drop(lambda nic: None if self._reach(nic) == nearest else _farther(self._reach(nic), nearest))
        strays = [nic for nic in self._left if shares.is_stray(nic)]
        if len(strays) < len(self._left):
            self._drop(lambda nic: "under no GPU's switch, unlike others" if nic in strays else None)
        quick = fastest(self._left)
        self._drop(lambda n: None if n in quick else f"{_speed(n)}, where the others have {speed_of(quick[0]):g}")
        words = nearest[0].words
        if isinstance(self._device, Host) or len(self._topology.numa_nodes) <= 1:
            words = "the only NIC to use" if len(self._left) == 1 else "all of the fastest"
        self._explain(self._left, words)
        self._summary = f"{words}, {_together(self._left)}"
        self._add_remarks(nearest)


# What is chosen only for lack of anything better, and what that means.
_POOR: dict[str, str] = {
    "wireless": "Wi-Fi, as nothing wired is up",
    "usb": "USB, as nothing better is up",
    "veth": "a container's link, its hardware is out of sight",
    "virtual": "virtual, as nothing else is up",
}


def _farther(far: Reach, near: Reach) -> str:
    if far[0] != near[0]:
        return f"farther: {far[0].name}, not {near[0].name}"
    return f"farther: NUMA distance {far[1]}, not {near[1]}"


def _down(nic: Nic) -> str:
    says_it = "down" in nic.state.lower() or "unknown" in nic.state
    return nic.state if says_it else f"down ({nic.state})"


def _model(nic: Nic) -> tuple[int, int, int] | None:
    """The class tells InfiniBand from Ethernet: NVIDIA's virtual functions have one device number in all models."""
    return None if nic.pci is None else (nic.pci.vendor, nic.pci.device, nic.pci.class_code)


def _speed(nic: Nic) -> str:
    return "speed unknown" if nic.speed_gbps is None else f"{nic.speed_gbps:g} Gb/s"


def _together(nics: list[Nic]) -> str:
    times = f"{len(nics)} × " if len(nics) > 1 else ""
    return times + _speed(nics[0])  # all of one speed

"""Assigns NICs to GPUs, so that none is idle while its neighbours are shared.

1. A NIC below a GPU's PCIe root port (PIX, PXB) goes to the nearest GPU; of several, to the one with the fewest so far.
   Each GPU takes part in its fastest sort alone: 400 Gb/s compute ports, not the 200 Gb/s storage port beside them.
2. A GPU left without (its own are down, or the machine is not built that way) takes part in what is nearest beyond:
   dealt out in the same way among the GPUs in the same situation; NICs that others own are borrowed, as few as fair.
   NICs under no GPU's switch ("strays") stand back behind those that are: storage and management hang off the CPU,
   often on a network of their own.

Where the topology says nothing - all pairs equally far, no NUMA node known, as in many virtual machines - every GPU
uses every NIC of the fastest sort, which is as fair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crossrail.topology.model import Device, Distance, Gpu, Nic, Topology

Reach: TypeAlias = tuple[Distance, int]
_FAR = 255  # what the firmware calls unreachable


@dataclass(frozen=True)
class Shares:
    """Which GPUs use which NIC. users: by NIC, the GPUs that use it. flat: the topology says nothing."""

    nics: tuple[Nic, ...]
    users: dict[str, tuple[Gpu, ...]]
    strays: frozenset[str]
    flat: bool

    def of(self, gpu: Gpu) -> list[Nic]:
        """The NICs that a GPU of the topology uses; never empty."""
        return [nic for nic in self.nics if gpu in self.users.get(nic.name, ())]

    def is_stray(self, nic: Nic) -> bool:
        """True when it is under no GPU's root port although others are."""
        return nic.name in self.strays

    def users_text(self, nic: Nic, but: Gpu | None = None) -> str:
        """The users for people, without one of them: "gpu0, gpu1"."""
        users = [gpu.name for gpu in self.users.get(nic.name, ()) if gpu != but]
        return ", ".join(users) if len(users) <= 4 else f"{len(users)} GPUs"


def reach(topology: Topology, device: Device, nic: Nic) -> Reach:
    """A sort key for the distance of a NIC: by Distance, then by the firmware's figure between the nodes."""
    figure = topology.numa_distance(device, nic)
    return topology.distance(device, nic), _FAR if figure is None else figure


def speed_of(nic: Nic) -> float:
    """A speed for comparisons; an unknown speed is less than any known one."""
    return nic.speed_gbps or 0.0


def fastest(nics: Sequence[Nic]) -> list[Nic]:
    """The NICs of the highest speed among them."""
    top = max((speed_of(nic) for nic in nics), default=0.0)
    return [nic for nic in nics if speed_of(nic) == top]


def deal(topology: Topology, nics: Sequence[Nic]) -> Shares:
    """nics: the candidates, at least one, in the order in which to deal."""
    return _Dealer(topology, nics).deal()


class _Dealer:
    def __init__(self, topology: Topology, nics: Sequence[Nic]) -> None:
        self._topology = topology
        self._nics = nics
        self._users: dict[str, list[Gpu]] = {nic.name: [] for nic in nics}
        self._reaches = {(g.pci.address, n.name): reach(topology, g, n) for g in topology.gpus for n in nics}

    def deal(self) -> Shares:
        flat = self._is_flat()
        if flat:
            for nic in fastest(self._nics):
                self._users[nic.name] = list(self._topology.gpus)
        else:
            self._deal_local()
            self._deal_beyond()
        strays = frozenset(nic.name for nic in self._nics if not self._is_attached(nic))
        if len(strays) == len(self._nics):
            strays = frozenset()
        return Shares(tuple(self._nics), {name: tuple(gpus) for name, gpus in self._users.items()}, strays, flat)

    def _reach(self, gpu: Gpu, nic: Nic) -> Reach:
        return self._reaches[gpu.pci.address, nic.name]

    def _is_local(self, gpu: Gpu, nic: Nic) -> bool:
        return self._reach(gpu, nic)[0] <= Distance.PXB

    def _is_attached(self, nic: Nic) -> bool:
        return any(self._is_local(gpu, nic) for gpu in self._topology.gpus)

    def _count(self, gpu: Gpu) -> int:
        return sum(gpu in users for users in self._users.values())

    def _is_flat(self) -> bool:
        places = [*(gpu.pci for gpu in self._topology.gpus), *(nic.pci for nic in self._nics)]
        unknown = all(place is None or place.numa is None for place in places)
        alike = len(set(self._reaches.values())) == 1
        return unknown and alike and not any(self._is_attached(nic) for nic in self._nics)

    def _deal_local(self) -> None:
        wanted = {}
        for gpu in self._topology.gpus:
            local = [nic for nic in self._nics if self._is_local(gpu, nic)]
            wanted[gpu.pci.address] = {nic.name for nic in fastest(local)}
        nearest = {
            n.name: min(self._reach(g, n) for g in self._topology.gpus) for n in self._nics if self._is_attached(n)
        }
        attached = [nic for nic in self._nics if nic.name in nearest]
        for nic in sorted(attached, key=lambda n: nearest[n.name][0]):  # stable, so that ties keep the given order
            near = [gpu for gpu in self._topology.gpus if self._reach(gpu, nic) == nearest[nic.name]]
            owners = [gpu for gpu in near if nic.name in wanted[gpu.pci.address]]
            if owners:
                self._users[nic.name].append(min(owners, key=self._count))

    def _deal_beyond(self) -> None:
        waiting = [gpu for gpu in self._topology.gpus if self._count(gpu) == 0]
        near = {gpu.pci.address: self._nearest(gpu) for gpu in waiting}
        owned = {name for name, users in self._users.items() if users}
        for names in dict.fromkeys(tuple(nic.name for nic in nics) for nics in near.values()):
            nics = [nic for nic in self._nics if nic.name in names]
            alike = [gpu for gpu in waiting if tuple(nic.name for nic in near[gpu.pci.address]) == names]
            if owned.isdisjoint(names):
                for nic in nics:
                    self._users[nic.name].append(min(alike, key=self._count))
            for gpu in alike:
                if self._count(gpu) == 0:
                    self._borrow(gpu, nics)

    def _nearest(self, gpu: Gpu) -> list[Nic]:
        """The fastest of the nearest, without strays if there are others."""
        level = min(self._reach(gpu, nic) for nic in self._nics)
        nics = [nic for nic in self._nics if self._reach(gpu, nic) == level]
        return fastest([nic for nic in nics if self._is_attached(nic)] or nics)

    def _borrow(self, gpu: Gpu, nics: Sequence[Nic]) -> None:
        """Takes as many as are fair to all their users, the least used first, from as many owners as possible."""
        claimants = {user.pci.address for nic in nics for user in self._users[nic.name]}
        quota = max(1, len(nics) // (len(claimants) + 1))
        borrowed_of: dict[Gpu | None, int] = {}

        def owner(nic: Nic) -> Gpu | None:
            return next(iter(self._users[nic.name]), None)

        def cost(nic: Nic) -> tuple[int, int]:
            return len(self._users[nic.name]), borrowed_of.get(owner(nic), 0)

        for _ in range(quota):
            nic = min((nic for nic in nics if gpu not in self._users[nic.name]), key=cost)
            borrowed_of[owner(nic)] = borrowed_of.get(owner(nic), 0) + 1
            self._users[nic.name].append(gpu)

"""Chooses by topology which NICs an engine uses when its rails are only a number, and which core its worker runs on.

Imported by engine.py on first use; crossrail.topology is imported likewise. Any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from crossrail import _core
from crossrail._devices import HOST, gpu_of
from crossrail._notify import log
from crossrail._raise import no_thread
from crossrail.errors import UsageError

if TYPE_CHECKING:
    from crossrail.topology import Need, RailChoice, Topology

_CPUS_MAX = 1024  # bits of a cpu_set_t, with which the worker is pinned
RDMA_DEVICES: str | os.PathLike[str] = "/sys/class/infiniband"

# What the rails of a transport must offer; the first that some NIC meets is used. Other transports leave the choice to
# the engine's tcp and to libfabric.
_NEEDS: dict[str, tuple[Need, ...]] = {
    "auto": ("verbs", "efa"),
    "shm": (),
    "verbs": ("verbs",),
    "ofi": ("efa",),
    "ofi:efa": ("efa",),
    "ofi:efa-direct": ("efa",),
}


def default_rails(transport: str, rails: int | Sequence[str], device: object = None) -> int | Sequence[str]:
    """The engine's rails: as given, except that a number becomes names of RDMA ports if the topology offers that many.

    transport, rails, device: the engine's options. Errors in the first two are left to the engine, whose messages are
    better. A machine without such hardware is not even inspected. A GPU with fewer NICs of its own than rails gets
    those, which is logged (level INFO): the others belong to its neighbours.
    """
    gpu = gpu_of(device)
    # Another transport in the combination would reject the names of ports.
    words = transport.split("+")
    needs = [need for word in words for need in _NEEDS[word]] if all(word in _NEEDS for word in words) else []
    if not isinstance(rails, int) or rails < 1 or not needs or not _has_rdma():
        return rails
    from crossrail.topology.addresses import read_this_machine

    topology = read_this_machine()
    place = "host" if gpu == HOST else _place_of(topology, gpu)
    for need in needs:
        names = rail_names(topology, need, rails, place)
        if not names:
            continue
        if len(names) < rails:
            log.info("device=%r: %d rails, not %d: %s are all NICs near it", device, len(names), rails, names)
        return names
    return rails


def log_rails(
    engine: str,
    transport: str,
    rails: int | Sequence[str],
    devices: Mapping[str, Sequence[str]],
    endpoints: Sequence[str],
) -> None:
    """Logs what may be surprising about the rails of an engine that has opened.

    engine: its name. transport, rails: its options, after default_rails. devices: the interface of each rail, by
    transport. endpoints: where its tcp transport listens.
    """
    for name, of_rails in devices.items():
        if len(set(of_rails)) < len(of_rails):
            text = "engine %r: some of its %d rails over %s share an interface: %s"
            log.info(text, engine, len(of_rails), name, ", ".join(of_rails))
    if endpoints and isinstance(rails, int) and all(end.startswith(("127.", "[::1]")) for end in endpoints):
        text = "engine %r: no interface is up with an address: tcp listens at %s, which no other host reaches"
        # With "auto" all peers may be on this host, and then nothing is wrong.
        log.log(logging.WARNING if "tcp" in transport else logging.INFO, text, engine, endpoints[0])


def rail_names(topology: Topology, need: Need, count: int, place: str = "host") -> list[str]:
    """`count` ports, best first, in the form of rails=. If there are fewer: none for the host, those for a GPU. Pure.

    place: one of the topology's devices.
    """
    from crossrail.topology import choose_rails

    choice = choose_rails(topology, place, need=need, limit=count)
    ports = [(rail.nic.rdma, rail.nic.rdma.port) for rail in choice.rails if rail.nic.rdma is not None]
    # libfabric names devices, each with one port.
    names = [device.name if need == "efa" else f"{device.name}:{port.number}" for device, port in ports if port]
    return names if len(names) == count or place != "host" else []


def _place_of(topology: Topology, gpu: int) -> str:
    """The topology's name for the GPU with this CUDA ordinal; "host", with the reason logged, if it is not visible."""
    address = _core._gpu_pci_address(gpu)
    try:
        return topology.device(address).name
    except UsageError:
        where = f"is at {address}, which /sys does not show" if address else "is none that CUDA knows the place of"
        log.info("cuda:%d %s: its rails are chosen as for host memory", gpu, where)
        return "host"


def _has_rdma() -> bool:
    """Whether there is RDMA hardware: software devices, which the topology leaves out, do not count."""
    try:
        with os.scandir(RDMA_DEVICES) as entries:  # not pathlib, which is slow to import
            return any(os.path.exists(f"{entry.path}/device") for entry in entries)  # noqa: PTH110
    except OSError:
        return False


def auto_worker_cpu(transport: str, rails: int | Sequence[str]) -> int | None:
    """The first core near the rails that this process may use, or None: leave the worker where the scheduler puts it.

    transport, rails: the engine's, after default_rails. Rails given as a number are those that choose_rails takes; the
    engine's tcp chooses by itself and may differ, so on machines of several nodes name them. None, with the reason
    in the log (level INFO), when the engine has no rail on a NIC, nobody knows the NIC's NUMA node, or this
    process may use none of that node's cores. Every engine of the same rails gets the same core: where several run,
    pin by hand or give each process an affinity of its own.
    """
    if transport in ("shm", "null"):
        log.info("worker_cpu='auto': transport %r uses no NIC; the worker is not pinned", transport)
        return None
    from crossrail.topology.addresses import read_this_machine

    topology = read_this_machine()
    cpu, reason = core_near(topology, _rails_of(topology, rails), os.sched_getaffinity(0))
    where = "the worker is not pinned" if cpu is None else f"the worker is pinned to core {cpu}"
    log.info("worker_cpu='auto': %s; %s", reason, where)
    return cpu


def check_worker_cpu(cpu: object) -> None:
    """UsageError for a core that this process cannot use. Values that are not numbers are left to the engine."""
    if isinstance(cpu, bool) or not isinstance(cpu, Integral):
        return
    usable = usable_cpus()
    if int(cpu) not in usable:
        from crossrail.topology.sysfs import format_cpu_list

        cores = format_cpu_list(tuple(usable))
        raise UsageError(f"worker_cpu is {cpu}, must be a core that this process may use: {cores}")


def usable_cpus() -> set[int]:
    """The CPUs of the cpuset: our threads may be pinned even to those outside the calling thread's affinity."""
    found = os.sched_getaffinity(0)

    def look() -> None:
        nonlocal found
        with contextlib.suppress(OSError):  # a sandbox that forbids pinning
            os.sched_setaffinity(0, range(_CPUS_MAX))
        found = os.sched_getaffinity(0)

    thread = threading.Thread(target=look, name="crossrail-cpus")
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(error) from None
    thread.join()
    return found


def core_near(topology: Topology, choice: RailChoice, affinity: Iterable[int]) -> tuple[int | None, str]:
    """The first core of the rails' NUMA node within the affinity, or None; and the reason. Pure."""
    from crossrail.topology import worker_cpus

    nodes = [topology.node_of(rail.nic) for rail in choice.rails]
    if not any(nodes) or not any(node.cpus for node in topology.numa_nodes):
        return None, "the rails' NUMA node is unknown" if choice.rails else choice.reason
    near = worker_cpus(topology, choice)  # the affinity would make it return far cores if none are near
    usable = set(near.cpus) & set(affinity)
    if not usable:
        return None, f"{near.reason}, but this process may use none of its cores"
    return min(usable), near.reason


def _rails_of(topology: Topology, rails: int | Sequence[str]) -> RailChoice:
    """The choice for these rails. Invalid rails are left to the engine, which opens next and reports them better."""
    from crossrail.topology import choose_rails

    if isinstance(rails, int):
        return choose_rails(topology, "host", need="ip", limit=max(rails, 1))
    by_ip = {ip: device.name for device in topology.net_devices for ip in device.ip_addresses}
    known = {name for nic in topology.nics for name in nic.names}
    given = [rail for rail in rails if isinstance(rail, str)] if isinstance(rails, (list, tuple)) else []
    names = [by_ip.get(rail, rail) for rail in given]
    # "mlx5_0:1" is a port of device mlx5_0.
    found = [name if name in known else name.rpartition(":")[0] for name in names]
    return choose_rails(topology, "host", only=[name for name in found if name in known])

"""Which NICs an engine takes when its owner only gave a number, and where its worker runs: chosen by the topology.

engine.py imports this when it is first needed, and this imports crossrail.topology when that is. Any thread.
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

_CPUS_MAX = 1024  # of a cpu_set_t, which the worker is pinned with
RDMA_DEVICES: str | os.PathLike[str] = "/sys/class/infiniband"

# What the rails of a transport must offer, the first for which there is a NIC. Others leave the choice to the engine's
# tcp, and to libfabric.
_NEEDS: dict[str, tuple[Need, ...]] = {
    "auto": ("verbs", "efa"),
    "shm": (),
    "verbs": ("verbs",),
    "ofi": ("efa",),
    "ofi:efa": ("efa",),
    "ofi:efa-direct": ("efa",),
}


def default_rails(transport: str, rails: int | Sequence[str], device: object = None) -> int | Sequence[str]:
    """The engine's rails: as given, but a number becomes names of RDMA ports where the topology has so many to offer.

    transport, rails, device: the engine's options. What is wrong with the first two is left to the engine, which says
    it better. A machine without such hardware is not even looked at. A GPU with fewer NICs of its own than rails gets
    those, which is logged (level INFO): the others are its neighbours'.
    """
    gpu = gpu_of(device)
    # Beside a transport that knows other names the names of ports would be errors.
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
    """Says in the log what may surprise about the rails of an engine that has opened.

    engine: its name. transport, rails: its options, after default_rails. devices: the interface of each rail, by
    transport. endpoints: where its tcp listens.
    """
    for name, of_rails in devices.items():
        if len(set(of_rails)) < len(of_rails):
            text = "engine %r: some of its %d rails over %s share an interface: %s"
            log.info(text, engine, len(of_rails), name, ", ".join(of_rails))
    if endpoints and isinstance(rails, int) and all(end.startswith(("127.", "[::1]")) for end in endpoints):
        text = "engine %r: no interface is up with an address: tcp listens at %s, which no other host reaches"
        # "auto" may be meant for peers on this host, and is right for them.
        log.log(logging.WARNING if "tcp" in transport else logging.INFO, text, engine, endpoints[0])


def rail_names(topology: Topology, need: Need, count: int, place: str = "host") -> list[str]:
    """`count` ports, best first, as rails= takes them; none when the host has fewer, what there is for a GPU. Pure.

    place: one of the topology's devices.
    """
    from crossrail.topology import choose_rails

    choice = choose_rails(topology, place, need=need, limit=count)
    ports = [(rail.nic.rdma, rail.nic.rdma.port) for rail in choice.rails if rail.nic.rdma is not None]
    # libfabric knows devices, each with one port.
    names = [device.name if need == "efa" else f"{device.name}:{port.number}" for device, port in ports if port]
    return names if len(names) == count or place != "host" else []


def _place_of(topology: Topology, gpu: int) -> str:
    """What the topology calls CUDA's GPU of that number; "host", with the reason in the log, if it is not in sight."""
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
        with os.scandir(RDMA_DEVICES) as entries:  # without pathlib, which is slow to import
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
    """UsageError for a core that this process cannot be given. Of what is no number the engine says it."""
    if isinstance(cpu, bool) or not isinstance(cpu, Integral):
        return
    usable = usable_cpus()
    if int(cpu) not in usable:
        from crossrail.topology.sysfs import format_cpu_list

        cores = format_cpu_list(tuple(usable))
        raise UsageError(f"worker_cpu is {cpu}, must be a core that this process may use: {cores}")


def usable_cpus() -> set[int]:
    """Those of the cpuset: a thread of ours may be pinned to one to which the calling thread is not."""
    found = os.sched_getaffinity(0)

    def look() -> None:
        nonlocal found
        with contextlib.suppress(OSError):  # a sandbox that lets nobody be pinned
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
    """The first core of the rails' NUMA node within the affinity, or None; and why. Pure."""
    from crossrail.topology import worker_cpus

    nodes = [topology.node_of(rail.nic) for rail in choice.rails]
    if not any(nodes) or not any(node.cpus for node in topology.numa_nodes):
        return None, "the rails' NUMA node is unknown" if choice.rails else choice.reason
    near = worker_cpus(topology, choice)  # without the affinity: with it, it answers far cores when there are no near
    usable = set(near.cpus) & set(affinity)
    if not usable:
        return None, f"{near.reason}, but this process may use none of its cores"
    return min(usable), near.reason


def _rails_of(topology: Topology, rails: int | Sequence[str]) -> RailChoice:
    """What is wrong with rails is left to the engine, which opens next and says it better."""
    from crossrail.topology import choose_rails

    if isinstance(rails, int):
        return choose_rails(topology, "host", need="ip", limit=max(rails, 1))
    by_ip = {ip: device.name for device in topology.net_devices for ip in device.ip_addresses}
    known = {name for nic in topology.nics for name in nic.names}
    given = [rail for rail in rails if isinstance(rail, str)] if isinstance(rails, (list, tuple)) else []
    names = [by_ip.get(rail, rail) for rail in given]
    # "mlx5_0:1" is a port of mlx5_0.
    found = [name if name in known else name.rpartition(":")[0] for name in names]
    return choose_rails(topology, "host", only=[name for name in found if name in known])

"""All checks, by topic, in the order of the report. A new check is a line here and a row in docs/doctor.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from crossrail.doctor import container, cpu, engine, environment, gpu, libraries, limits, network, pci, rdma, tcp
from crossrail.doctor.finding import Finding
from crossrail.doctor.host import Host

Check = Callable[[Host], Iterable[Finding]]

TOPICS: dict[str, tuple[Check, ...]] = {
    "crossrail": (engine.python, engine.selftest),
    "libraries": (
        libraries.verbs,
        libraries.providers,
        libraries.libfabric,
        libraries.cuda,
        libraries.gdrcopy,
        libraries.openssl,
        libraries.bundled,
    ),
    "rdma": (
        rdma.devices,
        rdma.ports,
        rdma.rates,
        rdma.gids,
        rdma.device_files,
        rdma.namespace,
        rdma.counters,
        rdma.firmware,
        pci.links,
        pci.iommu,
        pci.access_control,
    ),
    "gpu": (gpu.devices, gpu.direct, gpu.gdrcopy, gpu.rails, gpu.bars),
    "network": (
        network.interfaces,
        network.rails_alike,
        network.routing,
        network.drops,
        network.connection_tracking,
    ),
    "tcp": (tcp.windows, tcp.buffer_caps, tcp.memory, tcp.congestion, tcp.bursts, tcp.connections),
    "limits": (
        limits.memlock,
        limits.open_files,
        limits.shared_memory,
        limits.huge_pages,
        limits.overcommit,
        limits.memory_group,
    ),
    "container": (container.kind, container.network, container.attach, container.kernel),
    "cpu": (cpu.count, cpu.quota, cpu.governor, cpu.sleep_states, cpu.clock, cpu.numa, cpu.stolen),
    "environment": (
        environment.secret,
        environment.tls,
        environment.libfabric,
        environment.fork_safety,
        environment.foreign,
        environment.preload,
        environment.cuda,
        environment.python,
    ),
}

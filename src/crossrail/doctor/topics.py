"""All checks, by topic, in the order of the report. A new check is a line here, its names in NAMES, and words in
docs/doctor.md.
"""

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
        libraries.cudart,
        libraries.gdrcopy,
        libraries.openssl,
        libraries.bundled,
    ),
    "rdma": (
        rdma.devices,
        rdma.ports,
        rdma.rates,
        rdma.gids,
        rdma.partitions,
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
        limits.threads,
        limits.address_space,
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

NAMES: dict[str, frozenset[str]] = {
    topic: frozenset(names.split())
    for topic, names in {
        "crossrail": "absent native no-rail ofi python rails shm tcp verbs version",
        "libraries": "bundled libcuda libcudart libefa libfabric libfabric-broken libfabric-twice libgdrapi libibverbs "
        "libmlx5 libssl verbs-devices",
        "rdma": "acs counters device-files devices efa-driver firmware gids iommu mlx5-driver namespace "
        "partitions pcie-links ports rates software uverbs-module",
        "gpu": "bar devices direct gdrcopy rails",
        "network": "addresses arp conntrack down drops duplex interfaces mtu one-subnet rails roce-mtu speed tcp-mtu",
        "tcp": "buffer-caps congestion-control memory ports slow-start-after-idle somaxconn tcp-rmem tcp-wmem "
        "window-scaling windows",
        "limits": "address-space dev-shm huge-pages huge-pages-shared memlock memory-group open-files overcommit "
        "threads",
        "container": "attach capabilities kernel kind network",
        "cpu": "clock count governor load numa numa-balancing numa-far numa-unknown quota sleep-states steal",
        "environment": "cuda-blocking cuda-visible expandable-segments fi-efa-iface fi-efa-rdma fi-log fi-provider "
        "fi-tcp-iface fi-verbs-iface foreign fork-safe ld-library-path ld-preload python-debug secret tls tls-key",
    }.items()
}
"""What findings of each topic are called after its dot. Some are there only when something is wrong."""

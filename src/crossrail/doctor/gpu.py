"""GPUs: are they usable from here, and can NICs reach their memory?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from crossrail.doctor.finding import Finding, Fix, error, note, ok, warning
from crossrail.doctor.hardware import PCI
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import listing, size, sudo
from crossrail.topology import Distance, Topology, choose_rails

_DMABUF_KERNEL = (5, 12)
_BAR_SMALL_BYTES = 1 << 30


def devices(host: Host) -> Iterator[Finding]:
    """On the bus, with a driver, with device files."""
    check = "gpu.devices"
    hardware = host.hardware
    if not hardware.has_gpu:
        yield ok(check, "no NVIDIA GPU: host memory only", "PCI bus, /proc/driver/nvidia, /dev/nvidia*")
        return
    if hardware.gpus and not host.exists("/proc/driver/nvidia") and not hardware.gpu_nodes:
        yield warning(
            check,
            f"{len(hardware.gpus)} GPU(s) without the NVIDIA driver",
            f"PCI {listing([gpu.address for gpu in hardware.gpus])}; /proc/driver/nvidia is not there",
            "GPU memory cannot be transferred; host memory can",
            Fix(sudo(host, "modprobe nvidia"), "or install the driver"),
        )
        return
    if not hardware.gpu_nodes or not host.exists("/dev/nvidiactl"):
        yield error(
            check,
            "the GPU's driver runs, but its device files are not here",
            "/dev/nvidia0, /dev/nvidiactl",
            "no program here can use a GPU",
            Fix("docker run --gpus all ...", "docker, podman"),
            Fix("resources: {limits: {nvidia.com/gpu: 1}}", "kubernetes"),
            Fix(sudo(host, "nvidia-modprobe -u -c=0"), "on the host itself"),
        )
        return
    closed = [path for path in [*hardware.gpu_nodes, "/dev/nvidiactl"] if not host.can_open(path)]
    if closed:
        yield error(
            check,
            f"no permission to open {listing(closed)}",
            f"user {host.uid} may not read and write it",
            "no GPU can be used by this user",
            Fix(sudo(host, f"chmod 0666 {closed[0]}"), "until the next boot"),
        )
        return
    version = _driver_version(host)
    yield ok(check, f"{len(hardware.gpu_nodes)} GPU(s), driver {version or 'of unknown version'}", "/dev/nvidia*")


def _driver_version(host: Host) -> str:
    text = host.read("/proc/driver/nvidia/version") or ""
    match = re.search(r"\b(\d{3,4}\.\d+(?:\.\d+)?)\b", text)
    return f"{match[1]}{' (open)' if 'Open Kernel Module' in text else ''}" if match else ""


def direct(host: Host) -> Iterator[Finding]:
    """A way for NICs to GPU memory: dma-buf, or nvidia-peermem."""
    check = "gpu.direct"
    if not (host.hardware.has_gpu and host.hardware.nics):
        return
    is_open = "Open Kernel Module" in (host.read("/proc/driver/nvidia/version") or "")
    by_dmabuf = host.kernel >= _DMABUF_KERNEL and is_open
    by_peermem = host.exists("/sys/module/nvidia_peermem")
    seen = (
        f"kernel {host.kernel_text}, driver {'open' if is_open else 'proprietary'}, "
        f"nvidia_peermem {'loaded' if by_peermem else 'not loaded'}"
    )
    if by_dmabuf or by_peermem:
        ways = [name for name, there in (("dma-buf", by_dmabuf), ("nvidia-peermem", by_peermem)) if there]
        yield ok(check, f"NICs reach GPU memory by {' and '.join(ways)}", seen)
        return
    yield error(
        check,
        "NICs cannot reach GPU memory: neither dma-buf nor nvidia-peermem",
        seen,
        "registering a GPU tensor fails (EFAULT or ENOMEM); through host memory a transfer is several times slower",
        Fix(sudo(host, "modprobe nvidia-peermem"), "now"),
        Fix("echo nvidia-peermem | " + sudo(host, "tee /etc/modules-load.d/nvidia-peermem.conf"), "for good"),
        Fix(sudo(host, "apt-get install nvidia-open"), "or dma-buf: the open driver, and kernel 5.12 or newer"),
    )


def gdrcopy(host: Host) -> Iterator[Finding]:
    """Words in GPU memory that the CPU sets cheaply."""
    check = "gpu.gdrcopy"
    if not host.hardware.has_gpu:
        return
    if host.exists("/dev/gdrdrv") and host.can_open("/dev/gdrdrv"):
        yield ok(check, "GDRCopy's driver is there", "/dev/gdrdrv")
    else:
        there = host.exists("/dev/gdrdrv")
        yield note(
            check,
            "GDRCopy's driver may not be opened" if there else "no GDRCopy driver",
            f"/dev/gdrdrv {'is closed to this user' if there else 'is not there'}; "
            f"module gdrdrv {'loaded' if host.exists('/sys/module/gdrdrv') else 'not loaded'}",
            "kernels of MoE rounds in CUDA graphs wait for words in pinned memory: each look crosses PCIe",
            Fix(sudo(host, "chmod 0666 /dev/gdrdrv") if there else sudo(host, "modprobe gdrdrv")),
            Fix("docker run --device=/dev/gdrdrv ...", "in a container"),
        )


def rails(host: Host) -> Iterator[Finding]:
    """How far away each GPU's nearest NICs are: `crossrail topo` shows the details."""
    check = "gpu.rails"
    if not host.hardware.gpus:
        return
    topology = Topology.read(host.path("/sys"), proc=host.path("/proc"))
    nearest: dict[Distance, list[str]] = {}
    for gpu in topology.gpus:
        found = choose_rails(topology, gpu).rails
        if found and found[0].nic.rdma_up:
            nearest.setdefault(found[0].distance, []).append(gpu.name)
    for distance, gpus in sorted(nearest.items(), reverse=True):
        title = f"{listing(gpus)} and the nearest NIC: {distance.words} ({distance.name})"
        seen = "PCI and NUMA layout in /sys"
        fix = Fix("crossrail topo", "which NIC serves which device, and why")
        if distance >= Distance.NODE:
            cost = "GPUDirect crosses the link between CPUs or host bridges: slow, or refused"
            yield warning(check, title, seen, cost, fix)
        elif distance == Distance.PHB:
            cost = "GPUDirect passes the CPU's host bridge: slower than within a switch"
            yield note(check, title, seen, cost, fix)
        else:
            yield ok(check, title, seen)


def bars(host: Host) -> Iterator[Finding]:
    """The window through which others see GPU memory."""
    check = "gpu.bar"
    small = []
    for gpu in host.hardware.gpus:
        window_bytes = 0
        for line in (host.read(f"{PCI}/{gpu.address}/resource") or "").splitlines()[:6]:
            words = line.split()
            if len(words) == 3 and all(re.fullmatch(r"0x[0-9a-fA-F]{1,16}", word) for word in words):
                start, end = int(words[0], 16), int(words[1], 16)
                window_bytes = max(window_bytes, end - start + 1 if end > start else 0)
        if 0 < window_bytes < _BAR_SMALL_BYTES:
            small.append(f"{gpu.address}: {size(window_bytes)}")
    if small and host.hardware.nics:
        yield warning(
            check,
            f"{len(small)} GPU(s) show only a small window of their memory",
            f"{PCI}/*/resource: {listing(small)}",
            "no more than that can be registered for NICs through peermem at a time",
            Fix("", "in the BIOS: Resizable BAR and Above 4G decoding on"),
        )

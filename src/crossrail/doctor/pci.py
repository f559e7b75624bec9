"""What lies between a device and memory: the PCIe link, the IOMMU, access control in the switches."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from crossrail.doctor.finding import Finding, Fix, note, ok, warning
from crossrail.doctor.hardware import PCI
from crossrail.doctor.host import Host
from crossrail.doctor.remedies import listing, sudo

# GT/s of the generation, payload share after line coding.
_CODING = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 0.95}
_CLASS_BRIDGE = 0x0604
_ACS_CAPABILITY = 0x000D
_ACS_REDIRECT = 0x0004 | 0x0008  # P2P request redirect, P2P completion redirect
_EXTENDED_CONFIG = 0x100


def links(host: Host) -> Iterator[Finding]:
    """PCIe links of RDMA devices and GPUs at full speed and width."""
    check = "rdma.pcie-links"
    good = 0
    devices = [(nic.name, nic.pci) for nic in host.hardware.nics if nic.pci]
    devices += [(f"GPU {gpu.address}", gpu.address) for gpu in host.hardware.gpus]
    for name, address in devices:
        speed, width = _speed(host, address, "current_link_speed"), host.read_int(f"{PCI}/{address}/current_link_width")
        speed_max, width_max = _speed(host, address, "max_link_speed"), host.read_int(f"{PCI}/{address}/max_link_width")
        if not speed or not width or not speed_max or not width_max or width > 32:
            continue  # virtual functions and guests do not say
        is_gpu = name.startswith("GPU")
        # An idle GPU reduces its link's speed to save power; it does not drop lanes.
        if width < width_max or (speed < speed_max and not is_gpu):
            now, most = _gb_per_s(speed, width), _gb_per_s(speed_max, width_max)
            yield warning(
                check,
                f"{name}: PCIe runs at {speed:g} GT/s x{width}, and can {speed_max:g} GT/s x{width_max}",
                f"{PCI}/{address}/current_link_speed, current_link_width",
                f"at most {now:.1f} GB/s of {most:.1f} GB/s reach the device",
                Fix(sudo(host, f"lspci -vv -s {address} | grep -E 'LnkCap|LnkSta'"), "slot, riser or BIOS setting"),
            )
        else:
            good += 1
    if good:
        yield ok(check, f"{good} PCIe link(s) at full width and speed", f"{PCI}/*/current_link_speed")


def _speed(host: Host, address: str, name: str) -> float:
    match = re.match(r"(\d{1,3}(?:\.\d)?) GT/s", host.read(f"{PCI}/{address}/{name}") or "")
    return float(match[1]) if match else 0.0


def _gb_per_s(gt_per_s: float, width: int) -> float:
    return gt_per_s * width * _CODING.get(gt_per_s, 0.95) / 8


def iommu(host: Host) -> Iterator[Finding]:
    """Device DMA that is translated page by page costs look-ups."""
    check = "rdma.iommu"
    addresses = [nic.pci for nic in host.hardware.nics if nic.pci] + [gpu.address for gpu in host.hardware.gpus]
    kinds = {address: host.read(f"{PCI}/{address}/iommu_group/type") for address in addresses}
    translated = [address for address, kind in kinds.items() if kind in ("DMA", "DMA-FQ")]
    if translated:
        yield warning(
            check,
            f"DMA of {len(translated)} device(s) is translated by the IOMMU",
            f"iommu_group/type is {kinds[translated[0]]} for {listing(translated)}",
            "accesses may need a table walk, registering and closing memory costs more, and GPU and NIC reach "
            "each other only through the root complex",
            Fix(
                sudo(host, "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && ")
                + sudo(host, "update-grub"),
                "and reboot",
            ),
        )
    elif any(kinds.values()):
        yield ok(check, "IOMMU passes DMA through", "iommu_group/type")


def access_control(host: Host) -> Iterator[Finding]:
    """PCIe ACS sends traffic between GPU and NIC of one switch up to the root complex and back."""
    check = "rdma.acs"
    if not (host.hardware.nics and host.hardware.has_gpu):
        return
    bridges = [device for device in host.hardware.pci if device.class_code >> 8 == _CLASS_BRIDGE]
    redirecting, unreadable = [], 0
    for bridge in bridges:
        control = _acs_control(host.read_bytes(f"{bridge.path}/config"))
        if control is None:
            unreadable += 1
        elif control & _ACS_REDIRECT:
            redirecting.append(bridge.address)
    if redirecting:
        yield warning(
            check,
            f"PCIe access control (ACS) redirects at {len(redirecting)} of {len(bridges)} bridges",
            f"config space of {listing(redirecting)}",
            "GPUDirect traffic leaves the switch for the root complex: less bandwidth, and on some boards hangs "
            "(NCCL's troubleshooting guide)",
            *(
                Fix(sudo(host, f"setpci -s {address} ECAP_ACS+6.w=0000"), "until the next boot")
                for address in redirecting[:8]
            ),
            Fix("", "for good: ACS off in the BIOS; without virtual machines, VT-d / AMD IOMMU too"),
        )
    elif unreadable and unreadable == len(bridges):
        yield note(
            check,
            "cannot tell whether PCIe access control (ACS) is on",
            "only root reads the extended configuration of bridges",
            "it would slow GPUDirect down",
            Fix("sudo crossrail doctor --only rdma.acs"),
        )
    elif bridges:
        yield ok(check, f"no bridge of {len(bridges)} redirects GPUDirect traffic", f"ACS control in {PCI}/*/config")


def _acs_control(config: bytes) -> int | None:
    """The capability's control word; 0 without it, None when the bytes are not ours to read."""
    if len(config) < _EXTENDED_CONFIG + 4:
        return None
    offset, steps = _EXTENDED_CONFIG, 0
    while _EXTENDED_CONFIG <= offset <= len(config) - 8 and steps < 64:
        header = struct.unpack_from("<I", config, offset)[0]
        if header & 0xFFFF == _ACS_CAPABILITY:
            return int(struct.unpack_from("<H", config, offset + 6)[0])
        offset, steps = header >> 20, steps + 1
    return 0

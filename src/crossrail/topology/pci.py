"""PCI functions of a sysfs tree: where they are, their drivers, and the GPUs among them."""

from __future__ import annotations

import re
from pathlib import Path

from crossrail.topology.model import Gpu, NumaId, PciAddress, PciFunction
from crossrail.topology.sysfs import Tree

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")

_NVIDIA = 0x10DE
_CLASS_VGA = 0x0300
_CLASS_3D = 0x0302
CLASS_NETWORK = 0x02  # all of 0x02xx: Ethernet, InfiniBand, other


class PciReader:
    """Reads functions, each once."""

    def __init__(self, tree: Tree) -> None:
        """tree: of sysfs."""
        self._tree = tree
        self._read: dict[Path, PciFunction] = {}

    def all(self) -> list[PciFunction]:
        """Every function of the tree, in order of address."""
        links = (self._tree.root / "bus/pci/devices" / name for name in self._tree.names("bus", "pci", "devices"))
        functions = (self.of(directory) for link in links if (directory := self._tree.directory(link)) is not None)
        return sorted({f.address: f for f in functions if f is not None}.values(), key=lambda f: f.address)

    def of(self, directory: Path) -> PciFunction | None:
        """The function that a directory below /sys/devices is or belongs to (.../0000:00:03.0/virtio2/net/eth0)."""
        parts = directory.relative_to(self._tree.root).parts
        last = max((i for i, part in enumerate(parts) if _ADDRESS.fullmatch(part)), default=-1)
        if last < 0:
            return None
        place = self._tree.root.joinpath(*parts[: last + 1])
        if place not in self._read:
            self._read[place] = self._function(place, parts[: last + 1])
        return self._read[place]

    def _function(self, place: Path, parts: tuple[str, ...]) -> PciFunction:
        chain = [address for part in parts if (address := _address(part)) is not None]
        numa = self._tree.integer(place / "numa_node", at_least=-1, at_most=65535)
        return PciFunction(
            address=chain[-1],
            root=next((part for part in parts if _ROOT.fullmatch(part)), ""),
            bridges=tuple(chain[:-1]),
            class_code=(self._tree.integer(place / "class", at_least=0, at_most=0xFFFFFF) or 0) >> 8,
            vendor=self._tree.integer(place / "vendor", at_least=0, at_most=0xFFFF) or 0,
            device=self._tree.integer(place / "device", at_least=0, at_most=0xFFFF) or 0,
            driver=self._tree.link_name(place / "driver"),
            numa=None if numa is None or numa < 0 else NumaId(numa),
            physfn=_address(self._tree.link_name(place / "physfn")),
            vf_count=sum(name.startswith("virtfn") for name in self._tree.names(*parts)),
        )


def _address(text: str) -> PciAddress | None:
    return PciAddress.parse(text) if _ADDRESS.fullmatch(text) else None


def is_gpu(function: PciFunction) -> bool:
    """An NVIDIA display or 3D controller."""
    return function.vendor == _NVIDIA and function.class_code in (_CLASS_VGA, _CLASS_3D)


def read_gpus(functions: list[PciFunction], proc: Tree) -> list[Gpu]:
    """GPUs of sysfs and of NVIDIA's procfs, which says more of each and, in a container, holds those it may use."""
    known = {function.address: function for function in functions if is_gpu(function)}
    driven = {}
    for name in proc.names("driver", "nvidia", "gpus"):
        address = PciAddress.parse(name)
        if address is None:
            proc.note(proc.root / "driver/nvidia/gpus" / name, "is not a PCI address; ignored")
        else:
            driven[address] = _information(proc, name)
            known.setdefault(address, PciFunction(address, root=""))
    gpus: list[Gpu] = []
    index = 0
    for address in sorted(known):
        usable = address in driven or not driven
        model, uuid = driven.get(address, ("", ""))
        gpus.append(Gpu(known[address], index if usable else None, model, uuid))
        index += usable
    return gpus


def _information(proc: Tree, name: str) -> tuple[str, str]:
    text = proc.text(proc.root / "driver/nvidia/gpus" / name / "information") or ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    printable = {key.strip(): "".join(c for c in value if c.isprintable()).strip() for key, value in fields.items()}
    uuid = printable.get("GPU UUID", "")
    return printable.get("Model", "")[:64], uuid if re.fullmatch(r"GPU-[0-9a-fA-F-]{8,64}", uuid) else ""

"""The contents of a wheel, read from its bytes: files, size, tag, and what the native module needs to be loaded."""

from __future__ import annotations

import io
import json
import platform
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

SIZE_MAX = 5_000_000
GLIBC_MAX = (2, 28)
# All of them are glibc: what older ones kept in libraries of their own.
LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
EXPORTED = {"PyInit__core"}
LICENCES = ["LICENSE", "libfabric/COPYING", "nanobind.txt", "rdma-core.txt", "robin-map.txt"]


@dataclass
class Found:
    """facts: to be shown; wrong: what must not be, empty for a good wheel."""

    facts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)


def check(wheel: Path, source: Path, work: Path) -> Found:
    """source: what it was built from; it must contain its Python files. work: a folder that no file may name."""
    found = Found()
    size = wheel.stat().st_size
    found.facts.append(f"{size / 1e6:.2f} MB")
    found.expect(size <= SIZE_MAX, f"{size} bytes, more than {SIZE_MAX}")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    modules = [name for name in files if ".so" in PurePosixPath(name).suffixes]
    found.expect(len(modules) == 1, f"native modules: {modules}, not one")
    check_tag(found, wheel.name, modules)
    check_files(found, files, source)
    for name in modules:
        check_module(found, files[name])
    for name, content in files.items():
        found.expect(str(work).encode() not in content, f"{name} names the folder it was built in, {work}")
    return found


def check_tag(found: Found, name: str, modules: list[str]) -> None:
    """One wheel serves 3.12 and later: its module must keep to the stable ABI, and have a name that says so."""
    python, abi, tag = name.removesuffix(".whl").split("-")[-3:]
    found.expect(tag == f"manylinux_2_28_{platform.machine()}", f"platform tag {tag}")
    stable = python == "cp312"
    found.expect(abi == ("abi3" if stable else python), f"ABI tag {abi} for {python}")
    for module in modules:
        found.expect(module.endswith(".abi3.so") == stable, f"{module} in a wheel for {python}-{abi}")


def check_files(found: Found, files: dict[str, bytes], source: Path) -> None:
    package = source / "src"
    wanted = {str(path.relative_to(package)) for path in (package / "crossrail").rglob("*.py")}
    wanted |= {"crossrail/errors.md", "crossrail/py.typed", "crossrail/_core/__init__.pyi"}
    found.expect(not (missing := sorted(wanted - set(files))), f"files missing: {missing}")
    tops = {name.split("/")[0] for name in files}
    info = {top for top in tops if top.endswith(".dist-info")}
    found.expect(tops - info == {"crossrail"} and len(info) == 1, f"folders: {sorted(tops)}")
    sources = [name for name in files if PurePosixPath(name).suffix in (".cc", ".h", ".o", ".a")]
    found.expect(not sources, f"files of the build: {sources}")
    licences = [name for name in files if ".dist-info/licenses/" in name]
    for end in LICENCES:
        found.expect(any(name.endswith(f"/{end}") for name in licences), f"no licence .../{end} among {licences}")
    boms = [name for name in files if re.search(r"\.dist-info/sboms/[^/]+\.cdx\.json$", name)]
    found.expect(len(boms) == 1, f"bills of materials: {boms}")
    for name in boms:
        parts = json.loads(files[name])["components"]
        found.facts.append(
            "made of " + ", ".join(f"{part['name']} {part.get('version', '')}".strip() for part in parts)
        )


def check_module(found: Found, content: bytes) -> None:
    """What the loader would ask of the machine."""
    elf = ELFFile(io.BytesIO(content))
    needed, paths = dynamic(elf)
    found.facts.append(f"needs {', '.join(needed)}")
    found.expect(set(needed) <= LIBRARIES, f"links to {sorted(set(needed) - LIBRARIES)}")
    found.expect(not paths, f"looks for libraries in {paths}")
    versions = sorted(set(symbol_versions(elf)))
    strange = [version for version in versions if not version.startswith("GLIBC_")]
    found.expect(not strange, f"symbols of {strange}")
    newest = max(numbers(version) for version in versions)
    found.facts.append(f"symbols up to GLIBC_{'.'.join(map(str, newest))}")
    too_new = [version for version in versions if numbers(version) > GLIBC_MAX]
    found.expect(not too_new, f"symbols newer than glibc {GLIBC_MAX[0]}.{GLIBC_MAX[1]}: {too_new}")
    exported = set(exports(elf))
    found.expect(exported == EXPORTED, f"exports {len(exported)} symbols: {sorted(exported)[:5]}")


def dynamic(elf: ELFFile) -> tuple[list[str], list[str]]:
    """DT_NEEDED; DT_RPATH and DT_RUNPATH."""
    needed, paths = [], []
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                if tag.entry.d_tag == "DT_NEEDED":
                    needed.append(tag.needed)
                elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    paths.append(str(tag))
    return sorted(needed), paths


def symbol_versions(elf: ELFFile) -> Iterator[str]:
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                yield from (version.name for version in versions)


def numbers(version: str) -> tuple[int, ...]:
    """GLIBC_2.28 as (2, 28). GLIBC_PRIVATE is newer than all: nothing of it may be used."""
    text = version.partition("_")[2]
    return tuple(int(part) for part in text.split(".")) if text[:1].isdigit() else (99,)


def exports(elf: ELFFile) -> Iterator[str]:
    section = elf.get_section_by_name(".dynsym")
    assert isinstance(section, SymbolTableSection)
    for symbol in section.iter_symbols():
        if symbol.entry.st_shndx != "SHN_UNDEF" and symbol.entry.st_info.bind != "STB_LOCAL":
            yield symbol.name

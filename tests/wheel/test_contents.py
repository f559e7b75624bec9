"""What `./dev wheel` looks for in a wheel, on small wheels and on the native module that is built here."""

from __future__ import annotations

import importlib.util
import platform
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from crossrail import _core
from tests.support.process import REPOSITORY

TOOLS = Path(REPOSITORY) / "tools" / "wheel"
INFO = "crossrail-1.dist-info"
PLATFORM = f"manylinux_2_28_{platform.machine()}"


@pytest.fixture(scope="module")
def contents() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("contents", TOOLS / "contents.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["contents"] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["contents"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    package = tmp_path / "source" / "src" / "crossrail"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return tmp_path / "source"


def packed(folder: Path, *, name: str = f"crossrail-1-cp312-abi3-{PLATFORM}.whl", **other: bytes | None) -> Path:
    """A wheel with all that it should have but the native module; other: with these files instead."""
    files: dict[str, bytes | None] = {
        "crossrail/__init__.py": b"",
        "crossrail/errors.md": b"",
        "crossrail/py.typed": b"",
        "crossrail/_core/__init__.pyi": b"",
        f"{INFO}/sboms/crossrail.cdx.json": b'{"components": []}',
    }
    licences = ["LICENSE", "third_party/libfabric/COPYING", "nanobind.txt", "rdma-core.txt", "robin-map.txt"]
    files |= {f"{INFO}/licenses/{licence}": b"" for licence in licences}
    files |= other
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            if content is not None:
                archive.writestr(path, content)
    return folder / name


@pytest.mark.no_sanitizer  # which the module links to
def test_module_of_this_machine_is_looked_at(contents: ModuleType) -> None:
    """It links to glibc alone and exports its entry point; its symbols are as new as the machine."""
    found = contents.Found()
    contents.check_module(found, Path(_core.__file__).read_bytes())
    assert all("newer than glibc" in line for line in found.wrong), found.wrong


def test_symbols_newer_than_the_tag_are_refused(contents: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "GLIBC_MAX", (2, 4))
    found = contents.Found()
    contents.check_module(found, Path(_core.__file__).read_bytes())
    assert any("symbols newer than glibc 2.4" in line for line in found.wrong)


def test_libraries_and_exports_of_others_are_refused(contents: ModuleType) -> None:
    """Python itself is one that links to more and exports more."""
    found = contents.Found()
    contents.check_module(found, Path(sys.executable).resolve().read_bytes())
    assert any(line.startswith("exports") for line in found.wrong)


@pytest.mark.parametrize(
    ("version", "numbers"), [("GLIBC_2.28", (2, 28)), ("GLIBC_2.2.5", (2, 2, 5)), ("GLIBC_PRIVATE", (99,))]
)
def test_order_of_versions(contents: ModuleType, version: str, numbers: tuple[int, ...]) -> None:
    assert contents.numbers(version) == numbers


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"crossrail/__init__.py": None}, "files missing: ['crossrail/__init__.py']"),
        ({"crossrail/errors.md": None}, "files missing: ['crossrail/errors.md']"),
        ({"tests/__init__.py": b""}, "folders: ['crossrail', 'crossrail-1.dist-info', 'tests']"),
        ({"crossrail/engine.cc": b""}, "files of the build: ['crossrail/engine.cc']"),
        ({f"{INFO}/licenses/nanobind.txt": None}, "no licence .../nanobind.txt"),
        ({f"{INFO}/sboms/crossrail.cdx.json": None}, "bills of materials: []"),
        ({"crossrail/__init__.py": b"/builder/of/it/source"}, "names the folder it was built in"),
        ({}, "native modules: [], not one"),
    ],
)
def test_what_is_missing_or_too_much_is_named(
    contents: ModuleType, source: Path, tmp_path: Path, other: dict[str, bytes | None], words: str
) -> None:
    found = contents.check(packed(tmp_path, **other), source, Path("/builder/of/it"))
    assert any(words in line for line in found.wrong), found.wrong


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("crossrail-1-cp312-abi3-linux_x86_64.whl", "platform tag linux_x86_64"),
        (f"crossrail-1-cp312-cp312-{PLATFORM}.whl", "ABI tag cp312 for cp312"),
        (f"crossrail-1-cp310-abi3-{PLATFORM}.whl", "ABI tag abi3 for cp310"),
    ],
)
def test_tag_that_promises_something_else(
    contents: ModuleType, source: Path, tmp_path: Path, name: str, words: str
) -> None:
    found = contents.check(packed(tmp_path, name=name), source, Path("/builder/of/it"))
    assert any(words in line for line in found.wrong), found.wrong

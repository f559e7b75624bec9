"""Which system packages ./dev finds missing, and how it gets them (tools/dev/packages.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.dev import packages
from tools.dev.processes import Failure

FOR_ROOT = ["iproute2", "etcd-server", "prometheus", "libibverbs-dev"]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a Python and nothing else, used by root. What is put into the folder is on PATH there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(packages, "PYTHON", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(packages, "doctest_present", lambda: False)
    monkeypatch.setattr(packages, "verbs_headers_present", lambda: False)
    monkeypatch.setattr(packages, "python_package", lambda kind: f"python3-{kind}")
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packages.sysconfig, "get_path", lambda name: str(tmp_path / name))
    return tmp_path


def program(path: Path, script: str = "") -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_bare_machine_needs_all_of_them(bare: Path) -> None:
    needed = ["g++", "python3-venv", "python3-dev"]

    assert packages.missing_packages(native_tests=False) == needed
    assert packages.missing_packages(native_tests=True) == [*needed, "doctest-dev", *FOR_ROOT]


def test_only_root_is_made_to_have_what_only_its_tests_use(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    missing = packages.missing_packages(native_tests=True)

    assert "doctest-dev" in missing and not set(missing) & set(FOR_ROOT)


@pytest.mark.parametrize("compiler", ["c++", "g++", "clang++", "own-c++"])
def test_any_compiler_will_do_or_the_one_that_is_named(
    bare: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare / compiler)
    if compiler.startswith("own"):
        assert "g++" in packages.missing_packages(native_tests=False)
        monkeypatch.setenv("CXX", f"{compiler} -march=native")
    assert "g++" not in packages.missing_packages(native_tests=False)

    monkeypatch.setenv("CXX", "another-c++")
    assert "g++" in packages.missing_packages(native_tests=False)


def test_what_is_there_is_not_asked_for(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g++", "ip", "tc", "etcd", "prometheus"):
        program(bare / name)
    (bare / "include").mkdir()
    (bare / "include" / "Python.h").touch()
    (bare / ".venv" / "bin").mkdir(parents=True)
    program(bare / ".venv" / "bin" / "python")
    monkeypatch.setattr(packages, "doctest_present", lambda: True)
    monkeypatch.setattr(packages, "verbs_headers_present", lambda: True)

    assert packages.missing_packages(native_tests=True) == []

    (bare / "tc").unlink()
    assert packages.missing_packages(native_tests=True) == ["iproute2"]


def test_python_that_is_not_the_systems_has_packages_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    number = f"{sys.version_info.major}.{sys.version_info.minor}"

    monkeypatch.setattr(sys, "executable", "/opt/elsewhere/bin/python3")
    assert packages.python_package("dev") == f"python{number}-dev"

    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    exists = Path("/usr/bin/python3").exists()
    assert packages.python_package("venv") == ("python3-venv" if exists else f"python{number}-venv")


def test_who_is_not_root_is_told_the_whole_command(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "apt-get", "exit 99")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(Failure) as told:
        packages.install_packages(["g++", "python3-dev"])

    assert "sudo apt-get update && sudo apt-get install -y g++ python3-dev\n" in str(told.value)
    assert str(told.value).startswith("this machine lacks: g++, python3-dev\n")


def test_root_without_apt_is_told_the_command_without_sudo(bare: Path) -> None:
    with pytest.raises(Failure) as told:
        packages.install_packages(["g++"])

    assert "sudo" not in str(told.value) and "apt-get install -y g++\n" in str(told.value)


@pytest.fixture
def apt(bare: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[], list[str]]]:
    """An apt-get whose first installs and updates fail, as many as said; returns what was asked of it, in order."""
    pauses: list[float] = []
    monkeypatch.setattr(packages.time, "sleep", pauses.append)
    asked = bare / "asked"

    def failing(times: int) -> Callable[[], list[str]]:
        install = f'echo "$DEBIAN_FRONTEND $*" >>{asked}; [ $(/usr/bin/wc -l <{asked}) -gt {times} ]'
        update = f"[ -e {asked} ]"  # the first fails
        program(bare / "apt-get", f'case "$*" in *install*) {install};; *) {update};; esac')
        return lambda: asked.read_text().splitlines()

    return failing


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_apt_is_asked_again_when_it_fails(apt: Callable[[int], Callable[[], list[str]]], failures: int) -> None:
    asked = apt(failures)

    packages.install_packages(["g++", "iproute2"])

    assert len(asked()) == failures + 1
    assert all(line.startswith("noninteractive ") for line in asked())
    assert all(line.endswith("install -y --no-install-recommends g++ iproute2") for line in asked())


def test_apt_that_never_succeeds_is_a_failure(apt: Callable[[int], Callable[[], list[str]]]) -> None:
    asked = apt(99)

    with pytest.raises(Failure, match=r"apt could not install g\+\+ in 3 attempts"):
        packages.install_packages(["g++"])
    assert len(asked()) == 3

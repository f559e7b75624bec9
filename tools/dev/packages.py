"""System packages."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from tools.dev.processes import PYTHON, Failure, run_bounded, say, shown

APT_TIMEOUT_S = 600
APT_ATTEMPTS = 3


def doctest_present() -> bool:
    return any(Path(d, "doctest", "doctest.h").exists() for d in ("/usr/include", "/usr/local/include"))


def verbs_headers_present() -> bool:
    return any(Path(d, "infiniband", "verbs.h").exists() for d in ("/usr/include", "/usr/local/include"))


def python_package(kind: str) -> str:
    """Debian's package for the Python that runs this: python3-dev, or python3.12-dev if not the default."""
    default = Path("/usr/bin/python3")
    if default.exists() and default.resolve() == Path(sys.executable).resolve():
        return f"python3-{kind}"
    return f"python{sys.version_info.major}.{sys.version_info.minor}-{kind}"


def missing_packages(*, native_tests: bool) -> list[str]:
    missing = []
    compilers = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers):
        missing.append("g++")
    if not Path(PYTHON).exists() and not all(importlib.util.find_spec(m) for m in ("venv", "ensurepip")):
        missing.append(python_package("venv"))
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append(python_package("dev"))
    if native_tests and not doctest_present():
        missing.append("doctest-dev")
    # For tests between hosts, which only root can run: for other users they are skipped.
    if native_tests and os.geteuid() == 0 and not (shutil.which("ip") and shutil.which("tc")):
        missing.append("iproute2")
    # For tests of cluster membership, which start it themselves: only the program is needed.
    if native_tests and os.geteuid() == 0 and not shutil.which("etcd"):
        missing.append("etcd-server")
    # For tests that check our dashboard and alerts with it; again only the program.
    if native_tests and os.geteuid() == 0 and not shutil.which("prometheus"):
        missing.append("prometheus")
    # A build without libibverbs' headers has no verbs transport; nobody but root is made to have them.
    if native_tests and os.geteuid() == 0 and not verbs_headers_present():
        missing.append("libibverbs-dev")
    return missing


def ensure_system_packages(*, native_tests: bool) -> None:
    if missing_packages(native_tests=native_tests):
        # once here, take all that any command needs
        install_packages(missing_packages(native_tests=True))


def install_packages(missing: Sequence[str]) -> None:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise Failure(
            f"this machine lacks: {', '.join(missing)}\n"
            f"  On Debian and Ubuntu:  {sudo}apt-get update && {sudo}apt-get install -y {' '.join(missing)}\n"
            "  Then run the same ./dev command again."
        )
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=2"]
    apt += ["-o", "Acquire::http::Timeout=30", "-o", "Acquire::https::Timeout=30"]
    install = [*apt, "install", "-y", "--no-install-recommends", *missing]
    for attempt in range(APT_ATTEMPTS):
        say(f"installing {', '.join(missing)} (apt)")
        # A failed update may still leave lists that are good enough: the install decides.
        run_bounded([*apt, "update"], timeout_s=APT_TIMEOUT_S, env=env, quiet=True)
        if run_bounded(install, timeout_s=APT_TIMEOUT_S, env=env, quiet=True) == 0:
            return
        if attempt + 1 < APT_ATTEMPTS:
            time.sleep(5 * 3**attempt)
    raise Failure(f"apt could not install {', '.join(missing)} in {APT_ATTEMPTS} attempts: {shown(install)}")

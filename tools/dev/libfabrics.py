"""./dev libfabric: the tests of the ofi transport with other releases of libfabric than the one that we install."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

from tools.dev.arguments import take_option
from tools.dev.build import prepare
from tools.dev.processes import BUILD, PYTHON, Failure, must, run_here, say
from tools.dev.testing import ONE_THREAD, once_more, side_by_side

# Wheels for x86-64 that have one inside. The tests always run with the 2.5 of the extra `libfabric`; 2.3 is in none.
WHEELS = {"2.1": "impi-rt==2021.16.2", "2.2": "impi-rt==2021.17.2", "2.4": "mpich==5.0.0"}
FOLDERS = ("contract", "engine", "faults", "multihost", "property")
# Other providers than tcp are plug-ins that these wheels do not all have.
SELECTED = "ofi and not no_other_test_runs_on"
VERSION_OF = "import ctypes, sys; v = ctypes.CDLL(sys.argv[1]).fi_version(); print(f'{v >> 16}.{v & 0xFFFF}')"


def libfabric(arguments: list[str]) -> int:
    """arguments: releases, none for all of them; and --seed N."""
    seed = take_option(arguments, "--seed", "")
    options = ["--seed", seed] if seed else []
    for version in arguments:
        if version not in WHEELS:
            raise Failure(f"no wheel with libfabric {version} is known; there are: {', '.join(WHEELS)}")
    prepare()
    return max(_test_with(version, options) for version in arguments or WHEELS)


def _test_with(version: str, options: list[str]) -> int:
    library = _fetched(version)
    env = {"CROSSRAIL_LIBFABRIC": str(library), "FI_PROVIDER_PATH": str(library.parent), **ONE_THREAD}
    say(f"tests with libfabric {version}, of {WHEELS[version]}")
    command = [PYTHON, "-m", "pytest", "-rfEs", "-p", "no:cacheprovider", *once_more(), *side_by_side([]), *options]
    command += ["-k", SELECTED]
    return run_here([*command, *(f"tests/{folder}" for folder in FOLDERS)], **env)


def _fetched(version: str) -> Path:
    """Unpacked beside the builds, nothing installed."""
    folder = BUILD / "libfabric" / version
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        must([PYTHON, "-m", "pip", "download", "-q", "--no-deps", "-d", str(part), WHEELS[version]], timeout_s=300)
        for wheel in part.glob("*.whl"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(part)
            wheel.unlink()
        part.rename(folder)
    library = next(folder.glob("**/libfabric.so.1"), None)
    if library is None:
        raise Failure(f"no libfabric.so.1 in {WHEELS[version]}")
    found = subprocess.run([PYTHON, "-c", VERSION_OF, str(library)], capture_output=True, text=True, check=True)
    if found.stdout.strip() != version:
        raise Failure(f"{WHEELS[version]} has libfabric {found.stdout.strip()}, not {version}")
    return library

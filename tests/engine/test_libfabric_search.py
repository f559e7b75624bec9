"""Where libfabric is taken from, of several: in processes of their own, which see an /opt of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import crossrail as xr
from tests.support.limits import PROGRAM_S

UNSHARE = ["unshare", "--mount"]

# A libfabric that nobody has used since: of version 1.11, as the one check that it has to pass finds.
TOO_OLD = """
unsigned fi_version(void) { return 1u << 16 | 11; }
int fi_getinfo(void) { return -61; }
void fi_freeinfo(void) {}
void* fi_dupinfo(void) { return 0; }
int fi_fabric(void) { return -61; }
const char* fi_strerror(int code) { return "no"; }
"""

# argv: the folder for /opt/amazon/efa/lib64, the library to load before, or "-".
OPENS = """
import ctypes, os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "none", "/opt"], check=True, timeout=20)
os.makedirs("/opt/amazon/efa/lib64")
subprocess.run(["mount", "--bind", sys.argv[1], "/opt/amazon/efa/lib64"], check=True, timeout=20)
if sys.argv[2] != "-":
    ctypes.CDLL(sys.argv[2])
import crossrail as xr
try:
    xr.Engine("here", transport="ofi:tcp", rails=["127.0.0.1"]).close()
except xr.TransportError as error:
    print("refused:", error)
for path in sorted({line.split()[-1] for line in open("/proc/self/maps") if "libfabric.so" in line}):
    print("mapped:", path)
"""


def wheels_library() -> Path:
    """The one that the tests run with."""
    with xr.Engine("here", transport="ofi:tcp", rails=["127.0.0.1"]):
        lines = Path("/proc/self/maps").read_text().splitlines()
    return Path(next(line.split()[-1] for line in lines if line.endswith("/libfabric.so.1")))


class Places:
    """A libfabric in each, new or too old."""

    def __init__(self, folder: Path) -> None:
        self._old = folder / "old.so"
        (folder / "old.c").write_text(TOO_OLD)
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libfabric.so.1", "-o", str(self._old), str(folder / "old.c")]
        subprocess.run(command, check=True, timeout=PROGRAM_S)
        self._new = wheels_library()
        self.loaded, self.aws, self.system = (folder / name for name in ("loaded", "aws", "system"))
        for place in (self.loaded, self.aws, self.system):
            place.mkdir()

    def put(self, place: Path, *, new: bool) -> None:
        shutil.copy(self._new if new else self._old, place / "libfabric.so.1")

    def opened(self) -> list[str]:
        """What an engine says, and which libraries its process has then."""
        loaded = self.loaded / "libfabric.so.1"
        command = [*UNSHARE, sys.executable, "-c", OPENS, str(self.aws), str(loaded) if loaded.exists() else "-"]
        env = os.environ | {"LD_LIBRARY_PATH": str(self.system), "CROSSRAIL_LIBFABRIC": ""}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROGRAM_S, check=True)
        return done.stdout.splitlines()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


pytestmark = [
    pytest.mark.no_sanitizer,  # what is started here is not ours: a compiler, mount
    pytest.mark.skipif(
        subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=20).returncode != 0, reason="needs unshare"
    ),
]


def test_one_that_the_process_has_is_taken_before_all_others(places: Places) -> None:
    places.put(places.loaded, new=True)
    places.put(places.aws, new=False)
    places.put(places.system, new=False)

    assert places.opened() == [f"mapped: {places.loaded}/libfabric.so.1"]


def test_aws_one_is_taken_before_the_systems(places: Places) -> None:
    places.put(places.aws, new=True)
    places.put(places.system, new=True)

    assert places.opened() == ["mapped: /opt/amazon/efa/lib64/libfabric.so.1"]


def test_the_systems_is_taken_where_aws_one_is_too_old(places: Places) -> None:
    places.put(places.aws, new=False)
    places.put(places.system, new=True)

    assert places.opened() == [f"mapped: {places.system}/libfabric.so.1"]


def test_one_that_the_process_has_and_that_is_too_old_gets_no_second_beside_it(places: Places) -> None:
    places.put(places.loaded, new=False)
    places.put(places.aws, new=True)
    places.put(places.system, new=True)

    said, *mapped = places.opened()

    assert mapped == [f"mapped: {places.loaded}/libfabric.so.1"]
    assert f"{places.loaded}/libfabric.so.1 is libfabric 1.11, older than 2.1" in said
    assert "would mix their plugins" in said

"""Opens the libraries named on the command line and writes a JSON line about each. Runs as a child of the doctor.

Run as a file with `python -I`: it must work where crossrail does not, so it imports nothing from it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any


def describe(name: str) -> dict[str, Any]:
    """Describes one library."""
    found: dict[str, Any] = {"name": name}
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return found | {"error": str(error)}
    found["path"] = mapped_path(name)
    stem = name.rpartition("/")[2].partition(".")[0]
    if stem in VERSIONS and (version := VERSIONS[stem](library)):
        found["version"] = version
    if stem == "libibverbs":
        found["devices"] = verbs_devices(library)
    return found


def mapped_path(name: str) -> str:
    """The file behind it: what the loader chose, links followed."""
    wanted = name.rpartition("/")[2]
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n"):
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].rpartition("/")[2].startswith(wanted):
            return words[5]
    return str(Path(name).resolve()) if "/" in name else ""


def libfabric_version(library: Any) -> list[int]:
    """fi_version(3): major in the upper 16 bits."""
    library.fi_version.restype = ctypes.c_uint32
    both = library.fi_version()
    return [both >> 16, both & 0xFFFF]


def cuda_version(library: Any) -> list[int]:
    """The newest CUDA that the driver supports, 13020 -> 13.2. Needs no device and no cuInit."""
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return []
    return [number.value // 1000, number.value % 1000 // 10]


def gdrcopy_version(library: Any) -> list[int]:
    """gdr_runtime_get_version of gdrapi.h."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.gdr_runtime_get_version(ctypes.byref(major), ctypes.byref(minor))
    return [major.value, minor.value]


def verbs_devices(library: Any) -> list[str]:
    """The devices that ibv_get_device_list(3) returns: only those whose provider library was found."""
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype = ctypes.c_char_p
    library.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    library.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    count = ctypes.c_int()
    devices = library.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return []
    names = [library.ibv_get_device_name(devices[index]).decode(errors="replace") for index in range(count.value)]
    library.ibv_free_device_list(devices)
    return names


def openssl_version(library: Any) -> list[int]:
    """OpenSSL_version_num(3): 0xMNN00PP0."""
    library.OpenSSL_version_num.restype = ctypes.c_ulong
    number = library.OpenSSL_version_num()
    return [number >> 28, number >> 20 & 0xFF, number >> 4 & 0xFF]


VERSIONS = {
    "libfabric": libfabric_version,
    "libcuda": cuda_version,
    "libgdrapi": gdrcopy_version,
    "libssl": openssl_version,
}


def main() -> None:
    """Writes one line per library, each at once: the next library may crash."""
    for name in sys.argv[1:]:
        try:
            found = describe(name)
        except Exception as error:
            found = {"name": name, "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

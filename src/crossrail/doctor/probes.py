"""Facts that only a trial can tell. Each trial is a child process with a deadline: it may crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_FOLDER = Path(__file__).resolve().parent
_LIBRARIES_DEADLINE_S = 10.0
_ATTACH_DEADLINE_S = 5.0
_SELFTEST_DEADLINE_S = 90.0  # an emulated machine took 20 s for one transport
_OUTPUT_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Library:
    """The result of opening a library. error: the loader's message, empty if it opened. messages: what it printed
    meanwhile.

    path: the file, links resolved. version: as reported by the library, () if it has no call for that. devices: names
    that libibverbs lists; None for other libraries.
    """

    name: str
    error: str = ""
    path: str = ""
    version: tuple[int, ...] = ()
    devices: tuple[str, ...] | None = None
    messages: str = ""

    @property
    def opened(self) -> bool:
        """Whether it could be opened."""
        return not self.error

    @property
    def missing(self) -> bool:
        """Whether there is no such file, in contrast to one that does not load."""
        return "cannot open shared object file: No such file" in self.error and self.error.startswith(self.name)


@dataclass(frozen=True)
class TransportTest:
    """The result of testing one transport.

    state: "ok", "absent" (not in this build), "misfit" (native module and Python files do not fit), "failed" or
    "unfinished". ways: which way the bytes went, as the engine's explain says.
    """

    transport: str
    state: str
    detail: str = ""
    gb_per_s: float = 0.0
    ways: tuple[str, ...] = ()


@dataclass(frozen=True)
class RdmaPort:
    """A port as an RDMA transport of crossrail sees it. trouble: why it cannot be a rail, empty if it can."""

    transport: str
    name: str
    netdev: str = ""
    ip: str = ""
    trouble: str = ""
    is_software: bool = False


@dataclass(frozen=True)
class Selftest:
    """What the child reported before it ended. error: why crossrail could not be loaded, empty if it could."""

    error: str = ""
    version: str = ""
    installed_version: str = ""
    file: str = ""
    native_file: str = ""
    transports: list[TransportTest] = field(default_factory=list)
    ports: list[RdmaPort] = field(default_factory=list)
    chosen: tuple[str, ...] = ()  # the RDMA rails of an engine that was opened without a word about them


@dataclass(frozen=True)
class _Ran:
    """A child's end. code: None when it was killed at the deadline."""

    code: int | None
    lines: list[dict[str, Any]]
    messages: str


def _run(arguments: Sequence[str], deadline_s: float) -> _Ran:
    """Runs a command without input, in a process group of its own that does not outlive the deadline."""
    # Files, not pipes: what a grandchild holds open cannot keep us waiting.
    with _file_in_memory() as out, _file_in_memory() as err:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        code: int | None
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        lines = [parsed for line in out.read(_OUTPUT_BYTES_MAX).splitlines() if (parsed := _parse(line)) is not None]
        return _Ran(code, lines, err.read(_OUTPUT_BYTES_MAX).decode(errors="replace").strip())


def _file_in_memory() -> IO[bytes]:
    """In memory, since nothing may be writable, as in a container with a read-only root."""
    try:
        return os.fdopen(os.memfd_create("crossrail-doctor"), "w+b")
    except OSError:  # a sandbox without memfd: shm does not open there, and the selftest is to say so
        return tempfile.TemporaryFile()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def describe_end(code: int | None, deadline_s: float) -> str:
    """Describes how a child ended."""
    if code is None:
        return f"did not return within {deadline_s:g} s"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"crashed with signal {-code} ({signal.Signals(-code).name})"
    return f"ended with status {code}"


def open_libraries(names: Sequence[str]) -> dict[str, Library]:
    """Each name opened; one that crashes or hangs is named, and the others are tried all the same."""
    found: dict[str, Library] = {}
    deadline = time.monotonic() + _LIBRARIES_DEADLINE_S
    left = list(names)
    while left and time.monotonic() < deadline:
        arguments = [sys.executable, "-I", str(_FOLDER / "open_libraries.py"), *left]
        left_s = deadline - time.monotonic()
        ran = _run(arguments, left_s)
        for line in ran.lines:
            library = _library(line, ran.messages)
            if library is not None:
                found[library.name] = library
        left = [name for name in left if name not in found]
        if left:
            found[left[0]] = Library(left[0], f"opening it {describe_end(ran.code, left_s)}", messages=ran.messages)
            left = left[1:]
    for name in left:
        found[name] = Library(name, "not tried: opening the others took too long")
    return found


def _library(line: dict[str, Any], messages: str) -> Library | None:
    """Parses what the child wrote about a library."""
    if "name" not in line:
        return None
    stem = line["name"].rpartition("/")[2].partition(".")[0]
    return Library(
        name=line["name"],
        error=line.get("error", ""),
        path=line.get("path", ""),
        version=tuple(line.get("version", ())),
        devices=tuple(line["devices"]) if "devices" in line else None,
        messages="\n".join(text for text in messages.splitlines() if stem in text),
    )


def attach_errno() -> int | None:
    """A child reads this process, which Yama's "descendants only" forbids as it forbids any peer."""
    ran = _run([sys.executable, "-I", str(_FOLDER / "attach.py"), str(os.getpid())], _ATTACH_DEADLINE_S)
    return next((line["errno"] for line in ran.lines if isinstance(line.get("errno"), int)), None)


def run_selftest(transports: Sequence[str]) -> Selftest:
    """crossrail.doctor.selftest in a child. Importing crossrail is part of what is tested."""
    ran = _run([sys.executable, "-m", "crossrail.doctor.selftest", *transports], _SELFTEST_DEADLINE_S)
    loaded = next((line for line in ran.lines if line.get("step") == "loaded"), None)
    if loaded is None:
        end = describe_end(ran.code, _SELFTEST_DEADLINE_S)
        return Selftest(error=ran.messages or f"loading it {end}")
    tests = {line["transport"]: _transport_test(line) for line in ran.lines if line.get("step") == "transport"}
    for transport in transports:
        if transport not in tests:
            tests[transport] = TransportTest(
                transport, "unfinished", f"the test {describe_end(ran.code, _SELFTEST_DEADLINE_S)}. {ran.messages}"
            )
            break  # those after it were never begun
    return Selftest(
        version=loaded["version"],
        installed_version=loaded["installed_version"],
        file=loaded["file"],
        native_file=loaded["native_file"],
        transports=list(tests.values()),
        ports=[port for line in ran.lines if line.get("step") == "ports" for port in _ports(line)],
        chosen=next((tuple(line["rails"]) for line in ran.lines if line.get("step") == "chosen"), ()),
    )


def _transport_test(line: dict[str, Any]) -> TransportTest:
    ways = tuple(line.get("ways", ()))
    return TransportTest(line["transport"], line["state"], line.get("detail", ""), line.get("gb_per_s", 0.0), ways)


def _ports(line: dict[str, Any]) -> list[RdmaPort]:
    fields = ("name", "netdev", "ip", "trouble", "is_software")
    return [RdmaPort(line["transport"], **{name: port[name] for name in fields}) for port in line["ports"]]

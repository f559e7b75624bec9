"""The parent's view of an adapter's two processes: other libraries may crash, hang or print, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from crossrail.cli.bench.peers.base import ROLES, Offer

# The first statement reads the clock: what follows, until the library is asked for, is ours and not the library's.
_PROGRAM = "import time; t = time.monotonic_ns(); import crossrail.cli.bench.peers.child as child; child.main(t)"
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # numpy's, which nobody here uses
_LOOK_S = 0.02
_CRASH_S = 0.3  # until one that crashed has ended: its peer may notice before that
_STDERR_BYTES = 400


class PeerFailed(Exception):
    """A process of the adapter crashed, hung or reported an error. Users do not see the exception: it
    ends in a table.
    """


@dataclass(frozen=True)
class Settings:
    """The settings of every pair. timeout_s: for each answer, and for the end."""

    cpus: tuple[int, int]
    pool_bytes: int
    timeout_s: float


class _Process:
    """One of the two processes, with its connection once it has said which one it is."""

    def __init__(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        self.connection = connection
        self.rank: int = hello["rank"]
        self.pid: int = hello["pid"]
        self.harness_ns: int = hello["harness_ns"]
        self.buffer = bytearray()

    def line(self) -> bytes | None:
        """Reads what has arrived. Returns a whole line, None while it is incomplete; EOFError if the
        process is gone.
        """
        try:
            chunk = self.connection.recv(1 << 20)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError
        self.buffer += chunk
        line, found, rest = bytes(self.buffer).partition(b"\n")
        if not found:
            return None
        self.buffer = bytearray(rest)
        return line


class PeerPair:
    """Both processes. A context manager; leaving it kills what is left of them. One thread at a time."""

    def __init__(self, offer: Offer, settings: Settings) -> None:
        """Starts both; returns when they have connected. PeerFailed when they do not."""
        self._offer = offer
        self._settings = settings
        self.timeout_s = settings.timeout_s  # may be changed between calls
        self._folder = Path(tempfile.mkdtemp(prefix="crossrail-peers-"))
        self._launched: list[subprocess.Popen[bytes]] = []
        self._printed: list[BinaryIO] = []  # what each of them prints: in one file two lines would run into one
        self._processes: list[_Process] = []
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self._folder / "control"))
                listener.listen(2)
                self.started_ns = time.monotonic_ns()
                self._launch()
                self._meet(listener)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> PeerPair:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    @property
    def harness_s(self) -> float:
        """Time that the slower process spent importing the benchmark, which belongs to no library but crossrail."""
        return max(process.harness_ns for process in self._processes) / 1e9

    def call(self, command: str, doing: str = "", **arguments: Any) -> tuple[Any, Any]:
        """Sends a command to both at once. Returns both answers, the sender's first; PeerFailed if
        anything goes wrong.
        """
        return self._call(command, doing, (arguments, arguments))

    def meet(self) -> None:
        """Opens both and tells each what the other's open returned."""
        of_sender, of_receiver = self.call("open")
        self._call("meet", "", ({"theirs": of_receiver}, {"theirs": of_sender}))

    def end(self) -> None:
        """Both close and end by themselves. PeerFailed when they crash or hang doing so."""
        self.call("close")
        deadline = time.monotonic() + self.timeout_s
        for process in self._launched:
            try:
                code = process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                raise PeerFailed(f"still running {self.timeout_s:g} s after it was closed") from None
            if code != 0:
                raise PeerFailed(f"{_ending(code)} at exit")

    def kill(self) -> None:
        """Idempotent."""
        for process in self._processes:
            process.connection.close()
            with contextlib.suppress(ProcessLookupError):
                if self._is_ours(process.pid):
                    os.kill(process.pid, signal.SIGKILL)
        for launched in self._launched:
            launched.kill()
            launched.wait()
        for printed in self._printed:
            printed.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_ours(self, pid: int) -> bool:
        """A child that was not waited for keeps its number; mpiexec's are known by the socket that they name."""
        if any(launched.pid == pid for launched in self._launched):
            return all(launched.returncode is None for launched in self._launched if launched.pid == pid)
        with contextlib.suppress(OSError):
            return os.fsencode(self._folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def _launch(self) -> None:
        spec = {
            "factory": self._offer.factory,
            "options": dict(self._offer.options),
            "cpus": self._settings.cpus,
            "pool_bytes": self._settings.pool_bytes,
            "is_limit": self._offer.is_limit,
        }
        command = [sys.executable, "-c", _PROGRAM, str(self._folder / "control")]
        if self._offer.launcher == "mpiexec":
            found = mpiexec()
            if found is None:
                raise PeerFailed("mpiexec is not installed: pip install mpich")
            self._popen([found, "-n", "2", *command, "", json.dumps(spec)])
        else:
            for role in ROLES:
                self._popen([*command, role, json.dumps(spec)])

    def _popen(self, command: list[str]) -> None:
        environment = os.environ | _ONE_THREAD | dict(self._offer.environment)
        printed = (self._folder / f"printed-{len(self._launched)}").open("a+b")
        self._printed.append(printed)
        self._launched.append(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=environment,
                start_new_session=True,
            )
        )

    def _meet(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + self.timeout_s
        listener.settimeout(_LOOK_S)
        while len(self._processes) < len(ROLES):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                for index, process in enumerate(self._launched):
                    if (code := process.poll()) is not None:
                        raise PeerFailed(f"{_ending(code)} at the start{self._last_words(index)}") from None
                if time.monotonic() > deadline:
                    raise PeerFailed(f"did not start within {self.timeout_s:g} s") from None
                continue
            connection.settimeout(self.timeout_s)
            with connection.makefile("rb") as lines:
                hello = lines.readline()  # it says nothing more before it is asked
            if hello:
                self._processes.append(_Process(connection, json.loads(hello)))
        self._processes.sort(key=lambda process: process.rank)

    def _call(self, command: str, doing: str, arguments: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any]:
        doing = doing or command
        for process, its in zip(self._processes, arguments, strict=True):
            try:
                process.connection.sendall(json.dumps({"command": command, "arguments": its}).encode() + b"\n")
            except OSError:
                raise self._gone(process, doing) from None
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.connection, selectors.EVENT_READ, process)
            while len(answers) < len(ROLES):
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    silent = " and ".join(f"the {ROLES[rank]}" for rank in (0, 1) if rank not in answers)
                    raise PeerFailed(f"no answer from {silent} within {self.timeout_s:g} s at {doing}")
                for key, _ in ready:
                    answer = self._answer(key.data, doing)
                    if answer is not None:
                        answers[key.data.rank] = answer["result"]
                        selector.unregister(key.fileobj)
        return answers[0], answers[1]

    def _answer(self, process: _Process, doing: str) -> dict[str, Any] | None:
        try:
            line = process.line()
        except EOFError:
            raise self._gone(process, doing) from None
        if line is None:
            return None
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            other = self._processes[1 - process.rank]
            if self._has_crashed(other):  # of that this one's error is but what it saw
                raise self._gone(other, doing)
            words = self._last_words(self._launch_of(process))
            raise PeerFailed(f"the {ROLES[process.rank]} at {doing}: {answer['error']}{words}")
        return answer

    def _has_crashed(self, process: _Process) -> bool:
        try:
            return self._launched[self._launch_of(process)].wait(_CRASH_S) < 0
        except subprocess.TimeoutExpired:
            return False

    def _gone(self, process: _Process, doing: str) -> PeerFailed:
        index = self._launch_of(process)
        try:
            ending = _ending(self._launched[index].wait(min(self.timeout_s, 5.0)))
        except subprocess.TimeoutExpired:
            ending = "closed its connection"
        return PeerFailed(f"the {ROLES[process.rank]}: {ending} at {doing}{self._last_words(index)}")

    def _launch_of(self, process: _Process) -> int:
        """mpiexec is launched once, for both."""
        return process.rank if len(self._launched) > 1 else 0

    def _last_words(self, launch: int) -> str:
        """The last line that it printed, if any."""
        printed = self._printed[launch].fileno()  # it shares its position with us: it is left alone
        size = os.fstat(printed).st_size
        lines = os.pread(printed, _STDERR_BYTES, max(size - _STDERR_BYTES, 0)).decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        return f" (printed: {said[-1]})" if said else ""


def mpiexec() -> str | None:
    """The mpiexec of a wheel in this environment, or the system's."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

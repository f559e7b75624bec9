"""Children: a peer that takes commands, and one-off scripts. Everything has a deadline and is killed at the end."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import fork_server
from tests.support.fork_server import REPOSITORY, ForkedProcess
from tests.support.limits import WAIT_S
from tests.support.messages import HEADER_BYTES, decoded, encoded, length_of
from tests.support.node import CommandError, RemoteEngine


class PeerProcess:
    """A Node in a child process. Also a Caller.

    Invariant: at most one command is unanswered. Owner: its creator calls close(). prefix: a command that runs this one
    elsewhere, in the same process (tests.support.hosts). module: the module to run. Forked if a fork server is running
    and a fresh interpreter would have the same environment.
    """

    def __init__(self, prefix: Sequence[str] = (), module: str = "tests.support.peer") -> None:
        self._errors = tempfile.TemporaryFile(mode="w+")
        self._process: ForkedProcess | subprocess.Popen[bytes]
        server = None if prefix else fork_server.suitable()
        if server is not None:
            self._process = server.fork(module, self._errors.fileno())
        else:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=REPOSITORY,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def open(self, key: str = "main", **options: Any) -> RemoteEngine:
        return RemoteEngine(self, key, **options)

    def call(self, command: str, **arguments: Any) -> Any:
        self.start(command, **arguments)
        return self.answer()

    def start(self, command: str, **arguments: Any) -> None:
        """Sends a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(encoded({"command": command, "arguments": arguments}))
        self._process.stdin.flush()

    def answer(self, timeout_s: float = 2 * WAIT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        length = length_of(self._read(HEADER_BYTES, deadline))
        answer = decoded(self._read(length, deadline))
        if "error" in answer:
            raise CommandError(*answer["error"])
        return answer["result"]

    def kill(self) -> None:
        """SIGKILL; returns before the kernel is done with it."""
        self._process.kill()

    def stop(self) -> None:
        """SIGSTOP; returns once all of its threads are stopped."""
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + WAIT_S
        while self._thread_states() != {"T"} and time.monotonic() < deadline:
            time.sleep(0.001)

    def _thread_states(self) -> set[str]:
        """The states of all threads: for the process as a whole /proc shows only the first thread's."""
        states = set()
        for path in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                states.add(path.read_text().rpartition(")")[2].split()[0])
        return states

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait_dead(self) -> int:
        return self._process.wait(WAIT_S)

    def finish(self) -> str:
        """Lets it end by itself; returns what it wrote to standard error."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        status = self._process.wait(WAIT_S)
        assert status == 0, f"the peer ended with status {status}:\n{self.errors()}"
        return self.errors()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """Idempotent; kills what still runs."""
        if self.alive:
            self._process.kill()
        self._process.wait(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:  # a last command it never read
                    pass
        if self._errors.closed:
            return
        errors = self.errors()
        self._errors.close()
        # UBSan reports nowhere else: the test may merely have seen a peer disappear.
        assert "runtime error: " not in errors, errors

    def _read(self, length: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        got = bytearray()
        while len(got) < length:
            ready, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise AssertionError(f"the peer did not answer in time:\n{self.errors()}")
            more = os.read(fd, length - len(got))
            if not more:
                raise AssertionError(f"the peer ended (status {self._process.wait(WAIT_S)}):\n{self.errors()}")
            got += more
        return bytes(got)


# Some fork beside an engine's threads on purpose, which from Python 3.15 on raises where warnings are errors.
_FORKS = "ignore:This process:DeprecationWarning"
_PYTHON = (sys.executable, "-W", "error", "-W", _FORKS, "-X", "faulthandler", "-c")


def run_script(source: str, *arguments: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    """Runs Python source to its end in a fresh interpreter, with warnings as errors."""
    return subprocess.run(
        [*_PYTHON, textwrap.dedent(source), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=REPOSITORY,
    )


def start_script(source: str, *arguments: str) -> subprocess.Popen[str]:
    """Like run_script(), running: the caller talks to it, waits and closes its pipes (use it as a context manager)."""
    return subprocess.Popen(
        [*_PYTHON, textwrap.dedent(source), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def assert_clean(script: subprocess.CompletedProcess[str]) -> None:
    """Ended well, and neither Python nor nanobind complained on the way out."""
    assert script.returncode == 0, f"status {script.returncode}\n{script.stdout}\n{script.stderr}"
    for complaint in ("leaked", "Exception ignored", "Fatal Python error"):
        assert complaint not in script.stderr, script.stderr

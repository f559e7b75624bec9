"""Peers without the CPU time that Python takes to import numpy and crossrail: forked from a process that has imported
them and done nothing else. `python -m tests.support.fork_server FD` is that process.

Not multiprocessing's fork server, whose children end by os._exit: how an interpreter with open engines exits is part of
what peers test.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.support.limits import WAIT_S

REPOSITORY = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1


class ForkServer:
    """The forking process, as seen by a process that wants peers.

    Thread: one at a time. Owner: its creator calls close(), which also kills its children.
    """

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(WAIT_S)
        self._surroundings = _surroundings()
        with theirs:
            command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, cwd=REPOSITORY, pass_fds=[theirs.fileno()]
            )

    def suits(self) -> bool:
        """Whether a process that is started now would find what this one found when it started."""
        return _surroundings() == self._surroundings

    def fork(self, module: str, errors: int) -> "ForkedProcess":
        """A child that runs main() of that module, its standard error being that file descriptor."""
        (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
        try:
            socket.send_fds(self._orders, [json.dumps({"fork": module}).encode()], [stdin, stdout, errors])
        finally:
            os.close(stdin)
            os.close(stdout)
        return ForkedProcess(self, self._answer(), os.fdopen(to_child, "wb"), os.fdopen(from_child, "rb", 0))

    def reap(self, pid: int) -> int:
        """The exit status of a child that has ended, as subprocess reports it."""
        self._orders.send(json.dumps({"reap": pid}).encode())
        return self._answer()

    def close(self) -> None:
        self._orders.close()
        self._process.wait(WAIT_S)

    def _answer(self) -> int:
        answer = self._orders.recv(64)
        assert answer, f"the fork server ended (status {self._process.wait(WAIT_S)})"
        return int(answer)


class ForkedProcess:
    """A child of a ForkServer, with what PeerProcess asks of a subprocess.Popen.

    Invariant: until returncode is known the server has not reaped it, so the pid is this process's and nobody else's.
    """

    def __init__(self, server: ForkServer, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._server = server
        self._pidfd = os.pidfd_open(pid)
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _look(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], timeout_s)[0]:
            self.returncode = self._server.reap(self.pid)
            os.close(self._pidfd)
        return self.returncode


_running: ForkServer | None = None  # that of this process


def start() -> ForkServer:
    """From now on peers of this process are forked, where that makes no difference."""
    global _running
    _running = ForkServer()
    return _running


def suitable() -> ForkServer | None:
    return _running if _running is not None and _running.suits() else None


def _surroundings() -> tuple[Mapping[str, str], str]:
    """What a new process inherits: the environment, and the network namespace of the starting thread."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return environment, os.readlink("/proc/thread-self/ns/net")


def die_with_parent() -> None:
    """Never outlives the tests."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# --- in the process that forks ---


def serve(orders: socket.socket) -> str:
    """Returns in each child the module that it is to run, and here, when nobody is left to give orders, nothing."""
    while True:
        message, fds, _, _ = socket.recv_fds(orders, 4096, 3)
        if not message:
            return ""
        order = json.loads(message)
        if "reap" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])
        else:
            importlib.import_module(order["fork"])  # the first time; the next ones have it
            answer = os.fork()
            if answer == 0:
                orders.close()
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
            for fd in fds:
                os.close(fd)
            if answer == 0:
                return str(order["fork"])
        orders.send(str(answer).encode())


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they their peers
    module = serve(socket.socket(fileno=int(sys.argv[1])))
    if module:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        importlib.import_module(module).main()


if __name__ == "__main__":
    main()

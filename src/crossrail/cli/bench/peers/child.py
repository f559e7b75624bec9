"""One of the two processes of an adapter: `child.main(clock at the first line)`, driven by the parent over a socket.

Arguments: the parent's socket, the role ("" under mpiexec, which numbers its processes), and what to open, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossrail.cli.bench.peers import work
from crossrail.cli.bench.peers.base import ROLES, Role, Side

_PARENT_GONE = 3


class Player:
    """The commands that the parent can send."""

    def __init__(self, role: Role, factory: str, options: dict[str, Any], pool_bytes: int, is_limit: bool) -> None:
        self._role: Role = role
        self._factory = factory
        self._options = options
        self._pool_bytes = pool_bytes
        self._is_limit = is_limit
        self._side: Side | None = None
        self._threads = _thread_count()  # without the library

    @property
    def side(self) -> Side:
        """The one opened."""
        assert self._side is not None
        return self._side

    def open(self) -> str:
        """Returns what the other side needs."""
        module, _, name = self._factory.partition(":")
        make: Callable[..., Side] = getattr(importlib.import_module(module), name)
        self._side = make(self._role, self._pool_bytes, **self._options)
        return self._side.open().hex()

    def meet(self, theirs: str) -> None:
        """The other side."""
        self.side.meet(bytes.fromhex(theirs))

    def first_byte(self) -> int:
        """A message there and back. When it was back, on the clock of the machine."""
        if self.side.is_sender:
            self.side.message(8)
            self.side.take(8)
        else:
            self.side.take(8)
            self.side.message(8)
        return time.monotonic_ns()

    def fill(self) -> None:
        """Known data."""
        work.fill(self.side)

    def measure(self, shape: dict[str, Any], passes: int) -> dict[str, Any]:
        """A pass that is checked and not timed, then so many that are timed."""
        wanted = work.Shape(**shape)
        work.prepare(self.side, wanted)
        work.play(self.side, wanted)
        if not self._is_limit:
            work.check(self.side, wanted)
        return {
            "passes": [work.play(self.side, wanted) for _ in range(passes)],
            "can_submit": self.side.can_submit,
            "threads": _thread_count() - self._threads,
        }

    def close(self) -> None:
        """The library; then the process ends as any program does."""
        if self._side is not None:
            self._side.close()


def _thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def main(began_ns: int) -> None:
    """Answer the parent's calls until it says close, or is gone."""
    path, role, text = sys.argv[1:4]
    spec = json.loads(text)
    rank = int(os.environ["PMI_RANK"]) if not role else ROLES.index(role)
    os.sched_setaffinity(0, {spec["cpus"][rank]})
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    calls: queue.Queue[dict[str, Any]] = queue.Queue()
    stream = connection.makefile("rw")
    stream.write(json.dumps({"rank": rank, "pid": os.getpid(), "harness_ns": time.monotonic_ns() - began_ns}) + "\n")
    stream.flush()
    threading.Thread(target=_read_calls, args=(connection, calls), daemon=True).start()
    player = Player(ROLES[rank], spec["factory"], spec["options"], spec["pool_bytes"], spec["is_limit"])
    while True:
        call = calls.get()
        answer = _answer(player, call)
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
        if call["command"] == "close":
            return


def _read_calls(connection: socket.socket, calls: queue.Queue[dict[str, Any]]) -> None:
    """Own thread, so that the parent's end ends the process also in the middle of a call."""
    with connection.makefile("r") as lines:
        for line in lines:
            call = json.loads(line)
            calls.put(call)
            if call["command"] == "close":
                return
    os._exit(_PARENT_GONE)


def _answer(player: Player, call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": getattr(player, call["command"])(**call["arguments"])}
    except Exception as error:
        text = " ".join(str(error).split())
        return {"error": text if isinstance(error, work.WrongData) else f"{type(error).__name__}: {text}"}

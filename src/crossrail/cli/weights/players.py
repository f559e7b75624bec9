"""The processes of a fleet: starts them, sends them orders, reads their answers, kills them, and leaves none behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from crossrail._options import SECRET_VARIABLE
from crossrail.control.deadlines import in_time
from crossrail.errors import CrossrailError
from crossrail.weights.toy import TargetKind, ToyModel

_START_TIMEOUT_S = 240.0  # some import torch and transformers first
_EXIT_GRACE_S = 3.0  # of all together; some may still be importing torch
_LINE_BYTES_MAX = 1 << 24


class Role(Protocol):
    """The role of one process. It prints {"joined": true} when it has joined its controller."""

    @property
    def name(self) -> str:
        """The name of a player of which there is one."""

    def command(self) -> list[str]:
        """Arguments of Python."""


@dataclass(frozen=True)
class Player:
    """The settings of one toy process. first, last: versions that it plays. controller: address in hexadecimal.

    checks: trainers make new weights for each version, inference ranks compare everything they have.
    """

    role: str
    rank: int
    model: ToyModel
    controller: str
    last: int
    first: int = 1
    count: int = 1
    kind: TargetKind = "plain"
    spare: bool = False
    transport: str = "auto"
    tmp_bytes_max: int = 64 << 20
    checks: bool = True

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"

    def command(self) -> list[str]:
        return ["-m", "crossrail.cli.weights.play", json.dumps(asdict(self))]


class Players:
    """The player processes. They end when their standard input does, so none outlives this one. An asynchronous context
    manager; leaving it closes. Threads: the event loop's.
    """

    def __init__(self, secret: str) -> None:
        self._environment = os.environ | {SECRET_VARIABLE: secret}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._starting: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> Players:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self, player: Role) -> None:
        """Returns when it has joined."""
        starting = asyncio.ensure_future(self._start(player))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        await asyncio.shield(starting)  # if we are cancelled, close() waits for the process
        await self.said(player.name, "joined", _START_TIMEOUT_S)

    async def _start(self, player: Role) -> None:
        self._processes[player.name] = await asyncio.create_subprocess_exec(
            sys.executable, *player.command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=self._environment, limit=_LINE_BYTES_MAX,
            start_new_session=True,  # Ctrl-C goes to us alone; they end by their standard input
        )  # fmt: skip

    async def said(self, name: str, word: str, timeout_s: float) -> dict[str, Any]:
        """That player's next line with this word; others are skipped. CrossrailError if there is none."""
        stdout = self._processes[name].stdout
        assert stdout is not None
        while True:
            try:
                line = await in_time(stdout.readline(), timeout_s)
            except asyncio.TimeoutError:
                raise CrossrailError(f"{name} did not say {word!r} within {timeout_s:g} s") from None
            if not line:
                raise CrossrailError(f"{name} ended, with exit code {await self._processes[name].wait()}")
            words: dict[str, Any] = json.loads(line)
            if word in words:
                return words

    async def tell(self, name: str, **words: Any) -> None:
        """Sends one line of JSON to that player's standard input. CrossrailError if it has ended."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.write(json.dumps(words).encode() + b"\n")
        try:
            await stdin.drain()
        except ConnectionError as error:
            raise CrossrailError(f"{name} hears no more: {error}") from error

    def processor_s(self) -> float:
        """Total processor time of all players."""
        # Linux's clock of a process's processor time is made of its id: clock_getcpuclockid(3).
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self._processes.values())

    async def kill(self, name: str) -> None:
        """At once, with SIGKILL."""
        process = self._processes.pop(name)
        process.kill()
        await process.wait()

    async def close(self) -> None:
        """Waits for all, and kills those that do not end. Idempotent."""
        if self._starting:
            await asyncio.wait(self._starting)
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        processes = self._processes.values()
        if processes:
            ends = [asyncio.ensure_future(process.wait()) for process in processes]
            await asyncio.wait(ends, timeout=_EXIT_GRACE_S)
            for process in processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.wait(ends)
        self._processes.clear()

"""A prefill or decode rank in a process of its own: a line of JSON for each command, one for its answer.

Started as `python -m tests.sglang.child MODE ADDRESS`; Child is the other end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.sglang import side as s
from tests.support.limits import WAIT_S

ROOT = Path(__file__).resolve().parents[2]
START_S = 200.0  # SGLang's base classes import torch and transformers


class Child:
    """close() kills it, frozen or not."""

    def __init__(self, mode: str, address: str, **options: Any) -> None:
        environment = {
            **os.environ,
            "CROSSRAIL_SECRET": s.SECRET,
            "CROSSRAIL_SGLANG_OPTIONS": json.dumps(s.PATIENT | options),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.child", mode, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
            bufsize=1,
        )
        assert self._line(START_S) == "ready"

    def call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        return json.loads(self._line())

    def signal(self, number: int) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:  # its threads go on until the one that is to take the signal has a core
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self, timeout_s: float = 2 * WAIT_S) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert readable, f"no answer; it is {self._process.poll()}"
        return self._process.stdout.readline().strip()


class Commands:
    def __init__(self, side: s.Side) -> None:
        self._side = side
        self._requests: dict[int, Any] = {}

    def open(self, room: int) -> None:
        make = self._side.sender if self._side.mode == "prefill" else self._side.receiver
        self._requests[room] = make(room)

    def ask(self, room: int, pages: list[int], aux_index: int) -> None:
        self._requests[room].send_metadata(np.array(pages, np.int32), aux_index)

    def init(self, room: int, pages: int, aux_index: int) -> None:
        self._requests[room].init(pages, aux_index)

    def send(self, room: int, pages: list[int]) -> None:
        self._requests[room].send(np.array(pages, np.int32))

    def compute(self, text: str, pages: list[int], aux_index: int) -> None:
        self._side.compute(text, pages, aux_index)

    def until(self, room: int, poll: int) -> None:
        s.until(poll, self._requests[room])

    def poll(self, room: int) -> int:
        return int(self._requests[room].poll())

    def failure(self, room: int) -> str:
        return str(s.failure(self._requests[room]).failure_reason)

    def assert_holds(self, text: str, pages: list[int], aux_index: int) -> None:
        self._side.assert_holds(text, pages, aux_index)
        self._side.assert_untouched(pages, [aux_index])


def main(mode: str, address: str) -> None:
    if importlib.util.find_spec("sglang") is None:
        sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = Commands(s.Side(mode, address))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A second process of ours, with one line of JSON each way per call over its standard input and output.

Used by `demo` and `bench`. The child is `python -m <module>`, whose main calls `answer_calls`. It ends when its
standard input ends, so it never outlives its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from crossrail._closing import Closing
from crossrail.errors import CrossrailError

_EXIT_GRACE_S = 2.0
_PARENT_GONE = 3
_LOOK_S = 0.01  # between looks at several: seldom enough to leave them their cores


class ChildFailed(CrossrailError):
    """The other process ended, did not answer in time, or answered with an error."""


class Child(Closing):
    """The parent's end. A context manager; leaving it ends the child.

    Invariant: at most one call is waited for: the last one begun.
    """

    def __init__(self, module: str, role: str, *, cpu: int | None = None, pass_fds: tuple[int, ...] = ()) -> None:
        """Start `python -m module`. role: what messages call it ("the writing process")."""
        self.role = role
        self._buffer = bytearray()
        self._calls = 0
        self._early: dict[str, Any] | None = None  # an answer that raise_if_failed met before finish
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *([] if cpu is None else [str(cpu)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C goes to us alone, also while it still imports
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def call(self, command: str, timeout_s: float = 60.0, **arguments: Any) -> Any:
        """Run a command in the child and return what it answers."""
        self.start(command, **arguments)
        return self.finish(timeout_s)

    def start(self, command: str, **arguments: Any) -> None:
        """Begin a command without waiting for its answer; `finish` gets it."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise self._gone()
        self._calls += 1
        self._early = None
        call = {"number": self._calls, "command": command, "arguments": arguments}
        try:
            self._process.stdin.write(json.dumps(call).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def finish(self, timeout_s: float = 60.0) -> Any:
        """The answer to the command begun. ChildFailed when it was an error or none came."""
        answer = self._read_answer(time.monotonic() + timeout_s)
        if answer is None:
            raise ChildFailed(f"{self.role} (pid {self.pid}) did not answer within {timeout_s:g} s")
        return self._result(answer)

    def has_answered(self) -> bool:
        """Whether `finish` would return at once."""
        if self._early is None:
            self._early = self._read_answer(time.monotonic())
        return self._early is not None

    def raise_if_failed(self) -> None:
        """For a loop that waits for the child by other means: raises if the child reported an error, or is gone."""
        answer = self._read_answer(time.monotonic())
        if answer is not None:
            self._result(answer)
            self._early = answer

    def _result(self, answer: dict[str, Any]) -> Any:
        if "error" in answer:
            raise ChildFailed(f"{self.role} (pid {self.pid}): {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the child: close its input, then insist. Idempotent."""
        self.hang_up()
        self.end_by(time.monotonic() + _EXIT_GRACE_S)

    def hang_up(self) -> None:
        """Closes its input, at which it ends."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def end_by(self, deadline: float) -> None:
        """Waits for its end until then, of time.monotonic(), and insists."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()

    def _read_answer(self, deadline: float) -> dict[str, Any] | None:
        """The answer to the last call, or None at the deadline. Answers to calls that were given up are passed over."""
        if self._early is not None:
            early, self._early = self._early, None
            return early
        while True:
            line = self._read_line(deadline)
            if line is None:
                return None
            answer: dict[str, Any] = json.loads(line)
            if answer["number"] == self._calls:
                return answer

    def _read_line(self, deadline: float) -> bytes | None:
        """Reads one line without its end; None at the deadline."""
        assert self._process.stdout is not None
        stdout_fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([stdout_fd], [], [], left_s)[0]:
                return None
            chunk = os.read(stdout_fd, 65536)
            if not chunk:
                raise self._gone()
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def _gone(self) -> ChildFailed:
        try:
            code = self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            return ChildFailed(f"{self.role} (pid {self.pid}) closed its side and still runs; it will be killed")
        return ChildFailed(f"{self.role} (pid {self.pid}) {_describe_exit(code)} before it was done")


class Children(Closing):
    """Several that do the same at once, and may wait for each other. A context manager; leaving it ends all."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children

    def __len__(self) -> int:
        return len(self._children)

    def __getitem__(self, index: int) -> Child:
        return self._children[index]

    def all(self, command: str, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Each child's answer to the same command."""
        return self.each(command, [arguments] * len(self._children), timeout_s)

    def each(self, command: str, arguments: Iterable[Mapping[str, Any]], timeout_s: float = 60.0) -> list[Any]:
        """Each child's answer, with arguments of its own.

        Raises the first failure at once: the others may be waiting for the failed child until a deadline of their own.
        """
        for child, its in zip(self._children, arguments, strict=True):
            child.start(command, **its)
        deadline_s = time.monotonic() + timeout_s
        while late := [child for child in self._children if not child.has_answered()]:
            for child in self._children:
                child.raise_if_failed()
            if time.monotonic() > deadline_s:
                names = ", ".join(f"{child.role} (pid {child.pid})" for child in late)
                raise ChildFailed(f"{names} did not answer {command!r} within {timeout_s:g} s")
            time.sleep(_LOOK_S)
        return [child.finish() for child in self._children]

    def close(self) -> None:
        """Ends all. Idempotent."""
        for child in self._children:
            child.hang_up()
        deadline = time.monotonic() + _EXIT_GRACE_S
        for child in self._children:
            child.end_by(deadline)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def answer_calls(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """The child's main: answer one call after another until standard input ends.

    Whatever a handler prints goes to standard error, where it cannot spoil an answer.
    """
    logging.getLogger("crossrail").setLevel(logging.ERROR)  # the parent says what became of a peer
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_calls, args=(calls,), daemon=True, name="crossrail-calls").start()
    while True:
        call = json.loads(calls.get())
        answer = json.dumps(_answer(handlers, call))
        try:
            answers.write(answer + "\n")
            answers.flush()
        except BrokenPipeError:  # the parent closes our input too, but _read_calls may see that later
            os._exit(_PARENT_GONE)


def _read_calls(calls: queue.Queue[str]) -> None:
    """Own thread, so that the end of the input ends the process also in the middle of a handler."""
    for line in sys.stdin:
        calls.put(line)
    os._exit(_PARENT_GONE if not calls.empty() else 0)


def _answer(handlers: Mapping[str, Callable[..., Any]], call: dict[str, Any]) -> dict[str, Any]:
    number = call["number"]
    try:
        return {"number": number, "result": handlers[call["command"]](**call["arguments"])}
    except CrossrailError as error:
        return {"number": number, "error": str(error)}
    except Exception as error:
        return {"number": number, "error": f"{type(error).__name__}: {error}"}

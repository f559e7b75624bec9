"""The parent's side of a campaign process: starts it, sends it orders, reads its answers, freezes and kills it."""

from __future__ import annotations

import gc
import heapq
import mmap
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

import numpy as np

from crossrail._parent import end_with_parent
from crossrail.campaign.books import Bytes
from crossrail.campaign.checkers import UNTOUCHED, CheckFailed
from crossrail.campaign.child import PACKET_BYTES_MAX, Child

SLOT_BYTES = 4 << 20
_SLOTS = 20
_REPLY_LIMIT_S = 60.0


class ProcessGone(Exception):
    """The process ended before it answered."""


class Runs(Protocol):
    """The child's object: run() ends when the parent closes its end of the socket."""

    def run(self) -> None: ...


class Process:
    """One child process. slots: memory that it shares with us, and registers when told to."""

    def __init__(
        self, fleet: Fleet, name: str, slots: int, child: Callable[[socket.socket, list[Bytes]], Runs]
    ) -> None:
        self.fleet = fleet
        self.name = name
        self.slots: list[Bytes] = [_shared_memory() for _ in range(slots)]
        self.slots_free = list(range(slots))
        self.slots_resting: list[int] = []  # free once the round is over: its ledger still looks at them
        self.is_alive = True
        self.is_killed = False  # by us
        self.frozen_until = 0.0
        self.listeners: dict[str, Callable[..., None]] = {}  # by verb
        self.on_end: Callable[[], None] = lambda: None
        self._replies: dict[int, object] = {}
        self._outbox: deque[bytes] = deque()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            fleet._leave_to_parent()
            _be_child(theirs, self.slots, child)
        theirs.close()
        ours.setblocking(False)
        self.socket = ours

    def free_slots(self) -> None:
        """Between rounds: zeroes the resting slots and makes them free."""
        for slot in self.slots_resting:
            self.slots[slot][:] = UNTOUCHED
        self.slots_free += self.slots_resting
        self.slots_resting.clear()

    def tell(self, *what: object) -> None:
        """Sends a command; never blocks. To one that has ended it is lost."""
        if self.is_alive:
            self._outbox.append(pickle.dumps(what))
            self.flush()

    def ask(self, verb: str, *arguments: object) -> object:
        """Sends a command and lets time pass until its reply arrives. ProcessGone if none can arrive any more."""
        return self.reply_to(self.ask_soon(verb, *arguments), verb)

    def reply_to(self, number: int, verb: str) -> object:
        """Lets time pass until that reply arrives."""
        deadline = time.monotonic() + _REPLY_LIMIT_S
        while number not in self._replies:
            if not self.is_alive:
                raise ProcessGone(self.name)
            if time.monotonic() > deadline:
                raise CheckFailed(f"process {self.name!r} has not answered {verb!r} within {_REPLY_LIMIT_S:.0f} s")
            self.fleet.pass_time(0.0005)
        return self._replies.pop(number)

    def ask_soon(self, verb: str, *arguments: object) -> int:
        """Sends a command; its reply will be in take_reply() of that number."""
        number = self.fleet.next_number()
        self.tell(verb, number, *arguments)
        return number

    def take_reply(self, number: int) -> object | None:
        """The reply; None while there is none."""
        return self._replies.pop(number, None)

    def flush(self) -> None:
        """Sends what the socket has room for."""
        try:
            while self._outbox:
                self.socket.send(self._outbox[0])
                self._outbox.popleft()
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return  # full: later; ended: listen() sees that

    def listen(self) -> None:
        """Receives what the child has sent."""
        while self.is_alive:
            try:
                packet = self.socket.recv(PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._ended()
                return
            verb, *arguments = pickle.loads(packet)
            if verb == "reply":
                self._replies[arguments[0]] = arguments[1]
            else:
                self.listeners[verb](*arguments)

    def kill(self) -> None:
        """SIGKILL, whatever it is doing; returns when it has ended and everything it sent before was received."""
        self.is_killed = True
        os.kill(self.pid, signal.SIGKILL)
        self.socket.setblocking(True)
        self.listen()

    def freeze(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self.frozen_until = max(self.frozen_until, time.monotonic() + for_s)
        os.kill(self.pid, signal.SIGSTOP)
        self.fleet.at(self.frozen_until, self.thaw)

    def thaw(self) -> None:
        """SIGCONT, unless it is to stay frozen for longer."""
        if self.is_alive and self.frozen_until <= time.monotonic():
            self.frozen_until = 0.0
            os.kill(self.pid, signal.SIGCONT)

    def _ended(self) -> None:
        self.is_alive = False
        self.fleet._forget(self)
        self.socket.close()
        _, status = os.waitpid(self.pid, 0)
        if not self.is_killed:
            code = os.waitstatus_to_exitcode(status)
            self.fleet.complaints.append(f"process {self.name!r} ended by itself, with status {code}")
        self.on_end()


class Fleet:
    """All processes, and the passing of time. One thread."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.processes: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers: Iterator[int] = count(1)

    def start(
        self, name: str, slots: int = _SLOTS, child: Callable[[socket.socket, list[Bytes]], Runs] = Child
    ) -> Process:
        """A new process. child: what it is, by its end of the socket and the slots that it shares with us."""
        process = Process(self, name, slots, child)
        self.processes.append(process)
        self._selector.register(process.socket, selectors.EVENT_READ, process)
        return process

    def next_number(self) -> int:
        """A number that was never given before."""
        return next(self._numbers)

    def at(self, when: float, fn: Callable[[], None]) -> None:
        """Calls fn while time passes, when the monotonic clock is there."""
        heapq.heappush(self._timers, (when, self.next_number(), fn))

    def pass_time(self, for_s: float) -> None:
        """Receives messages for so long; at least once whatever has arrived."""
        end = time.monotonic() + for_s
        while True:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            for process in self.processes:
                process.flush()
            until = min(end, self._timers[0][0]) if self._timers else end
            for key, _ in self._selector.select(max(0.0, until - now)):
                key.data.listen()
            if time.monotonic() >= end:
                return

    def thaw_all(self) -> None:
        """Nobody is frozen any more."""
        for process in self.processes:
            if process.frozen_until:
                process.frozen_until = 0.0
                process.thaw()

    def close(self) -> None:
        """Ends all of them."""
        for process in list(self.processes):
            process.kill()
        self._selector.close()

    def _forget(self, process: Process) -> None:
        self.processes.remove(process)
        self._selector.unregister(process.socket)

    def _leave_to_parent(self) -> None:
        """In a child: closes what belongs to its siblings."""
        for process in self.processes:
            process.socket.close()
        self._selector.close()


def _shared_memory() -> Bytes:
    return np.frombuffer(mmap.mmap(-1, SLOT_BYTES), np.uint8)  # MAP_SHARED: a forked child has the same pages


def _be_child(control: socket.socket, slots: list[Bytes], child: Callable[[socket.socket, list[Bytes]], Runs]) -> None:
    """Never returns."""
    status = 1
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
        gc.freeze()  # what was our parent's stays as it is
        child(control, slots).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)

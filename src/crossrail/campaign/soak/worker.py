"""A process of the soak: it has one engine at a time, loads its peers by itself, and starts and stops on command.

It talks over the socket of crossrail.campaign.process: pickled tuples, a verb and its arguments.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crossrail.campaign.child import cut_connections, file_at, obey
from crossrail.campaign.soak.life import Life, Member
from crossrail.campaign.soak.load import TRIGGER_AHEAD, Load
from crossrail.campaign.soak.records import THREADS, Stage
from crossrail.campaign.usage import Usage
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.peers import Address

_JOIN_LIMIT_S = 50.0
_PROBE_LIMIT_S = 30.0
_PATIENCE_S = 5.0


class Worker:
    """The child's end. One thread obeys; the load's threads and the engine's callback thread write the books."""

    def __init__(self, control: socket.socket, stage: Stage, seat: int) -> None:
        self._control = control
        self._stage = stage
        self._seat = seat
        self._life: Life | None = None
        self._before: Usage | None = None  # it opened
        self._threads: list[Load] = []
        self._verbs: dict[str, Callable[..., None]] = {
            "open": self._open, "close": self._close, "round": self._round, "meet": self._meet, "go": self._go,
            "halt": self._halt, "jobs": self._jobs, "probe": self._probe, "fence": self._fence, "lift": self._lift,
            "pool": self._pool, "forget": self._forget, "cut": self._cut, "counts": self._counts,
            "release": self._release, "dump": self._dump,
        }  # fmt: skip

    def run(self) -> None:
        """Carries out orders until the parent closes its end."""
        obey(self._control, self._verbs)
        if self._life is not None:
            self._stop_threads()
            self._life.close(0.0)

    @property
    def life(self) -> Life:
        assert self._life is not None
        return self._life

    def _tell(self, *what: object) -> None:
        self._control.send(pickle.dumps(what))

    def complain(self, text: str) -> None:
        """Tells the parent of what must not be."""
        self._tell("complaint", f"seat {self._seat}: {text}")

    # ---- the engine

    def _open(self, ask: int, life: int, index: int, options: dict[str, Any], is_mapped: bool) -> None:
        self._before = Usage.take()
        self._life = mine = Life(self._stage, self._seat, index, life, options, is_mapped, self.complain)
        fd, inode, offset = file_at(mine.region.base) if is_mapped else (None, 0, 0)
        self._tell("reply", ask, (mine.engine.address, mine.region.descriptor, fd, inode, offset))

    def _close(self, ask: int, timeout_s: float) -> None:
        """Replies with what the engine has left behind, in words. The load continues until it is refused."""
        life = self.life
        life.close(timeout_s)
        self._stop_threads()
        if left := len(life.jobs):
            self.complain(f"life {life.life} was closed, and {left} operations did not complete")
        self._life = None
        del life
        gc.collect()  # engine, callbacks and jobs know each other
        assert self._before is not None
        deadline = time.monotonic() + _PATIENCE_S
        while (text := Usage.take().exceeds(self._before)) and time.monotonic() < deadline:
            time.sleep(0.005)
        if text:
            text += f": {_descriptors()}"
        self._tell("reply", ask, text)

    # ---- rounds

    def _round(self, number: int, members: Sequence[Member]) -> None:
        self.life.begin_round(number, members)

    def _meet(self, members: Sequence[Member]) -> None:
        if self._life is not None:
            self._life.meet(members)

    def _go(self, seed: int) -> None:
        draw = random.Random(seed)
        self._threads = [Load(self.life, number, draw.getrandbits(64)) for number in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _halt(self, ask: int) -> None:
        """Replies when nothing is submitted any more, and nothing waits for our word."""
        self._stop_threads()
        self.life.word.add(TRIGGER_AHEAD)
        self.life.open_pool()
        self._tell("reply", ask, True)

    def _stop_threads(self) -> None:
        for thread in self._threads:
            thread.is_stopping = True
        for thread in self._threads:
            thread.join(_JOIN_LIMIT_S)
            if thread.is_alive():
                self.complain(f"{thread.name} is in a submit for {_JOIN_LIMIT_S:.0f} s")
        self._threads.clear()

    def _jobs(self, ask: int) -> None:
        """Replies with what is in progress, in words."""
        jobs = list(self.life.jobs.values())
        self._tell("reply", ask, [f"row {job.rows[0]} ({job.kind}) of life {self.life.life}" for job in jobs])

    def _probe(self, ask: int) -> None:
        """Writes to each peer, after forgetting lost ones. Replies with the failures: name, status, reason."""
        life = self.life
        for member in life.members.values():
            if life.engine.peer_state(member.address) == "lost":
                life.engine.forget_peer(member.address)
        failed = []
        deadline = time.monotonic() + _PROBE_LIMIT_S
        for member, job in Load(life, 0, life.round).probe():
            if job is None or job.transfer is None:
                continue  # no slot in sight: all suspect
            try:
                job.transfer.wait(max(0.0, deadline - time.monotonic()))
            except WaitTimeout as error:
                failed.append((member.name, "pending", str(error)))
            except CrossrailError as error:
                failed.append((member.name, job.transfer.status, str(error)))
        self._tell("reply", ask, failed)

    def _counts(self, ask: int, numbers: Sequence[int]) -> None:
        life = self.life
        counts = {number: life.counter(number).poll() for number in numbers}
        self._tell("reply", ask, (life.engine.stats(), counts, Usage.take()))

    def _release(self, numbers: Sequence[int], force: Sequence[bool]) -> None:
        self.life.release(numbers, force)

    # ---- what happens to it

    def _fence(self, ask: int, timeout_s: float, is_closing: bool) -> None:
        """Replies with the reason for a failure, or with nothing. Peers stay locked out until "lift"."""
        try:
            self.life.fence(timeout_s, is_closing=is_closing)
        except WaitTimeout as error:
            self._tell("reply", ask, str(error))
            return
        self._tell("reply", ask, "")

    def _lift(self, ask: int) -> None:
        descriptor = self.life.lift_fence()
        self._tell("reply", ask, (descriptor, self.life.book.fences))

    def _pool(self) -> None:
        """Closes the pool, or opens another: meanwhile senders wait."""
        life = self.life
        if life.pool is not None and not life.pool.closed:
            life.pool.close()
        else:
            life.open_pool()

    def _forget(self, peer: Address) -> None:
        self.life.engine.forget_peer(peer)

    def _cut(self, chance: float, seed: int) -> None:
        cut_connections(chance, seed)

    def _dump(self, ask: int, path: str) -> None:
        if self._life is not None:
            engine = self._life.engine
            engine.dump(path, reason="a round of the soak failed")
            known = "\n".join(str(engine.explain(peer)) for peer in engine.peers())
            stacks = {thread.name: thread.is_alive() for thread in threading.enumerate()}
            Path(f"{path}.peers.txt").write_text(f"{known}\n{stacks}\n")
        self._tell("reply", ask, path)


def _descriptors() -> str:
    """The open descriptors of this process, in words."""
    found = []
    for fd in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
        with contextlib.suppress(FileNotFoundError):  # the one of iterdir itself
            found.append(f"{fd.name} {fd.readlink()}")
    return ", ".join(found)

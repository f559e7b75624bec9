"""An inference rank inside a blocking program: a thread with the event loop on which crossrail.weights runs.

Its program calls receive() when nothing reads the weights; only then are they written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import crossrail as xr
from crossrail import _ending
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire
from crossrail.errors import CrossrailError, UsageError, WaitTimeout
from crossrail.integrations.loop_thread import LoopThread
from crossrail.integrations.secret import shared_secret
from crossrail.weights.errors import UpdateFailed
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services.messages import mailbox
from crossrail.weights.services.receiver import FENCE_S, WeightReceiver
from crossrail.weights.services.versions import State

log = logging.getLogger("crossrail.vllm")

_LEAVE_S = 5.0  # for the controller's answer, and again for writers to be fenced off
_PATIENCE_S = 10.0 + FENCE_S  # beyond what a call may take: the receiver may be fencing already, by its own deadline
_TORN = "the weights are torn: update them before they are used"
T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """How a worker reaches its controller, whose address this is. transport, rails, port: as of crossrail.Engine.

    rank: among all inference ranks. device: the model's, as "cuda:0"; None: the host. secret_file: None: the value of
    CROSSRAIL_SECRET. join_s: how long joining takes at most.
    """

    controller: bytes
    rank: int
    transport: str = "auto"
    rails: int | Sequence[str] = 1
    port: int = 0
    secret_file: str | None = None
    join_s: float = 60.0
    device: str | None = None

    def secret(self) -> bytes:
        """UsageError when there is none."""
        return shared_secret(self.secret_file, "weight transfer", "init_info")


class WeightsWorker:
    """Open when made: registered, and joined. Threads: the caller's, one at a time; its calls block.

    fill: adds what lies where to the memory; it must stay there until close() has returned. apply: makes of what has
        come what is computed with, on the caller's thread, with all writers out. is_torn: these weights are part old,
        part new, as a worker before this one has left them.
    Raises what join() raises, and UsageError.
    """

    def __init__(
        self,
        link: Link,
        fill: Callable[[WeightMemory], None],
        *,
        apply: Callable[[], None] = lambda: None,
        is_torn: bool = False,
    ) -> None:
        self._link = link
        self._apply = apply
        self._is_applied = True
        secret = link.secret()
        self._engine = xr.Engine(
            f"vllm-weights-{link.rank}",
            transport=link.transport,
            rails=link.rails,
            port=link.port,
            secret=secret,
            device=link.device,
        )
        self._memory = WeightMemory(self._engine, "target", link.rank)
        self._memory.is_torn = is_torn
        self._loop = LoopThread("crossrail-weights")
        self._box: Mailbox | None = None
        self._wire: EngineWire | None = None
        self._receiver: WeightReceiver | None = None
        self._before: tuple[int, int] | None = None  # failures and commits
        self._is_joined = False
        self._ending: futures.Future[None] | None = None
        try:
            fill(self._memory)
            self._call(self._begin(secret), link.join_s)
        except BaseException:
            self.close()
            raise

    @property
    def is_torn(self) -> bool:
        """Whether the weights are part old, part new, until an update is complete. Also after close()."""
        return self._memory.is_torn or not self._is_applied

    def start(self) -> None:
        """Call this before requesting an update: whatever fails or completes from now on is that update."""
        self._check_open()
        assert self._receiver is not None
        self._before = self._receiver.failures, self._receiver.commits

    def receive(self, version: int, timeout_s: float) -> None:
        """Lets writers in, and returns when an update to this version is complete, with all writers out; also where the
        version is here already: it is written again.

        Raises UpdateFailed as soon as an attempt at it has failed, or the time is up; writers are out then too, or it
        says that they are not yet, and it says if weights are torn. That may take until a writer that is frozen is
        given up (FENCE_S), and join_s more while the controller is silent.
        """
        self._check_open()
        self._call(self._receive(version, timeout_s), timeout_s + FENCE_S + self._link.join_s)
        self._is_applied = False
        try:
            self._apply()
        except Exception as error:
            raise UpdateFailed(version, f"{error}; {_TORN}") from error
        self._is_applied = True

    def close(self) -> None:
        """Leaves; nothing is written any more when it returns. Idempotent.

        Raises WaitTimeout while a frozen writer may still write to the memory, which must stay then: call it again.
        No update comes meanwhile. After the interpreter's end, which closes the engine, it has nothing to do.
        """
        if _ending.is_over:
            return
        if self._ending is None or (self._ending.done() and self._ending.exception() is not None):
            self._ending = self._loop.start(self._end())
        self._wait(self._ending, 2 * _LEAVE_S)
        self._loop.close()
        was_open = not self._engine.closed
        self._memory.close()
        self._engine.close()
        if was_open and self.is_torn:
            log.warning("rank %d: %s", self._link.rank, _TORN)

    # ---- on the loop

    async def _begin(self, secret: bytes) -> None:
        self._wire = EngineWire(self._engine)
        self._box = mailbox(self._wire, secret)
        self._box.start()
        self._may_write = asyncio.Event()
        self._receiver = WeightReceiver(self._box, self._memory, pause=self._paused)
        await self._receiver.join(self._link.controller, self._link.join_s)
        self._is_joined = True

    async def _paused(self, _version: int) -> None:
        await self._may_write.wait()

    async def _receive(self, version: int, timeout_s: float) -> None:
        receiver = self._receiver
        assert receiver is not None
        failures, commits = self._before or (receiver.failures, receiver.commits)
        self._may_write.set()
        try:
            await receiver.receive(version, timeout_s, failures, commits)
        except CrossrailError as error:
            self._may_write.clear()
            why = f"{error}{await self._lock_out(receiver)}"
            if receiver.state is not State.WHOLE or not self._is_applied:
                why += f"; {_TORN}"
            elif receiver.has_come(version, commits):  # in the end
                return
            raise UpdateFailed(version, why) from error
        finally:
            self._may_write.clear()
            self._before = None

    async def _lock_out(self, receiver: WeightReceiver) -> str:
        """Joins again, which ends an attempt still in progress, and offers this rank for the next.

        Returns what to report if writers may still be active, else nothing.
        """
        try:
            await receiver.join(self._link.controller, self._link.join_s, displaces=False)
        except CrossrailError as error:
            if receiver.state is State.RECEIVING:  # the receiver keeps trying, by the attempt's deadline
                return f"; writers are not locked out yet: {error}"
            log.warning("rank %d is in no plan any more: %s", self._link.rank, error)
        return ""

    async def _end(self) -> None:
        if self._receiver is not None:
            if self._is_joined:
                await self._receiver.leave(_LEAVE_S)
                self._is_joined = False
            await self._receiver.close(FENCE_S)
        if self._box is not None:
            await self._box.close()
        if self._wire is not None:
            self._wire.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return self._wait(self._loop.start(work), timeout_s)

    def _wait(self, future: futures.Future[T], timeout_s: float) -> T:
        timeout_s += _PATIENCE_S
        if not futures.wait([future], timeout_s).done:  # it continues, so that writers are locked out in the end
            raise WaitTimeout(f"weights of rank {self._link.rank}: no end within {timeout_s:g} s")
        return future.result()

    def _check_open(self) -> None:
        if self._ending is not None:
            raise UsageError(f"weights of rank {self._link.rank}: close() was called, they take no more updates")

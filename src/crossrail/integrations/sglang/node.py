"""A thread beside SGLang's scheduler, with the event loop on which crossrail.kv runs: an engine, its wire, a mailbox.

SGLang's scheduler polls and must not wait: most of its calls are handed to the loop and return at once. Where it takes
pages back it has to wait until nothing touches them (`hold_until`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

import crossrail as xr
from crossrail._devices import gpu_at
from crossrail.control.mailbox import Mailbox
from crossrail.control.wire import EngineWire
from crossrail.integrations.loop_thread import LoopThread
from crossrail.integrations.ports import port_of_rank
from crossrail.integrations.sglang.memory import Pool
from crossrail.integrations.sglang.messages import mailbox
from crossrail.integrations.sglang.options import SglangOptions
from crossrail.kv import KvLayout, RankMemory

log = logging.getLogger("crossrail.sglang")

_PATIENCE_S = 30.0  # for the loop to do what takes it microseconds; it shares the interpreter with the scheduler
T = TypeVar("T")


class PagesNotQuiet(BaseException):
    """Pages that SGLang is about to give to another request may still be written or read by a peer: the scheduler ends.

    No Exception, for SGLang catches all of these where it takes pages back, and would go on with wrong KV.
    """


class RankNode:
    """One rank's engine and loop. Threads: any, but one at a time for each call.

    rank: of the attention. number: of all ranks of the server.
    Lifecycle: 1. made: registered and running. 2. close(), after whoever runs on the loop has ended. Idempotent.
    Owner of the KV memory: SGLang. It must stay until close() has returned.
    """

    def __init__(self, name: str, rank: int, number: int, pool: Pool, options: SglangOptions, secret: bytes) -> None:
        self.rank = rank
        self.options = options
        self.secret = secret
        self.pool = pool
        self.engine = xr.Engine(
            name,
            transport=options.transport,
            rails=options.rails,
            port=port_of_rank(options.port, number, options.rails),
            secret=secret,
            device=gpu_at(pool.buffers[0][0]),
        )
        self._regions = [self.engine.register(buffer) for buffer in pool.buffers]
        self.device = self._regions[0].device  # "cpu", "cuda:0" ...
        self._is_open = True
        self._loop = LoopThread("crossrail-sglang")
        self.wire, self.mailbox = self.call(self._begin())

    async def _begin(self) -> tuple[EngineWire, Mailbox]:
        wire = EngineWire(self.engine)
        return wire, mailbox(wire, self.secret)

    def memory(self, layout: KvLayout) -> RankMemory:
        """The pool by this layout of it."""
        return RankMemory(self.engine, layout, self._regions)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self.call(self._end())
        finally:
            self._loop.close()
            self.engine.close()

    async def _end(self) -> None:
        await self.mailbox.close()
        self.wire.close()

    def soon(self, call: Callable[..., object], *args: Any) -> None:
        """Runs it on the loop; returns at once. Calls run in their order."""
        self._loop.soon(call, *args)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = _PATIENCE_S) -> T:
        """Runs it on the loop and waits."""
        return self._loop.call(work, timeout_s)

    def start(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Runs it on the loop; returns at once."""
        return self._loop.start(work)

    def hold_until(self, quiet: threading.Event, what: str) -> None:
        """Returns once nothing touches the request's pages. Raises PagesNotQuiet after quiesce_s."""
        if not quiet.wait(self.options.quiesce_s):
            raise PagesNotQuiet(f"{what}: a peer may still touch its pages after {self.options.quiesce_s:g} s")

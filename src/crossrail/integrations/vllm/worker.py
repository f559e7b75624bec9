"""The half of the connector inside a vLLM worker: a thread with the event loop on which crossrail.kv runs.

vLLM calls from its own thread, and must not wait: its calls become calls on the loop. They wait in two cases only:
until a step that sends layer by layer is planned, and until writes out of preempted blocks have ended.

On a GPU vLLM has launched its kernels when it calls, and they run later. What is said of a layer, or of a step, is then
said to the loop when an event behind those kernels has completed; and blocks to load into are given to others when the
kernels that were launched before vLLM handed them out have ended: the request that had them before may have ended with
a step of it still to run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import crossrail as xr
from crossrail import _ending
from crossrail._buffers import memory_of
from crossrail._devices import gpu_at
from crossrail.control.wire import EngineWire
from crossrail.integrations.instance import Worker, fingerprint
from crossrail.integrations.loop_thread import LoopThread
from crossrail.integrations.ports import port_of_rank
from crossrail.integrations.vllm import stats
from crossrail.integrations.vllm.consumer import Consumer, Loaded
from crossrail.integrations.vllm.kernels import Event, Kernels
from crossrail.integrations.vllm.options import VllmOptions
from crossrail.integrations.vllm.orders import Orders
from crossrail.integrations.vllm.producer import LiveStep, Producer
from crossrail.kv import KvLayout, RankMemory
from crossrail.kv.messages import mailbox

log = logging.getLogger("crossrail.vllm")

_PATIENCE_S = 30.0  # for the loop to do what takes it microseconds; it shares the interpreter with the model
_JOIN_S = 10.0
T = TypeVar("T")


class WorkerSide:
    """One rank. Threads: vLLM's calls, one at a time; what ends on the loop is collected under a lock.

    Lifecycle: 1. open(), once the KV caches are allocated. 2. each step: begin_step, layer_saved for each layer,
    start_loads, end_step, take_results. 3. close().
    Owner of the KV memory: vLLM. It must stay until close() has returned.
    """

    def __init__(self, name: str, rank: int, options: VllmOptions, secret: bytes) -> None:
        self._name = name
        self._rank = rank
        self._options = options
        self._secret = secret
        self._loop: LoopThread | None = None
        self._engine: xr.Engine | None = None
        self._takes_back: Consumer | None = None  # there, from when on producers may write into vLLM's memory
        self._orders = Orders()
        self._step: LiveStep | None = None
        self._saved: set[int] = set()
        self._passed = 0  # layers of the step that the word has gone up for, or will once their kernels have ended
        self._sending: Kernels | None = None  # None: vLLM computes on the host, and what it says is done is done
        self._loading: Kernels | None = None
        self._mark: Event | str | None = None  # behind what was launched before this step
        self._changed = threading.Condition()  # guards what follows
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._data = stats.empty()
        self._counted: dict[str, int] = {}  # of the counters of others, what is in _data already

    def open(
        self,
        layout: KvLayout,
        buffers: Sequence[Any],
        form: dict[str, str],
        layers: Sequence[str],
        record: Callable[[], Event] | None = None,
    ) -> Worker:
        """Registers the KV caches and begins to listen. Returns what others must know of this rank.

        buffers: as RankMemory.register takes them. layers: their names, in the order of the layout. record: for caches
        on a GPU: an event behind the kernels that vLLM's thread has launched so far.
        """
        options = self._options
        self._layers = {name: i for i, name in enumerate(layers)}
        self._engine = xr.Engine(
            self._name,
            transport=options.transport,
            rails=options.rails,
            port=port_of_rank(options.port, self._rank, options.rails),
            secret=self._secret,
            watcher_poll_us=options.watcher_poll_us,
            device=gpu_at(memory_of(buffers[0]).address),
        )
        self._memory = RankMemory.register(self._engine, layout, buffers)
        if record is not None:
            self._sending, self._loading = Kernels(record), Kernels(record)
        self._loop = LoopThread("crossrail-vllm")
        self.description: Worker = self._call(self._begin(layout, form))
        log.info("rank %d: %s; fingerprint %s", self._rank, layout.describe(), fingerprint(self.description))
        return self.description

    async def _begin(self, layout: KvLayout, form: dict[str, str]) -> Worker:
        assert self._engine is not None
        self._wire = EngineWire(self._engine)
        self._mailbox = mailbox(self._wire, self._secret)
        description = Worker(self._wire.address, layout.to_wire(), form)
        self._producer = Producer(
            self._mailbox, layout, self._rank, self._memory, self._options, self._on_sent, self._wire.give_up
        )
        self._consumer = Consumer(self._mailbox, description, self._rank, self._memory, self._options, self._on_loaded)
        self._takes_back = self._consumer
        self._mailbox.start()
        return description

    def close(self) -> None:
        """Ends what is under way; nothing reads or writes the KV caches any more when it returns. Idempotent.

        Raises WaitTimeout, with all else closed, while a producer is frozen in the middle of a copy to here; so does
        a later call. After the interpreter's end it has nothing to do: `import crossrail` sees to it that engines are
        closed then, and calls from threads such as the loop's do not come back.
        """
        if _ending.is_over:
            return
        if self._engine is None:
            if self._takes_back is not None:
                self._takes_back.shut_out()
            return
        engine, self._engine = self._engine, None
        with contextlib.ExitStack() as ends:  # last first, each whatever the others raise
            ends.callback(engine.close)
            if self._loop is not None:
                ends.callback(self._loop.close)
                patience_s = _PATIENCE_S + self._options.producer_timeout_s
                ends.callback(lambda: self._call(self._end(), timeout_s=patience_s))
            for kernels in (self._sending, self._loading):
                if kernels is not None:
                    ends.callback(kernels.close, _JOIN_S)

    async def _end(self) -> None:
        async with contextlib.AsyncExitStack() as ends:
            ends.callback(self._wire.close)
            ends.push_async_callback(self._mailbox.close)
            ends.push_async_callback(self._producer.close)
            ends.push_async_callback(self._consumer.close)

    # ---- a step, in this order

    def preempted(self, orders: Orders) -> None:
        """Before blocks of these requests are used for others: returns when nothing reads them."""
        if orders.preempted or orders.stale:
            if self._sending is not None:
                self._sending.drain(self._options.quiesce_s)
            preempt = self._producer.preempt(orders.preempted, orders.stale)
            self._call(preempt, timeout_s=_PATIENCE_S + 2 * self._options.quiesce_s)

    def begin_step(self, orders: Orders) -> None:
        """Before the forward pass."""
        self._orders = orders
        self._saved.clear()
        self._passed = 0
        self._step = None
        if self._loading is not None:
            self._mark = self._loading.mark() if orders.loads else None
        if orders.chunks or orders.offers or orders.finished or orders.dropped:
            self._step = self._call(_as_coroutine(lambda: self._producer.begin_step(orders)))

    def layer_saved(self, name: str) -> None:
        """This layer's KV of this step is in the blocks, or will be after the kernels so far. Returns at once.

        A layer that open() was not told of reads the cache of one that is known: nothing is to be sent for it.
        """
        step = self._step
        if step is None or name not in self._layers:
            return
        self._saved.add(self._layers[name])
        before = self._passed
        while self._passed in self._saved:
            self._passed += 1
        if layers := self._passed - before:
            self._after_kernels(lambda why: _count(step, layers, why))

    def start_loads(self) -> None:
        """Blocks that vLLM has allocated may now be fetched into. Returns at once."""
        orders = self._orders
        if not (orders.wanted or orders.loads or orders.releases or orders.cancels):
            return
        if self._loading is None:
            self._take(orders)
        else:  # all in vLLM's order, also what needs no kernels: who cancels a load must not come before it
            self._loading.then(lambda why: self._take(_without_loads(orders, why)), self._mark)

    def end_step(self, failed: bool) -> None:
        """After the forward pass. failed: it raised, and nobody knows which layers are there."""
        orders, step, self._step = self._orders, self._step, None
        missing = len(self._layers) - self._passed
        if step is not None and failed:
            self._after_kernels(lambda _why: step.abandon("the forward pass failed"))
        elif step is not None and missing:  # layers that vLLM does not report one by one
            self._after_kernels(lambda why: _count(step, missing, why))
        if orders.chunks and not failed:
            self._after_kernels(lambda why: self._computed(orders, why))

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Requests that were sent, and received, since the last call; and those of the latter whose KV did not come.
        After a step that computed nothing it waits a moment for news: nobody else is in a hurry then.
        """
        with self._changed:
            if self._orders.idle and not (self._sent or self._received):
                self._changed.wait(self._options.idle_s)
            sent, self._sent = self._sent, set()
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
            return sent, received, failed

    def take_stats(self) -> stats.Data:
        """Of the time since the last call."""
        with self._changed:
            data, self._data = self._data, stats.empty()
        if self._engine is not None:
            counts = self._producer.counts
            now = {
                "sent": counts["written"],
                "send_failed": counts["failed"],
                "leases_expired": counts["lease expired"],
                "messages_dropped": sum(n for kind, n in self._mailbox.dropped.items() if kind != "unasked"),
            }
            for name, count in now.items():
                data[name] = count - self._counted.get(name, 0)
            self._counted = now
        return data

    # ---- kernels

    def _after_kernels(self, action: Callable[[str], None]) -> None:
        """Calls it when what was launched so far has ended, with what went wrong; on a host at once."""
        if self._sending is None:
            action("")
        else:
            self._sending.then(action, self._sending.mark())

    def _computed(self, orders: Orders, why: str) -> None:
        if why:
            log.error("the step of %d prompts cannot be sent: %s", len(orders.chunks), why)
        else:
            self._soon(self._producer.end_step, orders)

    def _take(self, orders: Orders) -> None:
        self._soon(self._consumer.take, orders)

    # ---- the loop

    def _on_sent(self, request: str) -> None:
        with self._changed:
            self._sent.add(request)
            self._changed.notify()

    def _on_loaded(self, loaded: Loaded) -> None:
        with self._changed:
            self._received.add(loaded.request)
            if loaded.how == "failed":
                self._failed.add(loaded.request)
            self._data[loaded.how] += 1
            self._data["loaded_bytes"] += loaded.nbytes
            if loaded.how == "loaded":
                self._data["load_seconds"].append(loaded.seconds)
            self._changed.notify()

    def _soon(self, call: Callable[[Orders], None], orders: Orders) -> None:
        assert self._loop is not None
        self._loop.soon(call, orders)

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float = _PATIENCE_S) -> T:
        assert self._loop is not None
        return self._loop.call(work, timeout_s)


def _count(step: LiveStep, layers: int, why: str) -> None:
    """So many more layers of the step are there; or none any more, and why."""
    if why:
        step.abandon(why)
    else:
        step.layers_done(layers)


def _without_loads(orders: Orders, why: str) -> Orders:
    """The same, its loads failed if there is a reason, and their prompts let go."""
    if not why:
        return orders
    return replace(
        orders,
        loads=[replace(load, wanted=None, why=why) for load in orders.loads],
        releases=[*orders.releases, *(load.request for load in orders.loads)],
    )


async def _as_coroutine(call: Callable[[], T]) -> T:
    return call()

"""The consumer's half of a worker: gets requests' KV into the blocks that vLLM allocated.

A load ends in one of these ways; only then is it reported, and may its blocks be used or freed:
- loaded: the count is complete.
- failed: all of the producer's ranks have confirmed that nothing can land any more, or were fenced off. A rank that is
  frozen in the middle of a copy cannot be fenced: then the load stays unreported until it can.
- cancelled by vLLM: the same, and nobody is told that it failed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from crossrail.control.deadlines import loop_time_s
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.wire import Unreachable
from crossrail.errors import CrossrailError, WaitTimeout
from crossrail.integrations.asking import Asker, Part
from crossrail.integrations.instance import Instance, Worker, mismatch, rank_name
from crossrail.integrations.vllm import orders as o
from crossrail.integrations.vllm.options import VllmOptions
from crossrail.kv import KvLayout, KvReceiver, KvTarget, PageState, RankMemory, Reception, foreign_lease
from crossrail.kv import messages as m

log = logging.getLogger("crossrail.vllm")

_ATTEMPTS = 1 << 20
_RELEASABLE = (PageState.RESERVED, PageState.IN_USE)
_ASK_S = 5.0  # for questions that are answered at once


class LoadFailed(CrossrailError):
    """Nothing more is to be expected of this load."""


@dataclass(frozen=True)
class Loaded:
    """How a load ended. how: "loaded", "failed" or "cancelled". seconds: since it had blocks."""

    request: str
    how: str
    seconds: float
    nbytes: int


@dataclass
class _Pending:
    """A request that wants its KV, from when it arrived on. attempt: tells it from others of the same transfer."""

    wanted: o.Wanted
    attempt: int
    task: asyncio.Task[None] | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)


class Consumer:
    """Threads: the event loop's. on_loaded: called once for each load."""

    def __init__(
        self,
        mailbox: Mailbox,
        worker: Worker,
        rank: int,
        memory: RankMemory,
        options: VllmOptions,
        on_loaded: Callable[[Loaded], None],
    ) -> None:
        self.layout = KvLayout.from_wire(worker.layout)
        self._mailbox = mailbox
        self._worker = worker
        self._rank = rank
        self._options = options
        self._on_loaded = on_loaded
        self._asker = Asker(mailbox, options.producer_timeout_s, options.probe_s)
        self._receiver = KvReceiver(self.layout, {rank: memory}, None)
        self._pending: dict[str, _Pending] = {}
        self._attempts = itertools.count()
        self._mismatches: dict[str, str] = {}  # by writer
        mailbox.spawn(self._beat(), "telling producers that we still want")

    async def close(self) -> None:
        """Gives up loads in progress, as far as producers answer in time, and revokes access to our memory from all of
        them.

        Raises WaitTimeout while one is frozen in the middle of a copy to us.
        """
        tasks = [pending.task for pending in self._pending.values() if pending.task is not None]
        for pending in self._pending.values():
            pending.stop.set()
        if tasks:
            await asyncio.wait(tasks, timeout=self._options.producer_timeout_s)
        await self._receiver.shut()

    def shut_out(self) -> None:
        """The last of close() again, if it raised: the engine may be closed by then, and the loop ended. Blocks."""
        self._receiver.close()

    # ---- what vLLM says

    def take(self, orders: o.Orders) -> None:
        for wanted in orders.wanted:
            self._pending[wanted.request] = _Pending(wanted, next(self._attempts) % _ATTEMPTS + 1)
        for load in orders.loads:
            self._start(load)
        for request in orders.cancels:
            if (pending := self._pending.get(request)) is not None:
                pending.stop.set()
        for request in orders.releases:
            released = self._pending.pop(request, None)
            if released is not None and not any(self._is_same(released, other) for other in self._pending.values()):
                self._mailbox.spawn(self._let_go(released), "letting a prompt go")

    @staticmethod
    def _is_same(one: _Pending, other: _Pending) -> bool:
        """Whether they want the same prompt: the producer holds it until one of them has it, or lets it go."""
        return (one.wanted.transfer_id, one.wanted.instance) == (other.wanted.transfer_id, other.wanted.instance)

    def _start(self, load: o.Load) -> None:
        if load.wanted is None:
            self._end(load, "failed", 0.0, load.why)
            return
        pending = self._pending.get(load.request)
        if pending is None:  # it was loaded before, and vLLM has lost it since
            pending = self._pending[load.request] = _Pending(load.wanted, next(self._attempts) % _ATTEMPTS + 1)
        pending.task = self._mailbox.spawn(self._load(load, pending), f"loading {load.request}")

    # ---- one load

    async def _load(self, load: o.Load, pending: _Pending) -> None:
        begun = loop_time_s()
        how, why = "failed", ""
        try:
            await self._fetch(load, pending)
            how = "loaded"
        except CrossrailError as error:
            why = str(error)
        except Exception as error:
            log.exception("request %s: its load failed by a mistake of ours", load.request)
            why = f"{type(error).__name__}: {error}"
        if pending.stop.is_set() and how == "failed":
            how = "cancelled"
        self._pending.pop(load.request, None)
        self._end(load, how, loop_time_s() - begun, why)

    def _end(self, load: o.Load, how: str, seconds: float, why: str) -> None:
        if how == "failed":
            log.error("request %s: its KV could not be loaded: %s", load.request, why)
        layout = self.layout
        pages = layout.pages_of(load.tokens) - self._first_page(load)
        nbytes = pages * layout.layers * layout.parts * layout.block_bytes if how == "loaded" else 0
        self._on_loaded(Loaded(load.request, how, seconds, nbytes))

    async def _fetch(self, load: o.Load, pending: _Pending) -> None:
        """Returns when everything has arrived; raises the reason if not, once nothing can land any more."""
        instance = pending.wanted.instance
        if differs := self._mismatch(instance):
            await self._let_go(pending)
            raise LoadFailed(differs)
        name = rank_name(pending.wanted.transfer_id, self._rank, self.layout.tp)
        pages = np.array(load.blocks[: self.layout.pages_of(load.tokens)], np.uint32)
        page_tokens = self.layout.page_tokens
        lease = foreign_lease(name, pages, page_tokens, prefix_tokens=self._first_page(load) * page_tokens)
        reception = self._receiver.adopt(name, load.tokens, lease)
        target = reception.dispatch(instance.layout, instance.writer)
        try:
            await self._dispatch(load, pending, target)
            await self._arrive(reception, pending)
        except BaseException as error:
            log.info("transfer %s: %s; taking its blocks back", name, error)
            await self._asker.take_back(self._receiver, reception, self._part(pending))
            raise
        finally:
            if reception.state in _RELEASABLE:
                reception.release()

    def _first_page(self, load: o.Load) -> int:
        """The first page to fetch: after those that are here, and after those that a sliding window has left behind."""
        left = itertools.takewhile(lambda block: block == o.NO_BLOCK, load.blocks)
        return max(load.prefix_tokens // self.layout.page_tokens, sum(1 for _ in left))

    def _mismatch(self, instance: Instance) -> str:
        writer = instance.writer
        if writer not in self._mismatches:
            self._mismatches[writer] = mismatch(instance.workers[0], self._worker)
        return self._mismatches[writer]

    async def _dispatch(self, load: o.Load, pending: _Pending, target: KvTarget) -> None:
        question = m.Dispatch(target.request, pending.attempt, load.prompt, target.to_wire(), self._options.load_s)
        answers = (m.Dispatched, m.DispatchRefused)
        self._asker.revive(pending.wanted.instance)
        for answer in await self._asker.ask_all(
            pending.wanted.instance, question, answers, self._options.producer_timeout_s
        ):
            if isinstance(answer, m.DispatchRefused):
                raise LoadFailed(f"the producer refuses: {answer.reason}")

    async def _arrive(self, reception: Reception, pending: _Pending) -> None:
        """Until all is counted. Raises when it will not be."""
        arrival = self._in_time(reception, pending)
        if lost := await self._asker.lost_before_arrival(arrival, self._part(pending), pending.stop):
            raise LoadFailed("vLLM cancelled it" if pending.stop.is_set() else lost)

    async def _in_time(self, reception: Reception, pending: _Pending) -> None:
        load_s = self._options.load_s
        try:
            await reception.arrived(load_s)
        except WaitTimeout as error:
            came = f"{error.arrived} of {error.expected} pieces of it came within load_s={load_s:g}"
            raise LoadFailed(f"{came}: {await self._asker.how_far(self._part(pending))}") from None

    # ---- taking back

    async def _let_go(self, pending: _Pending) -> None:
        """Tells the producer that nobody will fetch it; if that is impossible, the lease there expires."""
        try:
            part = self._part(pending)
            await self._asker.ask_all(part.instance, m.Withdraw(part.name, part.attempt), (m.Quiesced,), _ASK_S)
        except (NoAnswer, Unreachable) as error:
            log.info("transfer %s: %s", pending.wanted.transfer_id, error)

    # ---- questions

    async def _beat(self) -> None:
        """Renews the producer's lease for requests that wait for blocks here."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            waiting = [pending for pending in self._pending.values() if pending.task is None]
            for pending in waiting:
                self._mailbox.spawn(self._beat_one(pending), "a sign of life")

    async def _beat_one(self, pending: _Pending) -> None:
        try:
            part = self._part(pending)
            probe = m.Probe(part.name, part.attempt)
            await self._asker.ask_all(part.instance, probe, (m.Progress,), self._options.heartbeat_s)
        except (NoAnswer, Unreachable) as error:
            log.info("transfer %s: %s", pending.wanted.transfer_id, error)

    def _part(self, pending: _Pending) -> Part:
        wanted = pending.wanted
        return Part(rank_name(wanted.transfer_id, self._rank, self.layout.tp), pending.attempt, wanted.instance)

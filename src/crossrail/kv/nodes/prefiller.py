"""The prefiller: runs prompts through the model, one after another, and writes their KV to decoders as it is computed.

Life of a request here, or more exactly of one attempt:
1. queued: a Dispatch came.
2. running: pages are reserved, a SendJob is open; the model runs chunk by chunk, and each layer is sent once it is
   computed, then the tail.
3. written, once our own writes have completed; or failed, once nothing of it can land any more. Pages are released.
A Withdraw ends it at any point and is answered when nothing can land any more. One that overtakes its Dispatch is
remembered, and the Dispatch refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

import crossrail as xr
from crossrail.control.deadlines import set_in_time
from crossrail.errors import CrossrailError, UsageError
from crossrail.kv import messages as m
from crossrail.kv.errors import NoPages, TransferStopped
from crossrail.kv.foreign import exceptions_only
from crossrail.kv.model import Tokens
from crossrail.kv.nodes.attempts import AttemptBook, Key
from crossrail.kv.nodes.model_watch import CANCELLED_BY_NOBODY
from crossrail.kv.nodes.node import Node
from crossrail.kv.timeline import Timeline
from crossrail.kv.tracing import RequestSpan
from crossrail.kv.transfer.job import SendJob
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.pages import PageLease
from crossrail.kv.transfer.plan import plan_transfer
from crossrail.kv.transfer.prefix import NO_NAMES, PageNames, page_hashes
from crossrail.kv.transfer.sender import KvSender
from crossrail.kv.transfer.target import KvTarget

log = logging.getLogger("crossrail.kv")

_ENDED_KEPT = 2048
_TIMELINES_KEPT = 64  # number kept: decoders ask as soon as everything has arrived, and one may have thousands of spans
_TAIL_SLOTS = 256

_NAME_CHARS = 40


@dataclass(eq=False)
class _Work:
    """One attempt of a request. job: set once it runs. withdrawn: begin nothing more for it.

    name: unique, whatever the requests are called. names: of its pages, once it has some.
    """

    key: Key
    name: str
    decoder: bytes
    tokens: Tokens
    target: KvTarget
    deadline_at_s: float
    timeline: Timeline
    span: RequestSpan
    job: SendJob | None = None
    names: PageNames = field(default_factory=lambda: NO_NAMES)
    withdrawn: str = ""
    is_computed: bool = False  # the model is done with it, in one way or another
    tail_slot: int | None = None
    quiet: asyncio.Event = field(default_factory=asyncio.Event)  # set once nothing of it can land any more


class Prefiller(Node):
    """A Node that prefills. One chunk runs at a time; transfers of earlier requests go on meanwhile.

    First come, first served, except that prompts of one chunk run between the chunks of longer ones.
    """

    role: m.Role = "prefiller"
    owes = "has announced no layer"

    def _set_up(self, ranks: Mapping[int, RankMemory]) -> None:
        self.sender = KvSender(self.model.layout, ranks)
        self._tails: xr.Region = ranks[0].engine.alloc(max(_TAIL_SLOTS * self.model.tail_bytes, 1))
        self._free_tails = list(range(_TAIL_SLOTS))
        self._queue: deque[_Work] = deque()
        self._queued = asyncio.Event()
        self._is_closing = False
        self._works: dict[Key, _Work] = {}
        self._numbers = itertools.count(1)
        self._book = AttemptBook(self.mailbox, _ENDED_KEPT)
        self._with_timeline: deque[Key] = deque()
        self._released = asyncio.Event()  # set when pages or a tail slot were released
        self.mailbox.handle(m.Dispatch, self._on_dispatch)
        self.mailbox.handle(m.Probe, self._on_probe)
        self.mailbox.handle(m.Withdraw, self._on_withdraw)

    def start(self) -> None:
        super().start()
        self.mailbox.spawn(self._work(), f"prefilling of {self.name}")
        self.mailbox.spawn(self._report_when_model_hangs(), "watching the model")

    def _left_tokens(self) -> list[int]:
        return [len(work.tokens) for work in self._works.values()]

    async def close(self) -> None:
        """Ends what is in progress: waits until nothing of it can land any more. Idempotent."""
        self._is_closing = True
        await super().close()
        await self.sender.close()
        self._tails.close()

    # --- what decoders say ---

    async def _on_dispatch(self, sender: bytes, dispatch: m.Dispatch) -> m.Message:
        key = self._book.key_of(sender, dispatch)
        answer = (dispatch.request, dispatch.attempt)
        if key in self._works:
            return m.Dispatched(*answer)
        if refusal := self._refusal(key):
            return m.DispatchRefused(*answer, m.clipped(refusal))
        if busy := self._model_watch.hangs or self._too_busy():
            return m.DispatchRefused(*answer, m.clipped(busy), busy=True)
        try:
            target = KvTarget.from_wire(dispatch.ticket)
            tokens = m.unpack_tokens(dispatch.tokens)
            plan_transfer(self.model.layout, target.layout, target.request)
            if len(tokens) != target.tokens or not len(tokens):
                raise UsageError(f"{len(tokens)} tokens came for pages of {target.tokens}")
            if target.tail_bytes != self.model.tail_bytes:
                raise UsageError(f"the tail has {self.model.tail_bytes} bytes, there is room for {target.tail_bytes}")
            if (pages := self.model.layout.pages_of(len(tokens))) > self.pool.pages:
                raise UsageError(f"{len(tokens)} tokens take {pages} pages, there are {self.pool.pages} here")
        except UsageError as refusal:
            return m.DispatchRefused(*answer, m.clipped(refusal))
        clock = asyncio.get_running_loop().time
        about: dict[str, str | int] = {"crossrail.request": dispatch.request, "crossrail.node": self.name}
        span = RequestSpan("crossrail.kv.prefill", dispatch.traceparent, about)
        name = f"{dispatch.request[:_NAME_CHARS]}#{next(self._numbers)}"
        target = replace(target, request=name)
        work = _Work(key, name, sender, tokens, target, clock() + dispatch.timeout_s, Timeline(clock), span)
        self._works[key] = work
        self._queue.append(work)
        self._queued.set()
        self._count_active(len(self._works))
        return m.Dispatched(*answer)

    def _refusal(self, key: Key) -> str:
        if key in self._book.ended:
            return "this attempt has ended"
        if self.draining:
            return f"node {self.name!r} is draining"
        return ""

    def _too_busy(self) -> str:
        if self._full():
            self._drop_unwanted()
        return self._full()

    def _full(self) -> str:
        """Why the queue accepts nothing more. Independent of the new prompt's length: otherwise long prompts would
        starve behind short ones, which always fit.
        """
        if len(self._queue) >= self.options.queue_max:
            return f"node {self.name!r} has {len(self._queue)} requests in its queue already"
        tokens = sum(len(work.tokens) for work in self._queue)
        if tokens >= self.options.queue_tokens_max:
            return f"node {self.name!r} has prompts of {tokens} tokens in its queue already"
        return ""

    async def _on_probe(self, sender: bytes, probe: m.Probe) -> m.Message:
        key = self._book.key_of(sender, probe)
        answer = (probe.request, probe.attempt)
        work = self._works.get(key)
        if work is not None:
            silent_s = 0.0 if work.is_computed else self._model_watch.silent_s
            return m.Progress(*answer, "queued" if work.job is None else "running", model_silent_s=silent_s)
        return self._book.ended.get(key, m.Progress(*answer, "unknown"))

    async def _on_withdraw(self, sender: bytes, withdraw: m.Withdraw) -> m.Message:
        key = self._book.key_of(sender, withdraw)
        work = self._works.get(key)
        if work is None:
            self._book.ended.setdefault(key, m.Progress(withdraw.request, withdraw.attempt, "unknown"))
            return self._book.quiesced(key)
        self._give_up(work, "its decoder withdrew it")
        await work.quiet.wait()
        return self._book.quiesced(key, work.job)

    # --- work ---

    async def _report_when_model_hangs(self) -> None:
        """Reports a hang at once: until then routers send requests that are refused. Recovery can wait for the
        heartbeat.
        """
        while True:
            await self._model_watch.wait()
            self.report_soon()
            await self._model_watch.wait_until_it_goes_on()

    def _give_up(self, work: _Work, why: str) -> None:
        """Begins nothing more for it; what is in progress ends as soon as possible."""
        work.withdrawn = work.withdrawn or why
        if work.job is None:
            # It never ran, and will not, so there is nothing to wait for. Whoever has taken it looks at `withdrawn`
            # first.
            work.quiet.set()
            self._drop_unwanted()
        else:
            self.mailbox.spawn(self._stop(work, work.job, why), "stopping a transfer")

    def _drop_unwanted(self) -> None:
        """Ends queued attempts that nobody waits for: the one being computed may take minutes."""
        for work in list(self._queue):
            try:
                self._raise_if_withdrawn(work)
            except TransferStopped as stopped:
                self._queue.remove(work)
                self._end(work, "failed", str(stopped))

    async def _stop(self, work: _Work, job: SendJob, why: str) -> None:
        await job.cancel(why)
        work.quiet.set()

    async def _work(self) -> None:
        while True:
            self._queued.clear()
            while self._queue:
                await self._run_or_end(self._queue.popleft())
            await self._queued.wait()

    async def _run_or_end(self, work: _Work) -> None:
        # A task of its own: should the model await a future that failed by GeneratorExit, as one of a thread may,
        # Python closes the coroutines around it, up to the task's: it would be all our work.
        running = asyncio.ensure_future(self._run(work))
        try:
            await running
        except CrossrailError as error:
            self._end(work, "failed", str(error))
        except Exception as error:
            log.exception("request %s failed", work.name)
            self._end(work, "failed", f"{type(error).__name__}: {error}")

    async def _let_a_short_one_pass(self) -> None:
        """Between two chunks of a long prompt: runs the first queued prompt of at most one chunk, if there is room for
        it now. So short prompts need not wait for all of a long one, which still gets at least every second chunk.
        """
        for work in self._queue:
            if len(work.tokens) <= self.options.chunk_tokens:
                if self._free_tails and self.model.layout.pages_of(len(work.tokens)) <= self.pool.available:
                    self._queue.remove(work)
                    await self._run_or_end(work)
                return

    async def _run(self, work: _Work) -> None:
        """Prefills one request. When it returns the model is free; raises if nothing was begun.

        It does not wait for writes in flight, not even those of a failed request: the decoder may be frozen.
        """
        lease = await self._reserve(work)
        work.timeline.add("queue", 0.0)
        try:
            job = work.job = self.sender.open(work.target, lease)
        except CrossrailError:
            self._release(work, lease)
            raise
        timer = asyncio.get_running_loop().call_at(work.deadline_at_s, self._give_up, work, "its decoder's time is up")
        try:
            try:
                await self._prefill(work, job)
            finally:
                work.is_computed = True
        except Exception as error:
            if not isinstance(error, CrossrailError):
                log.exception("request %s failed in the model", work.name)
            self.mailbox.spawn(self._fail(work, job, timer, error), "ending a transfer")
        except BaseException:  # we are closing: the sender ends the job
            timer.cancel()
            raise
        else:
            self.mailbox.spawn(self._finish(work, job, timer), "finishing a transfer")

    async def _reserve(self, work: _Work) -> PageLease:
        """Pages for all of its tokens, and a slot for its tail, as soon as they are free."""
        page_tokens = self.model.layout.page_tokens
        # The last token runs in any case, for the tail, and must not write into a page that others read.
        work.names = page_hashes(work.tokens, page_tokens, salt=self.model.name.encode())
        names = work.names[: (len(work.tokens) - 1) // page_tokens]
        give_up_s = min(work.timeline.now() + self.options.page_wait_s, work.timeline.since_begin(work.deadline_at_s))
        while True:
            self._raise_if_withdrawn(work)
            self._released.clear()
            try:
                if not self._free_tails:
                    raise NoPages(work.name, f"all {_TAIL_SLOTS} places for tails are in use", 1, 0)
                lease = self.pool.reserve(self.model.layout.pages_of(len(work.tokens)), work.name, names=names)
                work.tail_slot = self._free_tails.pop()
                return lease
            except NoPages:
                left_s = give_up_s - work.timeline.now()
                if left_s <= 0:
                    raise
                # The loop looks again: it may have been withdrawn meanwhile.
                await set_in_time(self._released, min(left_s, self.options.probe_s))

    def _raise_if_withdrawn(self, work: _Work) -> None:
        work.withdrawn = work.withdrawn or self._book.why_unwanted(work.decoder, work.deadline_at_s)
        if work.withdrawn:
            raise TransferStopped(f"request {work.name!r}: {work.withdrawn}")

    async def _prefill(self, work: _Work, job: SendJob) -> None:
        tokens = work.tokens
        start = job.lease.prefix_tokens
        tail = b""
        while start < len(tokens):
            self._raise_if_withdrawn(work)
            if job.stopped:
                raise TransferStopped(f"request {work.name!r}: its transfer was stopped")
            end = min(start + self.options.chunk_tokens, len(tokens))
            begun = work.timeline.now()
            tail = await self._run_chunk(job, tokens[:end], start)
            work.timeline.add(f"prefill {end}", begun)
            start = end
            if start < len(tokens):
                await self._let_a_short_one_pass()
        if len(tail) != self.model.tail_bytes:
            raise UsageError(f"the model's tail has {len(tail)} bytes, it says {self.model.tail_bytes}")
        if tail:
            assert work.tail_slot is not None
            offset = work.tail_slot * self.model.tail_bytes
            self._tails.view()[offset : offset + len(tail)] = tail
            job.send_tail(self._tails, offset)
        if not job.stopped:  # at each chunk, not only at the end: requests with the same prefix often come together
            job.lease.publish_computed(work.names)

    async def _run_chunk(self, job: SendJob, tokens: Tokens, start: int) -> bytes:
        """Runs the tokens from `start` on through the model and sends their layers. Returns the tail."""
        if job.target.prefix_tokens == job.target.tokens:  # the decoder has all pages, and lacks only the tail
            return await self._run_model(job, tokens, start, _nothing_to_send)
        step = self.sender.begin_step([(job, len(tokens))])
        try:
            tail = await self._run_model(job, tokens, start, step.layer_done)
            if left := step.layers_left:  # all later steps would wait for these
                layers = self.model.layout.layers
                raise UsageError(f"the model announced {layers - left} of {layers} layers")
            return tail
        except BaseException as error:
            step.abandon(f"{type(error).__name__}: {error}")
            raise

    async def _run_model(self, job: SendJob, tokens: Tokens, start: int, layer_done: Callable[[], None]) -> bytes:

        def heard() -> None:  # on any thread
            self._model_watch.heard()
            layer_done()

        with self._model_watch.computing(), exceptions_only(awaits=True):
            try:
                return await self.model.prefill(self.cache, tokens, start, job.lease.pages, heard)
            except asyncio.CancelledError as error:
                if self._is_closing:
                    raise
                raise RuntimeError(CANCELLED_BY_NOBODY) from error

    async def _finish(self, work: _Work, job: SendJob, timer: asyncio.TimerHandle) -> None:
        try:
            await self._settle(work, job, timer)
        except CrossrailError as error:
            self._end(work, "failed", str(error))
        else:
            self._end(work, "written", "")

    async def _fail(self, work: _Work, job: SendJob, timer: asyncio.TimerHandle, why: Exception) -> None:
        detail = f"{type(why).__name__}: {why}"
        await job.cancel(detail)
        try:
            await self._settle(work, job, timer)
        except CrossrailError as error:  # the first error that stopped it
            detail = str(error)
        self._end(work, "failed", detail)

    async def _settle(self, work: _Work, job: SendJob, timer: asyncio.TimerHandle) -> None:
        """Waits for the end of our writes and releases the pages. Raises what stopped the job."""
        try:
            await job.finish()
        finally:
            timer.cancel()
            work.quiet.set()
            _add_writes(work.timeline, job)
            self._release(work, job.lease)

    def _release(self, work: _Work, lease: PageLease) -> None:
        lease.release()
        if work.tail_slot is not None:
            self._free_tails.append(work.tail_slot)
            work.tail_slot = None
        self._released.set()

    def _end(self, work: _Work, state: m.Ended, detail: str) -> None:
        work.quiet.set()
        if self._works.pop(work.key, None) is None:
            return
        work.span.end(detail)
        log.info(
            "request %s, attempt %d: %s by node %s, %d tokens, in %.3f s%s",
            *work.key[1:], state, self.name, len(work.tokens), work.timeline.now(), detail and f": {detail}",
        )  # fmt: skip
        self._book.end(work.key, work.job, state, detail, work.timeline.spans)
        self._with_timeline.append(work.key)
        while len(self._with_timeline) > _TIMELINES_KEPT:
            key = self._with_timeline.popleft()
            if (progress := self._book.ended.get(key)) is not None:
                self._book.ended[key] = structs.replace(progress, timeline=[])
        self._count_active(len(self._works))


def _nothing_to_send() -> None:
    """For layers that nobody waits for."""


def _add_writes(timeline: Timeline, job: SendJob) -> None:
    """Adds a span for the tail, and one for each layer of each chunk, from the begin of its writes to their end."""
    if job.tail is not None:
        timeline.add("tail", *(timeline.since_begin(at_s) for at_s in job.tail))
    posted_s = {(layer.end_tokens, layer.layer): timeline.since_begin(layer.at_s) for layer in job.posted}
    for layer in job.written:
        timeline.add(f"layer {layer.layer}", posted_s[layer.end_tokens, layer.layer], timeline.since_begin(layer.at_s))

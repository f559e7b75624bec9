"""One request at the prefiller: the writes posted for it, and when nothing reads its pages any more."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

from crossrail import Region, Transfer, Watcher
from crossrail._latest import Latest
from crossrail._options import check_counts, check_kind, check_timeout
from crossrail.errors import CrossrailError, PeerLost, UsageError, WaitTimeout
from crossrail.kv.errors import TransferStopped
from crossrail.kv.transfer.memory import RankMemory
from crossrail.kv.transfer.pages import PageLease
from crossrail.kv.transfer.plan import PageWrites, TransferPlan
from crossrail.kv.transfer.target import KvTarget

Submit = Callable[[], Transfer]

_DOUBTS_KEPT = 4096


class LayerTime(NamedTuple):
    """For the timeline: when (in loop time) something happened to a layer of the chunk that ends with this token."""

    end_tokens: int
    layer: int
    at_s: float


@dataclass(slots=True, eq=False)
class _SentLayer:
    """What was submitted of a layer for the chunk that ends with this token."""

    end: int
    layer: int
    last: int = 0  # how many transfers of the job were submitted with it
    posted_index: int = -1  # of its entry in SendJob.posted
    begun_s: float = math.inf  # the first of its writes that have ended
    ended_s: float = 0.0  # the last of them
    is_empty: bool = False  # it sends nothing, and is written once it is computed


class SendJob:
    """The transfer of one request's KV and tail. Made by KvSender.open.

    Lifecycle: 1. open: steps of the model send its chunks, send_tail its tail. 2. over: all of it is under way, or it
    was stopped, by cancel(), a failed write or an abandoned step. 3. quiet: none of our writes is in flight.
    4. settled: no step of the model fills its pages either. The lease can be released; it is in use if all went well,
    else reserved.

    Invariant: once it is stopped nothing more is submitted, and what is submitted is in _transfers until it has ended;
    that includes the writes of layers that are not computed yet, which wait in the engine for the word.
    posted, written: when the engine began the writes of each layer (until they have ended: when the layer was seen to
        be computed); when it saw the last of them end.
    tail: when the writes of the tail were submitted, and seen to have ended; None until then.
    is_in_doubt: a write ended because our engine gave the decoder up, for example after a long freeze. If the decoder
        resumes, bytes in its kernel may still land there: it has to fence us off (Doubts).
    Threads: the event loop's; the sender also submits on other threads, under its lock.
    """

    def __init__(
        self,
        target: KvTarget,
        plan: TransferPlan,
        lease: PageLease,
        ranks: Mapping[int, RankMemory],
        lock: RLock,
    ) -> None:
        self.target = target
        self.plan = plan
        self.lease = lease
        self.posted: list[LayerTime] = []
        self.written: list[LayerTime] = []
        self.tail: tuple[float, float] | None = None
        self.is_in_doubt = False
        self._ranks = ranks
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._quiet = asyncio.Event()
        self._stirred = asyncio.Event()  # as _changed, and when a write has ended
        self._lock = lock  # guards all that follows
        needs_nothing = target.prefix_tokens == target.tokens
        self._planned_tokens = target.tokens if needs_nothing else 0
        self._layers_owed = 0
        self._tail_owed = 0 in ranks and target.tail_bytes > 0
        self._tail_begun_s, self._tail_last = math.inf, 0  # as in _SentLayer
        self._open_steps = 0
        self._transfers: deque[Transfer] = deque()
        self._submitted = self._retired_count = 0  # transfers
        self._to_compute: deque[_SentLayer] = deque()  # submitted; in order, as the next
        self._to_write: deque[_SentLayer] = deque()
        self._error: CrossrailError | None = None
        self._end = asyncio.create_task(self._run(), name=f"kv-send-{target.request}")

    @property
    def request(self) -> str:
        """Name of the request, given by the decoder."""
        return self.target.request

    @property
    def stopped(self) -> bool:
        """True once nothing more will be posted, because something went wrong or the job was cancelled."""
        return self._error is not None

    @property
    def settled(self) -> bool:
        """True once it has ended, either way, and nothing of it reads our pages any more."""
        return self._end.done()

    def send_tail(self, region: Region, offset: int = 0) -> None:
        """Writes the request's tail, target.tail_bytes of region from offset on, to each rank that takes one.

        Call it once, at the sender that has rank 0; region: of that rank's engine. The bytes must stay unchanged until
        finish() has returned or raised. Does nothing if the job is stopped. Raises UsageError when no tail is owed, and
        for a region or an offset that this cannot be written from: it is owed on.
        """
        self._check_tail(region, offset)
        with self._lock:
            if not self._tail_owed:
                raise UsageError(f"request {self.request!r} owes no tail: it has none, it was sent, or rank 0 sends it")
            self._tail_owed = False
            self._tail_begun_s = self._loop.time()
            for rank in self.target.ranks:
                if rank is not None and rank.tail is not None:
                    submit = partial(
                        self._ranks[0].engine.submit_write,
                        region,
                        rank.tail,
                        self.target.tail_bytes,
                        src_offset=offset,
                        dst_offset=rank.tail_offset,
                        imm=rank.imm,
                    )
                    self._submit(submit)
                    self._tail_last = self._submitted
        self._changed.set()

    def _check_tail(self, region: Region, offset: int) -> None:
        """Raises for what the engine would refuse in the caller's arguments; errors in the decoder's stop the job
        instead.
        """
        check_kind(region, "region", Region, "a Region (engine.register(memory) makes one)")
        check_counts(0, offset=offset)
        if region.closed:
            raise UsageError(f"request {self.request!r}: the region of its tail is closed")
        if 0 in self._ranks and region._engine is not self._ranks[0].engine:
            raise UsageError(
                f"request {self.request!r}: its tail is in a region of another engine than rank 0's: {region!r}"
            )
        if offset + self.target.tail_bytes > region.nbytes:
            raise UsageError(
                f"request {self.request!r}: its tail of {self.target.tail_bytes} bytes from offset {offset} on exceeds "
                f"the region's {region.nbytes}"
            )

    async def finish(self, timeout_s: float | None = None) -> None:
        """Returns when the job is settled: everything was written, and the pages are complete and free of writers.

        Raises the reason if it was stopped, TransferStopped after a cancel; the job is settled then too. WaitTimeout:
        it continues. Cancelling the awaiting task stops nothing. Any number of tasks may call it, any number of times.
        """
        check_timeout(timeout_s)
        await self._wait([self._end], timeout_s, "settled")
        if self._error is not None:
            raise self._error

    async def cancel(self, reason: str = "cancelled", timeout_s: float | None = None) -> None:
        """Stops the job, and returns once it is quiet: nothing of it can arrive any more.

        If everything was written already, it stays so. A decoder that gave up waits for this. But while the job
        is_in_doubt, something can still arrive: the decoder must be told of an error instead, and fence us off. Our own
        pages can be reused only when finish() has returned or raised.
        Raises WaitTimeout if writes are still in flight, for example to a decoder that froze in the middle of one; the
        job is stopped all the same. May be called any number of times.
        """
        check_timeout(timeout_s)
        self._stop(TransferStopped(f"request {self.request!r}: {reason}"))
        quiet = asyncio.create_task(self._quiet.wait())
        try:
            await self._wait([quiet], timeout_s, "quiet")
        finally:
            quiet.cancel()

    async def at_rest(self, timeout_s: float | None = None) -> None:
        """Returns when no step is open and no write in flight: everything posted has ended, and more may follow.

        For allocators that take pages back in the middle of a request and compute them again later, in other pages:
        between at_rest() and the next begin_step nothing reads them. Raises WaitTimeout.
        """
        check_timeout(timeout_s)
        resting = asyncio.create_task(self._until_at_rest())
        try:
            await self._wait([resting], timeout_s, "at rest")
        finally:
            resting.cancel()

    async def _until_at_rest(self) -> None:
        while True:
            self._stirred.clear()  # before looking, so that a change after it wakes us
            with self._lock:
                if not self._open_steps and not self._transfers:
                    return
            await self._stirred.wait()

    async def _wait(self, what: list[asyncio.Task[Any]], timeout_s: float | None, state: str) -> None:
        done, _ = await asyncio.wait(what, timeout=timeout_s)
        if not done:
            raise WaitTimeout(f"request {self.request!r} is not {state} after {timeout_s:g} s: {self!r}")
        done.pop().result()

    # ---- for the sender

    def _writes_of(self, end: int, begin: int | None = None) -> list[PageWrites]:
        """The writes of each layer of a chunk that ends with this token; changes nothing.

        begin: where an earlier chunk of the same step ended, None: after the chunks of earlier steps. Refuses a chunk
        that does not end after that, that comes when the pages may belong to somebody else, or that has invalid pages.
        """
        if self.settled and self._error is not None:
            raise self._error
        begin = self._planned_tokens if begin is None else begin
        target = self.target
        if target.prefix_tokens == target.tokens:
            raise UsageError(
                f"request {self.request!r}: the decoder has the KV of all {target.tokens} tokens: no step is begun for "
                "it, only its tail is sent, if it has one"
            )
        if not begin < end <= target.tokens:
            raise UsageError(
                f"request {self.request!r}: a chunk up to token {end} must end behind {begin} and at most at "
                f"{target.tokens}"
            )
        units = self.plan.ready(target.tokens, target.prefix_tokens, begin, end)
        return self.plan.writes(self.lease.pages, target.pages, units, self._ranks.keys())

    def _begin_chunk(self, end: int) -> None:
        """A step of the model computes the chunk that ends with this token now. The lock is held."""
        self._planned_tokens = end
        self._layers_owed += self.plan.src.layers
        self._open_steps += 1

    def _submit_layer(
        self, end: int, layer: int, writes: Sequence[PageWrites], words: Mapping[int, Watcher], value: int
    ) -> None:
        """Submits one layer of a chunk, triggered by this value of its ranks' words. The lock is held."""
        sent = _SentLayer(end, layer)
        self._to_compute.append(sent)
        before = self._submitted
        layout = self.target.layout
        for write in writes:
            memory = self._ranks[write.source]
            rank = self.target.ranks[write.target]
            if rank is None:
                continue  # the target of another decoder process covers that rank
            src, src_base = memory.place(layer)
            dst, dst_base = rank.place(layout, layer)
            submit = partial(
                memory.engine.submit_paged_writes,
                src,
                write.src_pages,
                dst,
                write.dst_pages,
                write.page_bytes,
                src_stride=write.src_stride,
                dst_stride=write.dst_stride,
                src_offset=src_base + write.src_offset,
                dst_offset=dst_base + write.dst_offset,
                imm=rank.imm,
                trigger=(words[write.source], value),
            )
            self._submit(submit)
        sent.last = self._submitted
        if sent.last > before:
            self._to_write.append(sent)
        else:
            sent.is_empty = True

    def _pass_layer(self) -> None:
        """The next layer that was submitted is computed: it is being sent. The lock is held."""
        self._layers_owed -= 1
        if self._error is not None:
            return
        sent = self._to_compute.popleft()
        if sent.posted_index < 0:
            self._note_posted(sent, self._loop.time())
        if sent.is_empty:
            self.written.append(LayerTime(sent.end, sent.layer, self._loop.time()))

    def _close_step(self) -> None:
        """A step does not touch its pages any more. The lock is held."""
        self._open_steps -= 1

    def _wake(self) -> None:
        """Any thread, after a change: the job looks at itself."""
        self._loop.call_soon_threadsafe(self._stir)

    def _stir(self) -> None:
        self._changed.set()
        self._stirred.set()

    def _stop(self, error: CrossrailError) -> None:
        """Any thread. The first error is the one."""
        with self._lock:
            if self._error is not None or self._quiet.is_set():
                return
            self._error = error
            # Before anybody can count for layers that will not be computed: none of them begins.
            for transfer in self._transfers:
                transfer.cancel()
        self._wake()

    def _submit(self, submit: Submit) -> None:
        if self._error is not None:
            return
        try:
            transfer = submit()
            self._transfers.append(transfer)
            self._submitted += 1
            if self.stopped:  # by a callback inside of the submit, on a simulated engine
                transfer.cancel()
        except CrossrailError as error:  # the peer's numbers do not fit its memory, or our engine is closed
            self._stop(error)

    # ---- its life

    async def _run(self) -> None:
        while not await self._retired():
            await self._changed.wait()
        self._quiet.set()
        if self._error is not None:
            self.lease.drain()
        while self._has_open_steps():
            await self._changed.wait()
        if self._error is None:
            self.lease.use()
        else:
            self.lease.confirm()

    async def _retired(self) -> bool:
        """Waits for all writes under way. True: there will be no others."""
        self._changed.clear()  # before looking, so that a change after it wakes us
        while True:
            with self._lock:
                if not self._transfers:
                    return self._error is not None or self._is_posted()
                oldest = self._transfers[0]
            try:
                await oldest
            except CrossrailError as error:
                self.is_in_doubt = self.is_in_doubt or isinstance(error, PeerLost)
                self._stop(error)
            with self._lock:
                self._transfers.popleft()
                self._retired_count += 1
                self._note_written(oldest.triggered_at, oldest.completed_at)
                if self._retired_count == self._tail_last and self._error is None:
                    self.tail = (self._tail_begun_s, self._loop.time())
            self._stirred.set()

    def _note_posted(self, sent: _SentLayer, at_s: float) -> None:
        """Also improves an earlier estimate. The lock is held."""
        time = LayerTime(sent.end, sent.layer, at_s)
        if sent.posted_index < 0:
            sent.posted_index = len(self.posted)
            self.posted.append(time)
        else:
            self.posted[sent.posted_index] = time

    def _note_written(self, begun_s: float | None, ended_s: float | None) -> None:
        """A write has ended; when it began and ended, None: it is no layer's. The lock is held."""
        if self._to_write and begun_s is not None and ended_s is not None:
            first = self._to_write[0]
            first.begun_s, first.ended_s = min(first.begun_s, begun_s), max(first.ended_s, ended_s)
        while self._error is None and self._to_write and self._to_write[0].last <= self._retired_count:
            sent = self._to_write.popleft()
            self._note_posted(sent, sent.begun_s)
            self.written.append(LayerTime(sent.end, sent.layer, sent.ended_s))

    def _is_posted(self) -> bool:
        return self._planned_tokens == self.target.tokens and not self._layers_owed and not self._tail_owed

    def _has_open_steps(self) -> bool:
        self._changed.clear()
        with self._lock:
            return self._open_steps > 0

    def __repr__(self) -> str:
        state = (
            "settled" if self.settled else "quiet" if self._quiet.is_set() else "stopped" if self.stopped else "open"
        )
        return f"<SendJob {self.request!r}, {state}>"


class Doubts:
    """Attempts of which nobody at the prefiller can say that nothing can arrive any more; the latest few thousand."""

    def __init__(self) -> None:
        self._keys: Latest[Hashable, None] = Latest(_DOUBTS_KEPT)

    def note(self, key: Hashable, job: SendJob | None) -> None:
        """The attempt of this key has ended, or is quiet, and this was its transfer."""
        if job is not None and job.is_in_doubt:
            self._keys[key] = None

    def check(self, key: Hashable) -> None:
        """Call this before telling a decoder that the attempt is quiet. TransferStopped: do not tell it."""
        if key in self._keys:
            raise TransferStopped("the decoder was lost for a time: what was sent before may still arrive")

"""The prefiller's side: each layer's KV leaves as soon as it is computed.

The model, or a kernel in its CUDA graph, adds 1 to a watched word after each layer's attention output projection.
Whoever runs the model announces before each step which tokens of which requests it will compute. So a layer's writes
are submitted before it is computed, with a value of the word as their trigger, and the engine starts them without
Python, whoever holds the GIL then. Intermediate values of the word may be missed: then all layers passed are sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock

from crossrail import Watcher
from crossrail._closing import AsyncClosing
from crossrail._options import check_kind, check_whole
from crossrail.errors import UsageError
from crossrail.kv.errors import DuplicateRequest, TransferStopped
from crossrail.kv.transfer.job import SendJob
from crossrail.kv.transfer.layout import KvLayout
from crossrail.kv.transfer.memory import RankMemory, to_ranks
from crossrail.kv.transfer.pages import PageLease
from crossrail.kv.transfer.plan import PageWrites, plan_transfer
from crossrail.kv.transfer.target import KvTarget

_WORD = 1 << 64
# Limits on what waits in the engines. A submit takes some two microseconds, so these do not hold up a step; and they
# are large enough that the next layers are submitted already while another thread holds the GIL for long.
_AHEAD_TRANSFERS = 256
_AHEAD_PAGES = 1 << 20  # of 8 bytes


class _Load:
    """What a step does for one request. The sender's lock is held, except in the constructor, which changes nothing
    else.
    """

    def __init__(self, job: SendJob, end: int, writes: list[PageWrites]) -> None:
        self.job = job
        self._end = end
        self._writes = writes
        self.transfers = len(writes)  # of a layer
        self.pages = sum(len(write.src_pages) for write in writes)

    def begin(self) -> None:
        """The job counts on it from here on."""
        self.job._begin_chunk(self._end)

    def submit(self, layer: int, words: Mapping[int, Watcher], value: int) -> None:
        """Submits a layer's writes, triggered when the words of the ranks reach this value."""
        self.job._submit_layer(self._end, layer, self._writes, words, value)


class Step:
    """One forward pass of the model over chunks of several requests. Made by KvSender.begin_step.

    Invariant: layers 0.._passed-1 are computed, 0.._submitted-1 are with the engines; _passed <= _submitted. The step
    is over when all have passed, or when it was abandoned and its turn has come.
    """

    def __init__(self, sender: KvSender, loads: list[_Load], base: int) -> None:
        self._sender = sender
        self._loads = loads
        self._base = base  # the words before its first layer
        self._passed = 0
        self._submitted = 0
        self._missing = 0  # of one that was abandoned: layers that nobody will count
        self._transfers = sum(load.transfers for load in loads)  # of a layer
        self._pages = sum(load.pages for load in loads)

    def __repr__(self) -> str:
        return f"<Step of {len(self._loads)} requests, {self._passed} of {self._sender.layout.layers} layers posted>"

    @property
    def layers_left(self) -> int:
        """Layers that nobody has counted yet; 0: the step is over. Any thread."""
        return self._sender._layers_left(self)

    def layer_done(self) -> None:
        """Like KvSender.layer_done(), for this step only. UsageError once it is over, or while an earlier step lacks
        layers: it would count for that step.
        """
        self._sender._layer_done_of(self)

    def abandon(self, reason: str) -> None:
        """The model gave up: it no longer writes these pages, nor counts for this step. Stops the requests of the step.

        The sender counts the missing layers itself, so that steps begun after this one continue from there. Does
        nothing if the step is over.
        """
        self._sender._abandon(self, reason)

    def _is_abandoned(self) -> bool:
        """Under the sender's lock. It may become true inside a submit."""
        return self._missing > 0


class KvSender(AsyncClosing):
    """Sends KV to decoders, for the ranks that this process has: all ranks of an instance, or some.

    ranks: memory of rank 0, 1, ..., or a mapping from rank to memory, for the ranks that this process has. The watched
        word belongs to the engine of the lowest rank. If ranks have engines of their own, these begin a layer once
        layer_done(), or that engine's callback thread, has told them.
    Threads: the event loop's that it was made in; layer_done() and the word may be used on any thread. Close the sender
    before its engines.
    """

    def __init__(self, layout: KvLayout, ranks: Sequence[RankMemory] | Mapping[int, RankMemory]) -> None:
        check_kind(layout, "layout", KvLayout, "a KvLayout")
        self._ranks = ranks = to_ranks(layout, ranks)
        self.layout = layout
        self._jobs: dict[str, SendJob] = {}
        self._is_closed = False
        # Re-entrant: on a simulated engine a submit may run callbacks, as ours, before it returns.
        self._lock = RLock()
        self._is_pumping = False  # guarded by the lock, as what follows
        self._steps: deque[Step] = deque()
        self._next_base = 0
        self._countable = 0  # where the word stops that layer_done() counts: _next_base less what abandoned steps lack
        self._ahead_transfers = self._ahead_pages = 0  # of layers that are submitted and not computed
        first = ranks[min(ranks)].engine
        self._watcher = first.alloc_watcher(lambda _old, _new: self._pump())
        # The words of other engines follow this one.
        watchers = {first: self._watcher}
        for memory in ranks.values():
            if memory.engine not in watchers:
                watchers[memory.engine] = memory.engine.alloc_watcher(_nothing)
        self._followers = [watcher for watcher in watchers.values() if watcher is not self._watcher]
        self._words = {rank: watchers[memory.engine] for rank, memory in ranks.items()}

    def __repr__(self) -> str:
        return f"<KvSender of ranks {sorted(self._ranks)}, {len(self._jobs)} requests under way>"

    @property
    def word_address(self) -> int:
        """Address of the 64-bit word that goes up by one for each layer of each step; for your own kernels."""
        return self._watcher.address

    def layer_done(self, layers: int = 1) -> None:
        """Adds to the word: this many more layers of the current step are in memory. Any thread.

        The engines begin to send these layers by themselves.
        Raises UsageError if the steps begun so far have fewer layers left: the surplus would count for a later step.
        """
        with self._lock:
            if not self._count(layers, self._countable):
                self._count_odd(layers)
            self._pump()

    def layer_done_on(self, stream: object = None, layers: int = 1) -> None:
        """Like layer_done(), for kernels: adds once all earlier work on this CUDA stream has ended.

        Returns at once. If the stream is being captured, the addition becomes part of the graph and happens at each
        replay, for which steps are begun as for any other. For `stream` and errors see Watcher.add_on. Keep this object
        as long as such a graph may be replayed. Do not use it while layer_done() or another GPU adds too. Any thread.
        """
        self._watcher.add_on(stream, layers)

    def open(self, target: KvTarget, lease: PageLease) -> SendJob:
        """Begins a request. lease: reserved pages for all of target.tokens, those of our own prefix first.

        Raises LayoutMismatch, DuplicateRequest or UsageError, and leaves the lease as it was: also for whatever of the
        target cannot be sent to, so that what a decoder gets wrong does not meet the steps of others.
        """
        self._check_open()
        wanted: tuple[tuple[object, type], ...] = ((target, KvTarget), (lease, PageLease))
        for given, kind in wanted:
            if not isinstance(given, kind):
                raise UsageError(f"open() takes a {kind.__name__} there, not an object of type {type(given).__name__}")
        if target.request in self._jobs:
            raise DuplicateRequest(f"request {target.request!r} is under way: {self._jobs[target.request]!r}")
        lease.check_page_tokens(self.layout.page_tokens)
        plan = plan_transfer(self.layout, target.layout, target.request)
        plan.ready(target.tokens, target.prefix_tokens, 0, target.tokens)  # refuses a prefix that does not fit
        plan.check_dst_pages(target.pages, target.tokens)
        if len(lease.pages) < self.layout.pages_of(target.tokens):
            raise UsageError(
                f"the lease of request {target.request!r} has {len(lease.pages)} pages, {target.tokens} tokens take "
                f"{self.layout.pages_of(target.tokens)}"
            )
        lease.fill()
        job = self._jobs[target.request] = SendJob(target, plan, lease, self._ranks, self._lock)
        job._end.add_done_callback(lambda _: self._jobs.pop(target.request))
        return job

    def begin_step(self, chunks: Iterable[tuple[SendJob, int]]) -> Step:
        """Announces what the next step of the model computes: for each job, its tokens up to this end, exclusive.

        Call it before the step starts; several steps may be begun in advance. A job's chunks follow each other without
        a gap, from token 0 (what our own prefix cache had is part of the first chunk) to target.tokens. A job whose
        target.prefix_tokens are all of its tokens has no chunks, and is refused. All index arrays are made here, and
        the writes of the first layers are submitted, one submit for each pair of ranks; those of the other layers
        follow while these are computed.
        A stopped job is accepted too, and the step then only keeps its pages until it is over; a settled job is
        refused, with the reason why it stopped; another sender's job is, since this word does not start its writes. If
        anything is raised, no step has begun.
        """
        self._check_open()
        loads: list[_Load] = []
        planned: dict[SendJob, int] = {}
        for job, end in chunks:
            if getattr(job, "_ranks", None) is not self._ranks:  # the sender's own: its engines have this word
                raise UsageError(f"begin_step() takes jobs that this sender's open() has made, not {job!r:.200}")
            check_whole(end=end)
            loads.append(_Load(job, end, job._writes_of(end, planned.get(job))))
            planned[job] = end
        with self._lock:
            for load in loads:
                load.begin()
            step = Step(self, loads, self._next_base)
            self._next_base = (self._next_base + self.layout.layers) % _WORD
            self._countable = (self._countable + self.layout.layers) % _WORD
            self._steps.append(step)
            self._pump()
        return step

    async def close(self) -> None:
        """Cancels all jobs, waits until they are quiet, and stops watching the word. Open steps are abandoned, and no
        others begin. Idempotent.

        The engines must still be open, and the model must not count any more.
        """
        self._is_closed = True
        jobs = list(self._jobs.values())
        await asyncio.gather(*(job.cancel("the sender was closed") for job in jobs))
        for step in list(self._steps):
            step.abandon("the sender was closed")
        await asyncio.gather(*(job._end for job in jobs))
        for watcher in (self._watcher, *self._followers):
            watcher.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self!r} is closed: nobody would send")

    def _count(self, layers: int, limit: int) -> bool:
        """Adds to the word if that does not take it past the limit. False: it does, or layers is not plainly a count.
        The lock is held.

        The layers leave within this call. A model has just used the caches for itself, and each line of Python before
        it takes microseconds then.
        """
        return type(layers) is int and 0 <= layers < _WORD and self._watcher._add_up_to(limit, layers)

    def _count_odd(self, layers: int) -> None:
        """What _count did not: whole numbers of other types. UsageError for all else. The lock is held."""
        check_whole(layers=layers)
        room = (self._countable - self._watcher.value) % _WORD
        if room >= _WORD // 2:  # the word is past it: somebody's kernel counted too much
            room = 0
        if not 0 <= layers <= room:
            raise UsageError(f"layers={layers} must be 0 to {room}, what the steps begun so far still lack")
        self._watcher.add(layers, announce=False)

    # ---- what the word says: on the thread that counts, on the callback thread, or that of the loop

    def _pump(self) -> None:
        """Does what follows from the words now, and submits what is to come."""
        stirred: dict[SendJob, None] = {}
        with self._lock:
            if self._is_pumping:  # we are inside its submit: the outer call continues
                return
            self._is_pumping = True
            try:
                while self._pass_next_layer(stirred) or self._submit_next_layer(stirred):
                    pass
            finally:
                self._is_pumping = False
        for job in stirred:
            job._wake()

    def _pass_next_layer(self, stirred: dict[SendJob, None]) -> bool:
        """Notes the earliest layer that is computed and not yet noted. False: there is none. The lock is held."""
        for watcher in self._followers:
            if behind := (self._watcher.value - watcher.value) % _WORD:
                watcher.add(behind, announce=False)
        if not self._steps:
            return False
        step = self._steps[0]
        if step._is_abandoned():
            self._watcher.add(step._missing, announce=False)
            self._countable = (self._countable + step._missing) % _WORD
            self._steps.popleft()
            return True
        layer = step._passed
        if layer >= self._computed(step):
            return False
        if step._submitted == layer:
            self._submit_layer(step)
            if step._is_abandoned():  # by a callback inside of the submit, on a simulated engine
                return True
        step._passed += 1
        self._ahead_transfers -= step._transfers
        self._ahead_pages -= step._pages
        is_over = step._passed == self.layout.layers
        if is_over:
            self._steps.popleft()
        for load in step._loads:
            load.job._pass_layer()
            if is_over:
                load.job._close_step()
            stirred[load.job] = None
        return True

    def _submit_next_layer(self, stirred: dict[SendJob, None]) -> bool:
        """Submits the earliest layer not yet submitted. False: there is none, or enough are waiting. The
        lock is held.
        """
        for step in self._steps:
            if step._is_abandoned() or step._submitted == self.layout.layers:
                continue
            is_next = step is self._steps[0] and step._submitted == step._passed
            if not is_next and (
                self._ahead_transfers + step._transfers > _AHEAD_TRANSFERS
                or self._ahead_pages + step._pages > _AHEAD_PAGES
            ):
                return False
            self._submit_layer(step)
            stirred.update((load.job, None) for load in step._loads)
            return True
        return False

    def _submit_layer(self, step: Step) -> None:
        layer = step._submitted
        step._submitted += 1
        self._ahead_transfers += step._transfers
        self._ahead_pages += step._pages
        value = (step._base + layer + 1) % _WORD
        for load in step._loads:
            load.submit(layer, self._words, value)

    def _computed(self, step: Step) -> int:
        """Layers of the step that the word has gone past."""
        computed = (self._watcher.value - step._base) % _WORD
        return min(computed, self.layout.layers) if computed < _WORD // 2 else 0

    def _layers_left(self, step: Step) -> int:
        with self._lock:
            return self.layout.layers - self._computed(step) if self._is_open(step) else 0

    def _layer_done_of(self, step: Step) -> None:
        with self._lock:
            is_first = bool(self._steps) and self._steps[0] is step and not step._is_abandoned()
            if not is_first or not self._count(1, (step._base + self.layout.layers) % _WORD):
                self._count_current(step)
            self._pump()

    def _count_current(self, step: Step) -> None:
        """Of a step that the word has reached; UsageError for any other. The lock is held."""
        self._pump()
        if not self._is_open(step) or not self._lacks(step):
            raise UsageError("a layer is announced of a step that is over")
        current = next(other for other in self._steps if self._is_open(other) and self._lacks(other))
        if current is not step:
            lacking = self.layout.layers - self._computed(current)
            raise UsageError(f"a layer is announced of a step while one begun before it still lacks {lacking}")
        self._watcher.add(1, announce=False)

    def _lacks(self, step: Step) -> bool:
        return self._computed(step) < self.layout.layers

    def _is_open(self, step: Step) -> bool:
        """The lock is held."""
        return step in self._steps and not step._is_abandoned()

    def _abandon(self, step: Step, reason: str) -> None:
        self._pump()
        with self._lock:
            if not self._is_open(step):
                return
            # By the word itself, not by what was noted: a kernel may have counted since.
            step._missing = self.layout.layers - self._computed(step)
            if not step._missing:
                return
            self._countable = (self._countable - step._missing) % _WORD
            self._ahead_transfers -= step._transfers * (step._submitted - step._passed)
            self._ahead_pages -= step._pages * (step._submitted - step._passed)
            for load in step._loads:
                load.job._stop(TransferStopped(f"request {load.job.request!r}: {reason}"))
                load.job._close_step()
        for load in step._loads:
            load.job._wake()
        self._pump()


def _nothing(_old: int, _new: int) -> None:
    pass

"""The prefiller's side: layer by layer, KV leaves as soon as it is computed.

The model, or a kernel in its CUDA graph, adds 1 to a watched word after each layer's attention output projection.
Whoever runs the model says before each step which tokens of which requests it will compute; so the number of layers
that the word has gone up says what can be sent. Values in between may be missed: all layers passed are sent then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from threading import RLock

from crossrail.errors import UsageError
from crossrail.kv.errors import DuplicateRequest, TransferStopped
from crossrail.kv.job import SendJob
from crossrail.kv.layout import KvLayout
from crossrail.kv.memory import RankMemory
from crossrail.kv.pages import PageLease
from crossrail.kv.plan import plan_transfer
from crossrail.kv.target import KvTarget

_WORD = 1 << 64


class _Load:
    """What a step does for one request. Threads: any."""

    def __init__(self, job: SendJob, end: int) -> None:
        self.job = job
        self._end = end
        self._writes = job._plan(end)
        self._ready = (0, job._prepared(0, self._writes))  # a layer, and what sends it

    def post(self, layer: int) -> None:
        """Sends it. The sender's lock is held."""
        ready_layer, prepared = self._ready
        if ready_layer != layer:
            prepared = self.job._prepared(layer, self._writes)
        self.job._post(self._end, layer, prepared)

    def prepare(self, layer: int) -> None:
        """While it is computed."""
        self._ready = (layer, self.job._prepared(layer, self._writes))


class Step:
    """One forward pass of the model over chunks of several requests. Made by KvSender.begin_step.

    Invariant: layers 0..posted-1 are posted; it is over when all are, or when it was abandoned.
    """

    def __init__(self, sender: KvSender, loads: list[_Load], base: int) -> None:
        self._sender = sender
        self._loads = loads
        self._base = base  # the word before its first layer
        self._posted = 0

    def __repr__(self) -> str:
        return f"<Step of {len(self._loads)} requests, {self._posted} of {self._sender.layout.layers} layers posted>"

    def abandon(self, reason: str) -> None:
        """The model gave up: it does not write these pages, nor count for this step, any more. Stops its requests.

        Steps begun after this one are taken to count on from where the word stands. Does nothing when it is over.
        """
        self._sender._abandon(self, reason)


class KvSender:
    """Sends the KV of the ranks that this process has, all of an instance's or some, to decoders.

    ranks: by rank of the layout's tp. The watched word belongs to the engine of the lowest.
    Threads: that of the event loop it was made in, but layer_done() and the word are anybody's. Layers are posted by
    whoever calls layer_done(); those that only the word tells of, as with layer_done_on(), on the callback thread of
    that engine. Close it before its engines.
    """

    def __init__(self, layout: KvLayout, ranks: Mapping[int, RankMemory]) -> None:
        if not ranks or not all(0 <= rank < layout.tp for rank in ranks):
            raise UsageError(f"ranks {sorted(ranks)} must be some of 0..{layout.tp - 1}")
        for rank, memory in ranks.items():
            if memory.layout != layout:
                raise UsageError(f"rank {rank} has another layout: {memory.layout.describe()}")
        self.layout = layout
        self._ranks = dict(ranks)
        self._jobs: dict[str, SendJob] = {}
        # Re-entrant: on a simulated engine a submit may run callbacks, as ours, before it returns.
        self._lock = RLock()
        self._steps: deque[Step] = deque()  # guarded by the lock, as what follows
        self._next_base = 0
        self._watcher = ranks[min(ranks)].engine.alloc_watcher(lambda _old, _new: self._pump())

    def __repr__(self) -> str:
        return f"<KvSender of ranks {sorted(self._ranks)}, {len(self._jobs)} requests under way>"

    @property
    def word_address(self) -> int:
        """Where the 64-bit word is that goes up by one with each layer of each step: for kernels of your own."""
        return self._watcher.address

    def layer_done(self, layers: int = 1) -> None:
        """Adds to the word: so many more layers of the current step are in memory. Any thread.

        Posts them before it returns, a submit for each pair of ranks and job: waking a thread for it takes longer.
        UsageError if that is more than the steps begun so far have: of a step begun later they would count as computed.
        """
        with self._lock:
            open_layers = (self._next_base - self._watcher.value) % _WORD
            if open_layers >= _WORD // 2:  # the word is past them: somebody's kernel counted too much
                open_layers = 0
            if not 0 <= layers <= open_layers:
                raise UsageError(f"layers={layers} must be 0 to {open_layers}, what the steps begun so far still lack")
            self._watcher.add(layers, announce=False)
        self._pump()

    def layer_done_on(self, stream: object = None, layers: int = 1) -> None:
        """The same for kernels: the word goes up once everything that this CUDA stream was given before has ended.

        Returns at once. While the stream is captured the addition goes into the graph, and happens at each replay, for
        which steps are begun as for any other. The callback thread posts the layer. stream, errors: Watcher.add_on; so
        is what one has to keep: this object, as long as such a graph may be replayed. Not while layer_done() or another
        GPU adds too. Any thread.
        """
        self._watcher.add_on(stream, layers)

    def open(self, target: KvTarget, lease: PageLease) -> SendJob:
        """Begins a request. lease: reserved pages of ours for all of target.tokens, those of its own prefix first.

        Raises LayoutMismatch, DuplicateRequest, UsageError; the lease is as it was then.
        """
        if target.request in self._jobs:
            raise DuplicateRequest(f"request {target.request!r} is under way: {self._jobs[target.request]!r}")
        plan = plan_transfer(self.layout, target.layout, target.request)
        plan.ready(target.tokens, target.prefix_tokens, 0, target.tokens)  # refuses a prefix that does not fit
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
        """Says what the next step of the model computes: of each job the tokens up to this end, exclusive.

        Before the step starts; several may be begun ahead. A job's chunks follow each other without a gap from token 0
        (what our own prefix cache had is part of the first), the last ends with target.tokens. All index arrays are
        made here: a layer costs no more than a submit for each pair of ranks, whose arguments are put together while it
        is computed.
        A stopped job is taken as well, the step then merely keeps its pages until it is over; one that is settled is
        refused with what stopped it. Whatever is raised, no step has begun.
        """
        chunks = list(chunks)
        for job, end in chunks:
            job._check_chunk(end)
        loads = [_Load(job, end) for job, end in chunks]
        with self._lock:
            step = Step(self, loads, self._next_base)
            self._next_base = (self._next_base + self.layout.layers) % _WORD
            self._steps.append(step)
        self._pump()
        return step

    async def close(self) -> None:
        """Cancels all jobs, waits until they are quiet, and stops watching. Steps under way are abandoned. Idempotent.

        The engines must be open, and the model must not count any more.
        """
        jobs = list(self._jobs.values())
        await asyncio.gather(*(job.cancel("the sender was closed") for job in jobs))
        for step in list(self._steps):
            step.abandon("the sender was closed")
        await asyncio.gather(*(job._end for job in jobs))
        self._watcher.close()

    # ---- posting: on the callback thread, or that of the loop

    def _pump(self) -> None:
        while self._post_next_layer():
            pass

    def _post_next_layer(self) -> bool:
        """Posts the earliest layer that is computed and not posted. False: there is none."""
        with self._lock:
            if not self._steps:
                return False
            step = self._steps[0]
            if step._posted >= self._passed(step):
                return False
            layer = step._posted
            # Before the submits, so that a pump inside of one goes on with the next layer.
            step._posted += 1
            if step._posted == self.layout.layers:
                self._steps.popleft()
            for load in step._loads:
                load.post(layer)
                if step._posted == self.layout.layers:
                    load.job._close_step()
        for load in step._loads:
            load.job._wake()
            if layer + 1 < self.layout.layers:
                load.prepare(layer + 1)
        return True

    def _passed(self, step: Step) -> int:
        """Layers of the step that the word has gone past."""
        passed = (self._watcher.value - step._base) % _WORD
        return min(passed, self.layout.layers) if passed < _WORD // 2 else 0

    def _abandon(self, step: Step, reason: str) -> None:
        with self._lock:
            if step not in self._steps:
                return
            missing = self.layout.layers - self._passed(step)
            at = self._steps.index(step)
            for later in list(self._steps)[at + 1 :]:
                later._base = (later._base - missing) % _WORD
            self._next_base = (self._next_base - missing) % _WORD
            del self._steps[at]
            for load in step._loads:
                load.job._close_step()
        for load in step._loads:
            load.job._stop(TransferStopped(f"request {load.job.request!r}: {reason}"))
            load.job._wake()
        self._pump()

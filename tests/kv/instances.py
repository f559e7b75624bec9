"""A prefiller and a decoder without services around them: engines, memory, pool, and a model that fills in known KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

import crossrail as xr
from crossrail.kv import KvLayout, KvReceiver, KvSender, KvTarget, PagePool, PageState, RankMemory, Reception, SendJob
from tests.kv.worlds import bits, fill, rows, whole_kv
from tests.support.fake_gpu import FakeGpu, GpuMemory
from tests.support.limits import WAIT_S

CANARY = 0xAB
TAIL_BYTES = 40


def kv_of(layout: KvLayout, request: str, tokens: int) -> npt.NDArray[Any]:
    """The KV that the model computes for a request, on whichever instance."""
    return whole_kv(layout, tokens, seed=sum(request.encode()))


class Instance:
    """What both have: memory of each rank, of its engine's own or of a GPU; or raw: that nobody made for transfers."""

    def __init__(self, layout: KvLayout, engines: Sequence[xr.Engine], gpu: FakeGpu | None, raw: bool = False) -> None:
        self.layout = layout
        self.ranks: list[RankMemory] = []
        self._on_gpu: list[GpuMemory] = []
        for rank in range(layout.tp):
            engine = engines[rank % len(engines)]
            if raw:
                self.ranks.append(RankMemory.register(engine, layout, [np.zeros(layout.rank_bytes, np.uint8)]))
            elif gpu is None:
                self.ranks.append(RankMemory.alloc(engine, layout))
            else:
                self._on_gpu.append(gpu.allocate(layout.rank_bytes, rank % 2))
                self.ranks.append(RankMemory.register(engine, layout, [self._on_gpu[rank]]))

    def layer(self, rank: int, layer: int) -> npt.NDArray[Any]:
        """As the model sees it."""
        if not self._on_gpu:
            return self.ranks[rank].layer(layer)
        seen = self._on_gpu[rank].bytes[layer * self.layout.layer_bytes :][: self.layout.layer_bytes]
        return self.layout.layer_view(seen)


class Prefiller(Instance):
    """engines: one for all ranks, or one a rank."""

    def __init__(
        self,
        layout: KvLayout,
        engines: Sequence[xr.Engine],
        seed: int = 1,
        gpu: FakeGpu | None = None,
        raw: bool = False,
    ) -> None:
        super().__init__(layout, engines, gpu, raw)
        self.engines = engines
        self.pool = PagePool(layout.pages, layout.page_tokens)
        self.sender = KvSender(layout, dict(enumerate(self.ranks)))
        self.model = asyncio.Lock()
        self.tail = engines[0].alloc(TAIL_BYTES)
        self.tail.array()[:] = np.arange(TAIL_BYTES) + seed
        self.seed = seed

    def open(self, target: KvTarget) -> SendJob:
        """Takes a request as it came over the wire."""
        target = KvTarget.from_wire(target.to_wire())
        lease = self.pool.reserve(self.layout.pages_of(target.tokens), target.request)
        try:
            return self.sender.open(target, lease)
        except xr.CrossrailError:
            lease.release()
            raise

    def kv_of(self, request: str, tokens: int) -> npt.NDArray[Any]:
        return kv_of(self.layout, request, tokens)

    def compute(self, job: SendJob, layer: int) -> None:
        """One layer of all tokens of a request: who sends too early sends the canary."""
        kv = self.kv_of(job.request, job.target.tokens)
        for rank in range(self.layout.tp):
            fill(self.layout, rank, layer, self.layer(rank, layer), job.lease.pages, kv)

    def poison(self, job: SendJob) -> None:
        for rank in range(self.layout.tp):
            for layer in range(self.layout.layers):
                self.layer(rank, layer)[:, job.lease.pages] = np.array(CANARY).astype(self.layout.storage)

    async def step(self, chunks: Iterable[tuple[SendJob, int]]) -> None:
        """A forward pass over these chunks, layer by layer; one at a time, as a model does it."""
        chunks = list(chunks)
        async with self.model:
            self.sender.begin_step(chunks)
            for layer in range(self.layout.layers):
                for job, _ in chunks:
                    self.compute(job, layer)
                self.sender.layer_done()
                await asyncio.sleep(0)

    async def prefill(self, job: SendJob, ends: Iterable[int]) -> None:
        """A whole request, to its end; its pages are free again."""
        self.poison(job)
        for end in ends:
            await self.step([(job, end)])
        if job.target.tail_bytes:
            job.send_tail(self.tail)
        await asyncio.wait_for(job.finish(), WAIT_S)
        assert job.lease.state is PageState.IN_USE
        job.lease.release()


class Decoder(Instance):
    def __init__(
        self,
        layout: KvLayout,
        engines: Sequence[xr.Engine],
        *,
        tail: bool = False,
        slots: int = 64,
        gpu: FakeGpu | None = None,
        raw: bool = False,
    ) -> None:
        super().__init__(layout, engines, gpu, raw)
        self.pool = PagePool(layout.pages, layout.page_tokens)
        self.receiver = KvReceiver(
            layout, self.ranks, self.pool, tail_bytes=TAIL_BYTES if tail else 0, tail_slots=slots
        )
        for rank in range(self.layout.tp):
            for layer in range(layout.layers):
                self.layer(rank, layer)[:] = np.full(layout.storage.itemsize, CANARY, np.uint8).view(layout.storage)

    def reserve(self, request: str, tokens: int, **options: Any) -> Reception:
        return self.receiver.reserve(request, tokens, **options)

    def received(self, reception: Reception) -> list[npt.NDArray[Any]]:
        """What is there of a request's tokens behind its prefix: a rank's (layers, parts, heads, tokens, head_dim)."""
        tokens = range(reception.prefix_tokens, reception.tokens)
        return [
            np.stack(
                [
                    rows(self.layout, self.layer(rank, i), reception.lease.pages, tokens)
                    for i in range(self.layout.layers)
                ]
            )
            for rank in range(self.layout.tp)
        ]

    def assert_holds(self, reception: Reception, kv: npt.NDArray[Any]) -> None:
        """All of a request's KV behind its prefix is there, on every rank."""
        for rank, got in enumerate(self.received(reception)):
            heads = self.layout.heads_of(rank)
            expected = kv[:, :, heads.start : heads.stop, reception.prefix_tokens :]
            assert (bits(got) == bits(expected)).all(), f"rank {rank} of {reception.request!r}"

    def assert_untouched(self, pages: npt.NDArray[Any]) -> None:
        for rank in range(self.layout.tp):
            for layer in range(self.layout.layers):
                assert (bits(self.layer(rank, layer)[:, pages]) == CANARY).all()


@asynccontextmanager
async def closing(*prefillers: Prefiller) -> AsyncIterator[None]:
    """Ends their senders while the engines are open."""
    try:
        yield
    finally:
        for prefiller in prefillers:
            await asyncio.wait_for(prefiller.sender.close(), WAIT_S)


def assert_all_free(*pools: PagePool) -> None:
    for pool in pools:
        assert pool.available == pool.pages and not pool.report().leases, str(pool.report())

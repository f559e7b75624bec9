"""Workers without vLLM around them: caches of known content, and steps as vLLM makes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from crossrail.integrations.instance import Instance
from crossrail.integrations.vllm.options import VllmOptions
from crossrail.integrations.vllm.orders import Chunk, Load, Offer, Orders, Wanted
from crossrail.integrations.vllm.worker import WorkerSide
from crossrail.kv import KvLayout
from tests.support.gpu_stream import Stream
from tests.support.limits import WAIT_S

SECRET = b"of the tests"
PAGE = 8
LAYERS = 3
MODEL: dict[str, Any] = {"layers": LAYERS, "kv_heads": 4, "head_dim": 6, "dtype": "float32", "kind": "PACKED"}
NAMES = [f"layer {i}" for i in range(LAYERS)]
PATIENT = VllmOptions(transport="shm", load_s=WAIT_S, producer_timeout_s=WAIT_S, probe_s=0.1, quiesce_s=WAIT_S)
# A heartbeat may be late by twenty times its period, on a busy machine.
SHORT_LEASE = msgspec.structs.replace(PATIENT, lease_s=4.0, heartbeat_s=0.2)
IMPATIENT = msgspec.structs.replace(PATIENT, producer_timeout_s=0.5)

# Opens a Side, closed when the test ends.
Open = Callable[..., "Side"]


def content(request: str, layer: int, head: int, page: int) -> npt.NDArray[np.uint8]:
    """What the model computes for a page of a request: a head's K and V, packed in some way."""
    seed = [*request.encode(), layer, head, page]
    return np.random.default_rng(seed).integers(0, 256, PAGE * 6 * 4, np.uint8)


@dataclass
class Results:
    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


class Side:
    """An instance with all its workers in this process. stream: its model runs on a GPU, whose kernels are there."""

    def __init__(
        self, name: str, tp: int = 1, options: VllmOptions = PATIENT, stream: Stream | None = None, **changes: Any
    ) -> None:
        self.layout = KvLayout(**MODEL | {"pages": 16, "page_tokens": PAGE, "tp": tp} | changes)
        self.stream = stream
        given: list[Any] = []
        self.caches: list[npt.NDArray[np.uint8]] = []  # as kernels see them
        for _ in range(tp):
            cache = np.full(self.layout.rank_bytes, 0xAB, np.uint8)
            given.append(cache if stream is None else stream.gpu.array(cache))
            self.caches.append(cache if stream is None else given[-1].bytes)
        self.workers = [WorkerSide(f"{name}-{rank}", rank, options, SECRET) for rank in range(tp)]
        described = [
            worker.open(self.layout, [cache], {"packing": "of tests"}, NAMES, stream.record if stream else None)
            for worker, cache in zip(self.workers, given, strict=True)
        ]
        self.instance = Instance(name, described)
        self.results = [Results() for _ in range(tp)]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def pages(self, rank: int) -> npt.NDArray[np.uint8]:
        """Of shape (layers, pages, heads of the rank, bytes)."""
        return self.caches[rank].reshape(LAYERS, self.layout.pages, self.layout.rank_heads, -1)

    def step(
        self,
        orders: Orders | None = None,
        computed: dict[str, tuple[Collection[int], Collection[int]]] | None = None,
        between: Callable[[], None] = lambda: None,
        failed: bool = False,
    ) -> None:
        """computed: of each request, the pages that this step fills, and their blocks. between: after a layer."""
        orders = orders or Orders(idle=True)
        for worker in self.workers:
            worker.preempted(orders)
            worker.begin_step(orders)
        for layer, name in enumerate(NAMES):
            for rank, worker in enumerate(self.workers):
                for request, (pages, blocks) in (computed or {}).items():
                    self.launch(self._fill, rank, layer, request, pages, blocks)
                worker.layer_saved(name)
            if layer == 0:
                between()
                if failed:
                    break
        for worker, results in zip(self.workers, self.results, strict=True):
            worker.start_loads()
            worker.end_step(failed)
            sent, received, failed = worker.take_results()
            results.sent += sent
            results.received += received
            results.failed |= failed

    def launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """Of the model: on a host it is done when this returns."""
        if self.stream is None:
            kernel(*arguments)
        else:
            self.stream.launch(kernel, *arguments)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Steps that compute nothing."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}; {self.results}"
            self.step()

    def until_sent(self, request: str) -> None:
        self.until(lambda: all(request in results.sent for results in self.results), f"{request} sent")
        assert all(results.sent.count(request) == 1 for results in self.results)

    def until_received(self, request: str) -> None:
        self.until(lambda: all(request in results.received for results in self.results), f"{request} received")
        assert all(results.received.count(request) == 1 for results in self.results)

    def was_asked(self, transfer: str = "t") -> bool:
        """Whether a decoder's rank has asked for it, and waits."""
        offer = self.workers[0]._producer._by_transfer.get(transfer)
        return offer is not None and bool(offer.asks)

    def freeze(self) -> threading.Event:
        """The workers' loops do nothing until the event is set."""
        thaw = threading.Event()
        for worker in self.workers:
            worker._loop.soon(thaw.wait, WAIT_S)
        return thaw

    def until_asked(self) -> None:
        self.until(self.was_asked, "asked")

    def prefill(self, request: str, tokens: int, blocks: list[int], *, transfer: str = "t") -> None:
        """All in one step."""
        pages = range(self.layout.pages_of(tokens))
        orders = Orders(offers=[offer(request, tokens, transfer)], chunks=[Chunk(request, tokens, 0, tuple(blocks))])
        self.step(orders, {request: (pages, blocks)})

    def want(self, request: str, producer: Side, *, transfer: str = "t") -> Wanted:
        return Wanted(request, transfer, producer.instance)

    def load(
        self,
        request: str,
        producer: Side,
        tokens: int,
        blocks: list[int],
        *,
        prefix_tokens: int = 0,
        transfer: str = "t",
        prompt: bytes = b"prompt",
    ) -> None:
        """Announced and begun in one step."""
        wanted = self.want(request, producer, transfer=transfer)
        load = Load(request, wanted, "", tokens, prefix_tokens, tuple(blocks), prompt)
        self.step(Orders(wanted=[wanted], loads=[load]))

    def assert_holds(self, request: str, blocks: list[int], *, as_of: str, first: int = 0) -> None:
        """All ranks have these pages of what the producer called `as_of`."""
        for rank in range(self.layout.tp):
            heads = self.layout.heads_of(rank)
            for layer in range(LAYERS):
                for page, block in list(enumerate(blocks))[first:]:
                    for i, head in enumerate(heads):
                        got = self.pages(rank)[layer, block, i]
                        assert np.array_equal(got, content(as_of, layer, head, page)), (request, rank, layer, page)

    def untouched(self, block: int) -> bool:
        return all(bool((self.pages(rank)[:, block] == 0xAB).all()) for rank in range(self.layout.tp))

    def _fill(self, rank: int, layer: int, request: str, pages: Collection[int], blocks: Collection[int]) -> None:
        for page, block in zip(pages, blocks, strict=True):
            for i, head in enumerate(self.layout.heads_of(rank)):
                self.pages(rank)[layer, block, i] = content(request, layer, head, page)


def offer(request: str, tokens: int, transfer: str = "t", prompt: bytes = b"prompt") -> Offer:
    return Offer(request, transfer, tokens, prompt)

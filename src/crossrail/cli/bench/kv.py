"""Measures of KV transfers: a whole request between processes, the cost of a page, how soon a layer leaves."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from crossrail import _core
from crossrail.cli.bench.kv_sides import KvDecoder, KvPrefiller, NamedPool, from_text
from crossrail.cli.bench.pair import Pair, alternate, permutation
from crossrail.cli.bench.passes import fill, passes_per_sample
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream
from crossrail.errors import CrossrailError
from crossrail.kv import KvLayout

_PAGE_BYTES = 32 << 10  # 128 tokens of one bfloat16 head of 128: a rank of Qwen3-235B at TP 4
_LAYERS = 8
_MANY_PAGES = 100_000
_NAMED_PAGE_TOKENS = 16
_LAYERS_PER_SAMPLE = 500
_COMPUTE_BYTES = 8 << 20  # walked for one layer: about a millisecond that needs the core, and not the interpreter


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [
        Measure(
            name="kv-request",
            title="KV request, pages of 32 KiB, 8 layers",
            unit="GB/s",
            limit="memcpy of the same pages",
            samples=_request_samples,
            bar=Bar("ratio", ">=", 0.85),
        ),
        Measure(
            name="kv-page",
            title="KV request of 100,000 pages, a page",
            unit="ns",
            limit="bare loop that fills work requests",
            samples=_page_samples,
            bar=Bar("value", "<=", 150.0),
        ),
        Measure(
            name="kv-page-names",
            title="KV request of 100,000 known pages, a page's name",
            unit="ns",
            limit="SHA-256 of the same tokens",
            samples=_name_samples,
            bar=Bar("value", "<=", 200.0),
        ),
        Measure(
            name="kv-layer",
            title="KV layer computed to its write posted",
            unit="us",
            limit="thread that spins on a word",
            samples=lambda pair: _layer_samples(pair, by_kernel=False),
            bar=Bar("value", "<=", 10.0),
        ),
        Measure(
            name="kv-layer-word",
            title="the same, counted in memory as by a kernel",
            unit="us",
            limit="thread that spins on a word",
            samples=lambda pair: _layer_samples(pair, by_kernel=True),
        ),
    ]


def _request_samples(pair: Pair) -> SampleStream:
    """Times from the step's beginning until the decoder has counted all; every layer is computed at once."""
    pages = pair.settings.pool_bytes // (_LAYERS * 2 * _PAGE_BYTES)
    layout = KvLayout(_LAYERS, pages, page_tokens=128, kv_heads=1, head_dim=128, dtype="bfloat16")
    transport = pair.settings.rig_options["transport"]
    prefiller = KvPrefiller(layout, transport)
    pair.child.call("open_decoder", layout=layout.to_wire(), transport=transport)
    # Each layer's K and V are a plane of all pages; the decoder has the request's pages in another order.
    order = permutation(pages, seed=1)
    blocks = (np.arange(2 * _LAYERS)[:, np.newaxis] * pages + order).reshape(-1)
    in_order = np.arange(len(blocks))
    own = prefiller.engine.alloc(layout.rank_bytes)

    def send() -> float:
        target = from_text(pair.child.call("expect_request"))
        pair.child.start("take_request")
        begun = time.perf_counter_ns()
        prefiller.send(target, order)
        pair.child.finish()
        return time.perf_counter_ns() - begun

    def copy() -> float:
        return _core.bench.copy_pages(own.array(), prefiller.bytes, blocks, in_order, _PAGE_BYTES)

    try:
        fill(prefiller.bytes, seed=7)
        send()
        copy()
        if pair.child.call("digest_decoder") != hashlib.sha256(own.array().data).hexdigest():
            raise CrossrailError("KV request: what arrived is not what was sent")
        while True:
            copy_ns, sent_ns = alternate(passes_per_sample(pair), copy, send)
            yield Sample(layout.rank_bytes / sent_ns, layout.rank_bytes / copy_ns)
    finally:
        prefiller.close()
        pair.child.call("close_decoder")


def _page_samples(pair: Pair) -> SampleStream:
    """Everything that both sides do for a request except moving and counting: pages of 64 bytes, K and V of one layer,
    which amortises nothing; the transport completes at once and moves nothing."""
    layout = KvLayout(1, _MANY_PAGES // 2, page_tokens=1, kv_heads=1, head_dim=64, dtype="uint8")
    order = permutation(layout.pages, seed=2)
    indices = permutation(_MANY_PAGES, seed=3)
    prefiller, decoder = KvPrefiller(layout, "null"), KvDecoder(layout, "null")

    def send() -> float:
        begun = time.perf_counter_ns()
        prefiller.send(decoder.expect(), order)
        took_ns = time.perf_counter_ns() - begun
        decoder.drop()
        return took_ns

    def fill_requests() -> float:
        return _core.bench.fill_work_requests(indices, indices, layout.block_bytes, 1)

    try:
        with pair.on_all_cores():
            send()
            while True:
                filled_ns, sent_ns = alternate(4 * passes_per_sample(pair), fill_requests, send)
                yield Sample(sent_ns / _MANY_PAGES, filled_ns / _MANY_PAGES)
    finally:
        prefiller.close()
        decoder.close()


def _name_samples(pair: Pair) -> SampleStream:
    """What a side does with the names of a request's pages, 16 tokens each, if its pool has them: hash, look up, share,
    publish, release."""
    tokens = permutation(_MANY_PAGES * _NAMED_PAGE_TOKENS, seed=5).astype(np.int32)
    pool = NamedPool(_MANY_PAGES, _NAMED_PAGE_TOKENS)

    def share() -> float:
        begun = time.perf_counter_ns()
        pool.share(tokens)
        return time.perf_counter_ns() - begun

    def digest() -> float:
        begun = time.perf_counter_ns()
        hashlib.sha256(tokens.data).digest()
        return time.perf_counter_ns() - begun

    with pair.on_all_cores():
        share()
        while True:
            digest_ns, shared_ns = alternate(4 * passes_per_sample(pair), digest, share)
            yield Sample(shared_ns / _MANY_PAGES, digest_ns / _MANY_PAGES)


def _layer_samples(pair: Pair, by_kernel: bool) -> SampleStream:
    """Median, from just before the word goes up until the engine begins the layer's write; beside it, until a thread
    that does nothing else sees a bare word go up. by_kernel: nobody calls anything, the word changes in memory.
    """
    layout = KvLayout(pair.settings.scaled(_LAYERS_PER_SAMPLE), 64, 16, kv_heads=4, head_dim=64, dtype="bfloat16")
    prefiller, decoder = KvPrefiller(layout, "shm"), KvDecoder(layout, "shm")
    order = permutation(layout.pages, seed=4)
    count = _adder(ctypes.c_uint64.from_address(prefiller.sender.word_address)) if by_kernel else None
    computed: list[float] = []
    walked = np.zeros(_COMPUTE_BYTES // 4, np.float32)

    def compute(layer_done: Callable[[], None]) -> None:
        computed.clear()
        for _ in range(layout.layers):
            np.add(walked, 1.0, out=walked)
            computed.append(time.monotonic())
            layer_done()

    def posted_us() -> float:
        computing = asyncio.to_thread(compute, count or prefiller.sender.layer_done)
        job = prefiller.send(decoder.expect(), order, compute=computing)
        decoder.take()
        return _median_us(computed, [layer.at_s for layer in job.posted])

    def seen_us() -> float:
        word, seen_ns = np.zeros(1, np.uint64), np.zeros(layout.layers, np.int64)

        async def run() -> None:
            spinning = asyncio.to_thread(_core.bench.spin_on_word, word.view(np.uint8), seen_ns)
            counting = asyncio.to_thread(compute, _adder(ctypes.c_uint64.from_address(word.ctypes.data)))
            await asyncio.gather(spinning, counting)

        prefiller.run(run())
        return _median_us(computed, (seen_ns / 1e9).tolist())

    try:
        with pair.on_all_cores():
            while True:
                yield Sample(posted_us(), seen_us())
    finally:
        prefiller.close()
        decoder.close()


def _adder(word: ctypes.c_uint64) -> Callable[[], None]:
    """Adds 1 to the word, in memory. Nobody else modifies it."""

    def add() -> None:
        word.value += 1

    return add


def _median_us(begun_s: Sequence[float], ended_s: Sequence[float]) -> float:
    return 1e6 * statistics.median(end - begin for begin, end in zip(begun_s, ended_s, strict=True))

"""Measures of KV transfers: a whole request between processes, what a page costs, how soon a layer leaves."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time

import numpy as np

from crossrail import _core
from crossrail.cli.bench.kv_sides import KvDecoder, KvPrefiller, from_text
from crossrail.cli.bench.pair import Pair, alternate, permutation
from crossrail.cli.bench.passes import fill, passes_per_sample
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream
from crossrail.errors import CrossrailError
from crossrail.kv import KvLayout

_PAGE_BYTES = 32 << 10  # 128 tokens of one bfloat16 head of 128: a rank of Qwen3-235B at TP 4
_LAYERS = 8
_MANY_PAGES = 100_000
_LAYERS_PER_SAMPLE = 500
_COMPUTE_BYTES = 8 << 20  # walked for one layer: about a millisecond that needs the core, and not the interpreter


def measures() -> list[Measure]:
    """In the order of the table."""
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
            name="kv-layer",
            title="KV layer computed to its write posted",
            unit="us",
            limit="",
            samples=_layer_samples,
            bar=Bar("value", "<=", 10.0),
        ),
    ]


def _request_samples(pair: Pair) -> SampleStream:
    """From the step's beginning until the decoder's process has counted all; every layer is computed at once."""
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
    """All that both sides do for a request but moving and counting: pages of 64 bytes, K and V of one layer, which
    amortises nothing; the transport completes at once and moves nothing."""
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


def _layer_samples(pair: Pair) -> SampleStream:
    """Median, from just before the word goes up until the engine begins the layer's write."""
    layout = KvLayout(pair.settings.scaled(_LAYERS_PER_SAMPLE), 64, 16, kv_heads=4, head_dim=64, dtype="bfloat16")
    prefiller, decoder = KvPrefiller(layout, "shm"), KvDecoder(layout, "shm")
    order = permutation(layout.pages, seed=4)
    computed: list[float] = []

    walked = np.zeros(_COMPUTE_BYTES // 4, np.float32)

    def compute() -> None:
        for _ in range(layout.layers):
            np.add(walked, 1.0, out=walked)
            computed.append(time.monotonic())
            prefiller.sender.layer_done()

    try:
        with pair.on_all_cores():
            while True:
                computed.clear()
                job = prefiller.send(decoder.expect(), order, compute=asyncio.to_thread(compute))
                decoder.take()
                posted = [layer.at_s for layer in job.posted]
                yield Sample(1e6 * statistics.median(b - a for a, b in zip(computed, posted, strict=True)), None)
    finally:
        prefiller.close()
        decoder.close()

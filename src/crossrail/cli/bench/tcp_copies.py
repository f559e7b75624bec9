"""Bandwidth over TCP, and its CPU cost, each next to a loop over bare sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from crossrail.cli.bench.arrays import Indices
from crossrail.cli.bench.paged import paged_measure
from crossrail.cli.bench.pair import Link, Pair, Pool, alternate
from crossrail.cli.bench.passes import (
    SCATTER_BYTES,
    SCATTER_PEERS,
    SCATTER_WINDOW,
    Pass,
    ScatterLinks,
    passes_per_sample,
    verified_writes,
)
from crossrail.cli.bench.sockets import Chunks, fastest_chunks
from crossrail.cli.bench.spec import Bar, Measure, Point, Sample, SampleStream

_KIB = 1 << 10
_MIB = 1 << 20
# Pages of one batch of the bare loop, by page size: the fastest of those tried.
_BARE_BATCH_PAGES = {_KIB: 4096, 8 * _KIB: 512, 64 * _KIB: 128}
_CPU_BYTES = 32 * _MIB
_CPU_WINDOW = 16
# for each chunk size of the bare stream
_TUNING_ROUNDS = 3
_TUNING_BYTES = 64 * _MIB
_SCATTER_CALLS = 10_000


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [*_write_measures(), *_paged_measures(), *_cpu_measures(), _scatter_measure()]


# --- single writes ---


def _write_measures() -> Iterator[Measure]:
    for nbytes in (256 * _KIB, _MIB, 32 * _MIB):
        for window in (1, 16):
            yield _write_measure(nbytes, window)


def _write_measure(nbytes: int, window: int) -> Measure:
    size = f"{nbytes // _MIB} MiB" if nbytes >= _MIB else f"{nbytes // _KIB} KiB"
    return Measure(
        name=f"write-{size.replace(' ', '').lower()[:-2]}-w{window}",
        title=f"write {size}, window {window}",
        unit="GB/s",
        limit="bare socket",
        samples=lambda pair: _write_samples(pair, nbytes, window),
        point=Point("write", nbytes, window),
        bar=Bar("ratio", ">=", 0.95),
    )


def _write_samples(pair: Pair, nbytes: int, window: int) -> SampleStream:
    link = pair.link("adaptive")
    pool = pair.pool(link, private=False)
    write = verified_writes(pair, link, pool, nbytes, window)
    stream = _bare_stream(pair, link, pool, nbytes, window, wait="spin")
    moved = pool.nbytes // nbytes * nbytes
    while True:
        bare_ns, write_ns = alternate(passes_per_sample(pair), stream, write)
        yield Sample(moved / write_ns, moved / bare_ns)


def _bare_stream(
    pair: Pair,
    link: Link,
    pool: Pool,
    nbytes: int,
    window: int,
    *,
    wait: str,
    cost_of: Callable[[Pair, Pass], int] = lambda _, run: run(),
) -> Pass:
    """Through the same memory, once, in the chunks that cost least in a few short runs of each. The note names them."""

    def stream(chunks: Chunks, count: int) -> int:
        return pair.sockets.stream(
            link.key,
            link.rig.view(pool.src),
            pool.target,
            nbytes=nbytes,
            count=count,
            window=window,
            wait=wait,
            chunks=chunks,
        )

    all_of_it = pool.nbytes // nbytes
    stream(Chunks(0, 0), all_of_it)
    short = max(pair.settings.scaled(_TUNING_BYTES) // nbytes, 1)
    rounds = 1 if pair.settings.quick else _TUNING_ROUNDS
    chunks = fastest_chunks(nbytes, lambda tried: cost_of(pair, lambda: stream(tried, short)), rounds=rounds)
    pair.note = str(chunks)
    return lambda: stream(chunks, all_of_it)


# --- paged writes ---


def _paged_measures() -> Iterator[Measure]:
    for page_bytes, unit, bar in (
        (_KIB, "Mpages/s", Bar("value", ">=", 4.0)),
        (8 * _KIB, "GB/s", Bar("ratio", ">=", 0.9)),
        (64 * _KIB, "GB/s", Bar("ratio", ">=", 0.95)),
    ):
        limit = "bare socket, pages gathered and scattered in batches"
        yield paged_measure(page_bytes, unit, bar, limit, _bare_pages)


def _bare_pages(
    pair: Pair, link: Link, pool: Pool, src_pages: Indices, dst_pages: Indices, page_bytes: int
) -> Callable[[], int]:
    """Run once already."""

    def bare() -> int:
        return pair.sockets.pages(
            link.key,
            link.rig.view(pool.src),
            pool.target,
            src_pages,
            dst_pages,
            page_bytes=page_bytes,
            batch_pages=_BARE_BATCH_PAGES[page_bytes],
        )

    bare()
    return bare


# --- what it costs ---


def _cpu_measures() -> Iterator[Measure]:
    for key, how, wait in (("adaptive", "spinning", "spin"), ("sleeping", "sleeping", "block")):
        yield Measure(
            name=f"cpu-{how}",
            title=f"CPU of both sides, write 32 MiB, {how}",
            unit="s/GB",
            limit=f"bare socket, {how}",
            samples=partial(_cpu_samples, key=key, wait=wait),
            bar=Bar("ratio", "<=", 1.05),
        )


def _cpu_samples(pair: Pair, key: str, wait: str) -> SampleStream:
    link = pair.link(key)
    pool = pair.pool(link, private=False)
    write = verified_writes(pair, link, pool, _CPU_BYTES, _CPU_WINDOW)
    stream = _bare_stream(pair, link, pool, _CPU_BYTES, _CPU_WINDOW, wait=wait, cost_of=_cpu_of)
    moved = pool.nbytes // _CPU_BYTES * _CPU_BYTES
    while True:
        bare_ns, write_ns = alternate(
            passes_per_sample(pair), lambda: _cpu_of(pair, stream), lambda: _cpu_of(pair, write)
        )
        yield Sample(write_ns / moved, bare_ns / moved)


def _cpu_of(pair: Pair, run: Pass) -> int:
    """CPU time of both processes for one pass, in nanoseconds."""
    before = pair.cpu_ns()
    run()
    return pair.cpu_ns() - before


# --- scatter ---


def _scatter_measure() -> Measure:
    return Measure(
        name="scatter-8x4k",
        title="scatter 4 KiB to 8 peers, a call",
        unit="us",
        limit="bare socket, 8 messages of 4 KiB",
        samples=_scatter_samples,
        bar=Bar("value", "<=", 45.0),
    )


def _scatter_samples(pair: Pair) -> SampleStream:
    # An eighth of the pool each: the eight targets together are as large as a pool.
    links = ScatterLinks(pair, pair.settings.pool_bytes // SCATTER_PEERS)
    count = pair.settings.scaled(_SCATTER_CALLS)

    def bare() -> int:
        return pair.sockets.stream(
            links.link.key,
            links.link.rig.view(links.src),
            links.regions[0],
            nbytes=SCATTER_BYTES,
            count=count * SCATTER_PEERS,
            window=SCATTER_WINDOW * SCATTER_PEERS,
        )

    try:
        links.verify()
        while True:
            bare_ns, scatter_ns = alternate(passes_per_sample(pair), bare, lambda: links.scatter(count))
            yield Sample(scatter_ns / count / 1e3, bare_ns / count / 1e3)
    finally:
        links.close()

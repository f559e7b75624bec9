"""Bandwidth measures: single writes, paged writes and scatter, each next to one thread's memcpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from crossrail import _core
from crossrail.cli.bench.arrays import Indices
from crossrail.cli.bench.paged import paged_measure
from crossrail.cli.bench.pair import Link, Pair, Pool, alternate, permutation
from crossrail.cli.bench.passes import (
    SCATTER_BYTES,
    SCATTER_PEERS,
    ScatterLinks,
    passes_per_sample,
    verified_writes,
)
from crossrail.cli.bench.spec import Bar, Measure, Point, Sample, SampleStream

_KIB = 1 << 10
_MIB = 1 << 20
_COPY_CALL_BYTES = 32 * _MIB


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [*_write_measures(), *_paged_measures(), _scatter_measure()]


# --- single writes ---


def _write_measures() -> Iterator[Measure]:
    for nbytes in (64 * _KIB, 256 * _KIB, _MIB, 32 * _MIB):
        for window in (1, 16):
            bar = Bar("ratio", ">=", 0.95) if (nbytes, window) == (32 * _MIB, 16) else None
            yield _write_measure(nbytes, window, private=False, bar=bar)
    yield _write_measure(_MIB, 16, private=True, bar=None)
    yield _write_measure(32 * _MIB, 16, private=True, bar=Bar("ratio", ">=", 0.85))


def _write_measure(nbytes: int, window: int, *, private: bool, bar: Bar | None) -> Measure:
    size = f"{nbytes // _MIB} MiB" if nbytes >= _MIB else f"{nbytes // _KIB} KiB"
    name = f"write{'-private' if private else ''}-{size.replace(' ', '').lower()[:-2]}-w{window}"
    return Measure(
        name=name,
        title=f"{'private ' if private else ''}write {size}, window {window}",
        unit="GB/s",
        limit="memcpy",
        samples=lambda pair: _write_samples(pair, nbytes, window, private=private),
        point=Point("private write" if private else "write", nbytes, window),
        bar=bar,
    )


def _write_samples(pair: Pair, nbytes: int, window: int, *, private: bool) -> SampleStream:
    link = pair.link("adaptive")
    pool = pair.pool(link, private=private)
    write = verified_writes(pair, link, pool, nbytes, window)
    moved = pool.nbytes // nbytes * nbytes
    while True:
        copy_ns, write_ns = alternate(passes_per_sample(pair), lambda: _copy_pool(link, pool), write)
        pair.note = link.unmapped_paths() if private else ""
        yield Sample(moved / write_ns, pool.nbytes / copy_ns)


def _copy_pool(link: Link, pool: Pool) -> int:
    return _core.bench.copy_in_calls(link.rig.view(pool.own), link.rig.view(pool.src), _COPY_CALL_BYTES)


# --- paged writes ---


def _paged_measures() -> Iterator[Measure]:
    for page_bytes, unit, bar in (
        (_KIB, "Mpages/s", Bar("value", ">=", 3.0)),
        (8 * _KIB, "GB/s", Bar("ratio", ">=", 1.0)),
        (16 * _KIB, "GB/s", None),
        (64 * _KIB, "GB/s", Bar("ratio", ">=", 1.0)),
    ):
        yield paged_measure(page_bytes, unit, bar, "memcpy of the same pages", _page_copies)


def _page_copies(
    _pair: Pair, link: Link, pool: Pool, src_pages: Indices, dst_pages: Indices, page_bytes: int
) -> Callable[[], int]:
    def copy() -> int:
        own, src = link.rig.view(pool.own), link.rig.view(pool.src)
        return _core.bench.copy_pages(own, src, dst_pages, src_pages, page_bytes)

    return copy


# --- scatter ---


def _scatter_measure() -> Measure:
    return Measure(
        name="scatter-8x4k",
        title="scatter 4 KiB to 8 peers, a call",
        unit="us",
        limit="memcpy of the same slices",
        samples=_scatter_samples,
    )


def _scatter_samples(pair: Pair) -> SampleStream:
    # An eighth of the pool each: the eight targets together are as large as a pool.
    span_bytes = pair.settings.pool_bytes // SCATTER_PEERS
    links = ScatterLinks(pair, span_bytes)
    pages = span_bytes // SCATTER_BYTES
    src_pages, dst_pages = np.arange(pages, dtype=np.int64), permutation(pages, 8)
    count = pair.settings.scaled(40_000)
    try:
        links.verify()
        while True:
            own, src = links.link.rig.view(links.own), links.link.rig.view(links.src)
            copy_ns = _core.bench.copy_pages(own, src, dst_pages, src_pages, SCATTER_BYTES)
            limit_us = copy_ns / pages * SCATTER_PEERS / 1e3
            yield Sample(links.scatter(count) / count / 1e3, limit_us)
    finally:
        links.close()

"""The cost of posting by itself: the engine over a transport whose rails complete at once and move nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

from crossrail import _core
from crossrail.cli.bench.pair import IMM_DATA, Pair, permutation
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream

_PAGE_BYTES = 8 << 10
_PAGE_COUNT = 4096
_WINDOW = 4
_WRITE_WINDOW = 256
_TURN_ROUNDS, _TURN_WRITES = 3, 1000  # some 50 us
_SCATTER_PEERS = 56
_SLICE_BYTES = 256
_MEMORY_BYTES = _PAGE_BYTES * _PAGE_COUNT


def measures() -> list[Measure]:
    """The measures, in the order of the table."""
    return [
        Measure(
            name="post-paged",
            title="posting alone, paged",
            unit="Mpages/s",
            limit="bare loop that fills work requests",
            samples=_paged_samples,
            bar=Bar("value", ">=", 15.0),
        ),
        Measure(
            name="post-scatter-56",
            title="posting alone, scatter to 56, a call",
            unit="us",
            limit="bare loop that fills work requests",
            samples=_scatter_samples,
            bar=Bar("value", "<=", 3.0),
        ),
        Measure(
            name="post-recorded",
            title="posting alone, paged, beside it unrecorded",
            unit="Mpages/s",
            limit="the same without flight recorder",
            samples=_recorded_paged_samples,
            bar=Bar("ratio", ">=", 0.98),
        ),
        Measure(
            name="post-recorded-writes",
            title="posting alone, 8-byte writes, beside it unrecorded",
            unit="M/s",
            limit="the same without flight recorder",
            samples=_recorded_write_samples,
            bar=Bar("ratio", ">=", 0.98),
        ),
        Measure(
            name="post-counted",
            title="posting alone, paged, beside it uncounted",
            unit="Mpages/s",
            limit="the same without counts of peers and rails",
            samples=_counted_paged_samples,
            bar=Bar("ratio", ">=", 0.98),
        ),
        Measure(
            name="post-counted-writes",
            title="posting alone, 8-byte writes, beside it uncounted",
            unit="M/s",
            limit="the same without counts of peers and rails",
            samples=_counted_write_samples,
            bar=Bar("ratio", ">=", 0.98),
        ),
    ]


class _Watched(NamedTuple):
    """What an engine records of its posts; by default what engines record by default."""

    recorder_entries: int = 1024
    counts_traffic: bool = True


_ALL = _Watched()
_UNRECORDED = _Watched(recorder_entries=0)
_UNCOUNTED = _Watched(counts_traffic=False)

Poster = Callable[[_Watched], AbstractContextManager[Callable[[int], int]]]


@contextmanager
def _null_rigs(count: int, watched: _Watched = _ALL) -> Iterator[list[_core.bench.Rig]]:
    rigs = [
        _core.bench.Rig(f"bench-null-{i}", transport="null", polling="manual", **watched._asdict())
        for i in range(count)
    ]
    try:
        yield rigs
    finally:
        for rig in rigs:
            rig.close()


def _paged_samples(pair: Pair) -> SampleStream:
    src_pages, dst_pages = permutation(_PAGE_COUNT, 1), permutation(_PAGE_COUNT, 2)
    rounds = pair.settings.scaled(1000)
    with _paged_poster() as post:
        while True:
            fill_ns = _core.bench.fill_work_requests(dst_pages, src_pages, _PAGE_BYTES, rounds)
            pages = rounds * _PAGE_COUNT
            yield Sample(pages / post(rounds) * 1e3, pages / fill_ns * 1e3)


def _recorded_paged_samples(pair: Pair) -> SampleStream:
    return _paged_beside(pair, _UNRECORDED)


def _counted_paged_samples(pair: Pair) -> SampleStream:
    return _paged_beside(pair, _UNCOUNTED)


def _recorded_write_samples(pair: Pair) -> SampleStream:
    return _writes_beside(pair, _UNRECORDED)


def _counted_write_samples(pair: Pair) -> SampleStream:
    return _writes_beside(pair, _UNCOUNTED)


def _paged_beside(pair: Pair, less: _Watched) -> SampleStream:
    return _samples_beside(pair, _paged_poster, less, _TURN_ROUNDS, _TURN_ROUNDS * _PAGE_COUNT)


def _writes_beside(pair: Pair, less: _Watched) -> SampleStream:
    return _samples_beside(pair, _write_poster, less, _TURN_WRITES, _TURN_WRITES)


def _samples_beside(pair: Pair, poster: Poster, less: _Watched, calls: int, operations: int) -> SampleStream:
    """Engines in turns, so short that who is interrupted is the exception: the medians of their turns.

    Two of each, made and asked as all, less, less, all: of two that are alike, the first one made is slower by 1 %.
    """
    turns = pair.settings.scaled(500)
    with ExitStack() as stack:
        posts = [stack.enter_context(poster(watched)) for watched in (_ALL, less, less, _ALL)]
        while True:
            took_ns = [[post(calls) for post in posts] for _ in range(turns)]
            first_ns, *between_ns, last_ns = map(statistics.median, zip(*took_ns, strict=True))
            yield Sample(2 * operations / (first_ns + last_ns) * 1e3, 2 * operations / sum(between_ns) * 1e3)


@contextmanager
def _paged_poster(watched: _Watched = _ALL) -> Iterator[Callable[[int], int]]:
    """Posts all pages so many times over, and returns how long that took in nanoseconds."""
    src_pages, dst_pages = permutation(_PAGE_COUNT, 1), permutation(_PAGE_COUNT, 2)
    with _null_rigs(2, watched) as (rig, target):
        src, dst = rig.alloc(_MEMORY_BYTES), rig.remote(target.descriptor(target.alloc(_MEMORY_BYTES)))

        def post(count: int) -> int:
            return _core.bench.run_paged_writes(
                rig,
                src,
                src_pages,
                dst,
                dst_pages,
                page_bytes=_PAGE_BYTES,
                batch_pages=_PAGE_COUNT,
                rounds=count,
                window=_WINDOW,
                imm=IMM_DATA,
            )

        post(10)
        yield post


@contextmanager
def _write_poster(watched: _Watched) -> Iterator[Callable[[int], int]]:
    """Posts so many writes of a word, and returns how long that took in nanoseconds."""
    with _null_rigs(2, watched) as (rig, target):
        src, dst = rig.alloc(_MEMORY_BYTES), rig.remote(target.descriptor(target.alloc(_MEMORY_BYTES)))

        def post(count: int) -> int:
            return _core.bench.run_writes(
                rig, src, dst, nbytes=8, span_bytes=2048, count=count, window=_WRITE_WINDOW, imm=IMM_DATA
            )

        post(1000)
        yield post


def _scatter_samples(pair: Pair) -> SampleStream:
    count = pair.settings.scaled(200_000)
    indices = permutation(_SCATTER_PEERS, 3)
    with _null_rigs(_SCATTER_PEERS + 1) as rigs:
        rig, targets = rigs[0], rigs[1:]
        src = rig.alloc(_MEMORY_BYTES)
        dsts = [rig.remote(target.descriptor(target.alloc(_MEMORY_BYTES // 64))) for target in targets]
        group = rig.group([target.address for target in targets])

        def post(calls: int) -> int:
            return _core.bench.run_scatters(
                rig,
                src,
                dsts,
                group,
                slice_bytes=_SLICE_BYTES,
                span_bytes=_MEMORY_BYTES // 64,
                count=calls,
                window=_WINDOW,
                imm=IMM_DATA,
            )

        post(100)
        while True:
            fill_ns = _core.bench.fill_work_requests(indices, indices, _SLICE_BYTES, count)
            yield Sample(post(count) / count / 1e3, fill_ns / count / 1e3)

"""The measure of paged writes: the same over every transport, except for the limit next to it."""

from __future__ import annotations

from collections.abc import Callable

from crossrail.cli.bench.arrays import Indices
from crossrail.cli.bench.pair import Link, Pair, Pool, permutation
from crossrail.cli.bench.passes import PAGED_WINDOW, Pass, samples_beside, verified_paged_writes
from crossrail.cli.bench.spec import Bar, Measure, Point, SampleStream

_KIB = 1 << 10

# Makes the pass of the limit: source pages, target pages, bytes of a page.
MakeLimit = Callable[[Pair, Link, Pool, Indices, Indices, int], Pass]


def paged_measure(page_bytes: int, unit: str, bar: Bar | None, limit: str, make_limit: MakeLimit | None) -> Measure:
    """unit: "GB/s", or "Mpages/s"."""
    return Measure(
        name=f"paged-{page_bytes // _KIB}k",
        title=f"paged 4096 x {page_bytes // _KIB} KiB, shuffled",
        unit=unit,
        limit=limit,
        samples=lambda pair: _samples(pair, page_bytes, unit, make_limit),
        bar=bar,
        point=Point("paged", page_bytes, PAGED_WINDOW),
    )


def _samples(pair: Pair, page_bytes: int, unit: str, make_limit: MakeLimit | None) -> SampleStream:
    link = pair.link("adaptive")
    pool = pair.pool(link, private=False)
    count = pool.nbytes // page_bytes
    src_pages, dst_pages = permutation(count, page_bytes), permutation(count, page_bytes + 1)
    write = verified_paged_writes(pair, link, pool, page_bytes, src_pages, dst_pages)
    limit = None if make_limit is None else make_limit(pair, link, pool, src_pages, dst_pages, page_bytes)
    amount = count * 1e3 if unit == "Mpages/s" else count * page_bytes
    yield from samples_beside(pair, amount, write, limit)

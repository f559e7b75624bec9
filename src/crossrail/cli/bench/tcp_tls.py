"""The cost of TLS: an engine with it and one without, in turns, between the same two processes."""

from __future__ import annotations

from collections.abc import Callable

from crossrail.cli.bench.pair import Pair, alternate, permutation
from crossrail.cli.bench.passes import Pass, passes_per_sample, verified_paged_writes, verified_writes
from crossrail.cli.bench.spec import Measure, Sample, SampleStream
from crossrail.tls import TlsConfig

_KIB = 1 << 10
_MIB = 1 << 20


def measures() -> list[Measure]:
    """In the order of the table; none without CROSSRAIL_TLS_CERT etc., whose certificate both sides present."""
    if TlsConfig.from_environment() is None:
        return []
    return [_writes(_MIB, 1), _writes(_MIB, 16), _writes(32 * _MIB, 16), _pages(8 * _KIB), _pages(64 * _KIB)]


def _writes(nbytes: int, window: int) -> Measure:
    def make(pair: Pair, key: str) -> Pass:
        link = pair.link(key)
        return verified_writes(pair, link, pair.pool(link, private=False), nbytes, window)

    size = f"{nbytes // _MIB} MiB"
    return _measure(f"write-{nbytes // _MIB}m-w{window}", f"write {size}, window {window}", nbytes, make)


def _pages(page_bytes: int) -> Measure:
    def make(pair: Pair, key: str) -> Pass:
        link = pair.link(key)
        pool = pair.pool(link, private=False)
        count = pool.nbytes // page_bytes
        src_pages, dst_pages = permutation(count, page_bytes), permutation(count, page_bytes + 1)
        return verified_paged_writes(pair, link, pool, page_bytes, src_pages, dst_pages)

    size = f"{page_bytes // _KIB} KiB"
    return _measure(f"paged-{page_bytes // _KIB}k", f"paged 4096 x {size}, shuffled", page_bytes, make)


def _measure(name: str, title: str, nbytes: int, make: Callable[[Pair, str], Pass]) -> Measure:
    return Measure(
        name=f"tls-{name}",
        title=f"{title}, under TLS",
        unit="GB/s",
        limit="the same in the clear",
        samples=lambda pair: _samples(pair, nbytes, make),
    )


def _samples(pair: Pair, nbytes: int, make: Callable[[Pair, str], Pass]) -> SampleStream:
    clear, sealed = make(pair, "adaptive"), make(pair, "tls")
    moved = pair.settings.pool_bytes // nbytes * nbytes
    while True:
        clear_ns, sealed_ns = alternate(passes_per_sample(pair), clear, sealed)
        yield Sample(moved / sealed_ns, moved / clear_ns)

"""Measures of verbs and ofi, each next to a loop over the bare library where this build has one.

BARE has such a loop by transport. Without one the figure stands alone, and has no bar: another network's limit says
nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

from crossrail.cli.bench.arrays import Indices
from crossrail.cli.bench.bare_rdma import BareRdma
from crossrail.cli.bench.paged import paged_measure
from crossrail.cli.bench.pair import LOOPBACK, Link, Pair, Pool, alternate
from crossrail.cli.bench.passes import samples_beside, verified_writes
from crossrail.cli.bench.small import verified_ping_pong
from crossrail.cli.bench.spec import Bar, Measure, Point, Sample, SampleStream

_KIB = 1 << 10
_MIB = 1 << 20
_TURNS = 4
_WARM_UP_ROUNDS = 100
_SPEED_BAR = Bar("ratio", ">=", 0.95)
_PAGES_BAR = Bar("ratio", ">=", 0.9)
_LATENCY_BAR = Bar("difference", "<=", 1.0)


class BareLoop(Protocol):
    """Over the library alone, between the same two processes, from the pool's source to its target. Nanoseconds."""

    name: str

    def writes(self, pair: Pair, link: Link, pool: Pool, nbytes: int, window: int) -> int:
        """Once through the pool in writes of nbytes, until all are known to be placed."""
        ...

    def pages(self, pair: Pair, link: Link, pool: Pool, src: Indices, dst: Indices, page_bytes: int) -> int:
        """Writes all these pages once."""
        ...

    def one_way_ns(self, pair: Pair, link: Link, rounds: int) -> float:
        """One-way time of 8-byte writes with an immediate, while both ends spin."""
        ...


# A reliable queue pair of verbs keeps its order, so an immediate with the last page shows that all have arrived;
# libfabric's tcp promises no order.
BARE: dict[str, BareLoop] = {
    "ofi:tcp": BareRdma("bare libfabric", "ofi:tcp", LOOPBACK, imm_each=True),
    "verbs": BareRdma("bare verbs", "verbs", imm_each=False),
}


def measures(transport: str) -> list[Measure]:
    """The measures, in the order of the table."""
    bare = BARE.get(transport)
    return [*_write_measures(bare), *_paged_measures(bare), *_ping_pong_measures(bare)]


def _limit_of(bare: BareLoop | None) -> str:
    return "" if bare is None else bare.name


def _write_measures(bare: BareLoop | None) -> Iterator[Measure]:
    for nbytes, window, bar in (
        (64 * _KIB, 1, None),
        (64 * _KIB, 16, _SPEED_BAR),
        (_MIB, 1, None),
        (_MIB, 16, _SPEED_BAR),
        (32 * _MIB, 16, None),
    ):
        size = f"{nbytes // _MIB} MiB" if nbytes >= _MIB else f"{nbytes // _KIB} KiB"
        yield Measure(
            name=f"write-{size.replace(' ', '').lower()[:-2]}-w{window}",
            title=f"write {size}, window {window}",
            unit="GB/s",
            limit=_limit_of(bare),
            samples=partial(_write_samples, bare=bare, nbytes=nbytes, window=window),
            bar=bar if bare else None,
            point=Point("write", nbytes, window),
        )


def _write_samples(pair: Pair, bare: BareLoop | None, nbytes: int, window: int) -> SampleStream:
    link = pair.link("adaptive")
    pool = pair.pool(link, private=False)
    write = verified_writes(pair, link, pool, nbytes, window)
    moved = pool.nbytes // nbytes * nbytes
    limit = None if bare is None else lambda: bare.writes(pair, link, pool, nbytes, window)
    yield from samples_beside(pair, moved, write, limit)


def _paged_measures(bare: BareLoop | None) -> Iterator[Measure]:
    for page_bytes, unit in ((_KIB, "Mpages/s"), (8 * _KIB, "GB/s"), (64 * _KIB, "GB/s")):
        bar = (_PAGES_BAR if page_bytes == _KIB else _SPEED_BAR) if bare else None
        make_limit = None if bare is None else lambda *given: partial(bare.pages, *given)
        yield paged_measure(page_bytes, unit, bar, _limit_of(bare), make_limit)


def _ping_pong_measures(bare: BareLoop | None) -> Iterator[Measure]:
    yield Measure(
        name="ping-pong",
        title="8-byte write + imm, spin, one way",
        unit="us",
        limit=_limit_of(bare),
        samples=partial(_ping_pong_samples, key="manual", bare=bare),
        bar=_LATENCY_BAR if bare else None,
    )
    yield Measure(
        name="ping-pong-sleeping",
        title="8-byte write + imm, sleeping workers, one way",
        unit="us",
        limit="",
        samples=partial(_ping_pong_samples, key="sleeping", bare=None),
    )


def _ping_pong_samples(pair: Pair, key: str, bare: BareLoop | None) -> SampleStream:
    link = pair.link(key)
    ping_pong = verified_ping_pong(pair, link)
    rounds = pair.settings.scaled(20_000 if key == "manual" else 5_000)
    if bare is None:
        while True:
            yield Sample(sum(ping_pong(rounds) for _ in range(_TURNS)) / _TURNS / 1e3, None)
    bare.one_way_ns(pair, link, _WARM_UP_ROUNDS)
    while True:
        bare_ns, one_way_ns = alternate(_TURNS, lambda: bare.one_way_ns(pair, link, rounds), lambda: ping_pong(rounds))
        yield Sample(one_way_ns / 1e3, bare_ns / 1e3)

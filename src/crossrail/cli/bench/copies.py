"""Measures of bytes per second: single writes, paged writes and scatter, each beside one thread's memcpy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from crossrail.cli.bench.pair import IMM_ACK, IMM_DATA, Link, Pair, Pool, alternate, permutation
from crossrail.cli.bench.spec import Bar, Measure, Sample, SampleStream
from crossrail.cli.native import Memory

_KIB = 1 << 10
_MIB = 1 << 20
_COPY_CALL_BYTES = 32 * _MIB
# A sample walks through the pool this often, in turn with the limit: enough to even out interrupts.
_PASSES = 4
_PAGES_PER_CALL = 4096
_PAGED_WINDOW = 2
_SCATTER_PEERS = 8
_SCATTER_BYTES = 4 * _KIB
_SCATTER_WINDOW = 16


def measures() -> list[Measure]:
    """In the order of the table."""
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
        bar=bar,
    )


def _write_samples(pair: Pair, nbytes: int, window: int, *, private: bool) -> SampleStream:
    link = pair.link("adaptive")
    pool = pair.pool(link, private=private)
    per_pass = pool.nbytes // nbytes
    passes = 1 if pair.settings.quick else _PASSES

    def write(count: int) -> int:
        link.start_receiving(count)
        took_ns = pair.native.run_writes(
            link.rig,
            pool.src,
            pool.remote,
            nbytes=nbytes,
            span_bytes=pool.nbytes,
            count=count,
            window=window,
            imm=IMM_DATA,
            ack=IMM_ACK,
        )
        pair.child.finish()
        return took_ns

    _fill(link.rig.view(pool.src), seed=nbytes + window)
    pair.child.call("clear", key=link.key, region=pool.target)
    write(per_pass)
    expected = hashlib.sha256(link.rig.view(pool.src).data).hexdigest()
    pair.verify(link, pool.target, expected, f"write of {nbytes} bytes")
    moved = per_pass * nbytes
    while True:
        copy_ns, write_ns = alternate(passes, lambda: _copy_pool(pair, link, pool), lambda: write(per_pass))
        pair.note = link.unmapped_paths() if private else ""
        yield Sample(moved / write_ns, pool.nbytes / copy_ns)


def _copy_pool(pair: Pair, link: Link, pool: Pool) -> int:
    return pair.native.copy_in_calls(link.rig.view(pool.own), link.rig.view(pool.src), _COPY_CALL_BYTES)


def _fill(memory: Memory, seed: int) -> None:
    """Bytes that differ everywhere, so that a piece at the wrong place shows."""
    words = memory.view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed)


# --- paged writes ---


def _paged_measures() -> Iterator[Measure]:
    yield _paged_measure(_KIB, "Mpages/s", Bar("value", ">=", 3.0))
    yield _paged_measure(8 * _KIB, "GB/s", Bar("ratio", ">=", 1.0))
    yield _paged_measure(16 * _KIB, "GB/s", None)
    yield _paged_measure(64 * _KIB, "GB/s", Bar("ratio", ">=", 1.0))


def _paged_measure(page_bytes: int, unit: str, bar: Bar | None) -> Measure:
    return Measure(
        name=f"paged-{page_bytes // _KIB}k",
        title=f"paged 4096 x {page_bytes // _KIB} KiB, shuffled",
        unit=unit,
        limit="memcpy of the same pages",
        samples=lambda pair: _paged_samples(pair, page_bytes, per_page=unit != "GB/s"),
        bar=bar,
    )


def _paged_samples(pair: Pair, page_bytes: int, *, per_page: bool) -> SampleStream:
    link = pair.link("adaptive")
    pool = pair.pool(link, private=False)
    page_count = pool.nbytes // page_bytes
    src_pages, dst_pages = permutation(page_count, page_bytes), permutation(page_count, page_bytes + 1)
    passes = 1 if pair.settings.quick else _PASSES

    def write() -> int:
        link.start_receiving(page_count)
        took_ns = pair.native.run_paged_writes(
            link.rig,
            pool.src,
            src_pages,
            pool.remote,
            dst_pages,
            page_bytes=page_bytes,
            batch_pages=_PAGES_PER_CALL,
            window=_PAGED_WINDOW,
            imm=IMM_DATA,
            ack=IMM_ACK,
        )
        pair.child.finish()
        return took_ns

    def copy() -> int:
        own, src = link.rig.view(pool.own), link.rig.view(pool.src)
        return pair.native.copy_pages(own, src, dst_pages, src_pages, page_bytes)

    _fill(link.rig.view(pool.src), seed=page_bytes)
    pair.child.call("clear", key=link.key, region=pool.target)
    write()
    copy()
    expected = hashlib.sha256(link.rig.view(pool.own).data).hexdigest()
    pair.verify(link, pool.target, expected, f"paged writes of {page_bytes} bytes")
    # GB/s, or millions of pages per second.
    amount = page_count * 1e3 if per_page else page_count * page_bytes
    while True:
        copy_ns, write_ns = alternate(passes, copy, write)
        yield Sample(amount / write_ns, amount / copy_ns)


# --- scatter ---


def _scatter_measure() -> Measure:
    return Measure(
        name="scatter-8x4k",
        title="scatter 4 KiB to 8 peers, a call",
        unit="us",
        limit="memcpy of the same slices",
        samples=_scatter_samples,
    )


class _ScatterLinks:
    """One spinning rig here; eight at the peer, which one thread there drives in turn."""

    def __init__(self, pair: Pair, span_bytes: int) -> None:
        self._pair = pair
        self.link = pair.link("manual")
        self.src = self.link.rig.alloc(span_bytes)
        self.own = self.link.rig.alloc(span_bytes)
        self.keys = [self.link.key] + [f"scatter-{index}" for index in range(1, _SCATTER_PEERS)]
        addresses = [self.link.peer_address]
        for key in self.keys[1:]:
            address = pair.child.call("open_rig", key=key, transport=pair.settings.transport, polling="manual")
            addresses.append(bytes.fromhex(address))
        memory = [pair.child.call("add_memory", key=key, nbytes=span_bytes, private=False) for key in self.keys]
        self.regions = [index for index, _ in memory]
        self.remotes = [self.link.rig.remote(bytes.fromhex(descriptor)) for _, descriptor in memory]
        self.group = self.link.rig.group(addresses)
        self.span_bytes = span_bytes

    def scatter(self, count: int) -> int:
        """Nanoseconds for so many calls, until all eight have counted them all."""
        self.link.start_receiving(count, self.keys)
        took_ns = self._pair.native.run_scatters(
            self.link.rig,
            self.src,
            self.remotes,
            self.group,
            slice_bytes=_SCATTER_BYTES,
            span_bytes=self.span_bytes,
            count=count,
            window=_SCATTER_WINDOW,
            imm=IMM_DATA,
            ack=IMM_ACK,
        )
        self._pair.child.finish()
        return took_ns

    def verify(self) -> None:
        """Scatters the whole source once and checks each peer's region."""
        source = self.link.rig.view(self.src)
        _fill(source, seed=8)
        calls = self.span_bytes // (_SCATTER_BYTES * _SCATTER_PEERS)
        slices = source.reshape(calls, _SCATTER_PEERS, _SCATTER_BYTES)
        for key, region in zip(self.keys, self.regions, strict=True):
            self._pair.child.call("clear", key=key, region=region)
        self.scatter(calls)
        for index, (key, region) in enumerate(zip(self.keys, self.regions, strict=True)):
            expected = np.zeros(self.span_bytes, np.uint8)
            expected[: calls * _SCATTER_BYTES] = slices[:, index].reshape(-1)
            digest = self._pair.child.call("digest", key=key, region=region)
            if digest != hashlib.sha256(expected.data).hexdigest():
                raise AssertionError(f"scatter: peer {index} did not get what was sent")

    def close(self) -> None:
        """The peer's extra rigs; the link stays for others."""
        for key in self.keys[1:]:
            self._pair.child.call("close_rig", key=key)


def _scatter_samples(pair: Pair) -> SampleStream:
    # An eighth of the pool each: the eight targets together are as large as a pool.
    span_bytes = pair.settings.pool_bytes // _SCATTER_PEERS
    links = _ScatterLinks(pair, span_bytes)
    pages = span_bytes // _SCATTER_BYTES
    src_pages, dst_pages = np.arange(pages, dtype=np.int64), permutation(pages, 8)
    count = pair.settings.scaled(40_000)
    try:
        links.verify()
        while True:
            own, src = links.link.rig.view(links.own), links.link.rig.view(links.src)
            copy_ns = pair.native.copy_pages(own, src, dst_pages, src_pages, _SCATTER_BYTES)
            limit_us = copy_ns / pages * _SCATTER_PEERS / 1e3
            yield Sample(links.scatter(count) / count / 1e3, limit_us)
    finally:
        links.close()

"""Passes over large memory through the engine: set up and verified once, then run and timed any number of times."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from crossrail import _core
from crossrail.cli.bench.arrays import Indices, Memory
from crossrail.cli.bench.pair import IMM_ACK, IMM_DATA, Link, Pair, Pool, alternate
from crossrail.cli.bench.spec import Sample, SampleStream
from crossrail.errors import CrossrailError

_PAGES_PER_CALL = 4096
PAGED_WINDOW = 2
SCATTER_PEERS = 8
SCATTER_BYTES = 4 << 10
SCATTER_WINDOW = 16

# Runs once over everything; nanoseconds until the receiver had counted it and its answer was back.
Pass = Callable[[], int]


def passes_per_sample(pair: Pair) -> int:
    """A sample walks through the pool this often, in turn with the limit: enough to even out interrupts."""
    return 1 if pair.settings.quick else 4


def samples_beside(pair: Pair, amount: float, measured: Pass, limit: Pass | None) -> SampleStream:
    """Samples of amounts per nanosecond, each next to one of the limit if there is one."""
    while True:
        if limit is None:
            times = passes_per_sample(pair)
            yield Sample(amount / (sum(measured() for _ in range(times)) / times), None)
        else:
            limit_ns, took_ns = alternate(passes_per_sample(pair), limit, measured)
            yield Sample(amount / took_ns, amount / limit_ns)


def verified_writes(pair: Pair, link: Link, pool: Pool, nbytes: int, window: int) -> Pass:
    """Writes of nbytes that walk once through the pool."""
    count = pool.nbytes // nbytes

    def write() -> int:
        link.start_receiving(count)
        took_ns = _core.bench.run_writes(
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
        link.finish()
        return took_ns

    source = link.rig.view(pool.src)
    fill(source, seed=nbytes + window)
    verify_prefix(pair, link, source, pool.target, count * nbytes, write, f"write of {nbytes} bytes")
    return write


def verify_prefix(
    pair: Pair, link: Link, source: Memory, region: int, nbytes: int, write: Callable[[], object], what: str
) -> None:
    """Clears the peer's region, calls write(), and checks: the first nbytes are the source's, all others still zero.

    source: as long as the region.
    """
    pair.child.call("clear", key=link.key, region=region)
    write()
    expected = hashlib.sha256(source[:nbytes].data)
    expected.update(bytes(len(source) - nbytes))
    pair.verify(link, region, expected.hexdigest(), what)


def verified_paged_writes(
    pair: Pair, link: Link, pool: Pool, page_bytes: int, src_pages: Indices, dst_pages: Indices
) -> Pass:
    """Paged writes of all these pages, once. Leaves in pool.own what the target has to be."""

    def write() -> int:
        link.start_receiving(len(dst_pages))
        took_ns = _core.bench.run_paged_writes(
            link.rig,
            pool.src,
            src_pages,
            pool.remote,
            dst_pages,
            page_bytes=page_bytes,
            batch_pages=_PAGES_PER_CALL,
            window=PAGED_WINDOW,
            imm=IMM_DATA,
            ack=IMM_ACK,
        )
        link.finish()
        return took_ns

    source, own = link.rig.view(pool.src), link.rig.view(pool.own)
    fill(source, seed=page_bytes)
    pair.child.call("clear", key=link.key, region=pool.target)
    write()
    _core.bench.copy_pages(own, source, dst_pages, src_pages, page_bytes)
    expected = hashlib.sha256(own.data).hexdigest()
    pair.verify(link, pool.target, expected, f"paged writes of {page_bytes} bytes")
    return write


class ScatterLinks:
    """One spinning rig here; eight at the peer, which one thread there drives in turn."""

    def __init__(self, pair: Pair, span_bytes: int) -> None:
        self._pair = pair
        self.link = pair.link("manual")
        self.src = self.link.rig.alloc(span_bytes)
        self.own = self.link.rig.alloc(span_bytes)
        self.keys = [self.link.key] + [f"scatter-{index}" for index in range(1, SCATTER_PEERS)]
        addresses = [self.link.peer_address]
        for key in self.keys[1:]:
            address = pair.child.call("open_rig", key=key, polling="manual", **pair.settings.rig_options)
            addresses.append(bytes.fromhex(address))
        memory = [pair.child.call("add_memory", key=key, nbytes=span_bytes, private=False) for key in self.keys]
        self.regions = [index for index, _ in memory]
        self.remotes = [self.link.rig.remote(bytes.fromhex(descriptor)) for _, descriptor in memory]
        self.group = self.link.rig.group(addresses)
        self.span_bytes = span_bytes

    def scatter(self, count: int) -> int:
        """Nanoseconds for so many calls, until all eight have counted them all."""
        self.link.start_receiving(count, self.keys)
        took_ns = _core.bench.run_scatters(
            self.link.rig,
            self.src,
            self.remotes,
            self.group,
            slice_bytes=SCATTER_BYTES,
            span_bytes=self.span_bytes,
            count=count,
            window=SCATTER_WINDOW,
            imm=IMM_DATA,
            ack=IMM_ACK,
        )
        self.link.finish()
        return took_ns

    def verify(self) -> None:
        """Scatters the whole source once and checks each peer's region."""
        source = self.link.rig.view(self.src)
        fill(source, seed=8)
        calls = self.span_bytes // (SCATTER_BYTES * SCATTER_PEERS)
        slices = source.reshape(calls, SCATTER_PEERS, SCATTER_BYTES)
        for key, region in zip(self.keys, self.regions, strict=True):
            self._pair.child.call("clear", key=key, region=region)
        self.scatter(calls)
        for index, (key, region) in enumerate(zip(self.keys, self.regions, strict=True)):
            expected = np.zeros(self.span_bytes, np.uint8)
            expected[: calls * SCATTER_BYTES] = slices[:, index].reshape(-1)
            digest = self._pair.child.call("digest", key=key, region=region)
            if digest != hashlib.sha256(expected.data).hexdigest():
                raise CrossrailError(f"scatter: peer {index} did not get what was sent")

    def close(self) -> None:
        """The peer's extra rigs; the link stays for others."""
        for key in self.keys[1:]:
            self._pair.child.call("close_rig", key=key)


def fill(memory: Memory, seed: int) -> None:
    """Bytes that differ everywhere, so that a piece at the wrong place shows."""
    words = memory.view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed)

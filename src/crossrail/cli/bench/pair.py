"""The two processes of a benchmark: this one drives and keeps the clock, peer.py receives."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from crossrail import _core
from crossrail.cli.bench.arrays import Indices
from crossrail.cli.bench.bare_rdma import OpenedBare
from crossrail.cli.bench.sockets import Sockets
from crossrail.cli.child import Child
from crossrail.errors import CrossrailError, UsageError
from crossrail.tls import tls_of

PEER_MODULE = "crossrail.cli.bench.peer"
_CONTROL_BYTES = 4096
_DRIVE_S = 0.0005

LOOPBACK = "127.0.0.1"

# The options with which the rigs of a link are opened, by the link's key.
_LINKS: dict[str, dict[str, Any]] = {
    "adaptive": {"polling": "adaptive"},  # the default engine
    "manual": {"polling": "manual"},  # one spinning thread at each end
    "sleeping": {"polling": "adaptive", "spin_us": 0.0},
    "tls": {"polling": "adaptive"},  # with the certificates that the environment names
}

# Immediates. Each side has counters of its own, so the same number in both directions is two counters.
IMM_DATA = 1
IMM_ACK = 2


def choose_cpus() -> tuple[int, int]:
    """Two different cores that this process may use; the same one twice when there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


def check_cpus(cpus: tuple[int, int]) -> None:
    """UsageError when this process may not run on both."""
    allowed = os.sched_getaffinity(0)
    for cpu in cpus:
        if cpu not in allowed:
            names = ", ".join(str(core) for core in sorted(allowed))
            raise UsageError(f"--cpus names core {cpu}, and this process may use {names}")


@dataclass(frozen=True)
class Settings:
    """The parsed options."""

    cpus: tuple[int, int]
    pool_bytes: int
    transport: str
    quick: bool
    # Engines use this transport instead, beside the limits of the other: checks the benchmark, measures nothing.
    stand_in: str | None = None

    @property
    def rig_options(self) -> dict[str, Any]:
        """The options for every engine."""
        transport = self.stand_in or self.transport
        by_loopback = transport in ("tcp", "ofi:tcp")
        return {"transport": transport, "rails": [LOOPBACK]} if by_loopback else {"transport": transport}

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the report."""
        return {
            "transport": self.stand_in or self.transport,
            "cpus": list(self.cpus),
            "pool_bytes": self.pool_bytes,
            "quick": self.quick,
        }

    def scaled(self, count: int) -> int:
        """How many operations a sample takes: a tenth of them for a quick look."""
        return max(count // 10, 1) if self.quick else count


class Link:
    """A rig here and one there, each with a small control region that the other can write to."""

    def __init__(self, pair: Pair, key: str, **options: Any) -> None:
        """Opens both. options: of Rig."""
        self._pair = pair
        self.key = key
        self.is_manual = options.get("polling") == "manual"
        options |= pair.settings.rig_options
        self.rig: _core.bench.Rig = _core.bench.Rig(f"bench-{key}", **options)
        peer_address = pair.child.call("open_rig", key=key, **options)
        self.peer_address = bytes.fromhex(peer_address)
        self.control = self.rig.alloc(_CONTROL_BYTES)
        self.peer_control, descriptor = self.add_peer_memory(_CONTROL_BYTES, private=False)
        self.control_there = self.rig.remote(descriptor)
        own_descriptor = self.rig.descriptor(self.control).hex()
        self.control_here: int = pair.child.call("add_remote", key=key, descriptor=own_descriptor)

    def add_peer_memory(self, nbytes: int, *, private: bool) -> tuple[int, bytes]:
        """Memory at the peer. Returns its index there and its descriptor."""
        index, descriptor = self._pair.child.call("add_memory", key=self.key, nbytes=nbytes, private=private)
        return index, bytes.fromhex(descriptor)

    def start_receiving(self, count: int, keys: list[str] | None = None) -> None:
        """The peer counts so many arrivals and then answers with IMM_ACK. End it with `finish`."""
        self._pair.child.start(
            "receive",
            keys=keys or [self.key],
            imm=IMM_DATA,
            count=count,
            reply_src=self.peer_control,
            reply_dst=self.control_here,
            reply_imm=IMM_ACK,
        )

    def finish(self) -> None:
        """Ends what the peer was told to start.

        An engine that nobody drives acknowledges nothing, and the peer may still be waiting for that.
        """
        while self.is_manual and not self._pair.child.has_answered():
            self.rig.drive(_DRIVE_S)
        self._pair.child.finish()

    def unmapped_paths(self) -> str:
        """How bytes reached memory of the peer that cannot be mapped: the engine chooses by measuring."""
        paths = {path for _, path, _, _ in self.rig.paths(self.peer_address)}
        return ", ".join(sorted(path.replace("cross-memory-attach", "CMA") for path in paths - {"mapped"}))

    def close(self) -> None:
        """Close both ends."""
        self.rig.close()
        self._pair.child.call("close_rig", key=self.key)


@dataclass(frozen=True)
class Pool:
    """Large memory on both sides: a source and a place for the plain memcpy here, a target there."""

    src: int
    own: int
    target: int
    remote: int
    nbytes: int


class Pair:
    """Everything that measures share. A context manager.

    Invariant: this process is pinned to the first core and the peer to the second one while it is open.
    """

    def __init__(self, settings: Settings) -> None:
        """Start and pin the peer, and pin this process."""
        self.settings = settings
        self._affinity = os.sched_getaffinity(0)
        self.shared_fd = os.memfd_create("crossrail-bench")
        os.ftruncate(self.shared_fd, _core.bench.SHARED_BYTES)
        self.child = Child(PEER_MODULE, "the receiving process", cpu=settings.cpus[1], pass_fds=(self.shared_fd,))
        os.sched_setaffinity(0, {settings.cpus[0]})
        self.note = ""  # of the measure that runs; see Result.note
        self.bare: OpenedBare | None = None  # the bare loop of a NIC's library, over memory of a link
        self._links: dict[str, Link] = {}
        self._pools: dict[str, Pool] = {}
        self._sockets: Sockets | None = None
        self._flag_rounds = 0
        self._stream_records = 0

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.sched_setaffinity(0, self._affinity)
        self.bare = None
        for link in self._links.values():
            link.rig.close()
        self._close_sockets()
        self.child.close()
        os.close(self.shared_fd)

    def reset(self) -> None:
        """Drops every link after a failure, so that left-over counts do not disturb the next measure."""
        self.bare = None
        for link in self._links.values():
            link.rig.close()
        self._links, self._pools = {}, {}
        self._close_sockets()
        self.child.call("close_everything")

    def _close_sockets(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    @contextmanager
    def on_all_cores(self) -> Iterator[None]:
        """For measures of whole programs: their threads may use all cores, as in real life."""
        os.sched_setaffinity(0, self._affinity)
        try:
            yield
        finally:
            os.sched_setaffinity(0, {self.settings.cpus[0]})

    def link(self, key: str) -> Link:
        """The link of that kind, one of _LINKS, opened when first asked for."""
        if key not in self._links:
            tls = {"tls": tls_of(None, self.settings.transport)} if key == "tls" else {}
            self._links[key] = Link(self, key, **_LINKS[key], **tls)
        return self._links[key]

    @property
    def sockets(self) -> Sockets:
        """The bare connection to the peer, opened when first asked for."""
        if self._sockets is None:
            self._sockets = Sockets(self.child, quick=self.settings.quick)
        return self._sockets

    def cpu_ns(self) -> int:
        """CPU time that both processes used so far."""
        used_there: int = self.child.call("cpu_ns")
        return time.process_time_ns() + used_there

    def pool(self, link: Link, *, private: bool) -> Pool:
        """The pool of that kind of memory, made when first asked for."""
        key = f"{link.key}-{private}"
        if key not in self._pools:
            self._pools[key] = self._make_pool(link, private)
        return self._pools[key]

    def _make_pool(self, link: Link, private: bool) -> Pool:
        nbytes = self.settings.pool_bytes
        make = link.rig.map_private if private else link.rig.alloc
        src, own = make(nbytes), make(nbytes)
        target, descriptor = link.add_peer_memory(nbytes, private=private)
        return Pool(src, own, target, link.rig.remote(descriptor), nbytes)

    def verify(self, link: Link, region: int, expected: str, what: str) -> None:
        """CrossrailError unless the peer's region has that SHA-256."""
        if self.child.call("digest", key=link.key, region=region) != expected:
            raise CrossrailError(f"{what}: what arrived is not what was sent")

    def flag_one_way_ns(self, rounds: int | None = None) -> float:
        """The bare flag between the two processes, one way. Invariant: both sides count the same rounds."""
        rounds, start = rounds or self.settings.scaled(50_000), self._flag_rounds
        self.child.start("flag_ping_pong", fd=self.shared_fd, start=start, rounds=rounds)
        took_ns = _core.bench.flag_ping_pong(self.shared_fd, first=True, start=start, rounds=rounds)
        self.child.finish()
        self._flag_rounds += rounds
        return took_ns / rounds / 2

    def stream_per_s(self) -> float:
        """Records per second through the bare ring."""
        count, start = self.settings.scaled(2_000_000), self._stream_records
        self.child.start("slot_stream", fd=self.shared_fd, start=start, count=count)
        took_ns = _core.bench.slot_stream(self.shared_fd, producer=True, start=start, count=count)
        self.child.finish()
        self._stream_records += count
        return count / took_ns * 1e9


def alternate(times: int, limit: Callable[[], float], measured: Callable[[], float]) -> tuple[float, float]:
    """Both in turn, so often; means of what they return. A machine that changes speed between two passes of one sample
    then changes both sides of its ratio."""
    pairs = [(limit(), measured()) for _ in range(times)]
    return sum(pair[0] for pair in pairs) / times, sum(pair[1] for pair in pairs) / times


def alternate_briefly(times: int, limit: Callable[[], float], measured: Callable[[], float]) -> tuple[float, float]:
    """Like alternate(), for passes so short that most of them are not interrupted: medians."""
    pairs = [(limit(), measured()) for _ in range(times)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def permutation(count: int, seed: int) -> Indices:
    """0 .. count-1 in random order."""
    import numpy as np

    return np.random.default_rng(seed).permutation(count).astype(np.int64)

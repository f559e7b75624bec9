"""An engine's traffic counters per rail and per peer, as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest

from crossrail import Engine


@dataclass
class Counts:
    """Counters of one rail towards all peers, or of one peer over all rails, since the engine opened.

    works: work requests put on rails, counted once more when they were resent; bytes: of these; imms: how many of these
    had an immediate. broken: connections or paths that broke; again: works that were resent because of it.
    latencies: how many of the works that were timed took so long, by the engine's bounds; latency_s: sum of these. From
    the hand-over to the transport until nothing touches memory any more. One work at a time is timed of each peer,
    and of those that are over at once, as in shared memory, one in 256 writes.
    """

    works: int = 0
    bytes: int = 0
    imms: int = 0
    broken: int = 0
    again: int = 0
    latency_s: float = 0.0
    latencies: list[int] = field(default_factory=list)

    def add(self, more: Counts) -> None:
        self.works += more.works
        self.bytes += more.bytes
        self.imms += more.imms
        self.broken += more.broken
        self.again += more.again
        self.latency_s += more.latency_s
        pairs = zip(self.latencies, more.latencies, strict=True) if self.latencies else ((0, n) for n in more.latencies)
        self.latencies = [ours + theirs for ours, theirs in pairs]

    def since(self, was: Counts) -> Counts:
        """What was counted since then; 0 where the count has decreased."""
        latencies = zip_longest(self.latencies, was.latencies, fillvalue=0)
        return Counts(
            works=max(self.works - was.works, 0),
            bytes=max(self.bytes - was.bytes, 0),
            imms=max(self.imms - was.imms, 0),
            broken=max(self.broken - was.broken, 0),
            again=max(self.again - was.again, 0),
            latency_s=max(self.latency_s - was.latency_s, 0.0),
            latencies=[max(ours - theirs, 0) for ours, theirs in latencies],
        )


@dataclass
class RailTraffic:
    """depth: works on the rail that are not over; down: paths from it to rails of peers that are down, as
    Engine.explain says. Both None where not Traffic.is_whole.
    """

    transport: str
    rail: int
    counts: Counts
    depth: int | None
    down: int | None


@dataclass
class PeerTraffic:
    """Peers of one name; there may be several, which are summed up: `states` and `transports` say how many are in each.

    outstanding: works that the transport has; queued: operations not with it yet. refused: posts of which the transport
    did not take all, so that the rest was tried again. failed: transfers that failed because of this peer. paths: bytes
    by the way they went, as "mapped" or "tcp" (Engine.explain).
    """

    name: str
    transports: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    counts: Counts = field(default_factory=Counts)
    outstanding: int = 0
    queued: int = 0
    refused: int = 0
    failed: int = 0
    paths: Counter[str] = field(default_factory=Counter)


@dataclass
class Traffic:
    """The traffic counters of an engine. peers: by name. bounds_s: upper bounds of the latency buckets in seconds,
    ascending; one more bucket has everything above.

    is_whole: False if the thread that drives the engine did not answer in time for each peer, so depths of rails and
    paths of some peers are missing. hangs: it answered for none and made no progress meanwhile: it is not merely busy.
    """

    rails: list[RailTraffic]
    peers: dict[str, PeerTraffic]
    bounds_s: list[float]
    is_whole: bool
    hangs: bool


def read_traffic(engine: Engine, timeout_s: float = 1.0) -> Traffic:
    """The engine's counters now. Lost and forgotten peers are left out; what went to them stays in the rails' counters.

    Any thread; takes microseconds per peer. Asks the thread that drives the engine once per peer, and waits up to
    timeout_s seconds each time, and no longer than 3 s or timeout_s in all. After the first wait that fails it asks no
    more, and the answer lacks what only that thread knows. Raises EngineClosed.
    """
    rails, rows, bounds_s, is_whole, hangs = engine._traffic(timeout_s)
    peers: dict[str, PeerTraffic] = {}
    for name, transport, state, counts, outstanding, queued, refused, failed, paths in rows:
        peer = peers.setdefault(name, PeerTraffic(name))
        peer.transports[transport] += 1
        peer.states[state] += 1
        peer.counts.add(Counts(*counts))
        peer.outstanding += outstanding
        peer.queued += queued
        peer.refused += refused
        peer.failed += failed
        for path, nbytes in paths:
            peer.paths[path] += nbytes
    shown = [
        RailTraffic(transport, rail, Counts(*counts), depth if is_whole else None, down if is_whole else None)
        for transport, rail, counts, depth, down in rails
    ]
    return Traffic(shown, peers, bounds_s, is_whole, hangs)

"""Prometheus metrics of engines. They are read when scraped, so nothing is counted for them in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from crossrail import Engine, _options
from crossrail.errors import EngineClosed, UsageError
from crossrail.observe.durations import Durations
from crossrail.observe.families import counter, gauge, histogram
from crossrail.observe.traffic import Counts, PeerTraffic, RailTraffic, Traffic, read_traffic

PEERS_MAX = 256
_UNITS_PER_COUNT = 48
_PATIENCE_S = 1.0  # for whoever drives an engine by hand,
_PATIENCE_HANGING_S = 0.01  # and while it hangs, without a round since: scrapes must not pile up
Key = tuple[str, ...]  # values of labels

_ENGINE_COUNTERS: dict[str, tuple[str, str]] = {
    "bytes_written": ("crossrail_written_bytes", "Of writes, paged writes and scatters that are done."),
    "bytes_read": ("crossrail_read_bytes", "Of reads that are done."),
    "messages_sent": ("crossrail_messages_sent", "Messages that their receiver's pool has."),
    "messages_received": ("crossrail_messages_received", "Messages that our pool took."),
    "peers_connected": ("crossrail_peers_connected", "Connections to peers that came up."),
    "peers_lost": ("crossrail_peers_lost", "Peers that died, closed their engine or fell silent."),
    "worker_rounds": ("crossrail_rounds", "Rounds of whoever drives the engine."),
    "worker_sleeps": ("crossrail_worker_sleeps", "How often the worker went to sleep."),
}
_ENGINE_IMMEDIATES: dict[str, tuple[str, str]] = {
    "imm_units_received": ("crossrail_immediates_received", "Counts of immediates that arrived."),
    "imm_overflow_units": (
        "crossrail_immediates_dropped",
        "Counts that came when imm_counters_max numbers were in use: the job is broken.",
    ),
}
_ENGINE_GAUGES: dict[str, tuple[str, str]] = {
    "transfers_inflight": ("crossrail_transfers_inflight", "Transfers accepted and not complete."),
    "regions_open": ("crossrail_regions", "Regions that are open."),
}


@dataclass
class _Steady:
    """Counters of the peers of one name as they are shown: they grow when the sum does, and never shrink.

    When one of several peers goes, its counts leave the sum. Shown as it is, that would look like a counter that was
    reset, and rate() would take all that the others ever counted for new.
    """

    last: PeerTraffic  # the sum, when we last looked
    counts: Counts = field(default_factory=Counts)
    refused: int = 0
    failed: int = 0

    def follow(self, now: PeerTraffic) -> PeerTraffic:
        """The values to show now."""
        counts = Counts()
        for part in (self.counts, now.counts.since(self.last.counts)):
            counts.add(part)
        self.counts = counts  # not in place: what was given out is being read
        self.refused += max(now.refused - self.last.refused, 0)
        self.failed += max(now.failed - self.last.failed, 0)
        self.last = now
        return replace(now, counts=counts, refused=self.refused, failed=self.failed)


class EngineCollector(Collector):
    """The metrics of these engines, for a registry. Any thread. docs/metrics.md lists them.

    engines: told apart by their names, which must differ (UsageError). One that is closed only says so. peers_max: so
    many names of peers are shown of each, those that came first; crossrail_peers_hidden says how many are not.
    Owner of the engines: the caller.
    """

    def __init__(self, *engines: Engine, peers_max: int = PEERS_MAX) -> None:
        names = [engine.name for engine in engines]
        if len(set(names)) != len(names):
            raise UsageError(f"engines {names} are told apart by their names, and some are the same")
        _options.check_whole(peers_max=peers_max)
        if peers_max < 0:
            raise UsageError(f"peers_max is {peers_max}, must be 0 or more")
        self._engines = engines
        self._peers_max = peers_max
        # By engine and name: when it was first seen. A peer that is shown stays until it is gone.
        self._shown: dict[str, dict[str, _Steady]] = {}
        self._hanging: dict[str, int] = {}  # engines, when we last looked, and what rounds they had made
        # Guards both: scrapes may overlap, and what was read first has to come first.
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<EngineCollector of {', '.join(map(repr, self._engines))}>"

    def collect(self) -> Iterator[Metric]:
        """The current values, as Prometheus expects them."""
        open_ones: dict[Key, int] = {}
        stats: dict[str, Mapping[str, int]] = {}
        rails: dict[Key, RailTraffic] = {}
        peers: dict[Key, PeerTraffic] = {}
        hidden: dict[Key, int] = {}
        hanging: dict[Key, int] = {}
        bounds_s: Sequence[float] = ()
        for engine in self._engines:
            name = engine.name
            try:
                with self._lock:
                    traffic = self._read(engine)
                    shown = self._follow(name, traffic.peers)
                stats[name] = engine.stats()
            except EngineClosed:
                open_ones[name,] = 0
                continue
            open_ones[name,] = 1
            bounds_s = traffic.bounds_s
            rails |= {(name, rail.transport, str(rail.rail)): rail for rail in traffic.rails}
            peers |= {(name, peer.name): peer for peer in shown}
            hidden[name,] = len(traffic.peers) - len(shown)
            hanging[name,] = int(traffic.hangs)
        yield gauge("crossrail_engine_open", "1 while the engine is open.", open_ones, ["engine"])
        yield gauge(
            "crossrail_engine_hangs",
            "1 while a thread is in the engine, driving it, and does not come out again: it hangs there.",
            hanging,
            ["engine"],
        )
        yield from _engine_metrics(stats)
        yield from _rail_metrics(rails, bounds_s)
        yield gauge("crossrail_peers_hidden", "Names of peers beyond those that are shown.", hidden, ["engine"])
        yield from _peer_metrics(peers, bounds_s)

    def _read(self, engine: Engine) -> Traffic:
        rounds = engine.stats()["worker_rounds"]
        hangs_yet = self._hanging.pop(engine.name, None) == rounds
        traffic = read_traffic(engine, _PATIENCE_HANGING_S if hangs_yet else _PATIENCE_S)
        if traffic.hangs:
            self._hanging[engine.name] = rounds
        return traffic

    def _follow(self, engine: str, there: Mapping[str, PeerTraffic]) -> list[PeerTraffic]:
        """The peers that are shown, with their counters as shown."""
        shown = {name: steady for name, steady in self._shown.get(engine, {}).items() if name in there}
        for name in there:
            if len(shown) < self._peers_max and name not in shown:
                shown[name] = _Steady(PeerTraffic(name))
        self._shown[engine] = shown
        return [steady.follow(there[name]) for name, steady in shown.items()]


def _engine_metrics(stats: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    for key, (name, text) in _ENGINE_COUNTERS.items():
        yield counter(name, text, {(engine,): counts[key] for engine, counts in stats.items()}, ["engine"])
    for key, (name, text) in _ENGINE_IMMEDIATES.items():
        counted = {(engine,): each[key] / _UNITS_PER_COUNT for engine, each in stats.items()}
        yield counter(name, text, counted, ["engine"])
    for key, (name, text) in _ENGINE_GAUGES.items():
        yield gauge(name, text, {(engine,): counts[key] for engine, counts in stats.items()}, ["engine"])
    outcomes = {
        (engine, how): counts[f"transfers_{how}"]
        for engine, counts in stats.items()
        for how in ("done", "failed", "cancelled")
    }
    yield counter("crossrail_transfers", "Transfers that ended, by how.", outcomes, ["engine", "outcome"])


def _rail_metrics(rails: Mapping[Key, RailTraffic], bounds_s: Sequence[float]) -> Iterator[Metric]:
    labels = ["engine", "transport", "rail"]
    yield from _count_metrics("crossrail_rail", {key: rail.counts for key, rail in rails.items()}, labels, bounds_s)
    depths = {key: rail.depth for key, rail in rails.items() if rail.depth is not None}
    yield gauge("crossrail_rail_depth", "Works that are on the rail and not over.", depths, labels)
    down = {key: rail.down for key, rail in rails.items() if rail.down is not None}
    yield gauge("crossrail_rail_down_paths", "Paths from it to rails of peers that are down.", down, labels)


def _peer_metrics(peers: Mapping[Key, PeerTraffic], bounds_s: Sequence[float]) -> Iterator[Metric]:
    labels = ["engine", "peer"]
    yield from _count_metrics("crossrail_peer", {key: peer.counts for key, peer in peers.items()}, labels, bounds_s)
    outstanding = {key: peer.outstanding for key, peer in peers.items()}
    yield gauge("crossrail_peer_outstanding", "Works that the transport has.", outstanding, labels)
    queued = {key: peer.queued for key, peer in peers.items()}
    yield gauge("crossrail_peer_queued", "Operations that wait to be handed to the transport.", queued, labels)
    refused = {key: peer.refused for key, peer in peers.items()}
    yield counter(
        "crossrail_peer_refused_posts", "Posts that the transport had no room for: tried again.", refused, labels
    )
    failed = {key: peer.failed for key, peer in peers.items()}
    yield counter("crossrail_peer_failed_transfers", "Transfers that failed because of it.", failed, labels)
    states = {(*key, state): n for key, peer in peers.items() for state, n in peer.states.items()}
    yield gauge("crossrail_peer_state", "Peers of that name in that state.", states, [*labels, "state"])
    transports = {(*key, name): n for key, peer in peers.items() for name, n in peer.transports.items()}
    yield gauge("crossrail_peer_transport", "Peers of that name over it.", transports, [*labels, "transport"])
    paths = {(*key, path): nbytes for key, peer in peers.items() for path, nbytes in peer.paths.items()}
    yield gauge(
        "crossrail_peer_path_bytes",
        "Moved to regions that are reached in this way now.",
        paths,
        [*labels, "path"],
    )


def _count_metrics(
    prefix: str, counts: Mapping[Key, Counts], labels: Sequence[str], bounds_s: Sequence[float]
) -> Iterator[Metric]:
    """The metrics that rails and peers have in common."""
    for attribute, name, text in (
        ("bytes", "bytes", "Put on rails; what was resent counts again."),
        ("works", "works", "Work requests put on rails."),
        ("imms", "immediates", "Work requests that carried an immediate."),
        ("broken", "broken_paths", "Connections or paths that ended badly."),
        ("again", "retried_works", "Work requests that were resent because of that."),
    ):
        values = {key: getattr(count, attribute) for key, count in counts.items()}
        yield counter(f"{prefix}_{name}", text, values, labels)
    durations = {key: _durations(count, bounds_s) for key, count in counts.items()}
    text = "Of a sample of works, from hand-over to the transport to end."
    yield histogram(f"{prefix}_latency_seconds", text, durations, labels)


def _durations(counts: Counts, bounds_s: Sequence[float]) -> Durations:
    """Every second bound is left out: a factor of four is what an alert needs."""
    kept = Durations(bounds_s[::2])
    kept.sum_s = counts.latency_s
    for index, count in enumerate(counts.latencies):
        kept.counts[(index + 1) // 2] += count
    return kept

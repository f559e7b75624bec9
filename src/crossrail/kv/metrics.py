"""What a router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crossrail.kv.messages import Role
from crossrail.kv.router import Router

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROLES: tuple[Role, ...] = ("prefiller", "decoder")


class Metrics:
    """A registry of its own, so that several routers of one process do not mix. Threads: the event loop's."""

    def __init__(self, router: Router) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_RouterState(router))
        self.first_token_s = Histogram(
            "crossrail_kv_time_to_first_token_seconds",
            "From the request's arrival at the router to its first token there.",
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.request_s = Histogram(
            "crossrail_kv_request_seconds",
            "From the request's arrival at the router to its end, however it ended.",
            buckets=_LATENCY_BUCKETS_S,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """In the format that Prometheus scrapes."""
        return generate_latest(self._registry)


class _RouterState(Collector):
    """Read when asked for, so that nothing is counted twice."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        yield GaugeMetricFamily("crossrail_kv_requests", "Requests under way.", value=router.requests)
        ended = CounterMetricFamily(
            "crossrail_kv_requests_ended", "Requests by how they ended, and re-dispatches.", labels=["how"]
        )
        for how, count in sorted(router.counts.items()):
            ended.add_metric([how], count)
        yield ended
        dropped = CounterMetricFamily(
            "crossrail_kv_messages_dropped", "Control messages that were not taken.", labels=["why"]
        )
        for why, count in sorted(router.mailbox.dropped.items()):
            dropped.add_metric([why], count)
        yield dropped
        nodes = GaugeMetricFamily("crossrail_kv_nodes", "Members.", labels=["role"])
        pages = GaugeMetricFamily("crossrail_kv_pages", "Pages by node and state.", labels=["node", "state"])
        queued = GaugeMetricFamily("crossrail_kv_queued_tokens", "Tokens that a node has to do.", labels=["node"])
        for role in _ROLES:
            members = router.roster.members(role)
            nodes.add_metric([role], len(members))
            for member in members:
                load = member.load
                pages.add_metric([member.name, "free"], load.pages_free)
                pages.add_metric([member.name, "quarantined"], load.pages_quarantined)
                pages.add_metric([member.name, "all"], load.pages_total)
                queued.add_metric([member.name], load.queued_tokens)
        yield from (nodes, pages, queued)

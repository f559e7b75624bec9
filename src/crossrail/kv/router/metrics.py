"""Prometheus metrics of a router, for crossrail.observe.serve_metrics or a registry of yours."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from crossrail.kv.messages import Role
from crossrail.kv.router.router import Router
from crossrail.observe.durations import Durations
from crossrail.observe.families import counter, gauge, histogram

_LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_MOVES = ("redispatched", "restarted")
_ROLES: tuple[Role, ...] = ("prefiller", "decoder")


class RouterCollector(Collector):
    """The metrics of a router. Any thread. docs/metrics.md lists them.

    first_token, whole: durations of requests until their first token, and until their end, however they ended. Whoever
    accepts requests for the router, such as its HTTP front, adds to them, in one thread. Owner of the router: the
    caller.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self.first_token = Durations(_LATENCY_BOUNDS_S)
        self.whole = Durations(_LATENCY_BOUNDS_S)

    def __repr__(self) -> str:
        return f"<RouterCollector of {self._router.name!r}>"

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a prometheus_client registry."""
        router = self._router
        yield gauge("crossrail_kv_requests", "Requests under way.", {(): router.requests}, [])
        counts = dict(router.counts)
        ended = {(how,): count for how, count in sorted(counts.items()) if how not in _MOVES}
        yield counter("crossrail_kv_requests_ended", "Requests by how they ended, each once.", ended, ["how"])
        moved = {(what,): counts.get(what, 0) for what in _MOVES}
        yield counter("crossrail_kv_requests_moved", "How often one got another node.", moved, ["what"])
        dropped = {(why,): count for why, count in sorted(router.mailbox.dropped.items())}
        yield counter("crossrail_kv_messages_dropped", "Control messages that were not taken.", dropped, ["why"])
        members = {role: router.roster.members(role) for role in _ROLES}
        yield gauge(
            "crossrail_kv_nodes", "Members.", {(role,): len(there) for role, there in members.items()}, ["role"]
        )
        pages: dict[tuple[str, str], float] = {}
        queued: dict[tuple[str], float] = {}
        for member in (member for there in members.values() for member in there):
            load = member.load
            pages[member.name, "free"] = load.pages_free
            pages[member.name, "quarantined"] = load.pages_quarantined
            pages[member.name, "all"] = load.pages_total
            queued[member.name,] = load.queued_tokens
        yield gauge("crossrail_kv_pages", "Pages by node and state.", pages, ["node", "state"])
        yield gauge("crossrail_kv_queued_tokens", "Tokens that a node has to do.", queued, ["node"])
        first = "From the request's arrival at the router to its first token there."
        yield histogram("crossrail_kv_time_to_first_token_seconds", first, {(): self.first_token}, [])
        whole = "From the request's arrival at the router to its end, however it ended."
        yield histogram("crossrail_kv_request_seconds", whole, {(): self.whole}, [])

"""Prometheus metrics of MoE rounds, for crossrail.observe.serve_metrics or a registry of yours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from crossrail.moe.all_to_all import AllToAll
from crossrail.observe.families import counter, histogram

_COUNTERS = {
    "rounds": ("crossrail_moe_rounds", "Rounds begun."),
    "tokens_sent": ("crossrail_moe_tokens_sent", "Tokens given to dispatch."),
    "rows_received": ("crossrail_moe_rows_received", "Rows that our experts got."),
    "bytes_received": ("crossrail_moe_received_bytes", "Of these rows."),
    "bytes_summed": ("crossrail_moe_summed_bytes", "Of experts' outputs that combine summed up."),
    "waited_s": ("crossrail_moe_waited_seconds", "Spent in waiting for other ranks."),
}


class RoundCollector(Collector):
    """The metrics of AllToAlls, each under a name. Any thread. docs/metrics.md lists them.

    models: name to AllToAll, read at each scrape. Owner of the AllToAlls: the caller.
    """

    def __init__(self, models: Mapping[str, AllToAll]) -> None:
        self._models = models

    def __repr__(self) -> str:
        return f"<RoundCollector of {', '.join(self._models) or 'nothing'}>"

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a prometheus_client registry."""
        models = dict(self._models)
        labels = ["model", "rank"]
        stats = {(name, str(each.rank)): each.stats() for name, each in models.items()}
        for key, (name, text) in _COUNTERS.items():
            yield counter(name, text, {whose: counts[key] for whose, counts in stats.items()}, labels)
        durations = {(name, str(each.rank)): each.durations() for name, each in models.items()}
        text = "Of rounds completed, from dispatch_send to the end of combine_recv, with what experts took."
        yield histogram("crossrail_moe_round_seconds", text, durations, labels)

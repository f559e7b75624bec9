"""Prometheus metrics of weight updates, for crossrail.observe.serve_metrics or a registry of yours."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from crossrail.observe.families import counter, gauge, histogram
from crossrail.weights.inventory.holdings import Role
from crossrail.weights.services.controller import WeightController

_ROLES: tuple[Role, ...] = ("trainer", "target")


class UpdateCollector(Collector):
    """The metrics of a controller. Any thread. docs/metrics.md lists them. Owner of the controller: the caller."""

    def __init__(self, controller: WeightController) -> None:
        self._controller = controller

    def __repr__(self) -> str:
        return f"<UpdateCollector of {self._controller!r}>"

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a prometheus_client registry."""
        controller, totals = self._controller, self._controller.totals
        yield gauge("crossrail_weights_version", "The last that was completed; -1: none.", {(): controller.version}, [])
        members = {(role,): len(controller.ranks(role)) for role in _ROLES}
        yield gauge("crossrail_weights_members", "Trainers and inference ranks that are there.", members, ["role"])
        outcomes = {("done",): totals.done, ("failed",): totals.failed, ("cancelled",): totals.cancelled}
        yield counter("crossrail_weights_updates", "Updates by how they ended.", outcomes, ["outcome"])
        yield counter("crossrail_weights_written_bytes", "Of updates that are done.", {(): totals.written_bytes}, [])
        stages = {(stage,): seconds for stage, seconds in totals.stage_s.items()}
        yield counter("crossrail_weights_stage_seconds", "Of updates that are done, by stage.", stages, ["stage"])
        yield histogram("crossrail_weights_update_seconds", "Of updates that are done.", {(): totals.durations}, [])

"""Prometheus metric families from plain numbers, by label values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from crossrail.observe.durations import Durations

Key = TypeVar("Key", bound=tuple[str, ...])  # values of labels, in their order


def counter(name: str, text: str, values: Mapping[Key, float], labels: Sequence[str]) -> Metric:
    """A family of numbers that only grow; Prometheus adds "_total" to the name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, values: Mapping[Key, float], labels: Sequence[str]) -> Metric:
    """A family of numbers that go up and down."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(name: str, text: str, values: Mapping[Key, Durations], labels: Sequence[str]) -> Metric:
    """A family of durations."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, durations in values.items():
        buckets: list[tuple[str, float]] = []
        below = 0
        for bound_s, count in zip((*durations.bounds_s, float("inf")), durations.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound_s == float("inf") else f"{bound_s:g}", below))
        family.add_metric(key, buckets, sum_value=durations.sum_s)
    return family

"""The output of collectors, as plain numbers."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

_DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def collect(*collectors: Collector) -> Samples:
    """Value by name and sorted labels, as a registry of these gives them."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def read(text: str) -> Samples:
    """The samples in an endpoint's answer."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of all that have these labels; there must be one."""
    found = [value for (key, has), value in samples.items() if key == name and set(labels.items()) <= set(has)]
    assert found, f"no {name} with {labels} in {sorted(samples)}"
    return sum(found)


def names_of(samples: Samples, label: str) -> set[str]:
    """The values of this label."""
    return {value for _, labels in samples for key, value in labels if key == label}


def assert_documented(samples: Samples, prefix: str) -> None:
    """docs/metrics.md has these metrics, and of those with this prefix no others."""
    documented = {
        name for name in re.findall(r"`(crossrail_\w+[a-z])`", _DOCUMENTED.read_text()) if re.match(prefix, name)
    }
    assert documented == {re.sub("_(bucket|sum|count)$", "", name) for name, _ in samples}

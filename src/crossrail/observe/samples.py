"""Metrics as a scraper of an endpoint sees them: current values, and rates between two scrapes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from crossrail.errors import CrossrailError, UsageError
from crossrail.observe.http import open_url

_ANSWER_BYTES_MAX = 64 << 20
_HOW_TO_SERVE = (
    "a process serves them after crossrail.observe.serve_metrics(engine), "
    "`crossrail kv prefiller` and `decoder` with --metrics-port PORT"
)

Labels = Mapping[str, str]


@dataclass
class Scrape:
    """The result of one scrape. at_s: of time.monotonic()."""

    at_s: float
    # By metric, then by the label "peer": there may be hundreds of peers, and each is asked for separately.
    _samples: dict[str, dict[str, list[tuple[Labels, float]]]] = field(default_factory=dict)

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Adds one sample."""
        self._samples.setdefault(name, {}).setdefault(labels.get("peer", ""), []).append((labels, value))

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def of(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """The samples of this name that have these labels."""
        by_peer = self._samples.get(name, {})
        for samples in [by_peer.get(labels["peer"], [])] if "peer" in labels else by_peer.values():
            for has, value in samples:
                if labels.items() <= has.items():
                    yield has, value

    def total(self, name: str, **labels: str) -> float:
        """The sum of the matching samples; 0 if there are none."""
        return sum(value for _, value in self.of(name, **labels))

    def values_of(self, name: str, label: str, **labels: str) -> list[str]:
        """The values of this label, each once, in order."""
        return list(dict.fromkeys(has[label] for has, _ in self.of(name, **labels) if label in has))


def scrape(url: str, timeout_s: float) -> Scrape:
    """Reads an endpoint in Prometheus's text format. Raises CrossrailError where none answers, or not with that."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"{url!r} is not the address of a metrics endpoint: write for example http://127.0.0.1:9478/metrics"
        )
    try:
        with open_url(url, timeout_s) as answer:
            data = answer.read(_ANSWER_BYTES_MAX + 1)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)  # of a URLError, what was behind it
        remedy = f"; {_HOW_TO_SERVE}" if isinstance(reason, ConnectionRefusedError) else ""
        raise CrossrailError(f"no metrics at {url}: {getattr(reason, 'strerror', None) or reason}{remedy}") from None
    if len(data) > _ANSWER_BYTES_MAX:
        raise CrossrailError(
            f"what {url} answers is longer than {_ANSWER_BYTES_MAX >> 20} MiB: not crossrail's metrics"
        )
    return parse(data.decode(errors="replace"), url)


def parse(text: str, url: str) -> Scrape:
    """Parses a scrape's text; url: its name in errors."""
    found = Scrape(time.monotonic())
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.add(sample.name, sample.labels, sample.value)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # what its parser raises for other text
        raise CrossrailError(f"what {url} answers is not in Prometheus's format") from None
    if not len(found):
        raise CrossrailError(f"what {url} answers is not in Prometheus's format")
    return found


@dataclass
class Interval:
    """What happened between two scrapes. A counter that shrank was restarted in between: all of it counts."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """Between the two."""
        return self.now.at_s - self.before.at_s

    def growth(self, name: str, **labels: str) -> float:
        """The growth of a counter, summed up over all that have these labels."""
        before = {tuple(sorted(has.items())): value for has, value in self.before.of(name, **labels)}
        grown = 0.0
        for has, value in self.now.of(name, **labels):
            was = before.get(tuple(sorted(has.items())), 0.0)
            grown += value - was if value >= was else value
        return grown

    def rate(self, name: str, **labels: str) -> float:
        """The growth per second."""
        return self.growth(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """A quantile of a histogram's new entries: `share` of them were at most so large, by PromQL's interpolation.

        None: it got nothing.
        """
        grown = self._grown_by_bound(f"{name}_bucket", labels)
        bounds = sorted(grown)
        counts = [grown[bound] for bound in bounds]
        if not counts or counts[-1] <= 0:
            return None
        wanted = share * counts[-1]
        lower, below = 0.0, 0.0
        for bound, count in zip(bounds, counts, strict=True):
            if count >= wanted:
                if bound == float("inf"):
                    return lower
                inside = (wanted - below) / (count - below) if count > below else 1.0
                return lower + (bound - lower) * inside
            lower, below = bound, count
        return lower

    def _grown_by_bound(self, name: str, labels: Labels) -> dict[float, float]:
        grown: dict[float, float] = {}
        for scraped, sign in ((self.before, -1), (self.now, 1)):
            for has, value in scraped.of(name, **labels):
                bound = float(has["le"])
                grown[bound] = grown.get(bound, 0.0) + sign * value
        if any(count < 0 for count in grown.values()):  # it was reset
            grown = dict.fromkeys(grown, 0.0)
            for has, value in self.now.of(name, **labels):
                grown[float(has["le"])] += value
        return grown

"""`crossrail bench --transport verbs` at a tiny size, beside the bare loops over libibverbs."""

from contextlib import closing

import pytest

from crossrail.cli.bench.measures import all_measures
from crossrail.cli.bench.pair import Pair, Settings, choose_cpus


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(Settings, "scaled", lambda _self, _count: 20)
    return Pair(Settings(choose_cpus(), 1 << 20, "verbs", quick=True))


@pytest.mark.parametrize("name", ["write-64k-w1", "write-64k-w16", "paged-1k", "paged-64k", "ping-pong"])
def test_measure_stands_beside_bare_verbs(pair: Pair, name: str) -> None:
    (measure,) = (measure for measure in all_measures("verbs") if measure.name == name)

    with pair, closing(measure.samples(pair)) as samples:
        drawn = [next(samples) for _ in range(2)]

    assert measure.limit == "bare verbs" and (measure.bar is None) == (name == "write-64k-w1")
    assert all(sample.value > 0 and sample.limit is not None and sample.limit > 0 for sample in drawn)

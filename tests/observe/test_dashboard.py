"""The dashboard and the alert rules ask for what there is. Each part's own metrics are checked beside its tests."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from crossrail.observe import EngineCollector
from crossrail.observe.files import DASHBOARD
from tests.conftest import EngineFactory
from tests.observe.test_metrics import write
from tests.support.metrics import Samples, collect
from tests.support.promql import Query, alerts, assert_answered, queries, selectors, unanswered

ENGINE_METRICS = "crossrail_(?!kv_|weights_|moe_)"


@pytest.fixture
def samples(open_engine: EngineFactory) -> Samples:
    here, there = open_engine("here"), open_engine("there")
    write(here, there)
    return collect(EngineCollector(here, there))


def test_queries_about_engines_are_answered(samples: Samples) -> None:
    assert_answered(samples, ENGINE_METRICS)


def test_every_family_of_metrics_has_a_panel_and_an_alert_can_be_read() -> None:
    asked = Counter(
        re.match(r"crossrail_[a-z]+_", each.name).group() for query in queries() for each in selectors(query)
    )

    assert {"crossrail_rail_", "crossrail_peer_", "crossrail_weights_", "crossrail_moe_", "crossrail_kv_"} <= set(asked)
    assert len(alerts()) == 8
    assert len({rule["alert"] for rule in alerts()}) == 8


@pytest.mark.parametrize(
    ("expr", "legend", "what"),
    [
        ("crossrail_rail_speed", "", "there is no crossrail_rail_speed"),
        ("sum by (peer) (rate(crossrail_rail_bytes_total[1m]))", "", r"has no \['peer'\]"),
        ('crossrail_rail_depth{nic="a"}', "", r"has no \['nic'\]"),
        ('crossrail_transfers_total{outcome="lost"}', "", "has no outcome='lost'"),
        ("crossrail_rail_depth", "{{peer}}", r"texts name \['peer'\]"),
        ("sum by (rail) (crossrail_rail_depth)", "{{transport}}", r"texts name \['transport'\]"),
    ],
)
def test_wrong_queries_are_found(samples: Samples, expr: str, legend: str, what: str) -> None:
    (wrong,) = unanswered(Query("here", expr, legend), samples)

    assert re.search(what, wrong)


@pytest.mark.parametrize("expr", ["node_load1", "sum(crossrail_rail_depth) ^ 2", 'crossrail_rail_depth{rail!="0"}'])
def test_what_is_not_understood_is_no_answer(samples: Samples, expr: str) -> None:
    with pytest.raises(AssertionError):
        unanswered(Query("here", expr, ""), samples)


def test_panels_do_not_overlap_and_name_their_source() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
        # Said aloud: where it is missing, newer versions of Grafana may draw none.
        assert panel["type"] != "timeseries" or panel["options"]["legend"]["showLegend"] is True, panel["title"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])

"""Metrics of updates."""

from __future__ import annotations

from crossrail.weights import UpdateCollector
from tests.support.metrics import assert_documented, collect, total
from tests.support.promql import assert_answered
from tests.weights.conftest import MakeFleet


async def test_updates_are_counted_by_how_they_ended(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(trainer_count=1)
    await fleet.start()
    reports = [await fleet.update(1), await fleet.update(2)]
    member = fleet.controller._roster.members["trainer", 0]
    inventory = member.inventory
    member.inventory = type(inventory).of("trainer", 0, inventory.regions, list(inventory.holdings)[1:])
    fleet.controller.plan = None
    await fleet.failing_update(3)

    samples = collect(UpdateCollector(fleet.controller))

    assert total(samples, "crossrail_weights_version") == 2
    assert total(samples, "crossrail_weights_updates_total", outcome="done") == 2
    assert total(samples, "crossrail_weights_updates_total", outcome="failed") == 1
    assert total(samples, "crossrail_weights_updates_total", outcome="cancelled") == 0
    assert total(samples, "crossrail_weights_written_bytes_total") == sum(report.written_bytes for report in reports)
    for stage in ("plan", "open", "transfer", "commit"):
        spent_s = sum(getattr(report, f"{stage}_s") for report in reports)
        assert abs(total(samples, "crossrail_weights_stage_seconds_total", stage=stage) - spent_s) < 1e-9
    assert total(samples, "crossrail_weights_update_seconds_count") == 2
    assert total(samples, "crossrail_weights_members", role="trainer") == 1
    assert_documented(samples, "crossrail_weights_")
    assert_answered(samples, "crossrail_weights_")

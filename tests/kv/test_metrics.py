"""Metrics of a router."""

from __future__ import annotations

from crossrail.kv import RouterCollector
from tests.kv.conftest import start, until
from tests.kv.steps import GREEDY, PROMPT
from tests.support.kv_cluster import Cluster
from tests.support.metrics import assert_documented, collect, total
from tests.support.promql import assert_answered


async def test_requests_and_nodes_are_counted(cluster: Cluster) -> None:
    await start(cluster)
    collector = RouterCollector(cluster.router)
    await cluster.complete(PROMPT, GREEDY)
    await until(lambda: cluster.router.requests == 0, "it has ended")
    collector.first_token.add(0.003)
    collector.whole.add(200.0)
    cluster.router.mailbox._drop(b"nobody", "type", "a test says so")

    samples = collect(collector)

    assert total(samples, "crossrail_kv_requests") == 0
    assert total(samples, "crossrail_kv_requests_ended_total", how="length") == 1
    assert total(samples, "crossrail_kv_nodes", role="prefiller") == 1
    assert total(samples, "crossrail_kv_pages", node="d0", state="all") == 64
    assert total(samples, "crossrail_kv_time_to_first_token_seconds_bucket", le="0.005") == 1
    assert total(samples, "crossrail_kv_request_seconds_bucket", le="120") == 0
    assert total(samples, "crossrail_kv_request_seconds_sum") == 200
    assert_documented(samples, "crossrail_kv_")
    assert_answered(samples, "crossrail_kv_")

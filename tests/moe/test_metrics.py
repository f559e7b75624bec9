"""Metrics of rounds."""

from __future__ import annotations

from crossrail.moe import RoundCollector
from tests.moe.batches import draw
from tests.moe.ranks import Ranks
from tests.moe.test_rounds import BLOCK, whole_round
from tests.support.metrics import assert_documented, collect, total
from tests.support.promql import assert_answered
from tests.support.seeds import Seed


def test_rounds_are_counted_and_timed(seed: Seed) -> None:
    random = seed.rng()
    with Ranks(2, experts=4, hidden=32, top_k=2, max_tokens=8, scale_block=BLOCK, out_dtype="float32") as ranks:
        collector = RoundCollector({"layer 0": ranks.parts[1]})
        batches = [draw(random, 8, 32, 4, 2, BLOCK) for _ in range(2)]
        for _ in range(3):
            ranks.each(lambda part, rank: whole_round(part, rank, batches))
        ranks.each(lambda p, r: p.dispatch(batches[r].x, batches[r].scales, batches[r].indices))

        samples = collect(collector)

        stats = ranks.parts[1].stats()
        assert total(samples, "crossrail_moe_rounds_total", model="layer 0", rank="1") == 4
        assert total(samples, "crossrail_moe_tokens_sent_total") == 4 * 8
        assert total(samples, "crossrail_moe_rows_received_total") == stats["rows_received"] > 0
        assert total(samples, "crossrail_moe_received_bytes_total") == stats["bytes_received"]
        assert total(samples, "crossrail_moe_summed_bytes_total") == 3 * 16 * 128
        assert total(samples, "crossrail_moe_round_seconds_count") == 3  # the fourth is not over
        assert total(samples, "crossrail_moe_round_seconds_sum") > 0
        assert_documented(samples, "crossrail_moe_")
        assert_answered(samples, "crossrail_moe_")

"""The simulation of many GPUs: it sends what routes need, is the same in every run, and close to what was published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crossrail.cli.main import main
from crossrail.cli.moe.published import CLUSTERS, FIGURES, TOKENS
from crossrail.cli.moe.simulate import Setting, simulate
from crossrail.errors import UsageError

# Where nothing is left open: see docs/moe-measured.md.
DECODE_STEPS = {("cx7", 16): ("dispatch", "combine"), ("cx7", 32): ("dispatch", "combine"), ("efa", 16): ("combine",)}


@pytest.mark.parametrize(("cluster", "ranks"), DECODE_STEPS)
def test_decode_takes_what_was_published(cluster: str, ranks: int) -> None:
    outcome = simulate(Setting(CLUSTERS[cluster], ranks, TOKENS["decode"]))

    for step in DECODE_STEPS[cluster, ranks]:
        published = getattr(FIGURES["decode"][cluster][ranks], step)
        assert getattr(outcome, f"{step}_us") == pytest.approx(published, rel=0.2)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_prefill_takes_what_was_published(cluster: str) -> None:
    outcome = simulate(Setting(CLUSTERS[cluster], 16, TOKENS["prefill"]))

    published = FIGURES["prefill"][cluster][16]
    assert outcome.dispatch_us == pytest.approx(published.dispatch, rel=0.2)
    assert outcome.combine_us == pytest.approx(published.combine, rel=0.2)


def test_what_is_sent_is_what_routes_need() -> None:
    setting = Setting(CLUSTERS["cx7"], 16, TOKENS["decode"])
    config = setting.config()

    outcome = simulate(setting)

    far_routes = setting.tokens * config.top_k / 2  # half of the experts are on the other node; the mean of 16 ranks
    rows_bytes = far_routes * config.stride_bytes + 8 * 4 * config.experts  # and our routes to eight ranks
    assert outcome.dispatch_bytes == pytest.approx(rows_bytes, rel=0.02)
    assert outcome.combine_bytes == pytest.approx(far_routes * config.y_bytes, rel=0.02)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nodes_that_add_up_return_less_and_sooner(cluster: str) -> None:
    """16 ranks: four of a token's experts are on the other node, and all but one token in 256 have any there."""
    one_by_one, added_up = (simulate(Setting(CLUSTERS[cluster], 16, 512, node_sums=sums)) for sums in (False, True))

    assert added_up.combine_bytes == pytest.approx(512 * (1 - 2**-8) * 7168 * 2, rel=0.02)
    assert added_up.combine_us < 0.75 * one_by_one.combine_us
    assert added_up.dispatch_us < 1.05 * one_by_one.dispatch_us


def test_nodes_of_64_ranks_that_add_up_send_a_quarter_less() -> None:
    """A token has seven of its eight experts on other nodes, on 4.6 of them."""
    one_by_one, added_up = (simulate(Setting(CLUSTERS["cx7"], 64, 16, node_sums=sums)) for sums in (False, True))

    assert added_up.combine_bytes <= 0.75 * one_by_one.combine_bytes
    assert added_up.combine_us < one_by_one.combine_us
    assert added_up.dispatch_us < 1.05 * one_by_one.dispatch_us


def test_runs_of_one_seed_are_equal() -> None:
    first, again, other = (simulate(Setting(CLUSTERS["efa"], 16, 16, rounds=3, seed=seed)) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_without_far_ranks_nothing_is_sent() -> None:
    outcome = simulate(Setting(CLUSTERS["cx7"], 8, TOKENS["decode"]))

    assert outcome.dispatch_bytes == outcome.combine_bytes == 0
    assert outcome.dispatch_us > 0


def test_ranks_that_do_not_share_the_experts_evenly_are_refused() -> None:
    with pytest.raises(UsageError, match="ranks is 24, must be a divisor of 256"):
        Setting(CLUSTERS["cx7"], 24, 128)


def test_the_command_prints_and_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "moe.json"

    result = CliRunner().invoke(
        main,
        ["moe", "sim", "--cluster", "cx7", "--shape", "decode", "--ranks", "16", "--seed", "5", "--json", str(file)],
    )

    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written["seed"] == 5
    (found,) = written["results"]
    assert found["cluster"] == "cx7" and found["ranks"] == 16
    assert f"{found['dispatch_us']:,.0f}" in result.output and "110" in result.output
    assert "1 of 1: decode, cx7, 16 ranks" in result.output, "what it is at, before the table"

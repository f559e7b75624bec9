"""Intervals of medians and quotients: what they promise, and where there is none."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrail.cli.bench.interval import CONFIDENCE, Interval, of_median, of_quotient, order_statistics_outside
from tests.support.seeds import Seed

POSITIVE = st.floats(1e-6, 1e9)


def enclosed(count: int, outside: int) -> float:
    """How often the median is between the sorted runs that are left: by the binomial distribution."""
    return float(1 - 2 * sum(math.comb(count, below) for below in range(outside + 1)) / 2**count)


@pytest.mark.parametrize("count", range(6, 60))
def test_order_statistics_leave_out_as_many_as_the_level_allows(count: int) -> None:
    outside = order_statistics_outside(count)

    assert enclosed(count, outside) >= CONFIDENCE > enclosed(count, outside + 1)


@pytest.mark.parametrize(("count", "outside"), [(6, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_order_statistics_are_those_of_the_tables(count: int, outside: int) -> None:
    assert order_statistics_outside(count) == outside


def test_six_runs_give_the_smallest_and_the_largest() -> None:
    assert of_median([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == Interval(1.0, 6.0, "order statistics")


@given(st.lists(POSITIVE, min_size=2, max_size=12))
def test_interval_encloses_the_median_that_is_printed(values: list[float]) -> None:
    interval = of_median(values)

    assert interval is not None
    median = statistics.median(values) * (1 + 1e-9)
    assert interval.low <= median and median <= interval.high * (1 + 2e-9)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 0.0], [1.0, -2.0], [1.0, math.inf], [1.0, math.nan]])
def test_no_interval_of_too_few_runs_or_of_what_has_no_logarithm(values: list[float]) -> None:
    assert of_median(values) is None
    assert of_quotient(values, [1.0, 2.0]) is None
    assert of_quotient([1.0, 2.0], values) is None


@pytest.mark.parametrize("count", [2, 3, 5, 6, 9])
def test_interval_encloses_the_true_median_as_often_as_it_says(count: int, seed: Seed) -> None:
    """Of 2000 drawn samples: 95 %, give or take five standard deviations; order statistics may be above."""
    rng = seed.rng()
    drawn = rng.lognormal(mean=1.0, sigma=0.2, size=(2000, count))

    hits = 0
    for values in drawn:
        interval = of_median([float(value) for value in values])
        assert interval is not None
        hits += interval.low <= math.e <= interval.high

    slack = 5 * math.sqrt(0.95 * 0.05 / len(drawn))
    assert hits / len(drawn) >= CONFIDENCE - slack
    assert count >= 6 or hits / len(drawn) <= CONFIDENCE + slack


def test_quotient_of_the_same_runs_is_one() -> None:
    interval = of_quotient([2.0, 2.1, 2.2], [2.0, 2.1, 2.2])

    assert interval is not None and interval.low < 1 < interval.high


def test_quotient_of_clearly_different_runs_is_on_one_side() -> None:
    interval = of_quotient([3.0, 3.1, 3.05], [2.0, 2.02, 2.04])

    assert interval is not None and 1.4 < interval.low < 3.05 / 2.02 < interval.high < 1.6


def test_quotient_of_runs_without_spread_is_exact() -> None:
    interval = of_quotient([3.0, 3.0], [2.0, 2.0, 2.0])

    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((1.5, 1.5))


@given(st.lists(POSITIVE, min_size=2, max_size=8), st.lists(POSITIVE, min_size=2, max_size=8))
def test_quotient_turned_around_is_the_interval_turned_around(new: list[float], old: list[float]) -> None:
    there, back = of_quotient(new, old), of_quotient(old, new)

    assert there is not None and back is not None
    assert there.low == pytest.approx(1 / back.high, rel=1e-6, abs=1e-300)

"""Rates and quantiles between two looks at metrics."""

import pytest

import crossrail as xr
from crossrail.observe.samples import Interval, Scrape, parse, scrape


def look(at_s: float, text: str) -> Scrape:
    found = parse(text, "here")
    found.at_s = at_s
    return found


def counted(**values: float) -> str:
    lines = [f'bytes_total{{peer="{peer}",rail="0"}} {value}' for peer, value in values.items()]
    return "\n".join(["# TYPE bytes counter", *lines, ""])


def histogram(*cumulative: float) -> str:
    bounds = ("1.0", "2.0", "4.0", "+Inf")
    lines = [f'took_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, cumulative, strict=True)]
    return "\n".join(["# TYPE took histogram", *lines, f"took_count {cumulative[-1]}", "took_sum 1", ""])


def test_rates_are_per_second_and_by_labels() -> None:
    interval = Interval(look(10.0, counted(a=100, b=5)), look(12.0, counted(a=300, b=5)))

    assert interval.seconds == 2
    assert interval.rate("bytes_total", peer="a") == 100
    assert interval.rate("bytes_total", peer="b") == 0
    assert interval.rate("bytes_total", rail="0") == 100
    assert interval.rate("bytes_total", peer="c") == 0
    assert interval.now.total("bytes_total") == 305
    assert interval.now.values_of("bytes_total", "peer") == ["a", "b"]


def test_counter_that_began_anew_has_grown_by_all_it_is() -> None:
    interval = Interval(look(0.0, counted(a=1000)), look(1.0, counted(a=30, b=7)))

    assert interval.rate("bytes_total", peer="a") == 30
    assert interval.rate("bytes_total") == 37


@pytest.mark.parametrize(
    ("before", "now", "share", "expected"),
    [
        ((0, 0, 0, 0), (10, 10, 10, 10), 0.5, 0.5),
        ((0, 0, 0, 0), (0, 10, 10, 10), 0.5, 1.5),
        ((50, 50, 50, 50), (50, 50, 60, 60), 1.0, 4.0),
        ((0, 0, 0, 0), (0, 0, 0, 10), 0.99, 4.0),  # longer than all bounds: the last says at least
        ((5, 5, 5, 5), (5, 5, 5, 5), 0.5, None),
        ((9, 9, 9, 9), (0, 4, 4, 4), 0.5, 1.5),  # began anew
    ],
)
def test_quantiles_are_those_of_the_interval(
    before: tuple[float, ...], now: tuple[float, ...], share: float, expected: float | None
) -> None:
    assert Interval(look(0, histogram(*before)), look(1, histogram(*now))).quantile("took", share) == expected


@pytest.mark.parametrize("text", ["", "<html>404</html>", "a{b=1} 2", "metric{x=", '{"json": 1}', "\x00\xff"])
def test_what_is_no_metrics_is_one_error(text: str) -> None:
    with pytest.raises(xr.CrossrailError, match="Prometheus"):
        parse(text, "there")


@pytest.mark.parametrize("url", ["ftp://host/metrics", "/etc/passwd", "file:///etc/passwd", ""])
def test_only_http_is_asked(url: str) -> None:
    with pytest.raises(xr.UsageError, match="http://"):
        scrape(url, 1.0)

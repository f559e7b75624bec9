"""What benchmarks/kv_first_token.py makes of a timeline."""

import runpy

import pytest

from crossrail.kv.messages import Span
from tests.support.process import REPOSITORY

script = runpy.run_path(str(REPOSITORY / "benchmarks" / "kv_first_token.py"))


def spans(*layers: tuple[float, float]) -> list[Span]:
    """Of layers' transfers, each from and until."""
    # When Python or the decoder noticed, and what else there is, does not count.
    others = [Span("request", 0.0, 99.0), Span("transfer", 0.0, 50.0), Span("prefiller: tail", 10.0, 30.0)]
    chunks = [Span("prefiller: prefill 32", 0.0, 5.0), Span("prefiller: prefill 64", 5.0, 20.0)]
    return [*others, *chunks, *(Span("prefiller: layer 0", since, until - since) for since, until in layers)]


@pytest.mark.parametrize(
    ("layers", "hidden", "late_s"),
    [
        ([(1.0, 4.0), (9.0, 10.0)], 3 / 4, 1.0),
        ([(1.0, 9.0), (9.5, 11.5)], 8 / 10, 2.0),
        ([(1.0, 9.0), (2.0, 8.0), (8.0, 11.0)], 7 / 10, 3.0),  # side by side: once
        ([(1.0, 12.0), (9.0, 10.0)], 8 / 11, 3.0),  # an earlier one ends last
        ([(3.0, 4.0)], 0.0, 1.0),
    ],
)
def test_hidden_is_what_was_under_way_before_the_last_layer_was_computed(
    layers: list[tuple[float, float]], hidden: float, late_s: float
) -> None:
    assert script["hidden_share"](spans(*layers)) == (pytest.approx(hidden), pytest.approx(late_s))

"""Rates as people read them: of a slow network, too, there is something to be seen."""

import pytest

from crossrail._text import rate_text


@pytest.mark.parametrize(
    ("gb_per_s", "text"),
    [
        (141.93, "141.9 GB/s"),
        (1.0, "1.0 GB/s"),
        (0.9994, "999 MB/s"),
        (0.125, "125 MB/s"),
        (0.0034, "3.4 MB/s"),
        (0.000025, "25 kB/s"),
        (0.0, "0 kB/s"),
    ],
)
def test_rate_has_a_unit_in_which_it_can_be_read(gb_per_s: float, text: str) -> None:
    assert rate_text(gb_per_s) == text

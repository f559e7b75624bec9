"""HOST:PORT means the same in every command."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossrail.cli.places import parse_place
from crossrail.errors import UsageError

DEFAULT = 7311


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node7", ("node7", DEFAULT)),
        ("node7.example.com:9000", ("node7.example.com", 9000)),
        ("node_7:9000", ("node_7", 9000)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("fd00::2", ("fd00::2", DEFAULT)),
        ("[fd00::2]", ("fd00::2", DEFAULT)),
        ("[fd00::2]:99", ("fd00::2", 99)),
        ("[fe80::1%eth0]:99", ("fe80::1%eth0", 99)),
        ("fe80::1%eth0", ("fe80::1%eth0", DEFAULT)),
    ],
)
def test_with_a_default_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_place(text, default_port=DEFAULT) == expected


@pytest.mark.parametrize("text", ["node7", "[fd00::2]", "fd00::2", "", "::1:8000"])
def test_without_a_default_port_it_must_be_given(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not HOST:PORT or \[IPV6\]:PORT"):
        parse_place(text)


def test_host_left_out() -> None:
    assert parse_place(":0", port_min=0, needs_host=False) == ("", 0)
    with pytest.raises(UsageError, match="names no host"):
        parse_place(":80")


@pytest.mark.parametrize(
    "text",
    "|a b|a\n|host:|host:0|host:65536|host:9999999999|[::1|::1]:80|:80|a:b:c|a:b|[host]:80|[]:80|host:\u0661|80|80:80|"
    "user@host:80|host:80/path|http://host:80|host?".split("|"),
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_place(text, default_port=DEFAULT)


@given(st.text(max_size=40))
def test_any_text_is_a_place_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        host, port = parse_place(text, default_port=DEFAULT)
        assert host and 1 <= port <= 65535

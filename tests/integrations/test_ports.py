"""Ranks on one host, with ports that their user chose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import crossrail as xr
from crossrail.integrations.ports import port_of_rank
from tests.support.ports import free_port

ADDRESS = "127.0.0.73"  # of nobody else's


@pytest.mark.parametrize("rails", [1, [ADDRESS], [ADDRESS, ADDRESS]])
def test_ranks_whose_rails_share_an_address_meet_at_no_port(rails: int | Sequence[str]) -> None:
    first = free_port(neighbours=5)
    engines = []
    try:
        for rank in range(3):
            port = port_of_rank(first, rank, rails)
            engines.append(xr.Engine(f"rank {rank}", transport="tcp", rails=rails, port=port))
    finally:
        for engine in engines:
            engine.close()


def test_any_port_for_all() -> None:
    assert port_of_rank(0, 3, 2) == 0


def test_one_rail_each_takes_neighbouring_ports() -> None:
    assert [port_of_rank(7000, rank, 1) for rank in range(3)] == [7000, 7001, 7002]

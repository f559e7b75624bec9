"""Peers over tcp that are far away: a round trip takes longer than most networks' time-outs allow for."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S
from tests.support.proxy import ProxiedAddress
from tests.support.tcp_engines import TCP, events_of

pytestmark = pytest.mark.timeout(120)


class Far:
    """Two engines, `round_trip_s` away from each other."""

    def __init__(self, open_engine: EngineFactory, round_trip_s: float) -> None:
        self.here, self.there = open_engine("here", **TCP), open_engine("there", **TCP)
        self.way_there, self.way_back = ProxiedAddress(self.there.address), ProxiedAddress(self.here.address)
        self.proxies = [self.way_there.proxies[0], self.way_back.proxies[0]]
        for proxy in self.proxies:
            proxy.delay_s = round_trip_s / 2

    def connections_made(self) -> int:
        return sum(proxy.connections_made for proxy in self.proxies)

    def barriers(self, seconds: float) -> None:
        """Each way, one after another."""
        until_s = time.monotonic() + seconds

        def go(engine: xr.Engine, to: xr.Address) -> None:
            group = engine.add_peer_group([to])
            while time.monotonic() < until_s:
                engine.submit_barrier(group, 1).wait(WAIT_S)

        with ThreadPoolExecutor(2) as both:
            ways = [(self.here, self.way_there.address), (self.there, self.way_back.address)]
            for way in [both.submit(go, *way) for way in ways]:
                way.result()

    def close(self) -> None:
        self.way_there.close()
        self.way_back.close()


@pytest.fixture
def far(request: pytest.FixtureRequest, open_engine: EngineFactory) -> Iterator[Far]:
    made = Far(open_engine, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("far", [0.4], indirect=True)
def test_who_moves_over_to_a_far_peers_connection_does_so_once(far: Far) -> None:
    far.barriers(8)

    assert far.connections_made() <= 4


@pytest.mark.parametrize("far", [0.9], indirect=True)
def test_connection_whose_handshake_takes_seconds_is_made_again(far: Far) -> None:
    events = events_of(far.here), events_of(far.there)
    far.barriers(1)

    for proxy in far.proxies:
        proxy.cut()
    far.barriers(7)
    made = far.connections_made()
    far.barriers(5)

    assert far.connections_made() == made, "of those that were made again none stays"
    assert [event.kind for one in events for event in one if event.kind == "peer-lost"] == []

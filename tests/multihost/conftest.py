"""Two hosts: this test's thread is on `a`, with an engine of its own; a child on `b` has the other one."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import crossrail as xr
from tests.contract.setups import why_not as why_not_there
from tests.support.hosts import Host, Hosts, why_not
from tests.support.limits import WAIT_S
from tests.support.node import RemoteEngine, RemoteMemory
from tests.support.patterns import pattern
from tests.support.process import PeerProcess


@dataclass
class Network:
    hosts: Hosts
    here: xr.Engine
    child: PeerProcess
    there: RemoteEngine

    @property
    def a(self) -> Host:
        return self.hosts["a"]

    @property
    def b(self) -> Host:
        return self.hosts["b"]

    def source(self, nbytes: int, fill: int = 1) -> xr.Region:
        region = self.here.alloc(nbytes)
        region.array()[:] = pattern(fill, nbytes)
        return region

    def target(self, nbytes: int, fill: int | None = None) -> RemoteMemory:
        return self.there.memory(nbytes, fill=fill)

    def rail_bytes(self) -> list[int]:
        """What host a's netdevs have sent so far."""
        return [self.a.sent_bytes(rail) for rail in range(len(self.a.netdevs))]


NetworkFactory = Callable[..., Network]

# What carries bytes between hosts. libfabric's tcp goes by netdevs as a NIC does by its ports.
TRANSPORTS = tuple(transport for transport in ("tcp", "ofi:tcp") if not why_not_there(transport))
over_networks = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture
def network(nothing_leaks: None) -> Iterator[NetworkFactory]:
    """Makes hosts and a connected pair of engines; all of it goes at the end of the test."""
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def make(
            rails: int | tuple[int, int] = 2,
            *,
            by: str = "netdev",
            connected: bool = True,
            one_subnet: bool = False,
            delay_ms: float = 0,
            loss: float = 0,
            mtu: int = 1500,
            source_routes: bool = True,
            **options: Any,
        ) -> Network:
            """by: how engines name their rails. options: of both engines."""
            counts = dict(zip("ab", rails if isinstance(rails, tuple) else (rails, rails), strict=True))
            hosts = stack.enter_context(
                Hosts(counts, one_subnet=one_subnet, delay_ms=delay_ms, loss=loss, mtu=mtu, source_routes=source_routes)
            )
            options = {"transport": "tcp"} | options
            stack.enter_context(hosts["a"].entered())
            here = stack.enter_context(xr.Engine("here", rails=hosts["a"].rails(by), **options))
            child = hosts.spawn("b")
            there = child.open(rails=hosts["b"].rails(by), **options)
            if connected:
                here.connect(there.address, WAIT_S)
            return Network(hosts, here, child, there)

        yield make

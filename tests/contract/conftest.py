"""Runs every contract case over every backend present, on every set-up the case asks for.

A case takes the fixture `pair` and says with `@setups(...)` over which rails and memory it runs.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from crossrail.sim.loop import run_on
from tests.conftest import EngineFactory
from tests.contract.setups import DEFAULT, TLS, Setup, with_tls
from tests.support import limits
from tests.support.certificates import Authority
from tests.support.limits import WAIT_S, eventually
from tests.support.node import Caller, LocalNode, RemoteEngine, RemoteMemory
from tests.support.patterns import CANARY, ByteArray, pattern
from tests.support.process import PeerProcess
from tests.support.seeds import Seed


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "setups(list): the set-ups a contract case runs on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "setup" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("setups")
        metafunc.parametrize("setup", with_tls(marker.args[0] if marker else DEFAULT), ids=str)


@dataclass
class Pair:
    """Two engines: `here` in this process, `there` on the other side, and memory of the set-up's kinds for both."""

    setup: Setup
    here: xr.Engine
    there: RemoteEngine
    caller: Caller
    seed: Seed
    world: sim.World | None
    options: dict[str, Any]  # of both engines

    def __post_init__(self) -> None:
        self._numbers = itertools.count()

    def source(self, nbytes: int, fill: int | None = None, **how: Any) -> xr.Region:
        """Memory here, filled with a pattern of its own or with `fill`'s."""
        region = self.memory(nbytes, **how)
        region.array()[:] = pattern(self.seed.number(next(self._numbers)) if fill is None else fill, nbytes)
        return region

    def memory(self, nbytes: int, access: str | None = None) -> xr.Region:
        """Memory here, filled with the canary."""
        if self.setup.memory_here == "mapped":
            region = self.here.alloc(nbytes)
        else:
            region = self.here.register(np.empty(nbytes, np.uint8), access=access)
        region.array()[:] = CANARY
        return region

    def target(self, nbytes: int, *, fill: int | None = None, access: str | None = None) -> RemoteMemory:
        """Memory there, filled with the canary or with the pattern of `fill`."""
        return self.there.memory(nbytes, self.setup.memory_there, access=access, fill=fill)

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine to its end: on the simulated world's loop, else on an ordinary one."""
        if self.world is None:
            asyncio.run(main)
        else:
            run_on(self.world, main)

    def another(self, key: str, **options: Any) -> RemoteEngine:
        """One more engine on the other side, known there as `key`. Closed with the pair."""
        return RemoteEngine(self.caller, key, **(self.options | options))


def bytes_of(region: xr.Region) -> ByteArray:
    """A copy of what a region holds now."""
    return region.array().copy()


@pytest.fixture(scope="session")
def shared_process() -> Iterator[list[PeerProcess]]:
    """One child for all contract cases, since starting one costs more than most cases. Holds the living one."""
    holder = [PeerProcess()]
    yield holder
    holder[0].close()


@pytest.fixture(scope="session")
def tls_config(tmp_path_factory: pytest.TempPathFactory) -> xr.TlsConfig:
    """Of all engines alike."""
    return Authority(tmp_path_factory.mktemp("certificates")).issue()


@pytest.fixture
def world(setup: Setup, seed: Seed, nothing_leaks: None) -> Iterator[sim.World | None]:
    """Of simulated set-ups. Tests that look again and again in real time (eventually) let it go on meanwhile."""
    if setup.transport != "sim":
        yield None
        return
    with sim.World(seed.number()) as world:
        limits.between_looks.append(lambda: world.run(0.001))
        yield world
        limits.between_looks.pop()


@pytest.fixture
def caller(setup: Setup, shared_process: list[PeerProcess], world: sim.World | None) -> Iterator[Caller]:
    if setup.processes == 1:
        node = LocalNode()
        yield node
        node.shutdown()
        return
    if not shared_process[0].alive:  # an earlier case broke it
        shared_process[0].close()
        shared_process[0] = PeerProcess()
    child = shared_process[0]
    before = child.call("leaks")
    yield child
    child.call("close_all")
    eventually(lambda: child.call("leaks") == before, f"the other side as clean as before: {before}", WAIT_S)


@pytest.fixture
def pair(
    setup: Setup,
    caller: Caller,
    open_engine: EngineFactory,
    seed: Seed,
    world: sim.World | None,
    tls_config: xr.TlsConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> Pair:
    options = {"transport": setup.transport}
    if setup.transport == TLS:  # by the environment, since options of the other side travel as text
        options = {"transport": "tcp"}
        for name, file in (("CERT", tls_config.cert), ("KEY", tls_config.key), ("CA", tls_config.ca)):
            monkeypatch.setenv(f"CROSSRAIL_TLS_{name}", str(file))
    common = options | {"private_path": setup.private_path}
    here = open_engine(rails=setup.rails_here, **common)
    there = RemoteEngine(caller, rails=setup.rails_there, **common)
    return Pair(setup, here, there, caller, seed, world, options)

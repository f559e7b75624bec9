"""Tests of your own code without hardware: a pytest plugin with simulated worlds, in which any failure can be replayed.

In conftest.py: `pytest_plugins = ["crossrail.testing"]`. Then a test that takes `sim_world` gets a world of its own,
and one that is a coroutine runs on that world's event loop:

    async def test_push(sim_world):
        a, b = (sim_world.host(name).engine(name) for name in "ab")
        ...

Seeds differ from session to session unless --sim-seed, CROSSRAIL_SIM_SEED or `sim_seed` in pytest's configuration says
otherwise, in this order; a failed test tells with which it fails again. --sim-runs N runs each such test N times.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import secrets
import shlex
from collections.abc import Generator, Iterator
from typing import Any

from crossrail._extras import needs
from crossrail.sim import World
from crossrail.sim.loop import run_on

with needs(__name__, "pytest"):
    import pytest

SEED_VARIABLE = "CROSSRAIL_SIM_SEED"
_EVENTS_TOLD = 20
LIMIT_S = 3600.0  # virtual time, for a test that is a coroutine
_WORKER_SEED = "crossrail_sim_seed"
_SESSION_SEED = pytest.StashKey[int]()
_Reporting = Generator[None, pytest.TestReport, pytest.TestReport]


def pytest_addoption(parser: pytest.Parser) -> None:
    """--sim-seed, --sim-runs, and sim_seed for pytest.ini."""
    group = parser.getgroup("crossrail")
    group.addoption("--sim-seed", type=int, metavar="N", help="seed of simulated worlds: replays a failure")
    group.addoption("--sim-runs", type=int, default=1, metavar="N", help="run each test of a simulated world N times")
    parser.addini("sim_seed", "seed of simulated worlds; without it each session has a new one")


def pytest_configure(config: pytest.Config) -> None:
    """Settles the session's seed."""
    if (runs := config.getoption("--sim-runs")) < 1:
        raise pytest.UsageError(f"--sim-runs is {runs}, must be 1 or more")
    given = [config.getoption("--sim-seed"), os.environ.get(SEED_VARIABLE) or None, config.getini("sim_seed") or None]
    given.insert(0, getattr(config, "workerinput", {}).get(_WORKER_SEED))
    seed = next((value for value in given if value is not None), None)
    try:
        config.stash[_SESSION_SEED] = secrets.randbits(31) if seed is None else int(seed)
    except ValueError:
        raise pytest.UsageError(f"{SEED_VARIABLE} or sim_seed is {seed!r}, must be a whole number") from None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's hook: workers are sessions of their own, and get the seed that the header shows."""
    node.workerinput[_WORKER_SEED] = node.config.stash[_SESSION_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    """The seed, for repeating the same session."""
    return f"simulated worlds: --sim-seed {config.stash[_SESSION_SEED]}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Implements --sim-runs."""
    runs = metafunc.config.getoption("--sim-runs")
    if runs > 1 and "sim_world" in metafunc.fixturenames:
        metafunc.parametrize("sim_world", range(runs), indirect=True, ids=lambda run: f"run{run}")


@pytest.fixture
def sim_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world of its own, current during the test: `xr.Engine(..., transport="sim")` is in it. Closed afterwards.

    Its seed is drawn from the session's and the test's name, so tests can be left out and put in another order.
    """
    name = f"{request.config.stash[_SESSION_SEED]}/{request.node.nodeid}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    with World(seed=seed, keep_log=_EVENTS_TOLD) as world:
        yield world


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine that takes sim_world on the world's event loop."""
    world = pyfuncitem.funcargs.get("sim_world")
    if not isinstance(world, World) or not inspect.iscoroutinefunction(inspect.unwrap(pyfuncitem.obj)):
        return None
    if pyfuncitem.get_closest_marker("asyncio") is not None:
        raise pytest.UsageError(
            f"{pyfuncitem.name} takes sim_world and is pytest-asyncio's, by its mark or asyncio_mode=auto, whose loop "
            "is not on the world's clock. Next: remove the mark, or write a plain function with crossrail.sim.run()"
        )
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}
    run_on(world, pyfuncitem.obj(**arguments), limit_s=LIMIT_S)
    return True


def _replay(item: pytest.Item) -> str:
    _, colons, inside = item.nodeid.partition("::")
    file = os.path.relpath(item.path, item.config.invocation_params.dir)  # not relative to rootdir
    words = ["pytest", f"{file}{colons}{inside}", "--sim-seed", str(item.config.stash[_SESSION_SEED])]
    runs = item.config.getoption("--sim-runs")
    return shlex.join([*words, "--sim-runs", str(runs)] if runs > 1 else words)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> _Reporting:
    """Adds to a failure the command that replays it, and the last events in its world."""
    report = yield
    world = getattr(item, "funcargs", {}).get("sim_world")
    if report.failed and isinstance(world, World):
        report.sections.append(("replay", _replay(item)))
        report.sections.append(("last events of the simulated world", "\n".join(world.log[-_EVENTS_TOLD:])))
    return report

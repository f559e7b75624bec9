"""For every test: a seed, a leak check, engines and peers that are closed at the end, and counted skips."""

import asyncio
import gc
import importlib.util
import itertools
import os
import random
import secrets
import shlex
import signal
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import uvloop

import crossrail as xr
from tests.support import fork_server
from tests.support.fake_gpu import FakeGpu
from tests.support.hosts import FORBIDDEN
from tests.support.leaks import Snapshot, forget_failure
from tests.support.process import PeerProcess
from tests.support.seeds import Seed

# Collect tests of torch tensors only if torch is installed, and so with the others: a skip would be counted.
collect_ignore_glob = [
    f"*test_{module}*.py"
    for module in ("checkpoint_engine", "torch", "transformers", "triton")
    if importlib.util.find_spec(module) is None
]
if not importlib.util.find_spec("vllm"):  # ./dev vllm has it, in a separate environment
    collect_ignore_glob.append("vllm/*")
HAS_GPU = os.path.exists("/dev/nvidiactl")
if not HAS_GPU or not importlib.util.find_spec("torch"):
    collect_ignore_glob.append("hw/*")
if not HAS_GPU:
    # Without a GPU Triton's kernels run in its interpreter. This is read at Triton's first import, by whichever test.
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile(
    "crossrail",
    deadline=None,
    max_examples=60,
    derandomize=os.environ.get("CI") == "true",  # see .ci/run
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("crossrail")

EngineFactory = Callable[..., xr.Engine]
PeerFactory = Callable[[], PeerProcess]

FAILED = pytest.StashKey[bool]()
_finished = itertools.count(1)  # tests

# The contract's cases run on the product of rails, memory and processes: thousands per transport, minutes each time.
CONTRACT_SAMPLE = 4

# --- event loops ---

uvloop.new_event_loop().close()  # of a process's first one a pipe stays, and a leak check would find it


ON_BOTH_LOOPS = ("tests/engine/", *(f"tests/kv/test_{what}" for what in ("hostile", "http", "leaving", "listener")))


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Everything that an engine's users await must work on both loops: vLLM and SGLang serve on uvloop. Its transports
    differ too, which matters to the tests of HTTP.
    """
    on_both = item.nodeid.startswith(ON_BOTH_LOOPS)
    return {"asyncio": asyncio.new_event_loop} | ({"uvloop": uvloop.new_event_loop} if on_both else {})


# --- seeds and skips ---


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay random data and schedules from this number")
    parser.addoption(
        "--sample",
        type=int,
        default=None,
        metavar="N",
        help=f"of each test's parameters only N per transport, others with each seed (default: {CONTRACT_SAMPLE} of "
        "contract cases, all of other tests)",
    )
    parser.addoption("--all", action="store_true", help="contract cases on all their set-ups, not a sample of them")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        shared = getattr(config, "workerinput", {}).get("seed")  # of several processes each draws the same sample
        config.option.seed = secrets.randbits(31) if shared is None else shared
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell without job control starts what runs in the background so, and every child would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # nohup's, for us; children do not inherit it so


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells pytest-xdist's workers that they share the suite."""
    node.workerinput["seed"] = node.config.getoption("--seed")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (replay with --seed; it also draws the sample: --sample, --all)"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draws the sample (--sample, --all), after -k and -m. What is named one by one always runs."""
    if config.getoption("--all"):
        return
    sample: int | None = config.getoption("--sample")
    strata: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        strata.setdefault((item.nodeid.partition("[")[0], transport_of(item)), []).append(item)
    kept: set[pytest.Item] = set()
    for (test, transport), members in strata.items():
        count = sample if sample is not None else CONTRACT_SAMPLE if transport else len(members)
        named = any(argument.startswith(f"{test}[") for argument in config.args)
        draw = random.Random(f"{config.getoption('--seed')} {test} {transport}")  # whatever other tests there are
        kept.update(members if named else draw.sample(members, min(count, len(members))))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """Imported modules, torch above all, stay: garbage collections after each test need not examine them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Likewise what pytest keeps of each test, some 25 objects: after thousands of tests a simulation, which collects
    garbage twice, would take a second.
    """
    if next(_finished) % 100 == 0:
        gc.collect()
        gc.freeze()


def transport_of(item: pytest.Item) -> str:
    """The transport of a contract case's set-up; empty for other tests."""
    callspec = getattr(item, "callspec", None)
    return getattr(callspec.params.get("setup"), "transport", "") if callspec else ""


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_handlecrashitem() -> bool:
    """A worker that died is no matter of the time that it got: its test is not run once more (tools/dev/testing.py)."""
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    item.stash[FAILED] = (call.when != "setup" and item.stash.get(FAILED, False)) or report.failed
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        command = f"./dev test {shlex.quote(item.nodeid)} --seed {item.config.getoption('--seed')}"
        report.sections.append(("replay", command))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
        for report in skipped:
            terminalreporter.write_line(f"{report.nodeid}: {reason_of(report)}")
    counted = counted_skips(skipped)
    if counted < len(skipped):
        terminalreporter.write_line(f"not counted: {len(skipped) - counted} skipped, for {FORBIDDEN}")
    if (bound := skips_max()) is not None and counted > bound:
        terminalreporter.write_line(f"FAILED: {counted} skipped, CROSSRAIL_SKIPS_MAX={bound}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    bound = skips_max()
    if reporter is not None and bound is not None and counted_skips(reporter.stats.get("skipped", [])) > bound:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def reason_of(skipped: pytest.TestReport) -> str:
    return skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else str(skipped.longrepr)


def counted_skips(skipped: list[pytest.TestReport]) -> int:
    """Skips that CROSSRAIL_SKIPS_MAX bounds: all except those on machines without the right to create namespaces."""
    return sum(not reason_of(report).removeprefix("Skipped: ").startswith(FORBIDDEN) for report in skipped)


def skips_max() -> int | None:
    text = os.environ.get("CROSSRAIL_SKIPS_MAX")
    return None if text is None else int(text)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> Seed:
    """The source of all random numbers of a test."""
    return Seed(request.config.getoption("--seed"), request.node.nodeid)


# --- nothing stays behind ---


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    forget_failure()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After the test and its other fixtures: no more fds, threads or shared memory files of ours than before it, and
    garbage is collected again.

    Not checked after a failure: its traceback keeps objects alive, and one report is enough.
    """
    before = Snapshot.take()
    yield
    is_collected = gc.isenabled()
    gc.enable()  # one report is enough here, too
    if request.node.stash.get(FAILED, False):
        return
    # pytest's own references to what the other fixtures made, and to frames of callbacks that raised.
    request.node.funcargs.clear()
    for phase in ("setup", "call", "teardown"):
        caplog.get_records(phase).clear()
    # Log records of the other fixtures' teardown, with exceptions and their frames, are kept for the report too.
    request.config.pluginmanager.get_plugin("logging-plugin").report_handler.records.clear()
    assert not (leaked := before.leaked_for_good()), f"left behind: {leaked}"
    assert is_collected, "the garbage collector was left disabled: by a simulation that did not end?"


# --- engines and peers ---


@pytest.fixture(scope="session", autouse=True)
def forked_peers() -> Iterator[None]:
    """Peers are forked; the fork server's fds exist before the first test."""
    server = fork_server.start()
    yield
    server.close()


@pytest.fixture
def gpu(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, nothing_leaks: None) -> Iterator[FakeGpu]:
    """A fake GPU. Request it before anything that opens engines, which have to be closed first."""
    made = FakeGpu()
    yield made
    failed = request.node.stash.get(FAILED, False)  # its traceback keeps engines alive
    request.node.funcargs.clear()
    for phase in ("setup", "call"):  # as do exceptions that were logged
        caplog.get_records(phase).clear()
    made.close(is_checked=not failed)


@pytest.fixture
def open_engine(nothing_leaks: None) -> Iterator[EngineFactory]:
    """Opens engines that are closed at the end of the test."""
    opened: list[xr.Engine] = []

    def open_one(name: str = "here", **options: object) -> xr.Engine:
        opened.append(xr.Engine(name, **options))
        return opened[-1]

    yield open_one
    for engine in reversed(opened):
        engine.close()


@pytest.fixture
def engine(open_engine: EngineFactory) -> xr.Engine:
    return open_engine()


@pytest.fixture
def other(open_engine: EngineFactory) -> xr.Engine:
    """A second engine of this process."""
    return open_engine("other")


@pytest.fixture
def spawn_peer(nothing_leaks: None) -> Iterator[PeerFactory]:
    """Starts peers in processes of their own, killed at the end of the test if they still run."""
    spawned: list[PeerProcess] = []

    def spawn() -> PeerProcess:
        spawned.append(PeerProcess())
        return spawned[-1]

    yield spawn
    for peer in spawned:
        peer.close()

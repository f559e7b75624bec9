"""A router of its own for each test that asks, and ways to know that all is quiet again."""

import asyncio
import importlib.util
import random
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest

from crossrail.kv import messages as m
from crossrail.kv.etcd.records import Place
from crossrail.kv.http.front import Front
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.nodes.prefiller import Prefiller
from crossrail.kv.router.router import Router
from crossrail.kv.toy import ToyTokenizer
from tests.kv.scripts import OPTIONS, Town
from tests.support.etcd import EtcdServer
from tests.support.kv_cluster import SECRET, Cluster
from tests.support.kv_net import Net
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

PATIENCE_S = 0.5  # of fronts with clients that are slow on purpose

# Tests on the simulator are there only where that is built.
collect_ignore = [] if importlib.util.find_spec("crossrail.sim") else ["test_services_sim.py", "test_published.py"]


@pytest.fixture
async def cluster(nothing_leaks: None) -> AsyncIterator[Cluster]:
    """With a router and no nodes yet."""
    made = Cluster()
    made.add_router()
    yield made
    await made.close()


@pytest.fixture
async def town(seed: Seed) -> AsyncIterator[Town]:
    """A router whose nodes are scripts, and whose network is in memory."""
    net = Net(random.Random(seed.number()))
    made = Town(net, Router("router", m.mailbox(net.wire("router"), b"s3cret", resend_s=0.05), OPTIONS))
    made.router.start()
    yield made
    for script in made.scripts.values():
        await script.mailbox.close()
    await made.router.close()


@pytest.fixture
async def url(cluster: Cluster) -> AsyncIterator[str]:
    """Of its router's front."""
    front = Front(cluster.router, ToyTokenizer(), SECRET)
    port = await front.start("127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await front.close()


@pytest.fixture
async def impatient(cluster: Cluster) -> AsyncIterator[int]:
    """The port of a front that waits for no client long."""
    front = Front(cluster.router, ToyTokenizer(), SECRET, patience_s=PATIENCE_S)
    yield await front.start("127.0.0.1", 0)
    await front.close()


@pytest.fixture
async def client(nothing_leaks: None) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        yield session


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    made = EtcdServer(tmp_path_factory.mktemp("etcd"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def place(etcd_server: EtcdServer, request: pytest.FixtureRequest) -> Place:
    """A cluster of each test's own."""
    return Place((etcd_server.endpoint,), request.node.name)


async def start(cluster: Cluster, prefillers: int = 1, decoders: int = 1, token_s: float = 0.0) -> None:
    """Nodes p0, p1 ... and d0, d1 ..., joined. token_s: what makes prefill slow enough to be met in the middle."""
    for index in range(prefillers):
        cluster.add(Prefiller, f"p{index}", token_s)
    for index in range(decoders):
        cluster.add(Decoder, f"d{index}", token_s)
    await asyncio.wait_for(cluster.joined(), WAIT_S)


async def until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.002)


async def quiet(cluster: Cluster) -> None:
    """Every page of every node is free or cached again, soon."""
    await until(lambda: not cluster.busy_pages(), f"no page in use: {cluster.busy_pages()}")

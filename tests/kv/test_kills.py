"""Processes over tcp that are killed or stopped at the steps of a request. CROSSRAIL_KV_STEPS=all: at each of them.

Tokens are those of one node alone, once each, whoever went; and all pages are free again.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.etcd import ETCD, EtcdServer
from tests.support.kv_processes import SAMPLING, Asking, Services, all_pages_free, monolithic
from tests.support.limits import WAIT_S, eventually
from tests.support.seeds import Seed

LONG = msgspec.structs.replace(SAMPLING, max_tokens=60)  # a tenth of a second of decoding, and more on a busy machine
pytestmark = [pytest.mark.no_sanitizer, pytest.mark.timeout(85)]  # starts an interpreter for each process that it kills
NODES = {"p0": "prefiller", "p1": "prefiller", "d0": "decoder", "d1": "decoder"}
STOPPED_S = 2.0  # a router; nodes wait until they are passed over


def is_busy(services: Services, role: str) -> list[str]:
    return [node["node"] for node in services.nodes().values() if node["role"] == role and node["queued_tokens"]]


# By when a step is reached: of the services, and of the client.
STEPS: dict[str, Callable[[Services, Asking], object]] = {
    "started": lambda services, _: is_busy(services, "decoder"),
    "prefilling": lambda services, _: is_busy(services, "prefiller"),
    "decoding": lambda _, asking: asking.tokens,
    "half decoded": lambda _, asking: len(asking.tokens) > LONG.max_tokens / 2,
}
AFTER_S = {"prefilling": 0.8}  # and then some time of this, drawn: prefilling takes a second
at_a_step = pytest.mark.parametrize("step", STEPS if os.environ.get("CROSSRAIL_KV_STEPS") == "all" else ["any step"])


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Of all cases of this file."""
    folder = tmp_path_factory.mktemp("kills")
    made = Services(folder / "stderr", "tcp", prefiller_timeout_s=3)
    try:
        made.restore(NODES)  # each case leaves as many descriptors as it has found
        yield made
    finally:
        made.close()
    complaints = (folder / "stderr").read_text()
    assert "Traceback" not in complaints and "leaked" not in complaints, complaints


@pytest.fixture
def services(processes: Services) -> Services:
    """Two nodes of each role, over tcp, and a router, idle; whatever the case before has left."""
    processes.restore(NODES)
    # What it has left running, or its last report, would be taken for a step of this case.
    eventually(
        lambda: not is_busy(processes, "prefiller") + is_busy(processes, "decoder"), "all are idle", WAIT_S, 0.05
    )
    return processes


def reach(step: str, services: Services, asking: Asking, draw: random.Random) -> None:
    """Or its end, for one that is too quick on this machine."""
    step = draw.choice(list(STEPS)) if step == "any step" else step
    eventually(lambda: STEPS[step](services, asking) or not asking.is_alive(), step, 2 * WAIT_S, 0.01)
    time.sleep(draw.uniform(0, AFTER_S.get(step, 0.0)))


def stand_still(services: Services, name: str) -> None:
    services.signal(name, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    services.signal(name, signal.SIGCONT)


def all_is_free(services: Services) -> None:
    services.restore(NODES)
    eventually(lambda: all_pages_free(services, *NODES), "all pages are free", WAIT_S, 0.05)


@at_a_step
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("role", ["prefiller", "decoder"])
async def test_node_at_a_step(services: Services, role: str, number: signal.Signals, step: str, seed: Seed) -> None:
    expected = await monolithic(LONG)
    asking = Asking(services, LONG)
    reach(step, services, asking, random.Random(seed.number()))
    # Whoever works on the request; when nobody does any more, one of the two.
    victim = (is_busy(services, role) or [name for name in NODES if NODES[name] == role])[0]
    services.signal(victim, number)
    assert asking.result() == expected
    if number == signal.SIGKILL:
        services.kill(victim)
        eventually(lambda: victim not in services.nodes(), "the dead one is no member", WAIT_S, 0.05)
    all_is_free(services)
    assert Asking(services).result() == expected[: SAMPLING.max_tokens]


@at_a_step
async def test_router_killed_at_a_step(services: Services, step: str, seed: Seed) -> None:
    expected = await monolithic(LONG)
    asking = Asking(services, LONG, f"killed-{step}")
    reach(step, services, asking, random.Random(seed.number()))
    services.kill("router")
    asking.join(WAIT_S)
    all_is_free(services)
    assert not asking.is_alive() and asking.tokens == expected[: len(asking.tokens)]
    if asking.trouble:
        path = f"/v1/requests/killed-{step}".replace(" ", "%20")
        # Its decoder has let go of the pages before the next router has all that it tells.
        eventually(lambda: services.get(path).get("end"), "the next router knows how it ended", WAIT_S, 0.05)
        found = services.get(path)
        assert found["tokens"] == expected and found["end"]["reason"] == "length"
    assert Asking(services).result() == expected[: SAMPLING.max_tokens]


async def test_terminated_router_tells_its_clients_and_the_next_one_has_the_answer(services: Services) -> None:
    """It waits for no request, which may take hours: its decoder goes on, as when it is killed."""
    long = msgspec.structs.replace(SAMPLING, max_tokens=200)  # most of a second of decoding
    asking = Asking(services, long, "terminated")
    reach("decoding", services, asking, random.Random(0))
    services.signal("router", signal.SIGTERM)
    asking.join(WAIT_S)
    assert "the router is closing" in asking.error
    assert services.wait("router") == 0
    services.restore(NODES)
    eventually(lambda: services.get("/v1/requests/terminated").get("end"), "its decoder has finished it", WAIT_S, 0.05)
    assert services.get("/v1/requests/terminated")["tokens"] == await monolithic(long)


@at_a_step
async def test_router_stopped_at_a_step(services: Services, step: str, seed: Seed) -> None:
    asking = Asking(services, LONG)
    reach(step, services, asking, random.Random(seed.number()))
    stand_still(services, "router")
    assert asking.result() == await monolithic(LONG)
    all_is_free(services)


@pytest.mark.skipif(ETCD is None, reason="no etcd here (Debian: etcd-server)")
async def test_processes_with_membership_in_etcd(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    services = Services(tmp_path / "stderr", "tcp", f"etcd://{server.endpoint}/test", prefiller_timeout_s=3)
    try:
        nodes = {"p0": "prefiller", "d0": "decoder", "d1": "decoder"}
        services.restore(nodes)
        asking = Asking(services)
        busy: list[str] = []
        eventually(lambda: busy.extend(is_busy(services, "decoder")) or busy, "a decoder has it", WAIT_S, 0.01)
        services.kill(busy[0])
        assert asking.result() == await monolithic()
        services.kill("router")
        services.add_router()
        eventually(lambda: len(services.nodes()) == 2, "the next router knows who is left", WAIT_S, 0.05)
        assert Asking(services).result() == await monolithic()
    finally:
        services.close()
        server.stop()
    complaints = (tmp_path / "stderr").read_text()
    assert "Traceback" not in complaints and "leaked" not in complaints, complaints

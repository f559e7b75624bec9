"""Heartbeats: how peers fare, also idle ones, told without being asked. To the moment: tests/sim/test_liveness.py."""

import time
from collections.abc import Iterator

import pytest

import crossrail as xr
from crossrail import sim
from tests.conftest import EngineFactory, PeerFactory
from tests.contract.setups import REAL_TRANSPORTS, TRANSPORTS
from tests.support import limits
from tests.support.limits import NEVER_S, SLOWNESS, WAIT_S, eventually, never
from tests.support.seeds import Seed

BEAT_S = 0.05

over_all = pytest.mark.parametrize("transport", TRANSPORTS)
over_processes = pytest.mark.parametrize("transport", REAL_TRANSPORTS)


@pytest.fixture
def world(transport: str, seed: Seed, nothing_leaks: None) -> Iterator[None]:
    """Where simulated engines live; it goes on while a test looks again and again."""
    if transport != "sim":
        yield
        return
    with sim.World(seed.number()) as world:
        limits.between_looks.append(lambda: world.run(0.001))
        yield
        limits.between_looks.pop()


@over_all
def test_idle_peers_answer_and_round_trips_are_shown(world: None, transport: str, open_engine: EngineFactory) -> None:
    here, there = open_engine(transport=transport, heartbeat_s=BEAT_S), open_engine("there", transport=transport)
    here.connect(there.address, WAIT_S)

    eventually(lambda: (beat := here.explain(there.address).heartbeat) and beat.answered >= 5, "five answers")

    beat = here.explain(there.address).heartbeat
    assert beat is not None
    assert 0 < beat.rtt_min_s <= beat.rtt_s <= beat.rtt_max_s
    assert "heartbeats answered" in str(here.explain(there.address))
    stats = here.stats()
    assert (stats["transfers_submitted"], stats["messages_sent"]) == (0, 0)
    assert there.stats()["messages_received"] == 0


@over_all
def test_no_heartbeats_unless_asked_for(world: None, transport: str, open_engine: EngineFactory) -> None:
    here, there = open_engine(transport=transport), open_engine("there", transport=transport)
    here.connect(there.address, WAIT_S)

    never(lambda: here.explain(there.address).heartbeat, "a heartbeat", NEVER_S)


@over_all
def test_heartbeats_need_no_pool_and_pass_one_that_is_full(
    world: None, transport: str, open_engine: EngineFactory
) -> None:
    here, there = open_engine(transport=transport, heartbeat_s=0.005), open_engine("there", transport=transport)
    pool = there.submit_recvs(1, 64)
    here.connect(there.address, WAIT_S)
    # More than may be under way.
    messages = [here.submit_send(there.address, i.to_bytes(2, "little")) for i in range(600)]
    eventually(lambda: any(message.done for message in messages), "the pool full")
    answered = here.explain(there.address).heartbeat
    before = answered.answered if answered else 0

    # More than any window has room for behind messages that nobody takes.
    eventually(lambda: (beat := here.explain(there.address).heartbeat) and beat.answered >= before + 150, "150 more")

    assert {pool.recv(WAIT_S).data for _ in messages} == {i.to_bytes(2, "little") for i in range(600)}


@over_processes
def test_idle_peer_that_is_stopped_is_slow_then_frozen_then_thaws(
    transport: str, open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    events: list[xr.EngineEvent] = []
    here, child = open_engine(transport=transport, heartbeat_s=0.2), spawn_peer()
    here.on_event(events.append)
    there = child.open(transport=transport)
    here.connect(there.address, WAIT_S)
    eventually(lambda: here.explain(there.address).heartbeat, "an answer")

    child.stop()
    eventually(lambda: here.peer_state(there.address) == "frozen", "the peer frozen")
    assert here.explain(there.address).note
    child.resume()
    eventually(lambda: here.peer_state(there.address) == "connected", "the peer thawed")

    def kinds_told() -> list[str]:
        return [event.kind for event in events if event.kind in ("peer-slow", "peer-frozen", "peer-thawed")]

    eventually(lambda: kinds_told()[-1:] == ["peer-thawed"], "the last event")
    kinds = kinds_told()
    assert "peer-frozen" in kinds
    if transport != "shm":  # shm asks the kernel as soon as something waits, and knows before the interval is over
        assert kinds[0] == "peer-slow"


@over_processes
def test_idle_peer_that_dies_is_lost(transport: str, open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    here, child = open_engine(transport=transport, heartbeat_s=BEAT_S), spawn_peer()
    there = child.open(transport=transport)
    here.connect(there.address, WAIT_S)

    child.kill()

    eventually(lambda: here.peer_state(there.address) == "lost", "the peer lost")


@pytest.mark.parametrize("transport", [transport for transport in REAL_TRANSPORTS if transport != "shm"])
def test_idle_peer_of_another_host_that_stays_frozen_is_lost_in_the_end(
    transport: str, open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    here, child = open_engine(transport=transport, heartbeat_s=0.2, peer_timeout_s=3.0), spawn_peer()
    there = child.open(transport=transport)
    here.connect(there.address, WAIT_S)
    eventually(lambda: here.explain(there.address).heartbeat, "an answer")

    child.stop()

    eventually(lambda: here.peer_state(there.address) == "lost", "the peer lost")
    child.resume()


@over_processes
def test_engine_that_stood_still_itself_blames_nobody(
    transport: str, open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    here, child = open_engine(transport=transport), spawn_peer()
    beat_s = 0.6 * SLOWNESS  # a busy machine stops everybody for half a second
    there = child.open(transport=transport, heartbeat_s=beat_s)
    there.call("connect", peer=here.address.to_bytes().hex())
    there.call("keep_events")
    time.sleep(1.5 * beat_s)

    child.stop()
    time.sleep(3.5 * beat_s)
    child.resume()
    time.sleep(1.5 * beat_s)

    assert not {"peer-slow", "peer-frozen", "peer-lost"} & set(there.call("event_kinds"))


def test_bad_intervals_are_refused(open_engine: EngineFactory) -> None:
    for interval in (-1.0, 1e-9, float("nan")):
        with pytest.raises(xr.UsageError, match="heartbeat_s"):
            open_engine(heartbeat_s=interval)

"""Heartbeats on the simulator's clock: who is slow, frozen or lost, and when exactly."""

from collections.abc import Iterator

import pytest

import crossrail as xr
from crossrail import sim

BEAT_S = 0.5


class Two:
    """`here` asks `there` for signs of life, and notes what it is told, and when."""

    def __init__(self, world: sim.World, **options: float) -> None:
        self.world = world
        self.hosts = world.host("here"), world.host("there")
        self.here = self.hosts[0].engine("here", heartbeat_s=BEAT_S, **options)
        self.there = self.hosts[1].engine("there")
        self.told: list[tuple[str, float]] = []
        self.here.on_event(lambda event: self.told.append((event.kind, world.now_s)))
        self.here.connect(self.there.address)
        self.world.run(10 * BEAT_S)
        self.told.clear()

    @property
    def state(self) -> str:
        return self.here.peer_state(self.there.address)

    @property
    def heartbeat(self) -> xr.Heartbeat:
        beat = self.here.explain(self.there.address).heartbeat
        assert beat is not None
        return beat


@pytest.fixture
def two() -> Iterator[Two]:
    with sim.World(seed=11) as world:
        yield Two(world, peer_timeout_s=60.0)


def test_one_heartbeat_in_each_interval_is_answered(two: Two) -> None:
    before = two.heartbeat.answered

    two.world.run(20 * BEAT_S)

    assert two.heartbeat.answered == before + 20
    assert two.heartbeat.rtt_max_s < BEAT_S / 100
    assert two.told == []


def test_a_frozen_peer_is_slow_after_one_interval_and_frozen_after_three(two: Two) -> None:
    began_s = two.world.now_s
    two.world.freeze(two.there, for_s=6 * BEAT_S)

    two.world.run(10 * BEAT_S)

    assert [kind for kind, _ in two.told] == ["peer-slow", "peer-frozen", "peer-thawed"]
    slow_s, frozen_s, thawed_s = (at_s - began_s for _, at_s in two.told)
    assert BEAT_S <= slow_s <= 2 * BEAT_S
    assert frozen_s == pytest.approx(slow_s + 2 * BEAT_S, abs=0.01 * BEAT_S)
    assert thawed_s == pytest.approx(6 * BEAT_S, abs=0.01 * BEAT_S)
    assert two.state == "connected"


def test_a_peer_that_answers_late_is_slow_and_never_frozen(two: Two) -> None:
    two.world.freeze(two.there, for_s=2.5 * BEAT_S)

    two.world.run(6 * BEAT_S)

    assert [kind for kind, _ in two.told] == ["peer-slow", "peer-thawed"]
    assert two.heartbeat.rtt_max_s > BEAT_S


def test_an_engine_that_stood_still_itself_blames_nobody(two: Two) -> None:
    two.world.freeze(two.here, for_s=20 * BEAT_S)

    two.world.run(40 * BEAT_S)

    assert two.told == []
    assert two.state == "connected"


@pytest.mark.parametrize("how", ["killed", "cut off", "frozen"])
def test_an_idle_peer_that_never_answers_again_is_lost_after_its_time(how: str) -> None:
    with sim.World(seed=12) as world:
        two = Two(world, peer_timeout_s=4.0)
        began_s = world.now_s
        if how == "killed":
            world.kill(two.there)
        elif how == "cut off":
            world.partition([two.hosts[0]], [two.hosts[1]])
        else:
            world.freeze(two.there)

        world.run(20.0)

        assert two.state == "lost"
        kind, at_s = two.told[-1]
        assert kind == "peer-lost"
        assert at_s - began_s <= 4.0 + 3 * BEAT_S


def test_without_heartbeats_nobody_looks_at_an_idle_peer() -> None:
    with sim.World(seed=13) as world:
        here, there = (world.host(name).engine(name, peer_timeout_s=1.0) for name in ("here", "there"))
        here.connect(there.address)
        world.freeze(there, for_s=50.0)

        world.run(40.0)

        assert here.peer_state(there.address) == "connected"
        assert here.explain(there.address).heartbeat is None

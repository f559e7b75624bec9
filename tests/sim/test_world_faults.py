"""What goes wrong in a world on purpose, and that the contract holds all the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from tests.sim.workload import run_workload

MIB = 1 << 20


class Two:
    """Two engines on hosts of two rails, memory on both sides."""

    def __init__(self, world: sim.World, nic: str = "2xcx7", nbytes: int = 4 * MIB, **options: float) -> None:
        self.world = world
        self.hosts = world.host("a", nic), world.host("b", nic)
        self.a, self.b = (host.engine(host.name, **options) for host in self.hosts)
        rng = np.random.default_rng(world.seed)
        self.src = self.a.register(rng.integers(0, 256, nbytes, dtype=np.uint8))
        self.memory = np.zeros(nbytes, np.uint8)
        self.dst = self.b.register(self.memory)
        self.a.connect(self.b.address)

    def write(self) -> xr.Transfer:
        return self.a.submit_write(self.src, self.dst.descriptor, imm=1)

    def expect(self, count: int) -> None:
        self.b.imm_counter(1).wait(count, 60)
        self.world.run(1)
        assert self.b.imm_counter(1).poll() == 0
        assert np.array_equal(self.dst.array(), self.src.array())


@pytest.mark.parametrize("nic", ["2xcx7", "2xplain"])
def test_a_rail_that_goes_down_is_left_and_comes_back(nic: str) -> None:
    with sim.World(3, keep_log=True) as world:
        two = Two(world, nic)
        world.rail_down(two.hosts[0], 0, at_s=world.now_s + 50e-6, for_s=5)
        for _ in range(20):
            two.write().wait(60)
        two.expect(20)
        world.run(6)
        before = len(world.log)
        two.write().wait(60)

        assert any("kind=rail-down" in line for line in world.log)
        assert {line.split("rail=")[1][0] for line in world.log[before:] if " post " in line} == {"0", "1"}


def test_a_rail_is_plugged_in_again_by_hand() -> None:
    with sim.World(3, keep_log=True) as world:
        two = Two(world)
        world.rail_down(two.hosts[0], 0)
        two.write().wait(60)
        world.rail_up(two.hosts[0], 0, at_s=world.now_s + 1)
        world.run(6)
        before = len(world.log)
        two.write().wait(60)

        two.expect(2)
        assert {line.split("rail=")[1][0] for line in world.log[before:] if " post " in line} == {"0", "1"}


def test_a_rail_that_went_down_last_and_stays_away_fails_what_is_bound_to_it() -> None:
    """Its path is kept while there is no other, and is left as soon as there is one."""
    with sim.World(3) as world:
        two = Two(world, "2xplain", nbytes=4096, peer_timeout_s=10)
        two.write().wait(5)
        for rail in (1, 0):
            world.rail_down(two.hosts[0], rail)
            world.run(1)
        assert all("down: " in path.reason for path in two.a.explain(two.b.address).paths)
        world.rail_up(two.hosts[0], 1)
        world.run(1)

        bound = two.a.submit_write(two.src, two.dst.descriptor, imm=1, rail=0)
        free = two.write()
        assert world.run(30, until=lambda: bound.done and free.done)
        assert (bound.status, free.status) == ("transport-failed", "done")
        with pytest.raises(xr.TransferError, match=r"rail 0 is down: the port went down"):
            bound.wait(0)
        assert two.a.peer_state(two.b.address) == "connected"


def test_a_peer_that_is_killed_is_lost_and_what_left_it_still_arrives() -> None:
    with sim.World(4, keep_log=True) as world:
        two = Two(world, nbytes=16 * MIB, peer_timeout_s=1.0)
        transfer = two.write()
        world.kill(two.a, at_s=world.now_s + 50e-6)

        with pytest.raises(xr.EngineClosed):
            transfer.wait(60)
        killed_ns = world.now_ns
        two.src.array()[:] = 0  # the process is gone: its memory is somebody else's
        world.run(1e-3)

        landed = [int(line.split()[0]) for line in world.log if " land " in line]
        assert max(landed) > killed_ns
        with pytest.raises(xr.EngineClosed):
            two.write()


def test_who_writes_to_a_killed_peer_learns_it() -> None:
    with sim.World(5) as world:
        two = Two(world, peer_timeout_s=1.0)
        world.kill(two.hosts[1])

        with pytest.raises(xr.PeerLost):
            two.write().wait(60)
        assert two.a.peer_state(two.b.address) == "lost"


def test_a_restarted_engine_is_another() -> None:
    with sim.World(6) as world:
        two = Two(world, peer_timeout_s=1.0)
        old = two.dst.descriptor
        world.kill(two.b)
        reborn = two.hosts[1].engine("b")
        target = reborn.register(np.zeros(4 * MIB, np.uint8))

        two.a.submit_write(two.src, target.descriptor, imm=1).wait(60)
        with pytest.raises(xr.PeerLost):
            two.a.submit_write(two.src, old, imm=1).wait(60)

        reborn.imm_counter(1).wait(1, 1)
        assert np.array_equal(target.array(), two.src.array())
        assert not two.memory.any()


def test_a_frozen_peer_thaws_and_nothing_is_lost() -> None:
    with sim.World(7) as world:
        two = Two(world)
        events: list[str] = []
        two.a.on_event(lambda event: events.append(event.kind))
        pool = two.b.submit_recvs(4, 64)
        world.freeze(two.b, for_s=5)
        sent = two.a.submit_send(two.b.address, b"hello")
        writes = [two.write() for _ in range(3)]

        for write in writes:
            write.wait(60)  # the NIC goes on placing
        assert two.b.imm_counter(1).poll() == 0
        assert pool.recv(60).data == b"hello"
        sent.wait(60)

        assert world.now_s > 5
        assert {"peer-frozen", "peer-thawed"} <= set(events)
        two.expect(3)


def test_a_partition_shorter_than_patience_is_survived() -> None:
    with sim.World(8) as world:
        two = Two(world)
        world.partition([two.hosts[0]], [two.hosts[1]], at_s=world.now_s + 20e-6, for_s=3)
        for _ in range(5):
            two.write().wait(60)
        two.expect(5)


def test_a_partition_that_lasts_loses_the_peer() -> None:
    with sim.World(9) as world:
        two = Two(world)
        world.partition([two.hosts[0]], [two.hosts[1]])
        with pytest.raises(xr.PeerLost):
            two.write().wait(60)
        world.heal([two.hosts[0]], [two.hosts[1]])
        two.a.forget_peer(two.b.address)
        two.write().wait(60)
        two.b.imm_counter(1).wait(1, 60)


@pytest.mark.parametrize("for_s", [0.2, 3.0])  # the NIC's retries outlast the first, not the second
@pytest.mark.parametrize("silent", [0, 1])
def test_silence_of_one_side_is_survived_and_nothing_counts_twice(silent: int, for_s: float) -> None:
    with sim.World(8) as world:
        two = Two(world)
        two.write().wait(60)
        world.silence([two.hosts[silent]], [two.hosts[1 - silent]], at_s=world.now_s + 20e-6, for_s=for_s)
        writes = [two.write() for _ in range(20)]
        for write in writes:
            write.wait(60)
        world.run(for_s=10)
        assert two.b.imm_counter(1).poll() == 21
        two.expect(21)


def test_bytes_land_while_the_peer_cannot_say_so() -> None:
    with sim.World(9) as world:
        two = Two(world, nbytes=4096)  # long ones are posted bit by bit, as those before are acknowledged
        two.write().wait(60)
        world.silence([two.hosts[1]], [two.hosts[0]])
        write = two.write()
        two.b.imm_counter(1).wait(2, 60)
        assert not write.done
        with pytest.raises(xr.PeerLost):
            write.wait(60)


def test_a_slow_rail_takes_longer() -> None:
    with sim.World(10) as world:
        two = Two(world, "cx7")

        def took_ns() -> int:
            begin = world.now_ns
            two.write().wait(60)
            return world.now_ns - begin

        fast = took_ns()
        world.slow(two.hosts[0], 0, 50, for_s=0.1)
        slow = took_ns()
        world.run(0.2)
        again = took_ns()

    assert slow > 20 * fast
    assert again < 2 * fast


@pytest.mark.parametrize("seed", range(8))
def test_works_that_fail_are_done_once_all_the_same(seed: int) -> None:
    with sim.World(seed) as world:
        two = Two(world, nbytes=MIB)
        world.fail_works(two.hosts[0], chance=0.02)
        for _ in range(10):
            two.write().wait(60)
        world.fail_works(two.hosts[0])
        two.expect(10)


def test_works_fail_on_one_rail_alone_and_the_other_carries_on() -> None:
    with sim.World(21, keep_log=True) as world:
        two = Two(world)
        world.fail_works(two.hosts[0], chance=1.0, rail=1)
        for _ in range(10):
            two.write().wait(60)
        world.fail_works(two.hosts[0], rail=1)
        two.expect(10)

        rails = {word_of(line, "work"): word_of(line, "rail") for line in world.log if " post " in line}
        failed = [word_of(line, "work") for line in world.log if " fail " in line]
        assert failed
        assert {rails[work] for work in failed} == {"1"}


def test_a_fault_of_the_host_and_one_of_its_rail_end_each_by_itself() -> None:
    with sim.World(22) as world:
        two = Two(world, "cx7", nbytes=4096)
        host = two.hosts[0]
        world.withhold_completions(host, for_s=1)
        world.withhold_completions(host, rail=0, for_s=2)
        transfer = two.write()
        world.run(1.5)

        assert not transfer.done
        transfer.wait(60)
        assert 2 <= world.now_s < 2.5


def test_withheld_completions_of_one_rail_hold_up_only_its_works() -> None:
    with sim.World(23) as world:
        two = Two(world, nbytes=4096)
        world.withhold_completions(two.hosts[0], rail=1, for_s=3)
        transfers = [two.a.submit_write(two.src, two.dst.descriptor, imm=1, rail=rail) for rail in (0, 1)]
        world.run(1)

        assert [transfer.done for transfer in transfers] == [True, False]
        transfers[1].wait(60)
        two.expect(2)


def word_of(line: str, name: str) -> str:
    return line.split(f"{name}=")[1].split()[0]


def test_withheld_completions_keep_a_transfer_pending_until_they_are_released() -> None:
    with sim.World(11) as world:
        two = Two(world, nbytes=4096)
        world.withhold_completions(two.hosts[0], for_s=1)
        transfer = two.write()
        world.run(0.5)

        assert not transfer.done
        assert two.b.imm_counter(1).poll() == 1  # it is there
        transfer.wait(60)
        two.expect(1)


def test_a_full_queue_delays() -> None:
    with sim.World(12) as world:
        two = Two(world, "cx7")
        world.fill_queue(two.hosts[0], 0, for_s=0.25)
        begin = world.now_s
        two.write().wait(60)

        assert world.now_s - begin > 0.25
        two.expect(1)


@pytest.mark.parametrize("nic", ["2xcx7", "2xefa200"])
@pytest.mark.parametrize("pages", [0, 1024])
def test_a_full_queue_holds_up_no_other_rail(nic: str, pages: int) -> None:
    """What may go by any rail is done as soon as what is bound to the one that has room."""

    def time_ns(rail: int | None) -> int:
        with sim.World(12) as world:
            two = Two(world, nic)
            world.run(1)
            world.fill_queue(two.hosts[0], 0)
            begin_ns = world.now_ns
            if pages:
                order = np.arange(pages)[::-1].copy()
                nbytes = 4 * MIB // pages
                two.a.submit_paged_writes(two.src, order, two.dst.descriptor, order, nbytes, rail=rail).wait(60)
            else:
                two.a.submit_write(two.src, two.dst.descriptor, rail=rail).wait(60)
            assert np.array_equal(two.dst.array(), two.src.array())
            return world.now_ns - begin_ns

    assert time_ns(None) <= 1.1 * time_ns(1)


def test_a_registration_fails_as_asked() -> None:
    with sim.World(13) as world:
        host = world.host("a")
        engine = host.engine("a")
        world.fail_registrations(host, 1)
        with pytest.raises(xr.TransportError, match="fail_registrations"):
            engine.alloc(4096)
        engine.alloc(4096)


def test_a_registration_fails_on_the_rail_that_was_named() -> None:
    with sim.World(24) as world:
        host = world.host("a", "2xcx7")
        first, second = (host.engine(name, rails=[rail]) for name, rail in (("first", "0"), ("second", "1")))
        world.fail_registrations(host, 1, rail=1)
        first.alloc(4096)
        with pytest.raises(xr.TransportError, match="fail_registrations"):
            second.alloc(4096)
        second.alloc(4096)


def test_engines_meet_though_datagrams_are_lost_and_doubled() -> None:
    with sim.World(14) as world:
        world.lose_datagrams(0.5, doubling=0.3)
        two = Two(world)
        two.write().wait(60)
        two.expect(1)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_lands_after_a_completion(seed: int) -> None:
    """Whatever a transfer ended as, what its owner does with its memory afterwards stays."""
    rng = np.random.default_rng(seed)
    with sim.World(seed) as world:
        two = Two(world, "2xplain" if seed % 2 else "2xcx7", nbytes=MIB, peer_timeout_s=0.2)
        world.fail_works(two.hosts[0], chance=0.01)
        world.rail_down(two.hosts[1], 0, at_s=world.now_s + 1e-4, for_s=0.1)
        for _ in range(20):
            transfer = two.a.submit_read(two.src, two.dst.descriptor)
            if rng.random() < 0.5:
                world.run(float(rng.integers(0, 60_000)) * 1e-9)
                transfer.cancel()
            try:
                transfer.wait(60)
            except xr.TransferError:
                pass
            two.src.array()[:] = 9
            world.run(float(rng.integers(0, 100_000)) * 1e-9)
            assert (two.src.array() == 9).all()


@pytest.mark.parametrize("seed", range(6))
def test_nothing_lands_in_a_region_that_is_closed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with sim.World(seed) as world:
        two = Two(world, nbytes=MIB)
        for _ in range(10):
            backing = np.zeros(MIB, np.uint8)
            target = two.b.register(backing)
            transfers = [two.a.submit_write(two.src, target.descriptor) for _ in range(3)]
            world.run(float(rng.integers(0, 80_000)) * 1e-9)
            target.close(60)
            backing[:] = 3
            for transfer in transfers:
                try:
                    transfer.wait(60)
                except xr.TransferError:
                    pass
            assert (backing == 3).all()


@pytest.mark.parametrize("seed", range(20, 30))
def test_everything_ends_whatever_happens(seed: int) -> None:
    outcome = run_workload(seed)

    assert "pending" not in outcome.statuses
    assert "done" in outcome.statuses
    times = [int(line.split()[0]) for line in outcome.log]
    assert all(a <= b for a, b in pairwise(times))


def test_faults_name_their_mistakes() -> None:
    with sim.World(1) as world, sim.World(2) as other:
        host = world.host("a")
        with pytest.raises(xr.UsageError, match="rail is 1"):
            world.rail_down(host, 1)
        for per_rail in (
            lambda: world.fail_works(host, count=1, rail=1),
            lambda: world.withhold_completions(host, rail=1),
            lambda: world.fail_registrations(host, 1, rail=-1),
        ):
            with pytest.raises(xr.UsageError, match="rail is"):
                per_rail()
        with pytest.raises(xr.UsageError, match="another world"):
            other.withhold_completions(host)
        with pytest.raises(xr.UsageError, match="both sides"):
            world.partition([host], [host])
        with pytest.raises(xr.UsageError, match="chance"):
            world.fail_works(host, chance=2)
        with pytest.raises(xr.UsageError, match="factor"):
            world.slow(host, 0, 0)
        with pytest.raises(xr.UsageError, match=r"^at_s is -1"):
            world.freeze(host.engine("a"), at_s=-1)


def test_what_becomes_of_a_host_becomes_of_all_engines_that_it_has_by_then() -> None:
    with sim.World(1, keep_log=True) as world:
        host = world.host("h")
        world.freeze(host, at_s=1, for_s=1)
        world.kill(host, at_s=3)
        engines = [host.engine("a"), host.engine("b")]
        world.run(2.5)
        assert [sum(f" {word} " in line for line in world.log) for word in ("frozen", "thawed")] == [2, 2]

        world.run(1)

        assert all(engine.closed for engine in engines)


Fault = Callable[..., None]
OVERLAPPING: dict[str, tuple[Callable[[sim.World, sim.Host, sim.Host], Fault], str, str]] = {
    "rail_down": (lambda world, a, b: partial(world.rail_down, a, 0), "kind=rail-down", "kind=rail-up"),
    "fill_queue": (lambda world, a, b: partial(world.fill_queue, a, 0), "kind=queue-full", "kind=queue-room"),
    "slow": (lambda world, a, b: partial(world.slow, a, 0, 5.0), "kind=slow value=5000", "kind=slow value=1000"),
    "partition": (lambda world, a, b: partial(world.partition, [a], [b]), "kind=partition", "kind=heal"),
    "silence": (lambda world, a, b: partial(world.silence, [a], [b]), "kind=silence", "kind=sound"),
    "withhold": (
        lambda world, a, b: partial(world.withhold_completions, a), "kind=withhold-completions", "kind=release-comp"
    ),
    "withhold on a rail": (
        lambda world, a, b: partial(world.withhold_completions, a, rail=0), "kind=withhold", "kind=release"
    ),
    "freeze": (lambda world, a, b: partial(world.freeze, a.engines[0]), "frozen", "thawed"),
    "freeze a host": (lambda world, a, b: partial(world.freeze, a), "frozen", "thawed"),
}  # fmt: skip


def times_of(world: sim.World, what: str) -> list[float]:
    return [int(line.split()[0]) * 1e-9 for line in world.log if f" {what}" in line]


def world_of_one_engine(stack: ExitStack) -> tuple[sim.World, sim.Host, sim.Host]:
    world = stack.enter_context(sim.World(1, keep_log=True))
    hosts = world.host("a"), world.host("b")
    hosts[0].engine("a")
    return world, *hosts


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_fault_that_ends_leaves_others_of_its_kind_as_they_are(kind: str) -> None:
    with ExitStack() as stack:
        world, a, b = world_of_one_engine(stack)
        fault, begins, ends = OVERLAPPING[kind][0](world, a, b), *OVERLAPPING[kind][1:]
        fault(at_s=0.1, for_s=1.0)
        fault(at_s=0.5, for_s=10.0)
        world.run(20)
        assert times_of(world, begins)[0] == pytest.approx(0.1)
        assert times_of(world, ends) == [pytest.approx(10.5)]

        fault(at_s=20.1, for_s=1.0)
        fault(at_s=20.5)  # for ever
        world.run(100)
        assert len(times_of(world, ends)) == 1


def test_what_ends_faults_ends_all_that_have_begun_and_no_later_one() -> None:
    with ExitStack() as stack:
        world, a, b = world_of_one_engine(stack)
        (engine,) = a.engines
        for begin, end, ends in (
            (partial(world.rail_down, a, 0), partial(world.rail_up, a, 0), "kind=rail-up"),
            (partial(world.partition, [a], [b]), partial(world.heal, [a], [b]), "kind=heal"),
            (partial(world.freeze, engine), partial(world.thaw, engine), "thawed"),
            (partial(world.slow, a, 0, 5), partial(world.slow, a, 0, 1), "kind=slow value=1000"),
        ):
            now_s = world.now_s
            begin(at_s=now_s + 1, for_s=10.0)
            begin(at_s=now_s + 2)
            end(at_s=now_s + 3)
            begin(at_s=now_s + 4, for_s=20.0)
            world.run(30)
            assert times_of(world, ends) == [pytest.approx(now_s + 3), pytest.approx(now_s + 24)], ends


def test_of_several_slownesses_the_one_that_began_last_counts() -> None:
    with ExitStack() as stack:
        world, a, _ = world_of_one_engine(stack)
        world.slow(a, 0, 2, at_s=1, for_s=10)
        world.slow(a, 0, 7, at_s=2, for_s=3)
        world.run(20)

        values = [line.rpartition("=")[2] for line in world.log if "kind=slow" in line]
        assert values == ["2000", "7000", "2000", "1000"]


def test_a_count_below_zero_is_refused() -> None:
    with sim.World(1) as world:
        host = world.host("h")
        with pytest.raises(xr.UsageError, match="count is -1"):
            world.fail_works(host, count=-1)
        with pytest.raises(xr.UsageError, match="count is -1"):
            world.fail_registrations(host, -1)

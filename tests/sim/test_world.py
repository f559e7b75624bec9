"""Worlds: determinism, virtual time, callbacks, phantoms, and what engines in them refuse."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from tests.sim.workload import run_workload
from tests.support.limits import PROGRAM_S, WAIT_S

REPOSITORY = Path(__file__).resolve().parents[2]


def pair_of(world: sim.World, nic: str = "cx7") -> tuple[xr.Engine, xr.Engine]:
    return world.host("a", nic).engine("a"), world.host("b", nic).engine("b")


def test_the_same_seed_gives_the_same_log() -> None:
    first, again, other = run_workload(11), run_workload(11), run_workload(12)

    assert first.log == again.log
    assert first.digest == again.digest
    assert first.digest != other.digest
    assert any("killed" in line for line in first.log)  # the workload is not too tame to tell


def test_the_same_seed_gives_the_same_log_in_another_process() -> None:
    code = "from tests.sim.workload import run_workload; print(run_workload(11).digest)"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=PROGRAM_S, check=True
    )

    assert child.stdout.strip() == run_workload(11).digest


def test_the_digest_does_not_depend_on_keeping_lines() -> None:
    assert run_workload(3, keep_log=False).digest == run_workload(3, keep_log=True).digest
    assert run_workload(3, keep_log=False).log == []


def test_bytes_arrive_and_time_is_virtual() -> None:
    with sim.World(1) as world:
        a, b = pair_of(world)
        src = a.register(np.arange(1 << 20, dtype=np.uint32))
        dst = b.alloc(src.nbytes)

        a.submit_write(src, dst.descriptor, imm=1).wait(1)
        b.imm_counter(1).wait(1, 1)

        assert np.array_equal(dst.array(), src.array())
        assert 4 << 20 < world.now_s * 386e9 / 8 < 8 << 20  # 4 MiB at 386 Gb/s, and what else there is


def test_a_wait_ends_at_its_virtual_deadline() -> None:
    with sim.World(1) as world:
        _, b = pair_of(world)

        with pytest.raises(xr.WaitTimeout):
            b.imm_counter(1).wait(1, timeout_s=3600)

        assert world.now_ns == 3600 * 10**9


def test_a_wait_for_what_never_comes_raises() -> None:
    with sim.World(1) as world:
        a, b = pair_of(world)
        a.connect(b.address)

        with pytest.raises(sim.SimulationIdle, match="nothing is left to happen"):
            b.imm_counter(1).wait(1)

        src, dst = a.alloc(8), b.alloc(8)
        a.submit_write(src, dst.descriptor, imm=1).wait(1)
        world.run()
        assert b.imm_counter(1).poll() == 1  # whoever gave up gets nothing


def test_a_wait_for_a_message_that_nobody_takes_raises() -> None:
    with sim.World(1) as world:
        a, b = pair_of(world)

        with pytest.raises(sim.SimulationIdle):
            a.submit_send(b.address, b"hello").wait()


def test_a_connect_that_takes_long_is_not_idle() -> None:
    with sim.World(1) as world:
        a = world.host("a").engine("a", connect_timeout_s=300)
        b = world.host("b").engine("b")
        address = b.address
        world.kill(b)

        with pytest.raises(xr.PeerLost):
            a.connect(address, timeout_s=None)

        assert 300 <= world.now_s < 301


def test_run_for_until_and_to_the_end() -> None:
    with sim.World(1) as world:
        a, b = pair_of(world)
        src, dst = a.register_phantom(1 << 30), b.register_phantom(1 << 30)

        assert world.run(0.5)
        assert world.now_s == 0.5
        transfer = a.submit_write(src, dst.descriptor)
        assert not world.run(1e-6, until=lambda: transfer.done)
        assert world.run(until=lambda: transfer.done)
        assert world.now_s < 0.6
        a.submit_write(src, dst.descriptor, imm=1)
        assert world.run()
        assert b.imm_counter(1).poll() == 1


@pytest.mark.parametrize("watches", [False, True])
def test_a_condition_is_waited_for_over_long_pauses(watches: bool) -> None:
    asked = 0

    def never() -> bool:
        nonlocal asked
        asked += 1
        assert asked < 1000, f"asked again and again at {world.now_s} s"
        return False

    with sim.World(1) as world:
        a, b = pair_of(world)
        source, target = a.alloc(64), b.alloc(64)
        a.submit_write(source, target.descriptor).wait(1)
        watcher = a.alloc_watcher(lambda old, new: None) if watches else None
        began_s = world.now_s
        assert not world.run(5.0, until=never)
        assert world.now_s == pytest.approx(began_s + 5)
        world.freeze(b, at_s=began_s + 6)
        assert world.run(until=lambda: world.now_s >= began_s + 6)
        assert world.now_s == pytest.approx(began_s + 6)
        world.partition([world.hosts[0]], [world.hosts[1]])
        transfer = a.submit_write(source, target.descriptor)
        assert world.run(60.0, until=lambda: transfer.done)
        assert transfer.status == "peer-lost"
        if watcher is not None:
            watcher.close()


def test_conditions_of_several_threads_are_waited_for() -> None:
    with sim.World(1) as world:
        pair_of(world)
        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda: results.append(world.run(2.0, until=lambda: False)), daemon=True)
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert results == [False, False]


def test_callbacks_run_in_the_thread_that_waits() -> None:
    seen: list[tuple[object, ...]] = []
    with sim.World(1) as world:
        a, b = pair_of(world)
        src, dst = a.alloc(64), b.alloc(64)
        a.on_event(lambda event: seen.append(("event", event.kind, threading.get_ident())))
        b.imm_counter(1).on_count(1, lambda: seen.append(("count", threading.get_ident())))
        transfer = a.submit_write(src, dst.descriptor, imm=1)
        transfer.add_done_callback(lambda done: seen.append(("done", done.status, threading.get_ident())))

        world.run()

    me = threading.get_ident()
    assert sorted(map(str, seen[:3])) == sorted(
        map(str, [("event", "peer-connected", me), ("done", "done", me), ("count", me)])
    )


def test_a_callback_may_wait() -> None:
    ended: list[str] = []
    with sim.World(1) as world:
        a, b = pair_of(world)
        src, dst = a.alloc(64), b.alloc(64)

        def once_more(_: xr.Transfer) -> None:
            a.submit_write(src, dst.descriptor).wait(1)
            ended.append("inner")

        a.submit_write(src, dst.descriptor).add_done_callback(once_more)
        world.run(0.1)

    assert ended == ["inner"]


def test_watched_words_call_back() -> None:
    changes: list[tuple[int, int]] = []
    with sim.World(1) as world:
        watcher = world.host("a").engine("a").alloc_watcher(lambda old, new: changes.append((old, new)))
        watcher.add(3)
        world.run(1e-3)
        watcher.add(4)
        world.run(1e-3)

    assert changes == [(0, 3), (3, 7)]


def test_engines_whose_words_do_not_change_have_no_turns_for_them() -> None:
    """However often somebody waits: else each of many engines costs every turn of the loop."""
    changes: list[tuple[int, int]] = []
    with sim.World(1) as world:
        engines = [world.host(f"n{i}").engine(f"e{i}") for i in range(8)]
        watchers = [engine.alloc_watcher(lambda old, new: changes.append((old, new))) for engine in engines]
        world.run(1e-3)
        before = world.stats["turns"]
        for _ in range(100):
            world.run(1e-6)
        assert world.stats["turns"] == before
        watchers[3].add(2)
        world.run(1e-6)
        assert changes == [(0, 2)] and world.stats["turns"] <= before + 2


def test_messages_travel_and_a_full_pool_holds_them_back() -> None:
    with sim.World(2) as world:
        a, b = pair_of(world, "efa200")
        with b.submit_recvs(2, 64) as pool:
            sends = [a.submit_send(b.address, bytes([i])) for i in range(6)]
            assert sorted(pool.recv(1).data[0] for _ in sends) == list(range(6))
            for send in sends:
                send.wait(1)


def test_phantom_regions_are_of_any_size_and_have_no_memory() -> None:
    with sim.World(1) as world:
        a, b = pair_of(world)
        src, dst = a.register_phantom(1 << 40), b.register_phantom(1 << 40)

        a.submit_write(src, dst.descriptor, 1 << 20, dst_offset=(1 << 40) - (1 << 20), imm=1).wait(1)
        a.submit_read(src, dst.descriptor, 1 << 20).wait(1)

        assert b.imm_counter(1).poll() == 1
        with pytest.raises(xr.UsageError, match="no memory"):
            dst.array()
        with pytest.raises(xr.UsageError, match="exceeds the region"):
            a.submit_write(src, dst.descriptor, 2, dst_offset=(1 << 40) - 1)


def test_between_phantom_and_memory_nothing_moves() -> None:
    with sim.World(1) as world:
        a, b = pair_of(world)
        phantom, real = a.register_phantom(1 << 20), b.alloc(1 << 20)
        real.array()[:] = 7

        a.submit_write(phantom, real.descriptor, imm=1).wait(1)

        assert (real.array() == 7).all()


def test_phantoms_of_one_engine_are_not_the_same_memory() -> None:
    with sim.World(1) as world:
        a = world.host("a").engine("a")
        src, dst = a.register_phantom(1 << 20), a.register_phantom(1 << 20)

        a.submit_write(src, dst.descriptor, 8192, dst_offset=4096, imm=1).wait(1)

        a.imm_counter(1).wait(1, 1)


def test_phantoms_are_for_simulated_engines(open_engine: object) -> None:
    with xr.Engine("real", transport="shm") as engine, pytest.raises(xr.UsageError, match="simulated engines"):
        engine.register_phantom(1)


def test_engines_of_one_host_take_the_local_way() -> None:
    with sim.World(1) as world:
        host, far = world.host("a"), world.host("b").engine("far")
        a, near = host.engine("a"), host.engine("near")
        src = a.register_phantom(1 << 30)
        times = []
        for peer in (near, far):
            a.connect(peer.address)
            target = peer.register_phantom(1 << 30)
            begin = world.now_ns
            a.submit_write(src, target.descriptor).wait(1)
            times.append(world.now_ns - begin)

    near_ns, far_ns = times
    assert far_ns > 5 * near_ns


def test_a_wire_takes_what_comes_first_not_what_was_posted_first() -> None:
    with sim.World(1) as world:
        a, b, c, d = (world.host(name, "plain").engine(name) for name in "abcd")
        source, other = a.register_phantom(1 << 20), b.register_phantom(1 << 20)
        targets = [c.register_phantom(1 << 20), d.register_phantom(1 << 20)]
        for engine, region in ((a, source), (b, other)):  # connected, so that only the wires decide
            engine.submit_scatter(
                region, [t.descriptor for t in targets], lengths=0, src_offsets=0, dst_offsets=0
            ).wait(1)

        began_s = world.now_s
        first = [a.submit_write(source, target.descriptor) for target in targets]
        second = b.submit_write(other, targets[1].descriptor)
        second.wait(1)
        first[0].wait(1)

        assert not first[1].done  # behind it on a wire that b had to itself until then
        first[1].wait(1)
        assert world.now_s - began_s < 2.2 * (1 << 20) * 8 / 100e9  # both wires were busy all the time


def test_a_scatter_to_many_takes_all_rails() -> None:
    """Each target is one piece, on one rail; each peer's rails are as free as the others."""
    nbytes, peers = 1 << 19, 8
    with sim.World(1) as world:
        sender = world.host("sender", "2xplain").engine("sender")
        source = sender.register_phantom(nbytes)
        targets = [world.host(f"h{i}", "2xplain").engine(f"e{i}").register_phantom(nbytes) for i in range(peers)]
        to = [target.descriptor for target in targets]
        sender.submit_scatter(source, to, lengths=0, src_offsets=0, dst_offsets=0).wait(1)  # connects

        began_s = world.now_s
        sender.submit_scatter(source, to, lengths=nbytes, src_offsets=0, dst_offsets=0).wait(1)

        one_rail_s = peers * nbytes * 8 / 100e9
        assert world.now_s - began_s < 0.6 * one_rail_s


def test_other_worlds_are_out_of_reach() -> None:
    with sim.World(1) as here, sim.World(1) as there:
        engine = here.host("a").engine("a")
        stranger = there.host("a").engine("a")

        with pytest.raises(xr.UsageError, match="another simulated world"):
            engine.connect(stranger.address)
        with xr.Engine("real", transport="shm") as real, pytest.raises(xr.UsageError, match="cannot be reached"):
            engine.connect(real.address)


def test_a_simulated_engine_needs_a_world_and_stands_alone() -> None:
    with pytest.raises(xr.UsageError, match="there is no world"):
        xr.Engine("a", transport="sim")
    with sim.World(1), pytest.raises(xr.UsageError, match="cannot be combined with others"):
        xr.Engine("a", transport="sim+tcp")


def test_an_engine_that_names_no_host_has_one_of_its_own() -> None:
    with sim.World(1) as world:
        engine = xr.Engine("x", transport="sim", rails=4)

        assert engine.rails == 4
        assert [host.name for host in world.hosts] == ["host1"]
        with pytest.raises(xr.UsageError, match="has 4"):
            world.hosts[0].engine("y", rails=5)


def test_addresses_tell_nothing_of_this_machine() -> None:
    with sim.World(5) as one, sim.World(5) as two:
        addresses = [world.host("a").engine("a").address for world in (one, two)]

    assert addresses[0].pid == 0
    assert addresses[0].to_bytes()[:24] == addresses[1].to_bytes()[:24]  # the incarnation is the seed's


def test_a_world_closes_its_engines() -> None:
    with sim.World(1) as world:
        engine = world.host("a").engine("a")
    assert engine.closed
    with pytest.raises(xr.UsageError, match="no current world"):
        sim.current()


def test_write_with_a_trigger_says_on_the_worlds_clock_when_it_moved() -> None:
    with sim.World(seed=1) as world:
        a, b = pair_of(world)
        source, target = a.register_phantom(1 << 20), b.register_phantom(1 << 20)
        word = a.alloc_watcher(lambda _old, _new: None)
        transfer = a.submit_write(source, target.descriptor, 1 << 20, trigger=(word, 1))
        world.run(for_s=0.25)
        word.add()
        triggered_s = world.now_s
        transfer.wait(WAIT_S)

        assert transfer.triggered_at == pytest.approx(triggered_s) == pytest.approx(0.25)
        assert 0.25 < transfer.completed_at <= world.now_s

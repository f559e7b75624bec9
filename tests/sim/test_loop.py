"""The event loop on the virtual clock."""

import asyncio
import functools
import gc
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

import crossrail as xr
from crossrail import sim
from crossrail.sim import collecting
from crossrail.sim import loop as loop_module

DAY_S = 86_400.0


async def beat(every_s: float, beats: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(every_s)
        beats.append(loop.time())


def test_a_sleep_takes_its_time_on_the_virtual_clock_alone() -> None:
    async def main(world: sim.World) -> float:
        await asyncio.sleep(10 * DAY_S)
        assert asyncio.get_running_loop().time() == world.now_s
        return world.now_s

    began = time.monotonic()
    assert sim.run(main) == pytest.approx(10 * DAY_S)
    assert time.monotonic() - began < 30  # a bound against waiting in real time, no measure


def test_interrupt_is_raised_although_a_task_will_never_end() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()

    async def main(world: sim.World) -> None:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(1)
        signal.raise_signal(signal.SIGINT)
        await task

    with pytest.raises(KeyboardInterrupt):
        sim.run(main)


def test_timers_of_many_tasks_come_in_their_order() -> None:
    async def main(world: sim.World) -> list[float]:
        beats: list[float] = []
        tasks = [asyncio.create_task(beat(every_s, beats)) for every_s in (0.3, 0.5, 0.7)]
        await asyncio.sleep(2.05)
        for task in tasks:
            task.cancel()
        return beats

    beats = sim.run(main)

    expected = sorted(every_s * n for every_s in (0.3, 0.5, 0.7) for n in range(1, 7) if every_s * n < 2.05)
    assert beats == pytest.approx(expected)


def test_a_timeout_passes_on_the_virtual_clock() -> None:
    async def main(world: sim.World) -> float:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 30)
        return world.now_s

    assert sim.run(main) == pytest.approx(30)


def test_tasks_that_nothing_can_wake_are_named_with_their_places() -> None:
    async def for_ever() -> None:
        await asyncio.Queue().get()

    async def main(world: sim.World) -> None:
        await asyncio.create_task(for_ever(), name="consumer")

    with pytest.raises(xr.SimulationIdle, match=r"consumer in .*for_ever at .*test_loop\.py:\d+"):
        sim.run(main)


def test_awaiting_a_count_that_nobody_sends_is_idle_and_no_hang() -> None:
    async def main(world: sim.World) -> None:
        engine = world.host("a").engine("a")
        await engine.imm_counter(1).wait_async(1)

    with pytest.raises(xr.SimulationIdle, match="1 waiting task"):
        sim.run(main)


def test_tasks_of_an_idle_world_are_cancelled_and_clean_up() -> None:
    ended = []

    async def consumer() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append("consumer")

    async def main(world: sim.World) -> None:
        await asyncio.gather(consumer(), consumer())

    with pytest.raises(xr.SimulationIdle):
        sim.run(main)
    assert ended == ["consumer", "consumer"]


def _plainly(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(work, loop=loop, **options)


_FACTORIES = [None, _plainly, *([asyncio.eager_task_factory] if sys.version_info >= (3, 12) else [])]


@pytest.mark.parametrize("make_task", _FACTORIES)
def test_tasks_that_are_left_are_cancelled_in_the_order_in_which_they_were_made(make_task: Any) -> None:
    ended, kept = [], []

    async def service(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def main(world: sim.World) -> None:
        if make_task is not None:
            asyncio.get_running_loop().set_task_factory(make_task)
        kept.extend(asyncio.create_task(service(number)) for number in range(12))
        await asyncio.sleep(1)

    sim.run(main)
    assert ended == list(range(12))


def test_generators_that_are_left_are_closed_in_the_order_in_which_they_were_begun() -> None:
    ended, kept = [], []

    async def numbers(number: int) -> AsyncIterator[int]:
        try:
            yield number
        finally:
            ended.append(number)

    async def main(world: sim.World) -> None:
        kept.extend(numbers(number) for number in range(12))
        for generator in kept:
            await anext(generator)

    sim.run(main)
    assert ended == list(range(12))


def test_a_set_of_tasks_has_the_same_order_in_each_run() -> None:
    async def main(world: sim.World) -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(1), name=f"{number}") for number in range(12)}
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in [*tasks, *done]]

    orders, kept = [], []
    for run in range(3):
        kept.append([bytearray(100 * size) for size in range(run)])  # so that addresses differ
        orders.append(sim.run(main))
    assert orders[0] == orders[1] == orders[2]


def test_a_world_that_never_rests_ends_at_its_limit() -> None:
    async def main(world: sim.World) -> None:
        asyncio.create_task(beat(1.0, []), name="heart")  # noqa: RUF006
        await asyncio.Event().wait()

    with pytest.raises(xr.WaitTimeout, match=r"limit of 100 s.*heart"):
        sim.run(main, limit_s=100)


def test_a_transfer_and_its_count_are_awaited() -> None:
    async def main(world: sim.World) -> float:
        a, b = (world.host(name).engine(name) for name in "ab")
        source, target = a.alloc(4096), b.alloc(4096)
        source.array()[:] = 7
        counted = asyncio.create_task(b.imm_counter(1).wait_async(1, timeout_s=5))
        await a.submit_write(source, target.descriptor, imm=1)
        await counted
        assert target.array().tolist() == [7] * 4096
        return world.now_s

    assert 0 < sim.run(main) < 0.1


def test_messages_are_awaited_with_virtual_deadlines() -> None:
    async def main(world: sim.World) -> tuple[bytes, float]:
        a, b = (world.host(name).engine(name) for name in "ab")
        with b.submit_recvs(4, 64) as pool:
            with pytest.raises(xr.WaitTimeout):
                await pool.recv_async(timeout_s=60)
            await a.submit_send(b.address, b"hello")
            return (await pool.recv_async(timeout_s=60)).data, world.now_s

    data, now_s = sim.run(main)
    assert data == b"hello"
    assert 60 <= now_s < 60.1


def test_a_count_that_does_not_come_times_out_on_the_virtual_clock() -> None:
    async def main(world: sim.World) -> float:
        engine = world.host("a").engine("a")
        with pytest.raises(xr.WaitTimeout, match="0 of 3"):
            await engine.imm_counter(1).wait_async(3, timeout_s=3600)
        return world.now_s

    assert sim.run(main) == pytest.approx(3600)


def test_polling_with_sleep_0_moves_the_clock() -> None:
    async def main(world: sim.World) -> None:
        a, b = (world.host(name).engine(name) for name in "ab")
        transfer = a.submit_write(a.alloc(1 << 20), b.alloc(1 << 20).descriptor)
        while not transfer.done:
            await asyncio.sleep(0)

    sim.run(main)


def test_functions_of_an_executor_run_at_once_in_this_thread() -> None:
    async def main(world: sim.World) -> None:
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        assert world.now_s == 0

    sim.run(main)


def test_a_callback_of_the_engine_may_wake_the_loop() -> None:
    async def main(world: sim.World) -> float:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        a, b = (world.host(name).engine(name) for name in "ab")
        target = b.alloc(64)
        b.imm_counter(1).on_count(1, lambda: loop.call_soon_threadsafe(woken.set))
        a.submit_write(a.alloc(64), target.descriptor, imm=1)
        await woken.wait()
        return world.now_s

    assert 0 < sim.run(main) < 0.1


def test_ctrl_c_ends_a_run_that_goes_on_for_ever() -> None:
    async def main(world: sim.World) -> None:
        await beat(1e-3, [])

    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        sim.run(main)


def test_ctrl_c_while_garbage_is_collected_ends_a_run() -> None:
    """As hypothesis does, somebody may be told of collections; what is raised there is lost."""

    async def main(world: sim.World) -> None:
        await beat(1e-3, [])

    def interrupt(phase: str, _info: dict[str, int]) -> None:
        if phase == "stop" and loops:
            loops.clear()
            signal.raise_signal(signal.SIGINT)

    loops = [1]
    gc.callbacks.append(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            sim.run(main, limit_s=1000.0)
    finally:
        gc.callbacks.remove(interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("step", ["isenabled", "disable", "get_freeze_count", "collect"])
def test_ctrl_c_as_a_run_begins_leaves_the_collector_enabled(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting frozen objects, say, takes long in a large program: that is where it comes."""

    async def main(world: sim.World) -> None:
        assert not gc.isenabled()

    def interrupted() -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return found()

    found: Callable[[], Any] = getattr(gc, step)
    monkeypatch.setattr(gc, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        sim.run(main)
    assert gc.isenabled()
    sim.run(main)
    assert gc.isenabled()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_middle_of_a_task_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio would report the exception of a task that nobody awaits any more."""

    async def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    async def main(world: sim.World) -> None:
        await asyncio.gather(interrupted(), beat(1e-3, []))

    with pytest.raises(KeyboardInterrupt):
        sim.run(main)
    gc.collect()
    assert not caplog.records


def test_sockets_and_files_are_refused_in_words() -> None:
    async def main(world: sim.World) -> None:
        with pytest.raises(xr.UsageError, match="no sockets"):
            asyncio.get_running_loop().add_reader(0, print)
        with pytest.raises(xr.UsageError, match="no sockets, pipes, processes"):
            await asyncio.create_subprocess_exec("true")
        with pytest.raises(xr.UsageError, match="no sockets, pipes, processes"):
            await asyncio.open_connection("localhost", 80)

    sim.run(main)


async def test_awaiting_a_simulated_engine_on_a_real_loop_is_refused() -> None:
    with sim.World(seed=1) as world, world.host("a").engine("a") as engine:
        with pytest.raises(xr.UsageError, match="different clocks"):
            await engine.imm_counter(1).wait_async(1, timeout_s=5)


def test_awaiting_a_real_engine_on_a_simulated_loop_is_refused() -> None:
    async def main(world: sim.World) -> None:
        with pytest.raises(xr.UsageError, match="different clocks"):
            await engine.imm_counter(1).wait_async(1, timeout_s=5)

    with xr.Engine("real") as engine:
        sim.run(main)


async def test_a_run_inside_a_running_loop_is_refused() -> None:
    async def main(world: sim.World) -> None:
        raise AssertionError("it ran")

    with pytest.raises(xr.UsageError, match="already"):
        sim.run(main)


def test_two_runs_of_one_seed_are_the_same_to_the_byte() -> None:
    async def main(world: sim.World) -> None:
        engines = [world.host(f"h{i}", nic="2xefa200").engine(f"e{i}") for i in range(4)]
        regions = [engine.alloc(1 << 20) for engine in engines]

        async def talk(i: int) -> None:
            for j in range(10):
                await engines[i].submit_write(regions[i], regions[(i + 1 + j) % 4].descriptor, imm=5)
                await asyncio.sleep(1e-4 * j)

        await asyncio.gather(*(talk(i) for i in range(4)))

    def digest(seed: int) -> str:
        with sim.World(seed=seed) as world:
            sim.run(main, world=world)
            return world.log_digest

    assert digest(3) == digest(3)
    assert digest(3) != digest(4)
    assert re.fullmatch(r"[0-9a-f]{16,64}", digest(3))


@pytest.mark.parametrize("limit_s", [float("inf"), float("nan")])
def test_a_limit_that_is_no_number_of_seconds_is_refused(limit_s: float) -> None:
    with sim.World() as world, pytest.raises(xr.UsageError, match="limit_s"):
        world.event_loop(limit_s=limit_s)


def test_the_clock_stops_at_the_limit() -> None:
    async def sleeps(world: sim.World) -> None:
        world.rail_down(world.host("a"), 0, at_s=50)
        await asyncio.sleep(100)

    async def waits_for_nothing(world: sim.World) -> None:
        world.rail_down(world.host("a"), 0, at_s=50)
        await asyncio.get_running_loop().create_future()

    async def is_busy(world: sim.World) -> None:
        await beat(1e-3, [])

    for main in (sleeps, waits_for_nothing, is_busy):
        world = sim.World(keep_log=True)
        with pytest.raises(xr.WaitTimeout, match="limit of 10 s"):
            sim.run(main, world=world, limit_s=10)
        assert world.now_s == 10
        assert not [line for line in world.log if "rail-down" in line]
        world.close()


class Holder:
    """What only the collector ends: it holds itself, and something."""

    def __init__(self, held: object) -> None:
        self.itself, self.held = self, held


def test_garbage_is_collected_at_the_same_moments_in_each_run() -> None:
    async def main(world: sim.World, litter: int) -> None:
        a, b = (world.host(name).engine(name) for name in "ab")
        source = a.alloc(64)
        for _ in range(3):
            region = b.alloc(64)
            descriptor = region.descriptor
            Holder(region)
            del region
            await asyncio.sleep(1)
            for _ in range(litter):
                Holder(None)
            await a.submit_write(source, descriptor, imm=1)  # as long as the region is open
        for _ in range(25_000):
            await asyncio.sleep(0)
        with pytest.raises(xr.RemoteRegionClosed):
            await a.submit_write(source, descriptor, imm=1)

    digests, frozen = set(), gc.get_freeze_count()  # pytest may have frozen what was imported
    for litter in (0, 300, 20_000):
        with sim.World(3) as world:
            assert not gc.isenabled()
            sim.run(functools.partial(main, litter=litter), world=world)
            digests.add(world.log_digest)
        assert gc.isenabled() and gc.get_freeze_count() <= frozen
    assert len(digests) == 1


@pytest.mark.parametrize(("kept", "litter", "collections"), [(0, 0, 10), (100, 0, 1), (0, 1, 10)])
def test_tasks_that_live_make_collections_rarer_and_those_that_are_garbage_do_not(
    kept: int, litter: int, collections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[None] = []

    def collect_counted() -> None:
        collected.append(None)
        collecting.collect()

    monkeypatch.setattr(loop_module, "collect", collect_counted)
    monkeypatch.setattr(loop_module, "_TURNS_PER_COLLECTION", 100)

    async def main(world: sim.World) -> None:
        alive = [asyncio.create_task(asyncio.sleep(1)) for _ in range(kept)]
        for _ in range(1050):
            await asyncio.sleep(0)
            for _ in range(litter):
                Holder(asyncio.create_task(asyncio.sleep(0)))
        for task in alive:
            task.cancel()

    sim.run(main)
    assert len(collected) == collections


def test_who_keeps_garbage_collection_off_finds_it_off_afterwards() -> None:
    async def main(world: sim.World) -> None:
        assert not gc.isenabled()

    gc.disable()
    try:
        sim.run(main)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_who_lets_go_of_a_killed_engine_changes_nothing() -> None:
    async def main(world: sim.World, kept: list[object]) -> None:
        home, b = world.host("a"), world.host("b").engine("b", peer_timeout_s=2)
        source, engine = b.alloc(4096), home.engine("a.1")
        target = engine.alloc(4096)
        kept.append(target)
        descriptor = target.descriptor
        await b.submit_write(source, descriptor, imm=1)
        writes = [b.submit_write(source, descriptor, imm=1) for _ in range(4)]
        world.kill(engine)
        del engine, target
        if len(kept) > 1:
            kept.clear()
        home.engine("a.2")
        await asyncio.sleep(1e-7)
        writes += [b.submit_write(source, descriptor, imm=1) for _ in range(4)]
        await asyncio.gather(*writes, return_exceptions=True)

    digests = set()
    for kept in ([], [None]):
        with sim.World(3) as world:
            sim.run(functools.partial(main, kept=kept), world=world)
            digests.add(world.log_digest)
    assert len(digests) == 1

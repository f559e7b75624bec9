"""The end of an engine's life: closed in every way, dropped."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.contract.setups import REAL_TRANSPORTS
from tests.support.leaks import Snapshot, crossrail_threads, open_fds
from tests.support.limits import NEVER_S, PROGRAM_S, WAIT_S, eventually

# Whose hosts tell that nobody is there any more. A closed engine of verbs keeps its device open while it is referenced.
NETWORKS = [transport for transport in REAL_TRANSPORTS if transport not in ("shm", "verbs")]

# --- closing ---


def test_closing_is_idempotent_and_shows(engine: xr.Engine) -> None:
    engine.close()
    engine.close()

    assert engine.closed is True
    assert "closed" in repr(engine)


@pytest.mark.parametrize("options", [*({"transport": transport} for transport in NETWORKS), {"rails": 4}], ids=str)
def test_closed_engine_gives_back_threads_sockets_and_memory_while_still_referenced(options: dict[str, Any]) -> None:
    before = Snapshot.take()
    engine, other = xr.Engine("here", **options), xr.Engine("other", **options)
    target = other.alloc(10)
    engine.submit_write(engine.alloc(10), target.descriptor, imm=1).wait(WAIT_S)
    engine.on_event(lambda _: None)

    engine.close()
    other.close()

    del target  # its memory is the region's, not the engine's
    gc.collect()
    added = [name for fd, name in open_fds().items() if fd not in before.fds]
    # What a sleeper may still be asleep on.
    assert [name for name in added if not any(kind in name for kind in ("eventfd", "eventpoll"))] == []
    assert crossrail_threads() == before.threads


@pytest.mark.parametrize("transport", ["shm", *NETWORKS])
def test_closed_engine_is_lost_at_once_to_who_connects_though_it_is_still_referenced(transport: str) -> None:
    engine = xr.Engine("here", transport=transport)
    engine.close()
    with xr.Engine("other", transport=transport, connect_timeout_s=10 * WAIT_S) as other:
        with pytest.raises(xr.PeerLost):
            other.connect(engine.address, WAIT_S)


def test_engine_is_a_context_manager() -> None:
    with xr.Engine("here") as engine:
        assert not engine.closed

    assert engine.closed


async def test_closed_engine_is_not_entered_again(engine: xr.Engine) -> None:
    engine.close()

    with pytest.raises(xr.EngineClosed, match="is closed"), engine:
        pass
    with pytest.raises(xr.EngineClosed, match="is closed"):
        async with engine:
            pass


async def test_engine_is_an_asynchronous_context_manager() -> None:
    """Its close waits off the loop, which goes on and ends what the engine waits for."""
    async with xr.Engine("here") as engine, xr.Engine("other") as other:
        region = engine.alloc(64 << 20)
        target = other.alloc(64 << 20)
        transfer = engine.submit_write(region, target.descriptor, imm=1)
        await other.imm_counter(1).wait_async(1, timeout_s=WAIT_S)
        await transfer
    assert engine.closed and other.closed


async def test_leaving_an_engine_ends_blocking_waits_that_occupy_all_threads_of_the_loop() -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    async with xr.Engine("here") as engine:
        waits = [asyncio.ensure_future(asyncio.to_thread(engine.imm_counter(1).wait)) for _ in range(3)]
        await asyncio.sleep(0.05)

    ends = await asyncio.gather(*waits, return_exceptions=True)

    assert [type(end) for end in ends] == [xr.EngineClosed] * 3


def test_nothing_works_after_close(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst, counter = engine.alloc(10), other.alloc(10), engine.imm_counter(1)
    group = engine.add_peer_group([other.address])
    watched = engine.alloc_imm()
    engine.close()

    for call in (
        lambda: engine.submit_write(src, dst.descriptor),
        lambda: engine.submit_read(src, dst.descriptor),
        lambda: engine.submit_send(other.address, b"x"),
        lambda: engine.submit_barrier(group, 1),
        lambda: engine.submit_recvs(1, 1),
        lambda: engine.register(bytearray(10)),
        lambda: engine.alloc(10),
        lambda: engine.connect(other.address, 1),
        lambda: engine.alloc_watcher(lambda _, __: None),
        lambda: engine.alloc_imm(),
        lambda: counter.wait(1, WAIT_S),
        lambda: watched.wait(1, WAIT_S),
    ):
        with pytest.raises(xr.EngineClosed):
            call()


def test_closing_wakes_every_kind_of_waiter(engine: xr.Engine, other: xr.Engine) -> None:
    transfer = engine.submit_send(other.address, b"nobody receives")
    pool = engine.submit_recvs(1, 16)
    outcome: dict[str, type[BaseException]] = {}

    def wait(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except xr.CrossrailError as error:
            outcome[name] = type(error)

    waiters = {
        "transfer": lambda: transfer.wait(WAIT_S),
        "counter": lambda: engine.imm_counter(1).wait(1, WAIT_S),
        "pool": lambda: pool.recv(WAIT_S),
        "forever": lambda: engine.imm_counter(2).wait(1),
    }
    threads = [threading.Thread(target=wait, args=item) for item in waiters.items()]
    for thread in threads:
        thread.start()
    time.sleep(0.05)

    engine.close()
    for thread in threads:
        thread.join(WAIT_S)

    assert outcome == dict.fromkeys(waiters, xr.EngineClosed)
    assert transfer.status == "engine-closed"


async def test_closing_wakes_what_is_awaited(engine: xr.Engine, other: xr.Engine) -> None:
    transfer = engine.submit_send(other.address, b"nobody receives")
    pool = engine.submit_recvs(1, 16)
    tasks = [
        asyncio.ensure_future(transfer),
        asyncio.create_task(engine.imm_counter(1).wait_async(1)),
        asyncio.create_task(pool.recv_async()),
    ]
    await asyncio.sleep(0.05)

    await asyncio.to_thread(engine.close)

    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    assert [type(outcome) for outcome in outcomes] == [xr.EngineClosed] * 3


async def test_closing_on_the_loop_itself_wakes_what_is_awaited(engine: xr.Engine, other: xr.Engine) -> None:
    transfer = engine.submit_send(other.address, b"nobody receives")
    task = asyncio.ensure_future(transfer)
    await asyncio.sleep(0.01)

    engine.close()

    with pytest.raises(xr.EngineClosed):
        await asyncio.wait_for(task, WAIT_S)


def test_closing_with_transfers_in_flight_completes_each_exactly_once(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst = engine.register(np.zeros(8_000_000, np.uint8)), other.register(np.zeros(8_000_000, np.uint8))
    completions: Counter[int] = Counter()
    transfers = []
    for i in range(60):
        transfers.append(engine.submit_write(src, dst.descriptor, imm=1))
        transfers[-1].add_done_callback(lambda _, i=i: completions.update([i]))

    engine.close(0.01)

    assert all(transfer.done for transfer in transfers)
    assert {transfer.status for transfer in transfers} <= {"done", "engine-closed"}
    eventually(lambda: len(completions) == 60, "every callback")
    assert completions == Counter(range(60))


def test_closing_gives_short_transfers_time_to_finish(engine: xr.Engine, other: xr.Engine) -> None:
    engine.connect(other.address, WAIT_S)
    target = other.alloc(1000)
    transfers = [engine.submit_write(engine.alloc(1000), target.descriptor, imm=1) for _ in range(10)]

    engine.close(WAIT_S)

    assert {transfer.status for transfer in transfers} == {"done"}
    other.imm_counter(1).wait(10, WAIT_S)


def test_nothing_of_a_closed_engine_touches_memory_any_more(engine: xr.Engine, other: xr.Engine) -> None:
    array = np.zeros(16_000_000, np.uint8)
    dst = other.register(array)
    src = engine.register(np.ones(16_000_000, np.uint8))
    for _ in range(10):
        engine.submit_write(src, dst.descriptor)

    engine.close(0)
    array[:] = 7
    time.sleep(0.05)

    assert (array == 7).all()


def test_closing_from_many_threads_at_once(open_engine: EngineFactory) -> None:
    engine = open_engine()
    threads = [threading.Thread(target=engine.close) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    assert engine.closed


def test_impatient_close_does_not_wait_for_a_patient_one(engine: xr.Engine) -> None:
    pending = engine.submit_send(engine.address, b"nobody receives this")
    patient = threading.Thread(target=engine.close, args=(3 * WAIT_S,))
    patient.start()
    patient.join(NEVER_S)  # until it really waits; sooner would only test less
    impatient = threading.Thread(target=engine.close, args=(0,))

    impatient.start()

    impatient.join(WAIT_S)
    assert not impatient.is_alive()
    patient.join(WAIT_S)
    assert not patient.is_alive()
    assert pending.status == "engine-closed"


def test_closing_while_others_submit(open_engine: EngineFactory) -> None:
    engine, other = open_engine(), open_engine("other")
    src, dst = engine.alloc(100), other.alloc(100)
    transfers: list[xr.Transfer] = []
    refused: Counter[str] = Counter()

    def submit() -> None:
        try:
            while True:
                transfers.append(engine.submit_write(src, dst.descriptor, imm=1))
        except xr.EngineClosed:
            refused["closed"] += 1

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(transfers) > 100, "a hundred submits")

    engine.close()
    for thread in threads:
        thread.join(WAIT_S)

    assert refused["closed"] == 4
    assert all(transfer.done for transfer in transfers)


def test_closing_from_a_callback(open_engine: EngineFactory) -> None:
    engine = open_engine()
    region = engine.alloc(10)
    transfer = engine.submit_write(region, region.descriptor)

    transfer.add_done_callback(lambda _: engine.close())

    eventually(lambda: engine.closed, "the engine closed by its own callback")


def test_regions_of_a_closed_engine_can_be_closed(engine: xr.Engine) -> None:
    region = engine.register(bytearray(10))
    engine.close()

    region.close()

    assert region.closed


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_senseless_close_timeout_is_refused(engine: xr.Engine, timeout_s: float) -> None:
    with pytest.raises(xr.UsageError, match="timeout_s"):
        engine.close(timeout_s)


# --- being dropped: everything ends, and a warning names the engine that nobody closed ---

unclosed = pytest.mark.filterwarnings("ignore:engine 'dropped' was not closed:ResourceWarning")


def test_dropped_engine_warns_with_its_name() -> None:
    with pytest.warns(ResourceWarning, match="'dropped' was not closed"):
        xr.Engine("dropped")


@unclosed
def test_dropped_engine_closes_and_its_threads_end() -> None:
    before = crossrail_threads()
    engine = xr.Engine("dropped")
    region = engine.alloc(10)
    engine.submit_write(region, region.descriptor, imm=1).wait(WAIT_S)
    gone = weakref.ref(engine)

    del engine, region
    gc.collect()

    assert gone() is None
    eventually(lambda: crossrail_threads() == before, "its threads ended")


@unclosed
def test_engine_in_a_reference_cycle_is_collected() -> None:
    gone = weakref.ref(cyclic_engine())

    eventually(lambda: gc.collect() is not None and gone() is None, "the engine collected")


def cyclic_engine() -> xr.Engine:
    """An engine whose callbacks, of every kind, hold it."""
    engine = xr.Engine("dropped")
    other = engine.add_peer_group([engine.address])
    engine.on_event(lambda _: engine.closed)
    engine.holder = [engine.alloc_watcher(lambda _, __: engine.closed)]
    engine.imm_counter(1).on_count(1, lambda: engine.closed)
    engine.submit_barrier(other, 2).add_done_callback(lambda _: engine.closed)
    return engine


class Holder:
    """Has an engine, callbacks of every kind that are its methods, and arrays, into which the collector cannot look."""

    def __init__(self) -> None:
        self.engine = xr.Engine("held")
        self.engine.on_event(self.told)
        self.watcher = self.engine.alloc_watcher(self.told)
        self.region = self.engine.alloc(1000)
        self.arrays = [self.region.array(), self.watcher.array]
        self.pool = self.engine.submit_recvs(1, 16, self.told)
        self.engine.imm_counter(1).on_count(5, self.told)
        self.engine.submit_write(self.region, self.region.descriptor, imm=1).add_done_callback(self.told)

    def told(self, *_: object) -> None:
        self.engine.closed  # noqa: B018 - refers to the engine


def test_closed_engine_whose_callbacks_refer_to_arrays_is_collected() -> None:
    holder = Holder()
    gone = weakref.ref(holder)

    holder.engine.close()
    del holder

    eventually(lambda: gc.collect() is not None and gone() is None, "all of it collected")


def test_engine_closed_by_its_event_callback_tells_the_rest_and_is_collected(open_engine: EngineFactory) -> None:
    engine, names = xr.Engine("held"), ["a", "b", "c"]
    for name in names:
        engine.connect(open_engine(name).address, WAIT_S)
    array, gone, told = engine.alloc(8).array(), weakref.ref(engine), []

    def close_at_once(event: xr.EngineEvent, engine: xr.Engine = engine, _array: object = array) -> None:
        told.append(event.peer)
        engine.close()

    engine.on_event(close_at_once)  # all three are waiting, and are told together
    del engine, array, close_at_once

    eventually(lambda: gc.collect() is not None and gone() is None, "the engine collected")
    assert told == names


@unclosed
def test_a_child_keeps_its_engine_alive() -> None:
    counter = xr.Engine("dropped").imm_counter(1)
    gc.collect()

    with pytest.raises(xr.WaitTimeout):
        counter.wait(1, NEVER_S)
    assert counter.poll() == 0


@unclosed
def test_dropped_engine_with_transfers_in_flight() -> None:
    other = xr.Engine("other")
    dst = other.register(np.zeros(8_000_000, np.uint8))
    for _ in range(5):
        engine = xr.Engine("dropped")
        src = engine.register(np.ones(8_000_000, np.uint8))
        for _ in range(5):
            engine.submit_write(src, dst.descriptor)
        del engine, src
        gc.collect()

    other.close()


def test_engines_left_open_are_closed_in_the_order_in_which_they_were_opened() -> None:
    program = """
import crossrail as xr
class Told(xr.Engine):
    def close(self, *args):
        print(self.name)
        super().close(*args)
engines = [Told(str(number)) for number in range(8)]
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROGRAM_S)
    assert ended.stdout.split() == [str(number) for number in range(8)], ended.stderr

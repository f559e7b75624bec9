"""Nothing grows with use: resident memory after ten thousand of anything is what it was after a thousand."""

import asyncio
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S

pytestmark = pytest.mark.no_sanitizer

GROWTH_BYTES_MAX = 6 << 20


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def assert_no_growth(turn: Callable[[], object], count: int) -> None:
    """After `count` turns to fill pools and caches, ten times as many add next to nothing."""
    for _ in range(count):
        turn()
    before = resident_bytes()
    for _ in range(10 * count):
        turn()
    growth = resident_bytes() - before
    assert growth < GROWTH_BYTES_MAX, f"{growth / 2**20:.1f} MiB more after {10 * count} turns"


def test_writes_leave_no_memory_behind(engine: xr.Engine, other: xr.Engine) -> None:
    src, dst = engine.alloc(4096), other.alloc(4096)
    pages = np.arange(16)

    def turn() -> None:
        engine.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        engine.submit_paged_writes(src, pages, dst.descriptor, pages, 256, imm=1).wait(WAIT_S)
        other.imm_counter(1).wait(17, WAIT_S)

    assert_no_growth(turn, 1000)


def test_messages_and_callbacks_leave_no_memory_behind(engine: xr.Engine) -> None:
    with engine.submit_recvs(4, 1000) as pool:

        def turn() -> None:
            transfer = engine.submit_send(engine.address, bytes(1000))
            transfer.add_done_callback(lambda _: None)
            assert len(pool.recv(WAIT_S).data) == 1000
            transfer.wait(WAIT_S)

        assert_no_growth(turn, 1000)


def test_messages_that_waited_for_a_slow_receiver_leave_their_memory(open_engine: EngineFactory) -> None:
    """Recycled transfers kept the room of the longest message of each, until the engine was gone."""
    nbytes = 256 << 10
    engine, other = (open_engine(name, message_bytes_max=nbytes) for name in ("engine", "other"))
    engine.submit_barrier(engine.add_peer_group([other.address]), 1).wait(WAIT_S)
    trim = ctypes.CDLL(None).malloc_trim
    trim(0)  # what earlier tests freed would be used again
    before = resident_bytes()
    message = bytes(nbytes)

    waiting = [engine.submit_send(other.address, message) for _ in range(400)]
    held = resident_bytes() - before
    with other.submit_recvs(4, nbytes, on_message=lambda _: None):
        for transfer in waiting:
            transfer.wait(WAIT_S)
    waiting.clear()

    trim(0)
    growth = resident_bytes() - before
    assert held > 400 * nbytes // 2, "they held no memory while they waited: this test tells nothing"
    assert growth < held // 2, f"{growth / 2**20:.1f} MiB of {held / 2**20:.1f} MiB are still held"


def test_awaits_and_abandoned_awaits_leave_no_memory_behind(engine: xr.Engine) -> None:
    group = engine.add_peer_group([engine.address])

    async def turns() -> None:
        for _ in range(50):
            abandoned = asyncio.ensure_future(engine.imm_counter(2).wait_async(1))
            engine.submit_barrier(group, 1)
            await engine.imm_counter(1).wait_async(1, WAIT_S)
            abandoned.cancel()

    assert_no_growth(lambda: asyncio.run(turns()), 10)


def test_regions_and_descriptors_leave_no_memory_behind(engine: xr.Engine, other: xr.Engine) -> None:
    src = engine.alloc(64)

    def turn() -> None:
        with other.register(bytearray(64)) as region:
            engine.submit_write(src, region.descriptor).wait(WAIT_S)

    assert_no_growth(turn, 500)


def test_cancelled_transfers_leave_no_memory_behind(engine: xr.Engine, other: xr.Engine) -> None:
    engine.connect(other.address, WAIT_S)

    def turn() -> None:
        transfer = engine.submit_send(other.address, bytes(2000))
        transfer.cancel()
        with pytest.raises(xr.TransferCancelled):
            transfer.wait(WAIT_S)

    assert_no_growth(turn, 300)


def test_peers_that_come_and_go_leave_no_memory_behind(engine: xr.Engine) -> None:
    src = engine.alloc(64)

    def turn() -> None:
        with xr.Engine("passing by") as peer:
            target = peer.alloc(64)
            engine.submit_write(src, target.descriptor).wait(WAIT_S)
            address = peer.address
        engine.forget_peer(address)

    assert_no_growth(turn, 40)


def test_engines_that_come_and_go_leave_no_memory_behind() -> None:
    def turn() -> None:
        with xr.Engine("passing by", rails=4) as engine:
            region = engine.alloc(100_000)
            engine.submit_write(region, region.descriptor, 1, imm=1).wait(WAIT_S)
            engine.on_event(lambda _: None)

    assert_no_growth(turn, 40)

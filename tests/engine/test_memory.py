"""How long memory lives, and memory that the engine owns."""

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import NEVER_S, WAIT_S, eventually
from tests.support.patterns import assert_same_bytes, pattern


def test_region_keeps_its_buffer_alive(engine: xr.Engine) -> None:
    values = np.zeros(100, np.uint8)
    alive = weakref.ref(values)
    region = engine.register(values)

    del values
    gc.collect()
    assert alive() is not None

    region.close()
    del region
    gc.collect()
    assert alive() is None


def test_region_dropped_after_submit_lives_until_the_write_is_done(engine: xr.Engine, other: xr.Engine) -> None:
    dst = other.alloc(4_000_000)

    for i in range(20):
        engine.submit_write(engine.register(np.full(4_000_000, i, np.uint8)), dst.descriptor, imm=1)
        gc.collect()
        other.imm_counter(1).wait(1, WAIT_S)

        assert (dst.array() == i).all()


def test_same_buffer_registered_twice_gives_independent_regions(engine: xr.Engine) -> None:
    values = np.zeros(1000, np.uint8)
    whole, half = engine.register(values), engine.register(values[:500])
    src = engine.alloc(1000)
    assert (whole.nbytes, half.nbytes) == (1000, 500)
    assert whole.descriptor != half.descriptor

    with pytest.raises(xr.UsageError, match="500"):
        engine.submit_write(src, half.descriptor, 501)
    whole.close()
    engine.submit_write(src, half.descriptor, 500).wait(WAIT_S)
    with pytest.raises(xr.CrossrailError):
        engine.submit_write(src, whole.descriptor, 500).wait(WAIT_S)


def test_closing_twice_is_harmless(engine: xr.Engine) -> None:
    region = engine.register(bytearray(10))

    region.close()
    region.close()

    assert region.closed is True


def test_region_is_a_context_manager(engine: xr.Engine) -> None:
    with engine.register(bytearray(10)) as region:
        assert region.closed is False

    assert region.closed is True


def test_closed_region_can_be_neither_source_nor_described(engine: xr.Engine) -> None:
    region, target = engine.register(bytearray(10)), engine.alloc(10)
    region.close()

    with pytest.raises(xr.UsageError, match="closed"):
        engine.submit_write(region, target.descriptor)
    with pytest.raises(xr.UsageError, match="closed"):
        engine.submit_read(region, target.descriptor)


def test_closing_a_region_in_use_waits_for_its_transfers(engine: xr.Engine, other: xr.Engine) -> None:
    values = pattern(1, 32_000_000)
    src, dst = engine.register(values.copy()), other.register(np.zeros(32_000_000, np.uint8))
    transfers = [engine.submit_write(src, dst.descriptor, imm=1) for _ in range(8)]

    src.close(WAIT_S)

    assert src.inflight == 0
    assert all(transfer.done for transfer in transfers)
    other.imm_counter(1).wait(8, WAIT_S)
    assert_same_bytes(dst.array(), values)


# --- engine-owned memory ---


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 1_000_003])
@pytest.mark.parametrize("populate", [False, True])
def test_allocated_memory_is_zeroed_aligned_and_exact(engine: xr.Engine, nbytes: int, populate: bool) -> None:
    region = engine.alloc(nbytes, populate=populate)

    assert region.nbytes == nbytes
    assert region.base % 4096 == 0
    assert region.mapped is True
    assert region.access == "write"
    assert not region.array().any()


def test_registered_memory_is_not_mapped(engine: xr.Engine) -> None:
    assert engine.register(bytearray(10)).mapped is False


@pytest.mark.parametrize("nbytes", [0, -1])
def test_allocation_of_nothing_is_refused(engine: xr.Engine, nbytes: int) -> None:
    with pytest.raises(xr.UsageError, match="nbytes"):
        engine.alloc(nbytes)


def test_allocation_beyond_the_machine_is_a_system_failure(engine: xr.Engine) -> None:
    with pytest.raises((xr.TransportError, xr.UsageError)) as failure:
        engine.alloc(2**62)

    assert str(2**62) in str(failure.value) or isinstance(failure.value, xr.TransportError)
    assert engine.alloc(4096).nbytes == 4096


@pytest.mark.parametrize("kind", ["alloc", "register"])
def test_view_and_array_are_the_memory_itself(engine: xr.Engine, kind: str) -> None:
    region = engine.alloc(4000) if kind == "alloc" else engine.register(bytearray(4000))

    region.view()[10] = 7
    array = region.array("float32", (10, 100))
    array[0, 3] = 1.5

    assert region.array()[10] == 7
    assert (array.shape, array.dtype, array.nbytes) == ((10, 100), np.float32, 4000)
    assert region.array("float32")[3] == 1.5
    assert region.view().format == "B" and not region.view().readonly


def test_array_that_does_not_fit_is_refused(engine: xr.Engine) -> None:
    region = engine.alloc(4001)

    with pytest.raises(xr.UsageError, match="4001"):
        region.array("float32")
    with pytest.raises(xr.UsageError, match="shape"):
        region.array("uint8", (4002,))
    with pytest.raises(xr.UsageError, match="0 bytes"):
        region.array("S")
    for array in (np.arange(4), np.zeros(0), np.zeros(2, "i4,f8")):  # none of which compares with a text
        with pytest.raises(xr.UsageError, match="not a numpy dtype"):
            region.array(array)


@pytest.mark.parametrize("shape", [8.0, (8.0, 2), "8", "", b"8", [[2], [4]], True, np.array([[2, 4]]), np.array([2.0])])
def test_what_is_no_shape_is_refused(engine: xr.Engine, shape: Any) -> None:
    with pytest.raises(xr.UsageError, match=r"^shape is .*, must be a whole number or several"):
        engine.alloc(64).array("uint8", shape)


@pytest.mark.parametrize("shape", [(2, 4), [2, 4], np.array([2, 4]), (np.int32(2), -1)])
def test_shapes_of_every_kind_of_whole_numbers(engine: xr.Engine, shape: Any) -> None:
    assert engine.alloc(64).array("uint64", shape).shape == (2, 4)


def test_array_outlives_its_region(engine: xr.Engine) -> None:
    region = engine.alloc(100_000)
    array = region.array()
    array[:] = 3

    region.close()
    del region
    gc.collect()

    assert (array == 3).all()  # neither a crash nor someone else's memory


def test_array_outlives_its_engine() -> None:
    engine = xr.Engine("here")
    array = engine.alloc(100_000).array()
    array[:] = 3

    engine.close()
    del engine
    gc.collect()

    assert (array == 3).all()


def shared_mappings() -> int:
    """Of memory that engines share."""
    return Path("/proc/self/maps").read_text().count("/memfd:crossrail")


def test_many_allocations_come_and_go(engine: xr.Engine) -> None:
    before, mapped = engine.stats()["regions_open"], shared_mappings()

    for _ in range(300):
        engine.alloc(65_536).close()

    assert engine.stats()["regions_open"] == before
    assert shared_mappings() == mapped


def test_closed_regions_that_are_held_are_not_counted_as_open(engine: xr.Engine) -> None:
    before = engine.stats()["regions_open"]
    regions = [engine.alloc(65_536), engine.register(bytearray(10))]

    for region in regions:
        region.close()
        region.close()

    assert engine.stats()["regions_open"] == before
    del regions, region
    gc.collect()
    assert engine.stats()["regions_open"] == before


def test_calls_do_not_drive_what_dropped_regions_wait_for(open_engine: EngineFactory) -> None:
    manual, other = open_engine("manual", transport="shm", polling="manual"), open_engine("other", transport="shm")
    src, dst = manual.register(np.zeros(16 << 20, np.uint8)), other.alloc(16 << 20)
    manual.connect(other.address, WAIT_S)
    transfers = [manual.submit_write(src, dst.descriptor) for _ in range(8)]
    del src
    gc.collect()

    assert len(manual.peers()) == 1
    assert not any(transfer.done for transfer in transfers)

    for transfer in transfers:
        transfer.wait(WAIT_S)
    eventually(lambda: manual.stats()["regions_open"] == 0, "the dropped region closed")


def test_descriptor_that_others_ask_for_during_revoke_is_never_an_old_one(engine: xr.Engine) -> None:
    region = engine.alloc(100)
    timeout_s = Decimal("20." + "0" * 100_000)  # converted for so long, GIL held, that the asker mostly gets it next
    over = threading.Event()
    switch_interval_s = sys.getswitchinterval()

    def ask() -> None:
        while not over.is_set():
            with contextlib.suppress(xr.UsageError):  # revoked
                _ = region.descriptor

    asker = threading.Thread(target=ask)
    asker.start()
    sys.setswitchinterval(1e-6)
    try:
        seen = set()
        for _ in range(300):
            region.revoke(timeout_s)
            seen.add(region.renew())
    finally:
        sys.setswitchinterval(switch_interval_s)
        over.set()
        asker.join()

    assert len(seen) == 300


def test_weak_reference_to_a_region_ends_with_it(engine: xr.Engine) -> None:
    region = engine.alloc(10)
    weak = weakref.ref(region)
    assert weak() is region

    del region
    gc.collect()
    assert weak() is None


def test_dropped_regions_are_closed(engine: xr.Engine) -> None:
    before, mapped = engine.stats()["regions_open"], shared_mappings()

    for _ in range(50):
        engine.alloc(4096)
        engine.register(bytearray(10))
    gc.collect()

    eventually(lambda: engine.stats()["regions_open"] == before, "dropped regions closed", WAIT_S + NEVER_S)
    eventually(lambda: shared_mappings() == mapped, "their memory is given back")


def test_memory_that_was_not_registered_is_refused_in_words(engine: Any, other: xr.Engine) -> None:
    memory = np.zeros(100, np.uint8)
    source, target = engine.alloc(100), other.alloc(100)
    refused: list[tuple[str, Callable[[], object]]] = [
        (r"src .*engine\.register.* not ndarray", lambda: engine.submit_write(memory, target.descriptor)),
        (r"src .*engine\.register.* not None$", lambda: engine.submit_write(None, target.descriptor)),
        (r"dst .*RegionDescriptor.* not .*Region$", lambda: engine.submit_write(source, target)),
        (r"dst .*engine\.register.* not ndarray", lambda: engine.submit_read(memory, target.descriptor)),
        (r"src .*RegionDescriptor.* not ndarray", lambda: engine.submit_read(source, memory)),
        (r"src .*engine\.register", lambda: engine.submit_paged_writes(memory, [0], target.descriptor, [0], 1)),
        (r"src .*engine\.register", lambda: engine.submit_scatter(memory, [], lengths=1, src_offsets=0, dst_offsets=0)),
    ]
    for words, call in refused:
        with pytest.raises(xr.UsageError, match=words):
            call()


def test_staged_targets_of_one_region_count_on_their_own_numbers(open_engine: EngineFactory) -> None:
    """Behind a write that fills the staging ring, where short pieces that wait travel together."""
    engine = open_engine(transport="shm", private_path="staged")
    other = open_engine("other", transport="shm", private_path="staged")
    source = engine.register(np.zeros(8 << 20, np.uint8))
    target = other.register(np.zeros(8 << 20, np.uint8))
    engine.submit_write(source, target.descriptor, 64).wait(WAIT_S)

    numbers, rounds = np.arange(1, 9), 10
    for _ in range(rounds):
        ahead = engine.submit_write(source, target.descriptor)
        engine.submit_scatter(
            source, [target.descriptor] * 8, lengths=64, src_offsets=0, dst_offsets=numbers * 64, imm=numbers
        ).wait(WAIT_S)
        ahead.wait(WAIT_S)

    eventually(
        lambda: [other.imm_counter(imm).poll() for imm in numbers.tolist()] == [rounds] * len(numbers), "all counted"
    )


def test_write_within_an_engine_onto_memory_that_it_reads_is_refused(open_engine: EngineFactory) -> None:
    engine = open_engine()
    region = engine.alloc(1 << 20)
    for src, dst in ((0, 1), (1, 0), (0, 4095)):
        with pytest.raises(xr.UsageError, match=f"{abs(src - dst)} bytes apart, and overlap with length 4096"):
            engine.submit_write(region, region.descriptor, 4096, src_offset=src, dst_offset=dst)
        with pytest.raises(xr.UsageError, match="overlap"):
            engine.submit_read(region, region.descriptor, 4096, src_offset=src, dst_offset=dst)
        with pytest.raises(xr.UsageError, match="overlap"):
            engine.submit_scatter(region, [region.descriptor], lengths=4096, src_offsets=src, dst_offsets=dst)

    for src, dst in ((0, 4096), (4096, 0), (7, 7)):
        engine.submit_write(region, region.descriptor, 4096, src_offset=src, dst_offset=dst).wait(WAIT_S)


def test_region_speaks_dlpack_and_what_comes_of_it_keeps_the_memory(engine: xr.Engine) -> None:
    region = engine.alloc(64)
    array = np.from_dlpack(region)
    region.array()[:] = 7
    assert (array.dtype, array.shape, array.tolist()) == (np.uint8, (64,), [7] * 64)
    assert region.__dlpack_device__() == (1, 0)  # kDLCPU

    region.close()
    assert array[3] == 7
    with pytest.raises(xr.UsageError, match="closed"):
        np.from_dlpack(region)
    with pytest.raises(BufferError, match="read-only"):
        np.from_dlpack(engine.register(b"read-only"))

"""What is added to a WeightMemory and cannot be taken is refused at the call, by the parameter's name."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import crossrail as xr
from crossrail.weights import WeightMemory
from crossrail.weights.inventory.holdings import Role

ROWS = np.ones((8, 6), np.float32)


@pytest.fixture
def engine() -> Iterator[xr.Engine]:
    with xr.Engine("memory") as made:
        yield made


def test_array_that_is_read_only_is_a_source_and_no_target(engine: xr.Engine) -> None:
    constant = np.frombuffer(bytes(192), np.float32).reshape(8, 6)
    with WeightMemory(engine, "trainer", 0) as source, WeightMemory(engine, "target", 0) as target:
        source.add("w", constant)
        assert len(source.inventory().rows) == 1
        with pytest.raises(xr.UsageError, match="w: the array is read-only, and weights are written into it"):
            target.add("w", constant)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shape": 8}, "w: shape 8 must be a number, and box None a"),
        ({"shape": (8, 6.5)}, r"w: shape \(8, 6.5\) must be"),
        ({"shape": (16, 6), "box": (0, 8)}, r"box \(0, 8\) a \(start, stop\), for each dimension"),
        ({"shape": (16, 6), "box": ((0, 8, 1), (0, 6, 1))}, r"for each dimension"),
        ({"box": ((0, 4), (0, 6))}, r"w: the array has the shape \(8, 6\), its box"),
    ],
)
def test_malformed_places_are_refused(engine: xr.Engine, options: dict[str, Any], text: str) -> None:
    with WeightMemory(engine, "trainer", 0) as memory, pytest.raises(xr.UsageError, match=text):
        memory.add("w", ROWS, **options)


def test_name_that_is_no_text_is_refused(engine: xr.Engine) -> None:
    with WeightMemory(engine, "trainer", 0) as memory, pytest.raises(xr.UsageError, match="name is 3, must be"):
        memory.add(3, ROWS)  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["trainer", "target"])
@pytest.mark.parametrize(
    ("array", "text"),
    [
        (ROWS.T, r"'w': innermost dimension has gaps \(transposed\?\), strides \[4, 24\] bytes: .* contiguous copy"),
        (ROWS[:, ::2], r"innermost dimension has gaps .* strides \[24, 8\]"),
        (np.ones((2, 3, 4), np.float32).transpose(1, 0, 2), r"not in C order, strides \[16, 48, 4\]"),
        (as_strided(ROWS, (8, 6), (0, 4)), r"not in C order, strides \[0, 4\] bytes: an array that is .* broadcast"),
        (as_strided(ROWS, (8, 6), (4, 0)), r"not in C order, strides \[4, 0\]"),
        (np.ones((1, 1, 1, 1, 1, 2), np.float32), "more than 5 dimensions"),
    ],
)
def test_layout_that_is_not_taken_is_refused_at_once(
    engine: xr.Engine, role: Role, array: np.ndarray, text: str
) -> None:
    with WeightMemory(engine, role, 0) as memory:
        with pytest.raises(xr.UsageError, match=text):
            memory.add("w", array)
        memory.add("w", ROWS)
        assert len(memory.inventory().rows) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "bf16"}, "'w': dtype 'bf16' must be one of"),
        ({"dtype": "bfloat16"}, "w: bfloat16 lies in an array of uint16, not of float32"),
        ({"mesh": "m" * 129}, "'w': mesh is 'm"),
        ({"mesh": 3}, "'w': mesh is 3, must be a text"),
        ({"box": ((1, 9), (0, 6)), "shape": (8, 6)}, "'w': box .* not in the shape"),
        ({"scale_of": "v", "block": 128}, "w: block 128 must be"),
        ({"scale_of": "v", "block": (1.5, 2)}, r"w: block \(1.5, 2\) must be"),
        ({"scale_of": "v", "block": (2,)}, "'w': block .* does not have the 2 dimensions"),
        ({"scale_of": "v", "block": (128, 0)}, r"'w': scales: blocks must be 1 or more, .* \(128, 0\)"),
        ({"scale_of": "v", "block": (128, 1 << 70)}, "'w': scales: blocks must be 1 or more"),
        ({"box": ((0, 8), (0, 6)), "shape": (1 << 70, 6)}, "'w': has too many elements: shape"),
        ({"box": ((0, 8), (0, 6)), "shape": (1 << 40, 1 << 40)}, "'w': has too many elements: shape"),
    ],
)
def test_malformed_options_are_refused_at_once(engine: xr.Engine, options: dict[str, Any], text: str) -> None:
    with WeightMemory(engine, "target", 0) as memory, pytest.raises(xr.UsageError, match=text):
        memory.add("w", ROWS.copy(), **options)


def test_scales_that_are_not_float32_are_refused_at_once(engine: xr.Engine) -> None:
    with WeightMemory(engine, "target", 0) as memory, pytest.raises(xr.UsageError, match="'w': scales must be float32"):
        memory.add("w", ROWS.astype(np.float16), scale_of="v", block=(2, 2))


@pytest.mark.parametrize("name", ["", "n" * 513, "\ud800"])
def test_name_that_no_message_carries_is_refused_at_once(engine: xr.Engine, name: str) -> None:
    with WeightMemory(engine, "trainer", 0) as memory, pytest.raises(xr.UsageError, match=r"name is .* 1\.\.512"):
        memory.add(name, ROWS)


def test_role_and_rank_that_nobody_has_are_refused(engine: xr.Engine) -> None:
    with pytest.raises(xr.UsageError, match="role='inference' must be"):
        WeightMemory(engine, "inference", 0)  # type: ignore[arg-type]
    with pytest.raises(xr.UsageError, match="rank=-1 must be"):
        WeightMemory(engine, "trainer", -1)
    with pytest.raises(xr.UsageError, match="rank='0' must be"):
        WeightMemory(engine, "trainer", "0")  # type: ignore[arg-type]


class CountedRegion:
    """Of the host; how often anybody asked where any of them is."""

    looks = 0
    device = "cpu"
    descriptor = b"descriptor"

    def __init__(self, block: tuple[int, int]) -> None:
        self._base, self.nbytes = block[0], block[1]

    @property
    def base(self) -> int:
        CountedRegion.looks += 1
        return self._base

    def close(self) -> None:
        pass


class CountingEngine:
    _world = None

    def register(self, block: tuple[int, int], *, access: str) -> CountedRegion:
        return CountedRegion(block)


def test_where_thousands_of_arrays_lie_is_not_looked_for_among_all_regions() -> None:
    count = 2000
    whole = np.zeros((3 * count, mmap.PAGESIZE), np.uint8)
    with WeightMemory(CountingEngine(), "trainer", 0) as memory:  # type: ignore[arg-type]
        for number in range(count):  # each an allocation of its own, as far as one can tell
            part = np.frombuffer(whole[3 * number].data, np.uint8)
            memory.add(f"w{number}", part)
        CountedRegion.looks = 0

        inventory = memory.inventory()

        assert len(memory.regions) == count
        assert all(row["region"] == number and row["offset"] == 0 for number, row in enumerate(inventory.rows))
        assert CountedRegion.looks <= 4 * count


def test_arrays_with_no_page_of_others_between_them_are_one_region(engine: xr.Engine) -> None:
    page = mmap.PAGESIZE
    raw = np.zeros(12 * page, np.uint8)
    pages = raw[-raw.ctypes.data % page :]
    with WeightMemory(engine, "target", 0) as memory:
        # b begins in the page in which a ends, c in the next but one: behind a page of somebody else's.
        for name, begin, end in (("a", 16, page + 8), ("b", 2 * page - 8, 3 * page), ("c", 4 * page + 8, 5 * page)):
            memory.add(name, np.frombuffer(pages[begin:end].data, np.uint8))

        inventory = memory.inventory()

        places = [(row["region"], row["offset"]) for row in inventory.rows]
        assert places == [(0, 0), (0, 2 * page - 24), (1, 0)]
        assert [region.nbytes for region in memory.regions] == [3 * page - 16, page - 8]


def test_memory_that_is_closed_while_it_is_registered_waits(engine: xr.Engine) -> None:
    memory = WeightMemory(engine, "trainer", 0)
    memory.add("w", ROWS)
    registering, closes, register = threading.Event(), threading.Event(), engine.register

    def slow(*args: Any, **options: Any) -> xr.Region:
        registering.set()
        assert closes.wait(60)
        return register(*args, **options)

    memory.engine = SimpleNamespace(register=slow)  # type: ignore[assignment]
    with ThreadPoolExecutor(2) as threads:
        inventory = threads.submit(memory.inventory)
        assert registering.wait(60)
        closing = threads.submit(lambda: (closes.set(), memory.close()))
        assert len(inventory.result(60).regions) == 1
        closing.result(60)
    assert memory.regions == []


def test_array_of_no_elements_is_read_as_itself(engine: xr.Engine) -> None:
    with WeightMemory(engine, "target", 0) as memory:
        full, empty = np.zeros((8, 6), np.float32), np.zeros((0, 6), np.float32)
        memory.add("w", full)
        memory.add("shard", empty, shape=(8, 6), box=((8, 8), (0, 6)))
        memory.inventory()
        assert memory.like(empty, memory.regions) is empty


@pytest.mark.parametrize(("told", "gpus"), [((2, 3), ["cuda:3"]), ((1, 0), []), (None, [])])
def test_gpus_of_what_was_added_are_known_before_it_is_registered(
    engine: xr.Engine, told: tuple[int, int] | None, gpus: list[str]
) -> None:
    interface = {"shape": (4,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}
    array = SimpleNamespace(__cuda_array_interface__=interface)
    if told is not None:
        array.__dlpack_device__ = lambda: told
    with WeightMemory(engine, "trainer", 0) as memory:
        memory.add("host", np.zeros(4, np.float32))
        assert memory.gpus() == []
        memory.add("w", array)
        assert memory.gpus() == gpus

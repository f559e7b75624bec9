"""Random sequences of operations against a numpy model: right bytes, right counts, nothing else touched."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

import crossrail as xr
from tests.support.limits import WAIT_S, eventually
from tests.support.patterns import ByteArray, assert_same_bytes, pattern

NBYTES_MAX = 40_000
IMMS = 3


@dataclass
class World:
    """Two regions on each side, and what they should hold. Operations run one after the other."""

    here: xr.Engine
    there: xr.Engine
    mine: list[xr.Region]
    theirs: list[xr.Region]
    expected_mine: list[ByteArray] = field(default_factory=list)
    expected_theirs: list[ByteArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        for seed, region in enumerate(self.mine + self.theirs):
            region.array()[:] = pattern(seed, region.nbytes)
        self.expected_mine = [region.array().copy() for region in self.mine]
        self.expected_theirs = [region.array().copy() for region in self.theirs]

    def settle(self, imm: int | None, count: int) -> None:
        """Until the last operation is visible: by its count; without one nothing promises when, only that."""
        if imm is None:
            eventually(lambda: not self.wrong(), "the bytes of an operation without immediate")
        else:
            self.there.imm_counter(imm).wait(count, WAIT_S)
        self.check()

    def wrong(self) -> list[int]:
        """Which regions of the other side differ from the model."""
        pairs = zip(self.theirs, self.expected_theirs, strict=True)
        return [i for i, (region, expected) in enumerate(pairs) if not np.array_equal(region.array(), expected)]

    def check(self) -> None:
        assert [self.there.imm_counter(imm).poll() for imm in range(IMMS)] == [0] * IMMS
        for region, expected in zip(self.mine + self.theirs, self.expected_mine + self.expected_theirs, strict=True):
            assert_same_bytes(region.array(), expected)


def memory(engine: xr.Engine, nbytes: int, mapped: bool) -> xr.Region:
    return engine.alloc(nbytes) if mapped else engine.register(np.zeros(nbytes, np.uint8))


@st.composite
def ranges(draw: st.DrawFn, src_bytes: int, dst_bytes: int) -> tuple[int, int, int]:
    """(length, src_offset, dst_offset) that fit."""
    length = draw(st.integers(0, min(src_bytes, dst_bytes)))
    return length, draw(st.integers(0, src_bytes - length)), draw(st.integers(0, dst_bytes - length))


def write(world: World, data: st.DataObject, imm: int | None) -> None:
    i, j = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    src, dst = world.mine[i], world.theirs[j]
    length, src_offset, dst_offset = data.draw(ranges(src.nbytes, dst.nbytes))
    world.here.submit_write(src, dst.descriptor, length, src_offset=src_offset, dst_offset=dst_offset, imm=imm).wait(
        WAIT_S
    )
    world.expected_theirs[j][dst_offset:][:length] = world.expected_mine[i][src_offset:][:length]
    world.settle(imm, 1)


def read(world: World, data: st.DataObject, _: int | None) -> None:
    i, j = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
    dst, src = world.mine[i], world.theirs[j]
    length, src_offset, dst_offset = data.draw(ranges(src.nbytes, dst.nbytes))
    world.here.submit_read(dst, src.descriptor, length, dst_offset=dst_offset, src_offset=src_offset).wait(WAIT_S)
    world.expected_mine[i][dst_offset:][:length] = world.expected_theirs[j][src_offset:][:length]


def paged(world: World, data: st.DataObject, imm: int | None) -> None:
    src, dst = world.mine[0], world.theirs[0]
    smaller = min(src.nbytes, dst.nbytes)
    page_bytes = data.draw(st.integers(1, min(smaller, 5000)))
    src_stride = data.draw(st.integers(0, 2 * page_bytes))
    dst_stride = data.draw(st.integers(page_bytes, 2 * page_bytes))
    src_offset = data.draw(st.integers(0, src.nbytes - page_bytes))
    dst_offset = data.draw(st.integers(0, dst.nbytes - page_bytes))
    src_last = (src.nbytes - src_offset - page_bytes) // src_stride if src_stride else 50
    dst_last = (dst.nbytes - dst_offset - page_bytes) // dst_stride
    dst_pages = data.draw(st.lists(st.integers(0, dst_last), min_size=1, max_size=60, unique=True))
    src_pages = data.draw(
        st.lists(st.integers(0, src_last), min_size=len(dst_pages), max_size=len(dst_pages))
        | st.just([min(page, src_last) for page in dst_pages])
    )
    dtype = data.draw(st.sampled_from(["int32", "uint32", "int64", "uint64"]))
    world.here.submit_paged_writes(
        src,
        np.array(src_pages, dtype),
        dst.descriptor,
        np.array(dst_pages, dtype),
        page_bytes,
        src_stride=src_stride,
        dst_stride=dst_stride,
        src_offset=src_offset,
        dst_offset=dst_offset,
        imm=imm,
    ).wait(WAIT_S)
    for a, b in zip(src_pages, dst_pages, strict=True):
        page = world.expected_mine[0][src_offset + a * src_stride :][:page_bytes]
        world.expected_theirs[0][dst_offset + b * dst_stride :][:page_bytes] = page
    world.settle(imm, len(dst_pages))


def scatter(world: World, data: st.DataObject, imm: int | None) -> None:
    src = world.mine[1]
    parts = [data.draw(ranges(src.nbytes, target.nbytes)) for target in world.theirs]
    lengths, src_offsets, dst_offsets = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    world.here.submit_scatter(
        src,
        [target.descriptor for target in world.theirs],
        lengths=lengths,
        src_offsets=src_offsets,
        dst_offsets=dst_offsets,
        imm=imm,
    ).wait(WAIT_S)
    for expected, (length, src_offset, dst_offset) in zip(world.expected_theirs, parts, strict=True):
        expected[dst_offset:][:length] = world.expected_mine[1][src_offset:][:length]
    world.settle(imm, len(parts))


@settings(max_examples=300)
@given(data=st.data())
def test_any_sequence_of_operations_matches_the_model(data: st.DataObject) -> None:
    rails = st.integers(1, 16)
    sizes = st.integers(1, NBYTES_MAX)
    options = {"private_path": data.draw(st.sampled_from(["auto", "staged", "cma"]))}
    with (
        xr.Engine("here", rails=data.draw(rails), **options) as here,
        xr.Engine("there", rails=data.draw(rails), **options) as there,
    ):
        mine = [memory(here, data.draw(sizes), data.draw(st.booleans())) for _ in range(2)]
        theirs = [memory(there, data.draw(sizes), data.draw(st.booleans())) for _ in range(2)]
        world = World(here, there, mine, theirs)
        for operation in data.draw(st.lists(st.sampled_from([write, read, paged, scatter]), max_size=8)):
            imm = data.draw(st.none() | st.integers(0, IMMS - 1))
            note(f"{operation.__name__} imm={imm}")
            operation(world, data, imm)
            world.check()

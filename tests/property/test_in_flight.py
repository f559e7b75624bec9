"""Random operations all in flight at once, between two processes and within one: right bytes, exact counts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossrail as xr
from tests.support.limits import WAIT_S, eventually
from tests.support.node import Caller, LocalNode, RemoteEngine, RemoteMemory
from tests.support.patterns import CANARY, ByteArray, assert_same_bytes, pattern
from tests.support.process import PeerProcess

IMM = 5
PAGE_COUNT_MAX = 40


@dataclass(frozen=True)
class Piece:
    """One operation. Its bytes have a place of their own, the same on both sides, behind `gap` bytes of nobody's."""

    kind: str
    gap: int
    pages: int
    page_bytes: int
    shuffle: int
    counted: bool

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes


PIECES = st.lists(
    st.builds(
        Piece,
        kind=st.sampled_from(["write", "read", "paged_writes", "scatter"]),
        gap=st.integers(0, 70),
        pages=st.integers(1, PAGE_COUNT_MAX),
        page_bytes=st.integers(0, 40) | st.integers(0, 6000),
        shuffle=st.integers(0, 2**16),
        counted=st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


@dataclass
class World:
    """Sources hold patterns; targets hold the canary, and after the operations the model in `expected_*`."""

    engine: xr.Engine
    src: xr.Region
    dst: RemoteMemory
    remote_src: RemoteMemory
    read_dst: xr.Region
    expected_written: ByteArray
    expected_read: ByteArray
    count: int = 0

    def submit(self, piece: Piece, at: int) -> xr.Transfer:
        imm = IMM if piece.counted else None
        if piece.counted:
            self.count += {"write": 1, "read": 0}.get(piece.kind, piece.pages)
        if piece.kind == "read":
            self.expected_read[at:][: piece.nbytes] = pattern(2, len(self.expected_read))[at:][: piece.nbytes]
            return self.engine.submit_read(
                self.read_dst, self.remote_src.descriptor, piece.nbytes, dst_offset=at, src_offset=at
            )
        self.expected_written[at:][: piece.nbytes] = self.src.array()[at:][: piece.nbytes]
        order = np.random.default_rng(piece.shuffle).permutation(piece.pages)
        if piece.kind == "write":
            return self.engine.submit_write(
                self.src, self.dst.descriptor, piece.nbytes, src_offset=at, dst_offset=at, imm=imm
            )
        if piece.kind == "paged_writes":
            pages = order if piece.shuffle % 2 else np.arange(piece.pages)
            return self.engine.submit_paged_writes(
                self.src, pages, self.dst.descriptor, pages, piece.page_bytes, src_offset=at, dst_offset=at, imm=imm
            )
        offsets = at + order * piece.page_bytes
        return self.engine.submit_scatter(
            self.src,
            [self.dst.descriptor] * piece.pages,
            lengths=piece.page_bytes,
            src_offsets=offsets,
            dst_offsets=offsets,
            imm=imm,
        )


def memory(engine: xr.Engine, nbytes: int, kind: str) -> xr.Region:
    region = engine.alloc(nbytes) if kind == "mapped" else engine.register(np.empty(nbytes, np.uint8))
    region.array()[:] = CANARY
    return region


@pytest.fixture(params=[1, 2], ids=["1proc", "2proc"])
def caller(request: pytest.FixtureRequest, nothing_leaks: None) -> Iterator[Caller]:
    if request.param == 1:
        yield LocalNode()
        return
    child = PeerProcess()
    yield child
    child.close()


@settings(max_examples=80)
@given(
    pieces=PIECES,
    rails=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    kinds=st.tuples(*[st.sampled_from(["mapped", "private"])] * 2),
    path=st.sampled_from(["auto", "staged", "cma"]),
    settling=st.booleans(),
)
def test_operations_in_flight_together_match_the_model(
    caller: Caller,
    pieces: list[Piece],
    rails: tuple[int, int],
    kinds: tuple[str, str],
    path: str,
    settling: bool,
) -> None:
    offsets = np.cumsum([piece.gap + piece.nbytes for piece in pieces]) - [piece.nbytes for piece in pieces]
    nbytes = int(offsets[-1]) + pieces[-1].nbytes + 64
    there = RemoteEngine(caller, rails=rails[1], private_path=path)
    with xr.Engine("here", rails=rails[0], private_path=path) as engine:
        src = memory(engine, nbytes, kinds[0])
        src.array()[:] = pattern(1, nbytes)
        world = World(
            engine,
            src,
            there.memory(nbytes, kinds[1]),
            there.memory(nbytes, kinds[1], fill=2),
            memory(engine, nbytes, kinds[0]),
            np.full(nbytes, CANARY, np.uint8),
            np.full(nbytes, CANARY, np.uint8),
        )
        if settling:
            engine.connect(there.address, WAIT_S)

        transfers = [world.submit(piece, int(at)) for piece, at in zip(pieces, offsets, strict=True)]
        for transfer in transfers:
            transfer.wait(WAIT_S)
        there.expect_count(IMM, world.count)

        assert_same_bytes(world.read_dst.array(), world.expected_read, "read")
        if all(piece.counted for piece in pieces if piece.kind != "read"):  # else nothing says when they are visible
            assert_same_bytes(world.dst.content(), world.expected_written, "written")
        else:
            eventually(lambda: np.array_equal(world.dst.content(), world.expected_written), "the bytes nobody counted")
    there.close()

"""tcp: a file that is cut short while it is mapped and registered. What needs its bytes fails, and nothing more."""

import mmap
import tempfile
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.certificates import Authority
from tests.support.limits import WAIT_S

pytestmark = pytest.mark.timeout(120)

NBYTES = 4 << 20
TCP = {"transport": "tcp", "rails": ["127.0.0.1"]}


def cut_file(kept_bytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        mapped = mmap.mmap(file.fileno(), NBYTES)
        file.truncate(kept_bytes)
    return mapped


@pytest.mark.parametrize("nbytes", [8, NBYTES])
@pytest.mark.parametrize("kept_bytes", [0, NBYTES // 2], ids=["all", "half"])
def test_write_from_a_file_that_was_cut_fails_and_others_go_on(
    open_engine: EngineFactory, kept_bytes: int, nbytes: int
) -> None:
    engine, other = open_engine(**TCP), open_engine("other", **TCP)
    source, bad, target = engine.alloc(NBYTES), engine.register(cut_file(kept_bytes)), other.alloc(NBYTES)

    transfers = [engine.submit_write(source, target.descriptor, imm=1)]
    broken = engine.submit_write(bad, target.descriptor, nbytes, src_offset=NBYTES - nbytes, imm=2)
    transfers += [engine.submit_write(source, target.descriptor, imm=1) for _ in range(10)]

    with pytest.raises(xr.TransferError, match=r"the source's memory cannot be read: .*cut short"):
        broken.wait(WAIT_S)
    for transfer in transfers:
        transfer.wait(WAIT_S)
    other.imm_counter(1).wait(11, WAIT_S)
    assert (other.imm_counter(1).poll(), other.imm_counter(2).poll()) == (0, 0)
    engine.submit_write(bad, target.descriptor, kept_bytes, imm=2).wait(WAIT_S)
    other.imm_counter(2).wait(1, WAIT_S)


def test_read_of_a_file_that_was_cut_fails_and_others_go_on(open_engine: EngineFactory) -> None:
    engine, other = open_engine(**TCP), open_engine("other", **TCP)
    mine, theirs, bad = engine.alloc(NBYTES), other.alloc(NBYTES), other.register(cut_file(NBYTES // 2))

    broken = engine.submit_read(mine, bad.descriptor)
    transfers = [engine.submit_read(engine.alloc(NBYTES), theirs.descriptor) for _ in range(5)]

    with pytest.raises(xr.TransferError, match=r"the target's memory cannot be read: .*cut short"):
        broken.wait(WAIT_S)
    for transfer in transfers:
        transfer.wait(WAIT_S)
    engine.submit_read(mine, bad.descriptor, NBYTES // 2).wait(WAIT_S)


@pytest.fixture(params=["clear", "tls"])
def pair(open_engine: EngineFactory, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[xr.Engine, xr.Engine]:
    tls = {"tls": Authority(tmp_path).issue()} if request.param == "tls" else {}
    return open_engine(**TCP, **tls), open_engine("other", **TCP, **tls)


# Short ones come behind their heads, long ones mostly by themselves.
@pytest.mark.parametrize("nbytes", [8, 5000, 100_000, NBYTES])
@pytest.mark.parametrize("kept_bytes", [0, NBYTES // 2], ids=["all", "half"])
def test_write_into_a_file_that_was_cut_fails_and_others_go_on(
    pair: tuple[xr.Engine, xr.Engine], kept_bytes: int, nbytes: int
) -> None:
    engine, other = pair
    source, good = engine.alloc(NBYTES), other.alloc(NBYTES)
    file = cut_file(kept_bytes)
    bad = other.register(file)
    offset = NBYTES - nbytes

    transfers = [engine.submit_write(source, good.descriptor, imm=1) for _ in range(3)]
    broken = engine.submit_write(source, bad.descriptor, nbytes, dst_offset=offset, imm=2)
    transfers += [engine.submit_write(source, good.descriptor, imm=1) for _ in range(3)]

    with pytest.raises(xr.TransferError, match=r"the target's memory cannot be written: .*cut short"):
        broken.wait(WAIT_S)
    for transfer in transfers:
        transfer.wait(WAIT_S)
    other.imm_counter(1).wait(6, WAIT_S)
    assert other.imm_counter(2).poll() == 0
    source.array()[:] = 7
    engine.submit_write(source, bad.descriptor, kept_bytes, imm=2).wait(WAIT_S)
    other.imm_counter(2).wait(1, WAIT_S)
    assert file[:kept_bytes] == bytes([7]) * kept_bytes


def test_of_writes_that_travel_together_only_those_into_the_missing_part_fail(
    pair: tuple[xr.Engine, xr.Engine],
) -> None:
    engine, other = pair
    source = engine.alloc(NBYTES)
    source.array()[:] = 7
    file = cut_file(NBYTES // 2)
    bad = other.register(file)
    # All are queued before there is a connection.
    starts = np.random.default_rng(1).permutation(NBYTES // 8192) * 8192

    transfers = [engine.submit_write(source, bad.descriptor, 100, dst_offset=int(at), imm=1) for at in starts]

    for at, transfer in zip(starts, transfers, strict=True):
        if at < NBYTES // 2:
            transfer.wait(WAIT_S)
            assert file[at : at + 100] == bytes([7]) * 100
        else:
            with pytest.raises(xr.TransferError, match="cut short"):
                transfer.wait(WAIT_S)
    other.imm_counter(1).wait(len(starts) // 2, WAIT_S)
    assert other.imm_counter(1).poll() == 0


@pytest.mark.parametrize("nbytes", [8, 100_000, NBYTES])
def test_read_into_a_file_that_was_cut_fails_and_others_go_on(pair: tuple[xr.Engine, xr.Engine], nbytes: int) -> None:
    engine, other = pair
    mine, theirs, bad = engine.alloc(NBYTES), other.alloc(NBYTES), engine.register(cut_file(NBYTES // 2))

    broken = engine.submit_read(bad, theirs.descriptor, nbytes, dst_offset=NBYTES - nbytes)
    transfers = [engine.submit_read(mine, theirs.descriptor) for _ in range(3)]

    with pytest.raises(xr.TransferError, match=r"our memory cannot be written: .*cut short"):
        broken.wait(WAIT_S)
    for transfer in transfers:
        transfer.wait(WAIT_S)
    engine.submit_read(bad, theirs.descriptor, NBYTES // 2).wait(WAIT_S)


def test_files_are_cut_and_grow_again_while_writes_arrive(open_engine: EngineFactory) -> None:
    """Each write ends, and what is done is there, unless the file was cut afterwards."""
    engine, other = open_engine(**TCP), open_engine("other", **TCP)
    source = engine.alloc(NBYTES)
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        bad = other.register(mmap.mmap(file.fileno(), NBYTES))
        done = 0
        for turn in range(60):
            transfers = [
                engine.submit_write(source, bad.descriptor, 3000, dst_offset=at * 4096, imm=1) for at in range(100)
            ]
            transfers.append(engine.submit_write(source, bad.descriptor, imm=1))
            for _ in range(turn % 7):
                file.truncate(turn % 5 * 4096)
                file.truncate(NBYTES)
            for transfer in transfers:
                try:
                    transfer.wait(WAIT_S)
                    done += 1
                except xr.TransferError as error:
                    assert "cut short" in str(error)
    assert done > 0
    other.imm_counter(1).wait(done, WAIT_S)
    assert other.imm_counter(1).poll() == 0

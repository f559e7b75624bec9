"""tcp: a file that is cut short while it is mapped and registered. What needs its bytes fails, and nothing more."""

import mmap
import tempfile

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
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


@pytest.mark.parametrize("kept_bytes", [0, NBYTES // 2], ids=["all", "half"])
def test_write_from_a_file_that_was_cut_fails_and_others_go_on(open_engine: EngineFactory, kept_bytes: int) -> None:
    engine, other = open_engine(**TCP), open_engine("other", **TCP)
    source, bad, target = engine.alloc(NBYTES), engine.register(cut_file(kept_bytes)), other.alloc(NBYTES)

    transfers = [engine.submit_write(source, target.descriptor, imm=1)]
    broken = engine.submit_write(bad, target.descriptor, imm=2)
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

"""Private memory goes the way that was measured to be the faster one, whatever the traffic that it was measured on.

Where the kernel forbids cross-memory attach there is one way: these skip, and tests/faults/test_privileges.py is about
that.
"""

import ctypes
import errno

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S
from tests.support.process import PeerProcess

TRIAL_BYTES = 32 << 20  # each way


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def peer_that_may_be_attached(spawn_peer: PeerFactory) -> PeerProcess:
    """Asks the kernel itself, so that an engine that wrongly finds it forbidden is not believed."""
    peer = spawn_peer()
    byte = ctypes.create_string_buffer(1)
    local, nowhere = Iovec(ctypes.addressof(byte), 1), Iovec(None, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    got = libc.process_vm_readv(peer.pid, ctypes.byref(local), one, ctypes.byref(nowhere), one, none)
    assert got == -1
    if ctypes.get_errno() != errno.EFAULT:  # it looked at the address: it would let us
        pytest.skip(f"no cross-memory attach here: {errno.errorcode[ctypes.get_errno()]}")
    return peer


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20])
def test_transfers_that_are_waited_for_one_by_one_find_the_faster_way(
    open_engine: EngineFactory, spawn_peer: PeerFactory, nbytes: int, kind: str
) -> None:
    engine = open_engine(transport="shm")
    there = peer_that_may_be_attached(spawn_peer).open(transport="shm")
    mine = engine.register(np.zeros(nbytes, np.uint8))
    remote = there.memory(nbytes, "private").descriptor
    submit = {"write": engine.submit_write, "read": engine.submit_read}[kind]

    for _ in range(2 * TRIAL_BYTES // nbytes + 8):  # the windows that are measured need not begin with a transfer
        submit(mine, remote).wait(WAIT_S)

    [path] = [path for path in engine.explain(there.address).paths if path.bytes]
    assert "measured on this link" in path.reason, path.reason


def test_short_transfers_do_not_choose_for_long_ones(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    engine = open_engine(transport="shm")
    there = peer_that_may_be_attached(spawn_peer).open(transport="shm")
    mine = engine.register(np.zeros(4 << 20, np.uint8))
    remote = there.memory(4 << 20, "private").descriptor

    def reason() -> str:
        [path] = engine.explain(there.address).paths
        return path.reason

    for _ in range(2 * TRIAL_BYTES // (64 << 10) + 8):
        engine.submit_write(mine, remote, 64 << 10).wait(WAIT_S)
    assert "below 1 MiB" in reason(), reason()

    for _ in range(2 * TRIAL_BYTES // (4 << 20) + 4):
        engine.submit_write(mine, remote).wait(WAIT_S)
    assert "below 1 MiB" not in reason(), reason()


def test_what_lies_just_behind_its_source_chooses_for_itself(
    open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    engine = open_engine(transport="shm")
    there = peer_that_may_be_attached(spawn_peer).open(transport="shm")
    page, nbytes = 4096, 1 << 20
    mine = engine.register(np.zeros(nbytes + page, np.uint8))
    remote = there.memory(nbytes, "private").descriptor

    def is_decided() -> bool:
        [path] = engine.explain(there.address).paths
        attaching_lost = path.path == "staged" and "measured" in path.reason  # for all: those behind are not tried
        return attaching_lost or "behind the source" in path.reason

    # Places of the source in its page, 63 bytes apart: wherever both memories begin, the target lies behind one.
    engine.submit_write(mine, remote, nbytes).wait(WAIT_S)
    for offset in range(0, page, 63):
        for _ in range(0 if is_decided() else TRIAL_BYTES // nbytes + 2):
            engine.submit_write(mine, remote, nbytes, src_offset=offset).wait(WAIT_S)

    assert is_decided(), engine.explain(there.address)


@pytest.mark.parametrize("rails", [1, 4])
def test_rails_do_not_cut_what_could_be_attached_into_pieces_that_are_staged(
    open_engine: EngineFactory, spawn_peer: PeerFactory, rails: int
) -> None:
    nbytes = 200 << 10
    engine = open_engine(transport="shm", rails=rails)
    there = peer_that_may_be_attached(spawn_peer).open(transport="shm", rails=rails)
    mine = engine.register(np.zeros(nbytes, np.uint8))
    remote = there.memory(nbytes, "private").descriptor

    for _ in range(2 * TRIAL_BYTES // nbytes + 8):
        engine.submit_write(mine, remote).wait(WAIT_S)

    [path] = [path for path in engine.explain(there.address).paths if path.bytes]
    assert "measured on this link" in path.reason, path.reason


def test_explain_does_not_name_a_way_that_nothing_takes(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    pages, page_bytes = 1024, 16 << 10
    engine = open_engine(transport="shm")
    there = peer_that_may_be_attached(spawn_peer).open(transport="shm")
    mine = engine.register(np.zeros(pages * page_bytes, np.uint8))
    remote = there.memory(pages * page_bytes, "private").descriptor
    shuffled = np.random.default_rng(1).permutation(pages)

    for _ in range(2 * TRIAL_BYTES // (pages * page_bytes) + 4):
        engine.submit_paged_writes(mine, shuffled, remote, shuffled, page_bytes).wait(WAIT_S)

    [path] = [path for path in engine.explain(there.address).paths if path.bytes]
    assert (path.path, "shorter than 64 KiB" in path.reason) == ("staged", True), path.reason


def test_target_of_a_scatter_is_counted_though_the_region_of_another_was_closed(
    open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    there = spawn_peer().open(transport="shm", polling="manual")
    closed, kept = there.memory(1 << 20, "private"), there.memory(6 << 20, "private")
    engine = open_engine(transport="shm", private_path="staged")
    mine = engine.register(np.full(6 << 20, 7, np.uint8))
    ready = [engine.submit_write(mine, memory.descriptor, 64, imm=3) for memory in (closed, kept)]
    there.wait_count(3, 2)
    for transfer in ready:
        transfer.wait(WAIT_S)

    scatter = engine.submit_scatter(
        mine, [closed.descriptor, kept.descriptor], lengths=[1 << 20, 6 << 20], src_offsets=0, dst_offsets=0, imm=[1, 2]
    )
    closed.close()
    there.wait_count(2, 1)

    with pytest.raises(xr.TransferError):
        scatter.wait(WAIT_S)
    there.expect_count(1, 0)
    assert np.frombuffer(kept.content(), np.uint8).min() == 7

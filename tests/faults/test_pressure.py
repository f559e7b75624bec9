"""Full queues and exhausted pools: back-pressure, never loss."""

import threading
import time

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, never
from tests.support.patterns import assert_same_bytes, pattern


def test_small_command_queue_only_slows_down(open_engine: EngineFactory) -> None:
    engine, other = open_engine(submit_queue_depth=16), open_engine("other")
    count = 5000
    src, dst = engine.register(pattern(1, count * 8)), other.alloc(count * 8)

    for i in range(count):
        engine.submit_write(src, dst.descriptor, 8, src_offset=8 * i, dst_offset=8 * i, imm=1)

    other.imm_counter(1).wait(count, WAIT_S)
    assert_same_bytes(dst.array(), pattern(1, count * 8))


def test_full_queue_blocks_without_the_gil_and_resumes(open_engine: EngineFactory) -> None:
    engine, other = open_engine(polling="manual", submit_queue_depth=16), open_engine("other")
    dst = other.alloc(8)
    src = engine.alloc(8)
    transfers: list[xr.Transfer] = []

    def submit() -> None:
        for _ in range(100):
            transfers.append(engine.submit_write(src, dst.descriptor, imm=1))

    submitter = threading.Thread(target=submit)
    submitter.start()  # with no worker it either blocks at 16 or drives the engine itself
    deadline = time.monotonic() + WAIT_S
    while submitter.is_alive() and time.monotonic() < deadline:
        engine.progress()
    submitter.join(WAIT_S)
    for transfer in transfers:
        transfer.wait(WAIT_S)

    assert len(transfers) == 100
    other.imm_counter(1).wait(100, WAIT_S)


def test_full_queue_can_be_interrupted_by_close(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    engine = open_engine(submit_queue_depth=16)
    engine.connect(there.address, WAIT_S)
    child.stop()
    refused: list[xr.EngineClosed] = []
    transfers: list[xr.Transfer] = []

    def submit() -> None:
        try:
            for _ in range(200_000):
                transfers.append(engine.submit_send(there.address, bytes(10_000)))
        except xr.EngineClosed as error:
            refused.append(error)

    submitter = threading.Thread(target=submit)
    submitter.start()
    time.sleep(0.3)
    engine.close(0.1)
    submitter.join(WAIT_S)

    assert not submitter.is_alive()
    assert all(transfer.done for transfer in transfers)
    child.resume()


def test_many_paged_writes_at_once_all_arrive(open_engine: EngineFactory) -> None:
    engine, other = open_engine(rails=4, submit_queue_depth=16), open_engine("other", rails=2)
    src, dst = engine.register(pattern(1, 1_000_000)), other.register(np.zeros(1_000_000, np.uint8))
    pages = np.random.default_rng(1).permutation(1000)

    transfers = [engine.submit_paged_writes(src, pages, dst.descriptor, pages, 1000, imm=1) for _ in range(100)]
    for transfer in transfers:
        transfer.wait(WAIT_S)

    other.imm_counter(1).wait(100_000, WAIT_S)
    assert other.imm_counter(1).poll() == 0
    assert_same_bytes(dst.array(), pattern(1, 1_000_000))


@pytest.mark.parametrize("processes", [1, 2])
def test_exhausted_pool_does_not_hold_writes_up(
    engine: xr.Engine, open_engine: EngineFactory, spawn_peer: PeerFactory, processes: int
) -> None:
    if processes == 2:
        there = spawn_peer().open()
        there.receive(1, 16)
        target = there.memory(1000)
    else:
        other = open_engine("other")
        pool = other.submit_recvs(1, 16)
        target = other.alloc(1000)
    messages = [engine.submit_send(target.descriptor.owner, bytes(16)) for _ in range(500)]
    never(lambda: all(message.done for message in messages), "500 messages in one buffer", 0.1)

    for _ in range(100):
        engine.submit_write(engine.alloc(1000), target.descriptor, imm=2).wait(WAIT_S)

    if processes == 2:
        there.expect_count(2, 100)
    else:
        pool.close()


def test_dead_receiver_ends_the_messages_held_back(engine: xr.Engine, spawn_peer: PeerFactory) -> None:
    child = spawn_peer()
    there = child.open()
    there.receive(1, 16)
    messages = [engine.submit_send(there.address, bytes(16)) for _ in range(500)]
    time.sleep(0.05)

    child.kill()

    lost = 0
    for message in messages:
        try:
            message.wait(WAIT_S)
        except xr.PeerLost:
            lost += 1
    assert lost > 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_has_many_messages_does_not_keep_the_buffers_from_who_has_one(
    open_engine: EngineFactory, transport: str
) -> None:
    receiver = open_engine("receiver", transport=transport)
    names = ["chatty-1", "quiet", "chatty-2"]  # in the order in which they connect
    senders = {name: open_engine(name, transport=transport) for name in names}
    with receiver.submit_recvs(2, 16) as pool:
        for sender in senders.values():
            sender.connect(receiver.address, WAIT_S)
        chatty = [sender for name, sender in senders.items() if name != "quiet"]
        transfers = [sender.submit_send(receiver.address, b"chatty") for _ in range(200) for sender in chatty]
        time.sleep(0.1)  # what there is room for waits at the receiver
        transfers.append(senders["quiet"].submit_send(receiver.address, b"quiet"))
        time.sleep(0.1)  # so does this: no buffer was free when it came
        taken = 0
        while pool.recv(WAIT_S).data != b"quiet":
            taken += 1
            time.sleep(0.002)  # the buffer is free, and offered, before the next one is
        assert taken < 100
        for _ in range(len(transfers) - 1 - taken):
            pool.recv(WAIT_S)
        for transfer in transfers:
            transfer.wait(WAIT_S)

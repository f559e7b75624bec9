"""Short operations wait behind others of their kind, not behind all that is long. Told by the order of completions."""

from collections.abc import Callable

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually
from tests.support.tcp_engines import TCP

LONG_BYTES = 20 << 10
LONGS = 12_000  # three times what the transport takes on
PAGES = 1200
PAGED = 100  # the pages of all are as many times more

Submit = Callable[[xr.Engine, xr.Region, xr.RegionDescriptor], list[xr.Transfer]]


def writes(engine: xr.Engine, mine: xr.Region, theirs: xr.RegionDescriptor) -> list[xr.Transfer]:
    return [engine.submit_write(mine, theirs, LONG_BYTES) for _ in range(LONGS)]


def paged_writes(engine: xr.Engine, mine: xr.Region, theirs: xr.RegionDescriptor) -> list[xr.Transfer]:
    """Of pages as short as a short operation, of which each transfer is long."""
    pages = np.arange(PAGES) * 7 % 16
    return [engine.submit_paged_writes(mine, pages, theirs, pages, 1 << 10) for _ in range(PAGED)]


@pytest.mark.parametrize("submit", [writes, paged_writes])
@pytest.mark.parametrize("kind", ["write", "read", "barrier"])
def test_short_operation_does_not_wait_for_all_that_is_long(
    open_engine: EngineFactory, spawn_peer: PeerFactory, submit: Submit, kind: str
) -> None:
    engine = open_engine(**TCP)
    process = spawn_peer()
    peer = process.open(**TCP)
    mine, theirs = engine.alloc(LONG_BYTES), peer.memory(LONG_BYTES)
    group = engine.add_peer_group([peer.address])
    operations: dict[str, Callable[[], xr.Transfer]] = {
        "write": lambda: engine.submit_write(mine, theirs.descriptor, 8, imm=1),
        "read": lambda: engine.submit_read(mine, theirs.descriptor, 8),
        "barrier": lambda: engine.submit_barrier(group, 1),
    }
    engine.submit_write(mine, theirs.descriptor).wait(WAIT_S)  # now either lane is connected
    operations[kind]().wait(WAIT_S)
    process.stop()
    long = submit(engine, mine, theirs.descriptor)
    short = operations[kind]()
    order: list[xr.Transfer] = []  # callbacks run in the order of completions
    for transfer in (*long, short):
        transfer.add_done_callback(order.append)

    process.resume()
    for transfer in (*long, short):
        transfer.wait(WAIT_S)
    eventually(lambda: len(order) == len(long) + 1, "all callbacks")

    assert order.index(short) < len(long) / 4
    peer.expect_count(1, 0 if kind == "read" else 2)


def test_short_operation_is_heard_of_before_all_that_is_long_is_copied(
    open_engine: EngineFactory, spawn_peer: PeerFactory
) -> None:
    """On shm, where to post is to copy. One word begins all of them, in the order of their submits."""
    engine = open_engine()
    peer = spawn_peer().open()
    mine, theirs = engine.alloc(1 << 20), peer.memory(1 << 20)
    engine.submit_write(mine, theirs.descriptor).wait(WAIT_S)
    watcher = engine.alloc_watcher(lambda _old, _new: None)
    long = [engine.submit_write(mine, theirs.descriptor, trigger=(watcher, 1)) for _ in range(600)]
    short = engine.submit_write(mine, theirs.descriptor, 8, imm=1, trigger=(watcher, 1))
    order: list[xr.Transfer] = []
    for transfer in (*long, short):
        transfer.add_done_callback(order.append)

    watcher.add()
    for transfer in (*long, short):
        transfer.wait(WAIT_S)
    eventually(lambda: len(order) == len(long) + 1, "all callbacks")

    assert order.index(short) < len(long) / 4
    peer.expect_count(1, 1)


def test_long_operations_to_one_peer_leave_turns_to_other_peers(open_engine: EngineFactory) -> None:
    """One word begins all of them: a GiB to one peer, and behind it 16 MiB to another."""
    engine, one, other = open_engine(), open_engine("one"), open_engine("other")
    mine, theirs, others = engine.alloc(64 << 20), one.alloc(64 << 20), other.alloc(1 << 20)
    for target in (theirs, others):
        engine.submit_write(mine, target.descriptor, 8).wait(WAIT_S)
    watcher = engine.alloc_watcher(lambda _old, _new: None)
    stream = [engine.submit_write(mine, theirs.descriptor, trigger=(watcher, 1)) for _ in range(16)]
    few = [engine.submit_write(mine, others.descriptor, 256 << 10, trigger=(watcher, 1)) for _ in range(64)]
    order: list[xr.Transfer] = []
    for transfer in (*stream, *few):
        transfer.add_done_callback(order.append)

    watcher.add()
    for transfer in (*stream, *few):
        transfer.wait(WAIT_S)
    eventually(lambda: len(order) == len(stream) + len(few), "all callbacks")

    assert set(order[: len(few)]) == set(few)

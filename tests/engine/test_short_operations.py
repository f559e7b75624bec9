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

"""Long and lossy cables: slow, and exact."""

import hashlib

import numpy as np
import pytest

from tests.multihost.conftest import NetworkFactory
from tests.support.limits import WAIT_S, eventually
from tests.support.operations import Operations
from tests.support.patterns import assert_same_bytes, pattern

NBYTES = 1 << 20
PAGE_BYTES = 8192


def test_delay_and_loss_change_nothing_but_the_time(network: NetworkFactory) -> None:
    net = network(rails=2, delay_ms=10, loss=0.01)
    mine, remote = net.source(NBYTES, fill=1), net.target(NBYTES)
    operations = Operations(net.here, mine, [remote.descriptor], imm=1, page_bytes=PAGE_BYTES)
    back = net.here.register(np.zeros(NBYTES, np.uint8))
    net.there.receive(32, 1000)

    writes = [operations.submit("write") for _ in range(3)]
    pages = operations.submit("paged_writes")
    messages = [net.here.submit_send(net.there.address, bytes([i]) * 100) for i in range(32)]
    barrier = operations.submit("barrier")
    for transfer in [*writes, pages, *messages, barrier]:
        transfer.wait(2 * WAIT_S)
    net.there.expect_count(1, 3 + operations.counts("paged_writes") + 1)
    assert sorted(net.there.take()[1] for _ in range(32)) == [bytes([i]) * 100 for i in range(32)]

    operations.submit("write").wait(WAIT_S)
    net.there.expect_count(1, 1)
    assert remote.digest() == hashlib.sha256(mine.array()).hexdigest()
    net.here.submit_read(back, remote.descriptor).wait(WAIT_S)
    assert_same_bytes(back.array(), pattern(1, NBYTES))
    eventually(lambda: net.here.peer_state(net.there.address) == "connected", "the peer connected")


def test_rail_that_was_down_goes_on_by_long_packets(network: NetworkFactory) -> None:
    net = network(rails=2)
    mine, remote = net.source(NBYTES), net.target(NBYTES)
    for rail in range(2):  # connections that have carried next to nothing
        net.here.submit_write(mine, remote.descriptor, 20_000, rail=rail).wait(WAIT_S)

    net.b.down(0)
    pinned = [net.here.submit_write(mine, remote.descriptor, rail=0) for _ in range(4)]
    eventually(lambda: "down: no answer" in str(net.here.explain(net.there.address)), "an attempt in vain")
    net.b.up(0)
    for transfer in pinned:
        transfer.wait(WAIT_S)

    assert "short packets" not in str(net.here.explain(net.there.address))


@pytest.mark.parametrize("kind", ["write", "read", "paged_writes"])
def test_way_that_drops_long_packets_is_gone_by_short_ones_and_says_so(network: NetworkFactory, kind: str) -> None:
    net = network(rails=2, mtu=600)  # handshakes pass, and answers to pings
    mine, remote = net.source(NBYTES, fill=1), net.target(NBYTES, fill=2)
    operations = Operations(net.here, mine, [remote.descriptor], imm=1, page_bytes=16 * PAGE_BYTES)

    operations.submit(kind).wait(2 * WAIT_S)

    net.there.expect_count(1, operations.counts(kind))
    assert_same_bytes(mine.array(), pattern(2 if kind == "read" else 1, NBYTES))
    if kind == "write":
        assert remote.digest() == hashlib.sha256(mine.array()).hexdigest()
    assert "by short packets" in str(net.here.explain(net.there.address))

"""A little of the contract between two hosts. The whole of it runs over loopback, in tests/contract."""

import numpy as np
import pytest

from tests.multihost.conftest import NetworkFactory, over_networks
from tests.support.limits import WAIT_S
from tests.support.operations import Operations
from tests.support.patterns import assert_same_bytes, pattern

NBYTES = 3_000_001
PAGE_BYTES = 4096


@over_networks
@pytest.mark.parametrize("by", ["address", "address6", "netdev"])
def test_every_operation_between_two_hosts(network: NetworkFactory, by: str, transport: str) -> None:
    net = network(rails=2, by=by, transport=transport)
    mine, remote = net.source(NBYTES, fill=1), net.target(NBYTES)
    operations = Operations(net.here, mine, [remote.descriptor], imm=1, page_bytes=PAGE_BYTES)

    operations.submit("write").wait(WAIT_S)
    net.there.expect_count(1, 1)
    assert_same_bytes(remote.content(), pattern(1, NBYTES))

    remote.fill(2)
    operations.submit("read").wait(WAIT_S)
    assert_same_bytes(mine.array(), pattern(2, NBYTES))

    mine.array()[:] = pattern(3, NBYTES)
    operations.submit("paged_writes").wait(WAIT_S)
    net.there.expect_count(1, operations.counts("paged_writes"))
    pages = len(operations.pages)
    expected = pattern(2, NBYTES)
    whole = expected[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES)
    whole[operations.pages[::-1]] = mine.array()[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES)[operations.pages]
    assert_same_bytes(remote.content(), expected)

    operations.submit("scatter").wait(WAIT_S)
    net.there.expect_count(1, 1)
    assert_same_bytes(remote.content(), pattern(3, NBYTES))

    operations.submit("barrier").wait(WAIT_S)
    net.there.expect_count(1, 1)


@over_networks
@pytest.mark.parametrize("by", ["address", "address6", "netdev"])
def test_the_other_host_may_begin(network: NetworkFactory, by: str, transport: str) -> None:
    net = network(rails=2, by=by, connected=False, transport=transport)
    target = net.here.register(np.zeros(NBYTES, np.uint8))
    remote = net.target(NBYTES, fill=4)

    with net.here.submit_recvs(4, 1000) as pool:
        net.there.operate("write", remote, [target.descriptor], imm=5)
        net.there.send(net.here.address, b"done")
        assert pool.recv(WAIT_S).data == b"done"

    net.here.imm_counter(5).wait(1, WAIT_S)
    assert net.here.imm_counter(5).poll() == 0
    assert_same_bytes(target.array(), pattern(4, NBYTES))


@over_networks
def test_messages_and_answers_cross(network: NetworkFactory, transport: str) -> None:
    net = network(rails=2, transport=transport)
    net.there.receive(16, 100_000)
    message = bytes(pattern(6, 60_000))

    transfers = [net.here.submit_send(net.there.address, message) for _ in range(16)]

    for _ in range(16):
        sender, got = net.there.take()
        assert (sender, got) == (net.here.address, message)
    for transfer in transfers:
        transfer.wait(WAIT_S)

"""Plugs pulled in the middle of transfers: nothing is lost, nothing counted twice, and the rail comes back."""

import hashlib
import time

import numpy as np
import pytest

import crossrail as xr
from crossrail.observe import read_traffic
from tests.multihost.conftest import Network, NetworkFactory, over_networks
from tests.support.limits import WAIT_S, eventually, never
from tests.support.operations import Operations
from tests.support.patterns import assert_same_bytes, pattern

NBYTES = 4 << 20
FAILOVER_S = WAIT_S  # transfers go on over the other rails after some 2 s of silence, and then take their time
MBIT = 800


def slowed(net: Network) -> Network:
    """Slow enough for something to be under way at any moment."""
    for host in (net.a, net.b):
        for rail in range(len(host.netdevs)):
            host.limit(rail, MBIT)
    return net


class Flow:
    """Operations of one kind that go on while things happen, submitted by the test between its steps."""

    def __init__(self, net: Network, kind: str, nbytes: int = NBYTES) -> None:
        self.net = net
        self.kind = kind
        self.mine = net.source(nbytes, fill=1)
        self.remote = net.target(nbytes, fill=1)
        self.operations = Operations(net.here, self.mine, [self.remote.descriptor], imm=1, page_bytes=64 << 10)
        self.transfers: list[xr.Transfer] = []
        if kind == "send":
            net.there.receive(64, 1000)

    def submit(self, count: int) -> list[xr.Transfer]:
        new = [self.operations.submit(self.kind) for _ in range(count)]
        self.transfers += new
        return new

    def expect_all_done_and_counted_once(self) -> None:
        for transfer in self.transfers:
            transfer.wait(FAILOVER_S)
        counts = len(self.transfers) * self.operations.counts(self.kind)
        if counts > 0:
            self.net.there.expect_count(1, counts)
        if self.kind == "send":
            for _ in self.transfers:
                assert self.net.there.take()[1] == bytes(1000)
            with pytest.raises(Exception, match="WaitTimeout"):
                self.net.there.take(timeout_s=0.2)
        if self.kind == "write":
            assert self.remote.digest() == hashlib.sha256(self.mine.array()).hexdigest()
        if self.kind == "read":
            assert_same_bytes(self.mine.array(), pattern(1, self.mine.nbytes))


@over_networks
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("kind", ["write", "read", "paged_writes", "send"])
def test_rail_that_fails_loses_nothing_and_comes_back(
    network: NetworkFactory, transport: str, kind: str, side: str
) -> None:
    net = slowed(network(transport=transport, rails=2))
    flow = Flow(net, kind)
    flow.submit(20)
    time.sleep(0.05)

    net.hosts[side].down(0)
    flow.submit(20)
    flow.expect_all_done_and_counted_once()
    eventually(lambda: net.here.peer_state(net.there.address) == "connected", "the peer connected")

    net.hosts[side].up(0)
    carried = net.b.received_bytes(0) + net.b.sent_bytes(0)
    flow.transfers.clear()
    flow.mine.array()[:] = pattern(1, NBYTES)

    def comes_back() -> bool:
        for transfer in flow.submit(2):
            transfer.wait(WAIT_S)
        return net.b.received_bytes(0) + net.b.sent_bytes(0) - carried > (NBYTES if kind != "send" else 1000)

    if kind != "send":  # messages stay on the rail that they moved to
        eventually(comes_back, "the rail carrying bytes again", FAILOVER_S)
        flow.expect_all_done_and_counted_once()


def test_rail_that_is_down_is_shown_as_that(network: NetworkFactory) -> None:
    net = network(rails=2)
    source, target = net.source(NBYTES), net.target(NBYTES)

    def down() -> list[int | None]:
        net.here.submit_write(source, target.descriptor).wait(FAILOVER_S)
        return [rail.down for rail in read_traffic(net.here).rails]

    assert down() == [0, 0]
    net.b.down(1)
    eventually(lambda: down() == [0, 1], "the rail down", FAILOVER_S)
    net.b.up(1)
    eventually(lambda: down() == [0, 0], "the rail up again", FAILOVER_S)


@over_networks
def test_rails_that_fail_in_turn_lose_nothing(network: NetworkFactory, transport: str) -> None:
    net = slowed(network(transport=transport, rails=3))
    flow = Flow(net, "write")

    for rail in range(3):
        flow.submit(10)
        net.a.down(rail)
        time.sleep(0.05)
        flow.submit(10)
        for transfer in flow.transfers:
            transfer.wait(FAILOVER_S)
        net.a.up(rail)

    flow.expect_all_done_and_counted_once()


@over_networks
@pytest.mark.parametrize(("rails", "side", "failing"), [((1, 3), "b", 1), ((2, 3), "a", 0)])
def test_rail_that_fails_of_unequal_numbers_loses_nothing(
    network: NetworkFactory, transport: str, rails: tuple[int, int], side: str, failing: int
) -> None:
    net = slowed(network(transport=transport, rails=rails, one_subnet=True))
    flow = Flow(net, "write")
    flow.submit(6)
    flow.transfers[0].wait(WAIT_S)

    net.hosts[side].down(failing)
    flow.submit(6)
    flow.expect_all_done_and_counted_once()
    eventually(lambda: net.here.peer_state(net.there.address) == "connected", "the peer connected")

    net.hosts[side].up(failing)
    flow.transfers.clear()
    flow.submit(2)
    flow.expect_all_done_and_counted_once()


@over_networks
def test_messages_go_on_over_another_rail(network: NetworkFactory, transport: str) -> None:
    net = network(transport=transport, rails=2)
    flow = Flow(net, "send")
    flow.submit(5)
    for transfer in flow.transfers:
        transfer.wait(WAIT_S)

    net.b.down(0)
    flow.submit(5)

    flow.expect_all_done_and_counted_once()


@over_networks
@pytest.mark.parametrize("kind", ["write", "read"])
def test_all_rails_down_and_up_again(network: NetworkFactory, transport: str, kind: str) -> None:
    net = slowed(network(transport=transport, rails=2, peer_timeout_s=20))
    flow = Flow(net, kind)
    flow.submit(20)
    time.sleep(0.05)

    for rail in range(2):
        net.a.down(rail)
    flow.submit(5)
    never(lambda: flow.transfers[-1].done, "a transfer without a rail", 2.5)
    for rail in range(2):
        net.a.up(rail)

    flow.expect_all_done_and_counted_once()
    # Its thaw is seen at the next tick, which may come after the last transfer.
    eventually(lambda: net.here.peer_state(net.there.address) == "connected", "the peer thawed")


@over_networks
def test_all_rails_down_for_too_long_lose_the_peer(network: NetworkFactory, transport: str) -> None:
    net = slowed(network(transport=transport, rails=2, peer_timeout_s=2, connect_timeout_s=2))
    flow = Flow(net, "write")
    mine = net.here.register(np.zeros(NBYTES, np.uint8))
    stream = net.there.stream("write", net.target(NBYTES), [mine.descriptor], imm=2)
    flow.submit(20)
    time.sleep(0.05)
    started = time.monotonic()

    for rail in range(2):
        net.a.down(rail)

    with pytest.raises(xr.PeerLost, match=r"(silent|reached) for [\d.]+ s.*10\.[12]\.0\.1") as lost:
        flow.transfers[-1].wait(WAIT_S)
    took_s = time.monotonic() - started
    print(f"lost after {took_s:.1f} s: {lost.value}")
    assert 1.5 < took_s < 2 + 3
    assert net.there.caller.call("failed_stream", stream=stream)["failures"].count("PeerLost") > 0
    assert net.here.peer_state(net.there.address) == "lost"
    with pytest.raises(xr.PeerLost):
        flow.submit(1)[0].wait(WAIT_S)


@over_networks
def test_pinned_write_fails_when_its_rail_stays_away(network: NetworkFactory, transport: str) -> None:
    net = network(transport=transport, rails=2, peer_timeout_s=2)
    flow = Flow(net, "write")
    net.here.submit_write(flow.mine, flow.remote.descriptor, rail=1).wait(WAIT_S)
    net.a.down(1)

    pinned = net.here.submit_write(flow.mine, flow.remote.descriptor, imm=3, rail=1)
    flow.submit(3)

    flow.expect_all_done_and_counted_once()
    with pytest.raises(xr.TransferError, match="rail 1 is down"):
        pinned.wait(FAILOVER_S)
    assert net.there.count(3) == 0

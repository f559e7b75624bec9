"""Which rails talk to which, and that bytes go where they should: the netdevs count them."""

import hashlib
import itertools
import time

import pytest

import crossrail as xr
from tests.multihost.conftest import Network, NetworkFactory
from tests.support.limits import WAIT_S, eventually
from tests.support.node import RemoteMemory
from tests.support.patterns import assert_same_bytes, pattern

NBYTES = 32 << 20
SHORT = 1 << 20
COUNTS = (1, 2, 3, 4, 5, 8)
RAILS = [*itertools.pairwise(COUNTS), *itertools.pairwise(COUNTS[::-1]), (1, 8), (8, 3)]


def assert_same_content(mine: xr.Region, remote: RemoteMemory) -> None:
    assert remote.digest() == hashlib.sha256(mine.array()).hexdigest(), "other bytes there than here"


def moved(net: Network, before: list[int]) -> list[int]:
    return [now - then for now, then in zip(net.rail_bytes(), before, strict=True)]


def all_connected(net: Network) -> bool:
    return all(path.reason.endswith(", connected") for path in net.here.explain(net.there.address).paths)


@pytest.mark.parametrize(
    ("rails", "by"), [*((rails, "netdev") for rails in RAILS), ((2, 3), "address"), ((8, 5), "address6")]
)
def test_all_rails_of_the_larger_side_carry_bytes(network: NetworkFactory, rails: tuple[int, int], by: str) -> None:
    net = network(rails=rails, by=by, one_subnet=True)
    mine, remote = net.source(NBYTES), net.target(NBYTES)
    larger = net.a if rails[0] >= rails[1] else net.b
    for rail in range(max(rails)):  # one that is always free, as on a busy machine, would take everything
        if larger is net.a:
            net.a.limit(rail, 400 // rails[0])
        else:
            net.hosts.limit_incoming("b", rail, 400 // rails[1])
    net.here.submit_write(mine, remote.descriptor, SHORT, imm=1).wait(WAIT_S)  # connects all, and need not wait for all
    eventually(lambda: all_connected(net), "all rails connected")

    pairs = net.here.explain(net.there.address).rails
    assert len(pairs) == max(rails)
    assert {pair[0] for pair in pairs} == set(range(rails[0]))
    assert {pair[1] for pair in pairs} == set(range(rails[1]))

    net.here.submit_write(mine, remote.descriptor, imm=1).wait(WAIT_S)
    net.there.expect_count(1, 2)
    carried = [larger.sent_bytes(rail) + larger.received_bytes(rail) for rail in range(max(rails))]
    assert min(carried) > NBYTES // 100, f"bytes by rail: {carried}"
    assert_same_content(mine, remote)


@pytest.mark.parametrize(("by", "source_routes"), [("address", True), ("netdev", False)])
def test_rails_of_one_subnet_keep_to_their_netdevs_in_both_directions(
    network: NetworkFactory, by: str, source_routes: bool
) -> None:
    net = network(rails=4, one_subnet=True, by=by, source_routes=source_routes)
    mine, remote = net.source(NBYTES), net.target(NBYTES, fill=2)

    net.here.submit_read(mine, remote.descriptor, rail=2).wait(WAIT_S)

    assert_same_bytes(mine.array(), pattern(2, NBYTES))
    sent = [net.b.sent_bytes(i) for i in range(4)]
    assert sent[2] > NBYTES
    assert sum(sent) - sent[2] < NBYTES // 10, f"read data left by other netdevs: {sent}"


def test_pinned_rail_carries_what_is_pinned_and_no_other_does(network: NetworkFactory) -> None:
    net = network(rails=3)
    mine, remote = net.source(NBYTES), net.target(NBYTES)

    for rail in range(3):
        before = net.rail_bytes()
        net.here.submit_write(mine, remote.descriptor, imm=rail, rail=rail).wait(WAIT_S)
        net.there.expect_count(rail, 1)
        carried = moved(net, before)
        assert carried[rail] > NBYTES
        assert sum(carried) - carried[rail] < NBYTES // 100, f"pinned to rail {rail}: {carried}"
    assert_same_content(mine, remote)


def test_rail_without_counterpart_refuses_what_is_pinned_to_it(network: NetworkFactory) -> None:
    net = network(rails=(3, 2))
    mine, remote = net.source(1000), net.target(1000)

    transfer = net.here.submit_write(mine, remote.descriptor, imm=1, rail=2)

    with pytest.raises(xr.TransferError, match="rail 2 has no rail of the peer"):
        transfer.wait(WAIT_S)
    net.here.submit_write(mine, remote.descriptor, imm=1).wait(WAIT_S)
    net.there.expect_count(1, 1)


@pytest.mark.parametrize("after_ms", [0, 20, 100, 400])
def test_long_write_that_is_cancelled_counts_whole_or_not_at_all(network: NetworkFactory, after_ms: int) -> None:
    net = network(rails=3)
    mine, remote = net.source(NBYTES), net.target(NBYTES)
    for rail in range(3):
        net.a.limit(rail, 300)
    net.here.submit_write(mine, remote.descriptor, SHORT).wait(WAIT_S)

    transfers = [net.here.submit_write(mine, remote.descriptor, imm=1) for _ in range(2)]
    time.sleep(after_ms / 1000)
    for transfer in transfers:
        transfer.cancel()

    done = 0
    for transfer in transfers:
        try:
            transfer.wait(WAIT_S)
            done += 1
        except xr.TransferCancelled:
            pass
    net.here.submit_write(mine, remote.descriptor, imm=2).wait(WAIT_S)
    net.there.expect_count(2, 1)
    assert net.there.count(1) == done
    assert_same_content(mine, remote)

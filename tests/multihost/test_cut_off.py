"""Hosts that vanish without a word, and peers that freeze: found out by silence alone."""

import re
import time

import numpy as np
import pytest

import crossrail as xr
from tests.multihost.conftest import Network, NetworkFactory
from tests.support.hosts import run
from tests.support.limits import WAIT_S, eventually, never
from tests.support.operations import Operations

NBYTES = 1 << 20
TIMEOUT_S = 2.0
SLACK_S = 2.5


def unplug(net: Network) -> None:
    for rail in range(len(net.b.netdevs)):
        net.b.down(rail)


def lost_within(transfer: xr.Transfer, started: float, timeout_s: float) -> str:
    with pytest.raises(xr.PeerLost) as lost:
        transfer.wait(WAIT_S)
    took_s = time.monotonic() - started
    print(f"lost after {took_s:.1f} s: {lost.value}")
    assert took_s < timeout_s + SLACK_S
    return str(lost.value)


@pytest.mark.parametrize("kind", ["write", "read", "send"])
def test_host_that_vanishes_is_lost_in_time(network: NetworkFactory, kind: str) -> None:
    net = network(rails=2, peer_timeout_s=TIMEOUT_S)
    operations = Operations(net.here, net.source(NBYTES), [net.target(NBYTES).descriptor], imm=1)
    if kind != "send":
        operations.submit(kind).wait(WAIT_S)
    unplug(net)
    net.child.kill()  # its kernel's last words go nowhere

    started = time.monotonic()
    transfer = operations.submit(kind)

    text = lost_within(transfer, started, TIMEOUT_S)
    # Not "could not be reached for", which is after the kernel has given the connection up, and so for as long again.
    assert re.search(r"silent for [\d.]+ s.*10\.[12]\.0\.1", text), f"no time or no rail: {text}"
    assert net.here.peer_state(net.there.address) == "lost"


def test_address_that_our_own_host_has_lost_is_named(network: NetworkFactory) -> None:
    """To be looked for here, and not at the peer."""
    net = network(rails=1, peer_timeout_s=4.0)
    operations = Operations(net.here, net.source(NBYTES), [net.target(NBYTES).descriptor], imm=1)
    operations.submit("write").wait(WAIT_S)
    run(f"ip -n {net.a.namespace} address flush dev rail0")

    started = time.monotonic()
    text = lost_within(operations.submit("write"), started, 4.0)

    assert re.search(r"another connection: bind to .* from 10\.1\.0\.\d+: Cannot assign requested address", text), text


async def test_host_that_vanishes_is_lost_for_one_who_awaits(network: NetworkFactory) -> None:
    net = network(rails=1, peer_timeout_s=TIMEOUT_S)
    started = time.monotonic()
    unplug(net)

    with pytest.raises(xr.PeerLost, match=r"(silent|reached) for [\d.]+ s"):
        await net.here.submit_send(net.there.address, b"anybody there")

    assert time.monotonic() - started < TIMEOUT_S + SLACK_S


def test_host_that_cannot_be_reached_fails_by_the_connect_timeout(network: NetworkFactory) -> None:
    net = network(rails=2, connected=False, connect_timeout_s=1.5)
    unplug(net)

    started = time.monotonic()
    transfer = net.here.submit_send(net.there.address, b"anybody there")

    text = lost_within(transfer, started, 1.5)
    assert "10.1.0.2" in text or "10.2.0.2" in text, f"no word of the address: {text}"


def test_both_sides_lose_each_other(network: NetworkFactory) -> None:
    net = network(rails=2, peer_timeout_s=TIMEOUT_S)
    mine = net.here.register(np.zeros(NBYTES, np.uint8))
    remote = net.target(NBYTES)
    stream = net.there.stream("write", remote, [mine.descriptor], imm=1)
    net.here.submit_write(mine, remote.descriptor).wait(WAIT_S)

    unplug(net)

    failed = net.there.caller.call("failed_stream", stream=stream)
    assert set(failed["failures"]) == {"PeerLost"}
    assert net.here.imm_counter(1).poll() >= failed["done"]


def test_frozen_peer_is_shown_then_lost_and_what_thaws_does_no_harm(network: NetworkFactory) -> None:
    net = network(rails=2, peer_timeout_s=4)
    target = net.here.register(np.zeros(NBYTES, np.uint8))
    remote = net.target(NBYTES, fill=1)
    mine = net.source(NBYTES)
    net.here.submit_write(mine, remote.descriptor, imm=1).wait(WAIT_S)
    net.there.expect_count(1, 1)
    net.there.operate("write", remote, [target.descriptor], imm=2)
    net.here.imm_counter(2).wait(1, WAIT_S)

    net.child.stop()
    started = time.monotonic()
    transfers = [net.here.submit_write(mine, remote.descriptor, imm=1) for _ in range(20)]
    eventually(lambda: net.here.peer_state(net.there.address) == "frozen", "the peer frozen", 4)
    assert not transfers[-1].done
    assert "frozen" in lost_within(transfers[-1], started, 4)
    placed = sum(transfer.exception() is None for transfer in transfers)

    net.child.resume()
    time.sleep(0.5)
    arrived = net.there.count(1)
    assert placed <= arrived < 20, f"{arrived} counted, {placed} reported done"
    never(lambda: net.there.count(1) > arrived, "a count after the failure was told", 1.0)
    net.here.submit_write(mine, mine.descriptor, 100, dst_offset=500, imm=3).wait(WAIT_S)
    net.here.imm_counter(3).wait(1, WAIT_S)


def test_frozen_peer_that_thaws_in_time_loses_nothing(network: NetworkFactory) -> None:
    net = network(rails=2, peer_timeout_s=15)
    mine, remote = net.source(NBYTES), net.target(NBYTES)
    net.here.submit_write(mine, remote.descriptor, imm=1).wait(WAIT_S)

    net.child.stop()
    transfers = [net.here.submit_write(mine, remote.descriptor, imm=1) for _ in range(20)]
    eventually(lambda: net.here.peer_state(net.there.address) == "frozen", "the peer frozen", 4)
    time.sleep(0.5)
    net.child.resume()

    for transfer in transfers:
        transfer.wait(WAIT_S)
    net.there.expect_count(1, 21)
    eventually(lambda: net.here.peer_state(net.there.address) == "connected", "the peer thawed", 2)

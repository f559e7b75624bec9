"""One engine with both transports: shm within a host's network, tcp beyond, and it says why."""

import pytest

import crossrail as xr
from tests.multihost.conftest import Network, NetworkFactory
from tests.support.hosts import run
from tests.support.limits import WAIT_S, eventually
from tests.support.node import CommandError, RemoteEngine


def write_to(net: Network, peer: RemoteEngine) -> xr.Explanation:
    remote = peer.memory(100_000)
    net.here.submit_write(net.source(100_000), remote.descriptor, imm=1).wait(WAIT_S)
    peer.expect_count(1, 1)
    return net.here.explain(peer.address)


def test_auto_takes_shm_within_a_network_namespace_and_tcp_beyond(network: NetworkFactory) -> None:
    net = network(rails=2, transport="auto")
    near = net.hosts.spawn("a").open(transport="auto", rails=net.a.rails())

    to_near, to_far = write_to(net, near), write_to(net, net.there)

    assert (to_near.transport, to_far.transport) == ("shm", "tcp")
    assert "namespace" in to_near.reason or "host" in to_near.reason
    assert "network namespace" in to_far.reason, to_far.reason


@pytest.mark.parametrize("there", ["tcp", "auto"])
def test_tcp_is_taken_where_it_was_asked_for(network: NetworkFactory, there: str) -> None:
    net = network(rails=2, transport="tcp")
    near = net.hosts.spawn("a").open(transport=there, rails=net.a.rails())

    explanation = write_to(net, near)

    assert explanation.transport == "tcp"
    assert explanation.reason == "requested by transport='tcp'"


def test_rails_count_by_interface(network: NetworkFactory) -> None:
    net = network(rails=2)

    net.here.require(net.there.address, "rails=2")
    with xr.Engine("two", transport="tcp", rails=2, require="rails>=2"):
        pass
    with pytest.raises(xr.TransportError, match=r"rails>=4: engine 'four' has 2 rail.* 2 on rail0, 2 on rail1.*topo"):
        xr.Engine("four", transport="tcp", rails=4, require="rails>=4")


def test_rail_without_a_carrier_is_taken_by_name_only(network: NetworkFactory) -> None:
    net = network(rails=2, connected=False)
    net.b.down(0)  # the other end of the cable
    eventually(lambda: "NO-CARRIER" in run(f"ip -n {net.a.namespace} link show rail0"), "its carrier gone")

    with xr.Engine("one", transport="tcp") as one, xr.Engine("named", transport="tcp", rails=["rail0"]) as named:
        assert one.address.endpoints[0].startswith(f"{net.a.addresses[1]}:")
        assert named.address.endpoints[0].startswith(f"{net.a.addresses[0]}:")


def test_address_that_both_hosts_have_is_said_to_lead_nowhere(network: NetworkFactory) -> None:
    net = network(rails=1, connected=False)
    for host in (net.a, net.b):  # as docker0 has on all hosts
        run(f"ip -n {host.namespace} link add shared type bridge")
        run(f"ip -n {host.namespace} address add 172.17.0.1/16 dev shared")
        run(f"ip -n {host.namespace} link set shared up")

    with xr.Engine("here", transport="tcp", rails=["shared"]) as here:
        there = net.hosts.spawn("b").open(transport="tcp", rails=["shared"])
        with pytest.raises(xr.PeerLost, match=r"refused.*this host has that address, too, so it leads to ourselves"):
            here.connect(there.address, WAIT_S)


def test_host_without_an_address_says_so_on_both_sides(
    network: NetworkFactory, caplog: pytest.LogCaptureFixture
) -> None:
    net = network(rails=1, connected=False)
    run(f"ip -n {net.a.namespace} address flush dev rail0")

    with xr.Engine("early", transport="tcp") as early:
        assert early.address.endpoints[0].startswith("127.0.0.1:")
        assert "no interface is up with an address" in caplog.text
        with pytest.raises(CommandError, match=r"PeerLost.*that address is one within a host"):
            net.there.call("connect", peer=early.address.to_bytes().hex())

"""The tool itself: hosts are apart, cables are as bad as asked for, and nothing stays behind."""

import socket
import time

import pytest

from tests.multihost.conftest import NetworkFactory
from tests.support.hosts import Host, Hosts, namespaces, remove_stale, why_not
from tests.support.limits import WAIT_S
from tests.support.process import run_script

KILLED = """
    import os
    from tests.support.hosts import Hosts

    hosts = Hosts(2).__enter__()
    print(hosts["a"].namespace, flush=True)
    os._exit(1)
"""


def ping_ms(one: Host, two: Host, address: str) -> float:
    """How long a refused connection takes: there and back."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with one.entered(), socket.socket(family) as probe:
        probe.settimeout(WAIT_S)
        started = time.monotonic()
        assert probe.connect_ex((address, 9)) != 0
    return (time.monotonic() - started) * 1000


@pytest.fixture(autouse=True)
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


def test_what_a_killed_run_left_behind_is_removed_by_the_next() -> None:
    left = run_script(KILLED).stdout.strip()
    assert left in namespaces()

    with Hosts(1) as hosts:
        assert left not in namespaces()
        assert hosts["a"].namespace in namespaces()
        remove_stale()
        assert hosts["a"].namespace in namespaces()

    assert hosts["a"].namespace not in namespaces()


def test_hosts_of_any_number_reach_each_other() -> None:
    with Hosts({"a": 1, "b": 2, "c": 1}, names=("a", "b", "c")) as hosts:
        ping_ms(hosts["a"], hosts["b"], hosts["b"].addresses[0])
        ping_ms(hosts["b"], hosts["c"], hosts["c"].addresses6[0])


def test_cable_takes_its_time() -> None:
    with Hosts(1, delay_ms=20) as hosts:
        ping_ms(hosts["a"], hosts["b"], hosts["b"].addresses[0])  # neighbours find each other
        took_ms = ping_ms(hosts["a"], hosts["b"], hosts["b"].addresses[0])

    assert 40 <= took_ms < 400


def test_thread_comes_home(network: NetworkFactory) -> None:
    net = network(rails=1)

    assert {name for _, name in socket.if_nameindex()} >= {"lo", "rail0"}
    with net.b.entered():
        assert net.b.received_bytes(0) >= 0
    assert net.hosts["a"].netdevs == ["rail0"]

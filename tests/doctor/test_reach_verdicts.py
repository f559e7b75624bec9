"""Which pairs of addresses are measured with a stream, and what is said of what was measured."""

from dataclasses import replace

import pytest

from crossrail.doctor.finding import Severity
from crossrail.doctor.host import Host
from crossrail.doctor.reach.measure import UNKNOWN, Attempt, Matrix, Pair, choose_streams
from crossrail.doctor.reach.rails import Rail, local_rails
from crossrail.doctor.reach.verdict import judge
from tests.doctor.tree import severities


def pair_of(number: int, to: int, **fields: object) -> Pair:
    here = Rail(f"eth{number}", f"10.0.{number}.1", 9000, 100_000)
    there = Rail(f"eth{to}", f"10.0.{to}.2", 9000, 100_000)
    values: dict[str, object] = {"rtt_us": 50.0, "mtu": 9000, "mss": 8948, "out_gb_per_s": 3.0, "in_gb_per_s": 3.0}
    return replace(Pair(here, there), **{**values, "retransmits": 0, **fields})  # type: ignore[arg-type]


def verdict(*pairs: Pair) -> dict[str, Severity]:
    matrix = Matrix("peer", 7311, [Attempt("10.0.0.2", "ok")], "1.0", [], list(pairs))
    return {check: s for check, s in severities(judge(matrix, "1.0")).items() if s is not Severity.OK}


def test_streams_take_each_address_once_first() -> None:
    pairs = [pair_of(a, b) for a in range(8) for b in range(8)]

    chosen = choose_streams(pairs, 8)

    assert {pair.here.address for pair in chosen} == {pair.here.address for pair in pairs}
    assert {pair.there.address for pair in chosen} == {pair.there.address for pair in pairs}
    assert all(pair.here.interface == pair.there.interface for pair in chosen), "neighbours first"
    assert choose_streams([replace(pair, state="timeout") for pair in pairs]) == []


def test_healthy_pairs_have_nothing_said_of_them() -> None:
    assert verdict(pair_of(0, 0), pair_of(1, 1)) == {}


@pytest.mark.parametrize(
    ("fields", "check", "severity"),
    [
        ({"state": "timeout"}, "reach.pairs", Severity.WARNING),
        ({"state": "refused"}, "reach.pairs", Severity.WARNING),
        ({"state": "stalled"}, "reach.stalled", Severity.ERROR),
        ({"state": "ended"}, "reach.ended", Severity.ERROR),
        ({"out_gb_per_s": 0.4}, "reach.uneven", Severity.WARNING),
        ({"mtu": 1450}, "reach.path-mtu", Severity.WARNING),
        ({"mss": 1360}, "reach.mss", Severity.NOTE),
        ({"there": Rail("eth9", "10.0.1.2", 1500, 100_000)}, "reach.mtu", Severity.WARNING),
        ({"retransmits": 4000}, "reach.retransmits", Severity.NOTE),
        ({"rtt_us": 8000.0}, "reach.round-trip", Severity.NOTE),
    ],
)
def test_one_bad_pair_is_judged(fields: dict[str, object], check: str, severity: Severity) -> None:
    found = verdict(pair_of(0, 0), pair_of(1, 1, **fields))

    assert found[check] is severity


@pytest.mark.parametrize(("mtu", "shorter"), [(9000, 1500), (1500, 1280)])
def test_pair_that_stalls_is_told_a_shorter_mtu_than_its_own(mtu: int, shorter: int) -> None:
    stalled = pair_of(0, 0, state="stalled", here=Rail("eth0", "10.0.0.1", mtu, 100_000))
    matrix = Matrix("peer", 7311, [Attempt("10.0.0.2", "ok")], "1.0", [], [stalled])

    [finding] = [finding for finding in judge(matrix, "1.0") if finding.check == "reach.stalled"]

    assert f"sudo ip link set eth0 mtu {shorter}" in [fix.command for fix in finding.fixes]


def test_no_pair_at_all_is_an_error() -> None:
    assert verdict(pair_of(0, 0, state="timeout"))["reach.pairs"] is Severity.ERROR


def test_peer_without_an_address_that_engines_use_is_an_error() -> None:
    assert verdict() == {"reach.pairs": Severity.ERROR}


def test_address_that_the_peer_does_not_have_is_no_way_to_its_engines() -> None:
    published = pair_of(0, 0, there=Rail(UNKNOWN, "192.0.2.9", 0, None))

    assert verdict(published)["reach.translated"] is Severity.ERROR
    assert verdict(published, pair_of(1, 1, state="timeout"))["reach.translated"] is Severity.ERROR
    assert verdict(published, pair_of(1, 1))["reach.translated"] is Severity.NOTE


def test_name_that_leads_to_this_machine_is_said_to() -> None:
    matrix = Matrix("node1", 7311, [Attempt("127.0.1.1", "refused", "Connection refused")])
    (finding,) = judge(matrix, "1.0")
    assert "node1 leads to this very machine" in finding.title

    matrix.target = "127.0.1.1"
    (finding,) = judge(matrix, "1.0")
    assert "nothing listens" in finding.title


def test_slow_stream_on_a_fast_link_is_a_warning() -> None:
    assert verdict(pair_of(0, 0, out_gb_per_s=1.0))["reach.below-link"] is Severity.WARNING


def test_slow_link_is_not_called_uneven() -> None:
    slow = replace(pair_of(1, 1, out_gb_per_s=0.11, in_gb_per_s=0.11), here=Rail("mgmt", "10.0.1.1", 9000, 1000))

    assert "reach.uneven" not in verdict(pair_of(0, 0), slow)


def test_rails_of_this_machine() -> None:
    host = Host()

    assert any(rail.address == "127.0.0.1" for rail in local_rails(host, loopback=True))
    assert all(not rail.is_loopback and not rail.address.startswith("fe80") for rail in local_rails(host))


def test_bridges_of_containers_are_no_rails_and_a_nodes_own_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("br-0123456789ab", "172.18.0.1"), ("docker0", "172.17.0.1"), ("br-ex", "10.0.0.7")]
    monkeypatch.setattr("crossrail.doctor.reach.rails._addresses", lambda: found)

    assert [rail.address for rail in local_rails(Host())] == ["10.0.0.7"]

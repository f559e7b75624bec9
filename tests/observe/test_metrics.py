"""Metrics of engines: what they say is what happened, and who is gone is gone from them."""

import os
import re
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.registry import Collector

import crossrail as xr
from crossrail import sim
from crossrail.observe import EngineCollector, MetricsServer, Traffic, read_traffic, serve_metrics
from crossrail.observe import server as metrics_server
from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S, eventually
from tests.support.metrics import Samples, assert_documented, collect, names_of, total
from tests.support.proxy import ProxiedAddress


def scrape(*engines: xr.Engine, **options: int) -> Samples:
    return collect(EngineCollector(*engines, **options))


def write(here: xr.Engine, there: xr.Engine, nbytes: int = 64) -> None:
    with here.alloc(nbytes) as src, there.alloc(nbytes) as dst:
        here.submit_write(src, dst.descriptor, nbytes).wait(WAIT_S)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("rails", [1, 3])
def test_rails_and_peers_count_what_was_written(open_engine: EngineFactory, transport: str, rails: int) -> None:
    here, there = (open_engine(name, transport=transport, rails=rails) for name in ("here", "there"))
    src, dst = here.alloc(1 << 20), there.alloc(1 << 20)

    for _ in range(10):
        here.submit_write(src, dst.descriptor, 1000, imm=1).wait(WAIT_S)
    here.submit_write(src, dst.descriptor, 1 << 20).wait(WAIT_S)
    here.submit_paged_writes(
        src, np.arange(0, 16, 2), dst.descriptor, np.arange(0, 16, 2), page_bytes=4096, imm=2
    ).wait(WAIT_S)

    samples = scrape(here)
    nbytes = 10 * 1000 + (1 << 20) + 8 * 4096
    assert total(samples, "crossrail_rail_bytes_total", transport=transport) == nbytes
    assert total(samples, "crossrail_peer_bytes_total", peer="there") == nbytes
    assert total(samples, "crossrail_written_bytes_total") == nbytes
    assert total(samples, "crossrail_peer_immediates_total", peer="there") == 18
    assert total(samples, "crossrail_rail_immediates_total") == 18
    assert total(samples, "crossrail_peer_works_total") == total(samples, "crossrail_rail_works_total") >= 19
    assert total(samples, "crossrail_peer_path_bytes", peer="there") == nbytes
    assert total(samples, "crossrail_peer_state", peer="there", state="connected") == 1
    assert total(samples, "crossrail_peer_transport", peer="there", transport=transport) == 1
    assert names_of(samples, "rail") == {str(rail) for rail in range(rails)}
    assert total(samples, "crossrail_peer_broken_paths_total") == 0
    assert total(samples, "crossrail_transfers_total", outcome="done") == 12
    there.imm_counter(1).wait(10, WAIT_S)
    there.imm_counter(2).wait(8, WAIT_S)
    assert total(scrape(there), "crossrail_immediates_received_total") == 18


def test_latency_of_each_rail_is_sampled_where_transfers_come_in_bursts(open_engine: EngineFactory) -> None:
    """The first of a burst goes by the same rail each time."""
    rails = ["127.0.0.1", "127.0.0.1"]
    here, there = (open_engine(name, transport="tcp", rails=rails) for name in ("here", "there"))
    src, dst = here.alloc(8 << 20), there.alloc(8 << 20)

    def burst() -> bool:
        for transfer in [here.submit_write(src, dst.descriptor, 1 << 20, imm=1) for _ in range(8)]:
            transfer.wait(WAIT_S)
        samples = scrape(here)
        return all(total(samples, "crossrail_rail_latency_seconds_count", rail=rail) > 0 for rail in "01")

    eventually(burst, "samples of both rails")


def test_reads_and_messages_are_works_too(open_engine: EngineFactory) -> None:
    here, there = open_engine("here", transport="tcp"), open_engine("there", transport="tcp")
    local, remote = here.alloc(5000), there.alloc(5000)
    here.submit_read(local, remote.descriptor, 5000).wait(WAIT_S)
    with there.submit_recvs(4, 64):
        here.submit_send(there.address, b"x" * 64).wait(WAIT_S)

    samples = scrape(here)
    assert total(samples, "crossrail_peer_works_total") == 2
    assert total(samples, "crossrail_peer_bytes_total") == 5064
    assert total(samples, "crossrail_read_bytes_total") == 5000
    assert total(samples, "crossrail_messages_sent_total") == 1


@pytest.mark.parametrize("memory", ["tcp", "mapped", "staged"])
def test_latency_is_sampled_on_every_way(open_engine: EngineFactory, memory: str) -> None:
    transport = "tcp" if memory == "tcp" else "shm"
    here = open_engine("here", transport=transport, private_path="staged")
    there = open_engine("there", transport=transport)
    src = here.alloc(8192)
    dst = there.alloc(8192) if memory == "mapped" else there.register(np.zeros(8192, np.uint8))

    for _ in range(600):  # of what is over at once one in 256 is timed
        here.submit_write(src, dst.descriptor, 8192, imm=1).wait(WAIT_S)

    samples = scrape(here)
    timed = total(samples, "crossrail_rail_latency_seconds_count")
    assert timed >= (2 if memory == "mapped" else 300)
    assert total(samples, "crossrail_rail_latency_seconds_bucket", le="+Inf") == timed
    assert total(samples, "crossrail_peer_latency_seconds_count", peer="there") == timed
    assert 0 < total(samples, "crossrail_peer_latency_seconds_sum") / timed < WAIT_S
    bounds = [
        (float(dict(labels)["le"]), value)
        for (name, labels), value in samples.items()
        if name == "crossrail_rail_latency_seconds_bucket"
    ]
    counts = [count for _, count in sorted(bounds)]
    assert counts == sorted(counts)  # cumulative


def test_depth_is_what_the_peer_has_not_taken(open_engine: EngineFactory) -> None:
    here = open_engine("here", transport="shm", private_path="staged")
    there = open_engine("there", transport="shm", polling="manual")  # takes nothing until somebody drives it
    src, dst = here.alloc(1 << 20), there.register(np.zeros(1 << 20, np.uint8))
    here_write = here.submit_write(src, dst.descriptor, 8)
    while not here_write.done:
        there.progress()

    writes = [here.submit_write(src, dst.descriptor, 1 << 20, imm=1) for _ in range(400)]

    def rail_is_full() -> bool:  # what counters say of each other holds once they stand still: they are read one by one
        samples = scrape(here)
        depth = total(samples, "crossrail_rail_depth")
        return (
            total(samples, "crossrail_peer_queued") > 0
            and total(samples, "crossrail_transfers_inflight") == 400
            and 0 < depth <= total(samples, "crossrail_peer_outstanding", peer="there")
        )

    eventually(rail_is_full, "the rail full")
    eventually(lambda: total(scrape(here), "crossrail_peer_refused_posts_total") > 0, "a post that found no room")
    for write in writes:
        write.cancel()
    eventually(lambda: there.progress() or all(write.done for write in writes), "all over")


def test_connections_that_break_are_counted_and_what_went_out_anew(open_engine: EngineFactory) -> None:
    here, there = (open_engine(name, transport="tcp", peer_timeout_s=60.0) for name in ("here", "there"))
    way = ProxiedAddress(there.address)
    try:
        src, dst = here.alloc(1 << 20), there.alloc(1 << 20)
        here.connect(way.address, WAIT_S)
        here.submit_write(src, dst.descriptor, 8).wait(WAIT_S)
        for proxy in way.proxies:
            proxy.stall()
        writes = [here.submit_write(src, dst.descriptor, 1 << 20, imm=1) for _ in range(8)]
        eventually(lambda: total(scrape(here), "crossrail_rail_depth") > 0, "something on the rail")
        for proxy in way.proxies:
            proxy.cut()
            proxy.stall(False)

        for write in writes:
            write.wait(WAIT_S)

        samples = scrape(here)
        assert total(samples, "crossrail_peer_broken_paths_total") >= 1
        assert total(samples, "crossrail_rail_retried_works_total") >= 1
        assert total(samples, "crossrail_peer_retried_works_total") == total(
            samples, "crossrail_rail_retried_works_total"
        )
    finally:
        way.close()


def test_failures_are_the_peers(open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine("there")
    src, dst = here.alloc(64), there.alloc(64)
    descriptor = dst.descriptor
    here.submit_write(src, descriptor, 64).wait(WAIT_S)
    dst.close()

    with pytest.raises(xr.RemoteRegionClosed):
        here.submit_write(src, descriptor, 64).wait(WAIT_S)

    samples = scrape(here)
    assert total(samples, "crossrail_peer_failed_transfers_total", peer="there") == 1
    assert total(samples, "crossrail_transfers_total", outcome="failed") == 1


def test_who_is_gone_disappears_and_rails_keep_the_sum(open_engine: EngineFactory, spawn_peer: PeerFactory) -> None:
    here = open_engine("here", transport="shm")
    forgotten, left = (open_engine(name, transport="shm") for name in ("forgotten", "left"))
    killed = spawn_peer()
    here.connect(killed.open(name="killed", transport="shm").address, WAIT_S)
    for engine in (forgotten, left):
        write(here, engine)
    assert names_of(scrape(here), "peer") == {"forgotten", "left", "killed"}

    here.forget_peer(forgotten.address)
    left.close()
    killed.kill()

    eventually(lambda: names_of(scrape(here), "peer") == set(), "nobody left")
    assert total(scrape(here), "crossrail_rail_bytes_total") == 128
    assert total(scrape(here), "crossrail_peers_lost_total") == 2


def test_peers_of_one_name_are_one(open_engine: EngineFactory) -> None:
    here = open_engine("here")
    for twin in (open_engine("twin"), open_engine("twin")):
        write(here, twin)

    samples = scrape(here)

    assert total(samples, "crossrail_peer_bytes_total", peer="twin") == 128
    assert total(samples, "crossrail_peer_state", peer="twin") == 2


def test_counters_of_a_name_do_not_shrink_when_one_of_its_peers_goes(open_engine: EngineFactory) -> None:
    here = open_engine("here", transport="shm")
    stays, goes = (open_engine("twin", transport="shm") for _ in range(2))
    collector = EngineCollector(here)
    for twin in (stays, goes, goes):
        write(here, twin)
    before = collect(collector)

    goes.close()
    eventually(lambda: total(collect(collector), "crossrail_peer_state", peer="twin") == 1, "one of the name is left")
    after = collect(collector)
    counters = [key for key in before if re.match("crossrail_peer_.*_(total|bucket|count|sum)$", key[0])]
    assert counters and not [key for key in counters if after[key] < before[key]]
    write(here, stays)
    assert total(collect(collector), "crossrail_peer_bytes_total", peer="twin") == 4 * 64

    stays.close()
    eventually(lambda: names_of(collect(collector), "peer") == set(), "nobody left")
    write(here, open_engine("twin", transport="shm"))
    assert total(collect(collector), "crossrail_peer_bytes_total", peer="twin") == 64


def test_so_many_peers_are_shown_and_they_stay(open_engine: EngineFactory) -> None:
    here = open_engine("here", transport="shm")
    others = [open_engine(f"peer-{i}", transport="shm") for i in range(5)]
    collector = EngineCollector(here, peers_max=3)

    def shown() -> tuple[set[str], float]:
        families = list(collector.collect())
        peers = {sample.labels["peer"] for family in families for sample in family.samples if "peer" in sample.labels}
        (hidden,) = (sample.value for f in families if f.name == "crossrail_peers_hidden" for sample in f.samples)
        return peers, hidden

    here.connect(others[4].address, WAIT_S)
    assert shown() == ({"peer-4"}, 0)
    for other in others[:4]:
        here.connect(other.address, WAIT_S)
    peers, hidden = shown()
    assert "peer-4" in peers and len(peers) == 3 and hidden == 2
    here.forget_peer(others[4].address)

    assert shown()[0] > peers - {"peer-4"} and shown()[1] == 1


def test_engine_that_counts_nothing_has_no_rails(open_engine: EngineFactory) -> None:
    here, there = open_engine("here", counts_traffic=False), open_engine("there")
    write(here, there)

    assert read_traffic(here).rails == []
    samples = scrape(here)
    assert names_of(samples, "rail") == set()
    assert total(samples, "crossrail_written_bytes_total") == 64
    assert total(samples, "crossrail_peer_bytes_total", peer="there") == 0


# --- the endpoint ---


def get(server: MetricsServer, query: str = "") -> str:
    with urllib.request.urlopen(server.url + query, timeout=WAIT_S) as answer:
        return answer.read().decode()


def test_endpoint_serves_several_engines_each_family_once(open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine("there")
    write(here, there)

    with serve_metrics(here, there, port=0) as server:
        text = get(server)

    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    written = {
        sample.labels["engine"]: sample.value
        for family in parse(text)
        for sample in family.samples
        if sample.name == "crossrail_written_bytes_total"
    }
    assert written == {"here": 64, "there": 0}


def test_names_of_peers_cannot_forge_metrics(open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine('x"} 1\ncrossrail_forged{a="\\')
    here.connect(there.address, WAIT_S)

    with serve_metrics(here, port=0) as server:
        families = {family.name: family for family in parse(get(server))}

    assert "crossrail_forged" not in families
    assert {sample.labels["peer"] for sample in families["crossrail_peer_state"].samples} == {there.name}


def test_engine_that_hangs_says_so_and_holds_up_no_scrape(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = open_engine("here", polling="manual")  # no round is made that we do not make
    other, there = open_engine("other"), open_engine("there")
    write(here, there)
    write(other, there)
    hangs, patiences = True, []

    def traffic(engine: xr.Engine, timeout_s: float) -> Traffic:
        patiences.append(timeout_s)
        found = read_traffic(engine, timeout_s)
        if engine is here and hangs:
            found.is_whole, found.hangs = False, True
            for rail in found.rails:
                rail.depth = None
            for peer in found.peers.values():
                peer.paths.clear()
        return found

    monkeypatch.setattr("crossrail.observe.metrics.read_traffic", traffic)
    collector = EngineCollector(here, other)
    for _ in range(2):
        samples = collect(collector)
        assert total(samples, "crossrail_engine_hangs", engine="here") == 1
        assert total(samples, "crossrail_engine_hangs", engine="other") == 0
        assert total(samples, "crossrail_rail_works_total", engine="here") == 1
        assert total(samples, "crossrail_rail_depth", engine="other") == 0
        assert total(samples, "crossrail_rounds_total", engine="here") > 0
        for name in ("crossrail_rail_depth", "crossrail_peer_path_bytes"):
            assert all(key != name or ("engine", "here") not in labels for key, labels in samples)
    here.progress()  # it goes on, and whoever drives it may just be busy
    collect(collector)
    collect(collector)
    hangs = False
    collect(collector)
    assert total(collect(collector), "crossrail_engine_hangs", engine="here") == 0
    first, again = patiences[0], patiences[2]
    assert first >= 0.5 and again <= 0.1
    assert patiences[::2] == [first, again, first, again, again, first]
    assert set(patiences[1::2]) == {first}


def test_closed_engine_says_so_and_no_more(open_engine: EngineFactory) -> None:
    here = open_engine("here")
    with serve_metrics(here, port=0) as server:
        here.close()
        samples = [sample for family in parse(get(server)) for sample in family.samples]

    assert [(sample.name, sample.value) for sample in samples] == [("crossrail_engine_open", 0)]


def test_port_that_is_taken_is_one_error(engine: xr.Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(xr.TransportError, match=f"127.0.0.1:{port}: {os.strerror(98)}") as caught:
            serve_metrics(engine, port=port)

    assert caught.value.code == 98


def test_endpoint_closes_twice_and_its_port_is_free_again(engine: xr.Engine) -> None:
    server = serve_metrics(engine, port=0)
    server.close()
    server.close()

    with pytest.raises(urllib.error.URLError):
        get(server)
    serve_metrics(engine, port=server.port).close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_port_out_of_range_is_refused(engine: xr.Engine, port: int) -> None:
    with pytest.raises(xr.UsageError, match=str(port)):
        serve_metrics(engine, port=port)


def test_what_has_no_metrics_is_refused_at_once(engine: xr.Engine) -> None:
    for other in ([engine], "here", None):
        with pytest.raises(xr.UsageError, match=f"one after the other, not {type(other).__name__}"):
            serve_metrics(engine, other, port=0)  # type: ignore[arg-type]
    for port in ("9478", 9478.0, True, None):
        with pytest.raises(xr.UsageError, match="port must be a whole number"):
            serve_metrics(engine, port=port)  # type: ignore[arg-type]
    with pytest.raises(xr.UsageError, match="host must be text"):
        serve_metrics(engine, port=0, host=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"host": "a..b"}, "host is 'a..b', which is not the name of a host"),
        ({"patience_s": "x"}, "patience_s must be a number, not str"),
        ({"patience_s": -1}, "patience_s is -1, must be more than 0"),
        ({"patience_s": float("nan")}, "patience_s is nan"),
        ({"peers_max": "x"}, "peers_max must be a whole number"),
        ({"peers_max": -1}, "peers_max is -1"),
    ],
    ids=str,
)
def test_option_that_is_none_is_refused(engine: xr.Engine, option: dict[str, Any], words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        serve_metrics(engine, port=0, **option)


@pytest.mark.parametrize("host", ["nobody.invalid", "203.0.113.9"])
def test_host_that_is_not_this_one_is_not_helped_by_another_port(engine: xr.Engine, host: str) -> None:
    with pytest.raises(xr.TransportError, match="Next: host is an address of this host"):
        serve_metrics(engine, port=0, host=host)


def test_address_of_one_interface_is_shown_with_it() -> None:
    """No other of IPv6 needs one: these are told apart by it."""
    loopback = socket.if_nametoindex("lo")
    assert metrics_server._shown(("fe80::1", 9478, 0, loopback)) == "fe80::1%lo"
    assert metrics_server._shown(("::1", 9478, 0, 0)) == "::1"
    assert metrics_server._shown(("127.0.0.1", 9478)) == "127.0.0.1"


def test_engines_of_one_name_are_refused(open_engine: EngineFactory) -> None:
    with pytest.raises(xr.UsageError, match="same"):
        serve_metrics(open_engine("twin"), open_engine("twin"), port=0)


def test_collectors_of_others_are_served_too(engine: xr.Engine) -> None:
    class Own(Collector):
        def collect(self) -> Iterator[Metric]:
            yield GaugeMetricFamily("mine", "A metric of the user's.", value=7)

    with serve_metrics(engine, Own(), port=0) as server:
        assert "mine 7.0" in get(server).splitlines()


def test_metrics_that_are_asked_for_by_name_are_all_that_comes(engine: xr.Engine) -> None:
    """As of Prometheus with `params: {"name[]": [...]}`."""
    with serve_metrics(engine, port=0) as server:
        chosen = get(server, "?name[]=crossrail_transfers_total&name[]=crossrail_rail_latency_seconds_count")

        names = [line.partition("{")[0] for line in chosen.splitlines() if not line.startswith("#")]
        assert set(names) == {"crossrail_transfers_total", "crossrail_rail_latency_seconds_count"}
        assert names.count("crossrail_transfers_total") == 3
        assert get(server, "?name[]=nothing") == ""


def test_every_metric_is_documented(open_engine: EngineFactory) -> None:
    here, there = open_engine("here"), open_engine("there")
    write(here, there)

    assert_documented(scrape(here), "crossrail_(?!kv_|weights_|moe_)")


# --- over RDMA, in the simulator: the layer is that of verbs and ofi ---


def test_rdma_rails_count_what_goes_out_anew(open_engine: EngineFactory) -> None:
    with sim.World(3) as world:
        hosts = world.host("a", "2xcx7"), world.host("b", "2xcx7")
        here, there = (host.engine(host.name) for host in hosts)
        nbytes = 4 << 20
        src, dst = here.register(np.zeros(nbytes, np.uint8)), there.register(np.zeros(nbytes, np.uint8))
        here.connect(there.address)
        assert total(scrape(here), "crossrail_rail_down_paths") == 0
        world.rail_down(hosts[0], 0, at_s=world.now_s + 50e-6, for_s=5)

        for _ in range(4):
            here.submit_write(src, dst.descriptor, imm=1).wait(60)

        samples = scrape(here)
        assert total(samples, "crossrail_rail_down_paths", rail="0") == 1
        assert total(samples, "crossrail_rail_down_paths", rail="1") == 0
        assert names_of(samples, "rail") == {"0", "1"}
        assert total(samples, "crossrail_rail_broken_paths_total", rail="0") >= 1
        assert total(samples, "crossrail_rail_broken_paths_total", rail="1") == 0
        retried = total(samples, "crossrail_rail_retried_works_total", rail="0")
        assert retried >= 1
        assert total(samples, "crossrail_rail_retried_works_total", rail="1") == 0
        sent = total(samples, "crossrail_peer_bytes_total", peer="b")
        assert 4 * nbytes < sent <= 4 * nbytes + retried * nbytes
        assert total(samples, "crossrail_rail_latency_seconds_count") >= 1
        # In virtual time: no write takes as long as the deadline of its wait.
        assert 0 < total(samples, "crossrail_rail_latency_seconds_sum") < 60
        there.imm_counter(1).wait(4, 60)


@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
@pytest.mark.parametrize("version", [b"\xff", b"x.y.z", b"1.", b"1.0.0b", b"", b"1.\xb2", b"9" * 5000])
def test_formats_that_cannot_be_get_the_default(
    engine: xr.Engine, kind: str, version: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve_metrics(engine, port=0) as server:
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.0\r\nAccept: %b; version=%b\r\n\r\n" % (kind.encode(), version))
            answer = scraper.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"# TYPE crossrail_peer_path_bytes gauge\n" in answer
    assert capfd.readouterr().err == ""


def answer_to(server: MetricsServer, request: bytes) -> tuple[bytes, bytes]:
    """The head and the body."""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as client:
        client.sendall(request)
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
        return head, body


def test_head_is_answered_as_get_would_be_without_a_body(engine: xr.Engine) -> None:
    query = b"/metrics?name[]=crossrail_engine_open HTTP/1.0\r\n\r\n"
    with serve_metrics(engine, port=0) as server:
        got, text = answer_to(server, b"GET " + query)
        head, nothing = answer_to(server, b"HEAD " + query)

    assert text.startswith(b"# HELP crossrail_engine_open")
    assert (head.splitlines()[0], nothing) == (b"HTTP/1.0 200 OK", b"")
    without_date = [[line for line in each.splitlines() if not line.startswith(b"Date:")] for each in (got, head)]
    assert sorted(without_date[0]) == sorted(without_date[1])


def is_hung_up_on(scraper: socket.socket) -> bool:
    try:
        return scraper.recv(1) == b""
    except ConnectionResetError:  # there was something that the server has not read
        return True


def test_a_scraper_that_says_nothing_or_is_gone_is_let_go(engine: xr.Engine, capfd: pytest.CaptureFixture[str]) -> None:
    with serve_metrics(engine, port=0, patience_s=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as silent:
            assert is_hung_up_on(silent)
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nHost")
            assert is_hung_up_on(slow)
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets it
            gone.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")

    assert capfd.readouterr().err == ""

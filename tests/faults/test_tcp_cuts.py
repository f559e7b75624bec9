"""Connections over tcp that break while everything is under way: nothing is lost, nothing is counted twice."""

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S, eventually, never
from tests.support.patterns import assert_same_bytes, pattern
from tests.support.proxy import ProxiedAddress, proxied
from tests.support.seeds import Seed
from tests.support.tcp_wire import endpoints_of, with_ports

pytestmark = pytest.mark.timeout(120)

NBYTES = 3_000_001


class Wire:
    """Two engines that reach each other only through proxies."""

    def __init__(self, open_engine: EngineFactory, rails: int) -> None:
        common = {"transport": "tcp", "rails": [f"127.0.0.{1 + i}" for i in range(rails)], "peer_timeout_s": 15.0}
        self.here, self.there = open_engine("here", **common), open_engine("there", **common)
        self.way_there = ProxiedAddress(self.there.address)
        self.way_back = ProxiedAddress(self.here.address)
        self.proxies = self.way_there.proxies + self.way_back.proxies

    def connect(self) -> None:
        self.here.connect(self.way_there.address, WAIT_S)
        self.there.connect(self.way_back.address, WAIT_S)

    def close(self) -> None:
        self.way_there.close()
        self.way_back.close()


@pytest.fixture(params=[1, 3])
def wire(request: pytest.FixtureRequest, open_engine: EngineFactory) -> Iterator[Wire]:
    made = Wire(open_engine, request.param)
    yield made
    made.close()


def cut_at_random(wire: Wire, rng: np.random.Generator, typical_bytes: int) -> None:
    """Every connection lives for a random number of bytes."""

    def budget() -> int:
        return int(rng.exponential(typical_bytes)) + 400

    for proxy in wire.proxies:
        proxy.next_budget = budget


def expect_count(engine: xr.Engine, imm: int, count: int) -> None:
    """Exactly `count` arrive: that many, and then no more."""
    engine.imm_counter(imm).wait(count, WAIT_S)
    assert engine.imm_counter(imm).poll() == 0


def test_counted_writes_arrive_exactly_once_whatever_is_cut(wire: Wire, seed: Seed) -> None:
    rng = seed.rng()
    cut_at_random(wire, rng, 5_000)
    wire.connect()
    count = 3000
    src = wire.here.register(pattern(1, count * 16))
    dst = wire.there.register(np.zeros(count * 16, np.uint8))
    back_src, back_dst = wire.there.alloc(64), wire.here.alloc(64)

    transfers = []
    for i in range(count):
        nbytes = int(rng.integers(0, 17))
        at = {"src_offset": 16 * i, "dst_offset": 16 * i}
        transfers.append(wire.here.submit_write(src, dst.descriptor, nbytes, **at, imm=1))
        if i % 3 == 0:
            transfers.append(wire.there.submit_write(back_src, back_dst.descriptor, 8, imm=2))
        if i % 20 == 0:
            transfers[-1].wait(WAIT_S)
    for transfer in transfers:
        transfer.wait(WAIT_S)

    expect_count(wire.there, 1, count)
    expect_count(wire.here, 2, count // 3)
    assert sum(proxy.connections_made for proxy in wire.proxies) > 6, "hardly anything was cut"


def test_large_transfers_of_every_kind_survive_cuts(wire: Wire, seed: Seed) -> None:
    rng = seed.rng()
    cut_at_random(wire, rng, 12_000_000)
    wire.connect()
    src, dst = wire.here.register(pattern(1, NBYTES)), wire.there.register(np.zeros(NBYTES, np.uint8))
    back = wire.here.register(np.zeros(NBYTES, np.uint8))
    pages = rng.permutation(NBYTES // 1000)

    for _ in range(4):
        transfers = [wire.here.submit_write(src, dst.descriptor, imm=1) for _ in range(3)]
        transfers.append(wire.here.submit_paged_writes(src, pages, dst.descriptor, pages, 1000, imm=2))
        transfers.append(wire.here.submit_read(back, dst.descriptor))
        for transfer in transfers:
            transfer.wait(WAIT_S)
    last = wire.here.submit_read(back, dst.descriptor)
    last.wait(WAIT_S)

    expect_count(wire.there, 1, 12)
    expect_count(wire.there, 2, 4 * len(pages))
    assert_same_bytes(dst.array(), pattern(1, NBYTES))
    assert_same_bytes(back.array(), pattern(1, NBYTES))


def cut_after(wire: Wire, nbytes: int) -> None:
    """Every connection lives for so many bytes, the handshake and both directions included."""
    for proxy in wire.proxies:
        proxy.next_budget = lambda: nbytes


@pytest.mark.parametrize("budget_bytes", [30_000, 400_000])
def test_operations_longer_than_every_connection_get_through(wire: Wire, budget_bytes: int) -> None:
    nbytes = 20 * budget_bytes
    wire.connect()
    cut_after(wire, budget_bytes)
    for proxy in wire.proxies:
        proxy.cut()
    src, dst = wire.here.register(pattern(1, nbytes)), wire.there.register(np.zeros(nbytes, np.uint8))
    back = wire.here.register(np.zeros(nbytes, np.uint8))
    pages = np.arange(nbytes // 1000)[::-1].copy()

    wire.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    assert_same_bytes(dst.array(), pattern(1, nbytes))
    wire.here.submit_read(back, dst.descriptor).wait(WAIT_S)
    assert_same_bytes(back.array(), pattern(1, nbytes))
    dst.array()[:] = 0
    wire.here.submit_paged_writes(src, pages, dst.descriptor, pages, 1000, imm=2).wait(WAIT_S)

    expect_count(wire.there, 1, 1)
    expect_count(wire.there, 2, len(pages))
    assert_same_bytes(dst.array(), pattern(1, nbytes))


@pytest.mark.parametrize("swallows_s", [0.0, 0.15, 0.3], ids=["cuts", "swallows", "swallows longer"])
def test_peer_to_which_nothing_gets_through_is_lost_by_deadline(open_engine: EngineFactory, swallows_s: float) -> None:
    """Also where a box on the way takes what we send, so that our kernel gets rid of it."""
    common = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 2.0}
    here, there = open_engine("here", **common), open_engine("there", **common)
    with proxied(there.address) as way:
        here.connect(way.address, WAIT_S)
        src, dst = here.alloc(4 << 20), there.alloc(4 << 20)
        here.submit_write(src, dst.descriptor).wait(WAIT_S)
        way.proxies[0].shrink_buffers(32 << 10)
        way.proxies[0].bytes_per_s = 4e6
        way.proxies[0].swallows_s = swallows_s
        way.proxies[0].next_budget = lambda: 2000  # more than a handshake, less than any frame with data
        way.proxies[0].cut()

        with pytest.raises(xr.PeerLost, match=r"connections to it broke before anything got through: \w"):
            here.submit_write(src, dst.descriptor).wait(WAIT_S)


@pytest.mark.parametrize("buffers", [4, 300])
def test_messages_arrive_exactly_once_whatever_is_cut(wire: Wire, seed: Seed, buffers: int) -> None:
    rng = seed.rng()
    cut_at_random(wire, rng, 20_000)
    wire.connect()
    received: Counter[bytes] = Counter()
    count = 500
    with wire.there.submit_recvs(buffers, 600, on_message=lambda message: received.update([bytes(message.data)])):
        transfers = [
            wire.here.submit_send(wire.there.address, i.to_bytes(4, "little") + bytes(int(rng.integers(0, 590))))
            for i in range(count)
        ]
        for transfer in transfers:
            transfer.wait(WAIT_S)
        eventually(lambda: sum(received.values()) >= count, "every message")

    assert set(received.values()) == {1}
    assert len(received) == count


def test_taken_messages_are_told_again_when_the_word_was_cut_off(wire: Wire) -> None:
    wire.connect()
    with wire.there.submit_recvs(1, 16) as pool:
        transfers = [wire.here.submit_send(wire.there.address, bytes([i])) for i in range(20)]
        got = [bytes(pool.recv(WAIT_S).data)]  # any of them: they come by several rails
        for proxy in wire.proxies:
            proxy.cut()
        got += [bytes(pool.recv(WAIT_S).data) for _ in range(19)]
        for transfer in transfers:
            transfer.wait(WAIT_S)

    assert sorted(got) == [bytes([i]) for i in range(20)]


def test_too_long_message_is_refused_even_if_the_refusal_was_cut_off(wire: Wire) -> None:
    wire.connect()
    transfers = [wire.here.submit_send(wire.there.address, bytes(5000)) for _ in range(5)]
    eventually(lambda: any(forward > 20_000 for p in wire.way_there.proxies for forward, _ in p.passed_bytes()), "sent")
    for proxy in wire.way_there.proxies:
        proxy.stall()

    with wire.there.submit_recvs(4, 16):
        eventually(lambda: wire.there.stats()["transfers_inflight"] == 0, "idle")
        for proxy in wire.way_there.proxies:
            proxy.cut()
            proxy.stall(False)
        for transfer in transfers:
            with pytest.raises(xr.TransferError, match="5000 bytes"):
                transfer.wait(WAIT_S)


def test_refusals_are_told_again_however_many_there_were(wire: Wire) -> None:
    wire.connect()
    src, dst, gone = wire.here.alloc(64), wire.there.alloc(64), wire.there.alloc(64)
    descriptor = gone.descriptor
    gone.close(WAIT_S)
    for _ in range(3):
        refused = [wire.here.submit_write(src, descriptor, 8, imm=1) for _ in range(400)]
        good = [wire.here.submit_write(src, dst.descriptor, 8, imm=2) for _ in range(10)]
        for proxy in wire.proxies:
            proxy.cut()
        for transfer in refused:
            with pytest.raises(xr.TransferError, match="closed"):
                transfer.wait(WAIT_S)
        for transfer in good:
            transfer.wait(WAIT_S)

    assert wire.there.imm_counter(1).poll() == 0
    expect_count(wire.there, 2, 30)


def test_cancelled_writes_count_whole_or_not_at_all_under_cuts(wire: Wire, seed: Seed) -> None:
    rng = seed.rng()
    cut_at_random(wire, rng, 4_000_000)
    wire.connect()
    src, dst = wire.here.register(pattern(1, NBYTES)), wire.there.register(np.zeros(NBYTES, np.uint8))
    done = 0
    for _ in range(6):
        transfers = [wire.here.submit_write(src, dst.descriptor, imm=1) for _ in range(5)]
        for transfer in transfers:
            if rng.random() < 0.5:
                transfer.cancel()
        for transfer in transfers:
            try:
                transfer.wait(WAIT_S)
                done += 1
            except xr.TransferCancelled:
                pass

    expect_count(wire.there, 1, done)


def test_one_rail_of_several_away_slows_down_and_comes_back(open_engine: EngineFactory) -> None:
    wire = Wire(open_engine, 3)
    try:
        wire.connect()
        src, dst = wire.here.register(pattern(1, NBYTES)), wire.there.register(np.zeros(NBYTES, np.uint8))
        wire.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        for away in (0, 1, 2):
            wire.way_there.proxies[away].go_away()
            for _ in range(3):
                wire.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
            wire.way_there.proxies[away].go_away(False)

        expect_count(wire.there, 1, 10)
        assert wire.here.peer_state(wire.there.address) == "connected"
        before = wire.way_there.proxies[2].connections_made
        eventually(
            lambda: (
                wire.way_there.proxies[2].connections_made > before or len(wire.way_there.proxies[2].passed_bytes()) > 0
            ),
            "the rail used again",
        )
        wire.here.submit_write(src, dst.descriptor, 100, imm=1, rail=2).wait(WAIT_S)
    finally:
        wire.close()


def test_rail_that_is_stalled_while_others_answer_is_given_up(open_engine: EngineFactory) -> None:
    wire = Wire(open_engine, 2)
    try:
        wire.connect()
        src, dst = wire.here.register(pattern(1, NBYTES)), wire.there.register(np.zeros(NBYTES, np.uint8))
        wire.here.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        wire.way_there.proxies[1].stall()

        transfers = [wire.here.submit_write(src, dst.descriptor, imm=1) for _ in range(4)]
        for transfer in transfers:
            transfer.wait(WAIT_S)

        expect_count(wire.there, 1, 5)
    finally:
        wire.close()


def test_rail_whose_outage_ends_as_it_is_given_up_goes_on_by_long_packets(open_engine: EngineFactory) -> None:
    wire = Wire(open_engine, 2)
    try:
        wire.connect()
        source = wire.here.register(pattern(1, NBYTES))
        target = wire.there.register(np.zeros(NBYTES, np.uint8))
        for rail in range(2):  # connections that have carried next to nothing
            wire.here.submit_write(source, target.descriptor, 20_000, rail=rail).wait(WAIT_S)
        wire.way_there.proxies[1].forget()  # and the next connection gets through at once

        wire.here.submit_write(source, target.descriptor, 20_000, rail=1).wait(WAIT_S)

        assert "short packets" not in str(wire.here.explain(wire.there.address))
    finally:
        wire.close()


def test_lane_that_cannot_be_connected_is_explained_while_the_other_serves_for_both(wire: Wire) -> None:
    """As when a certificate has expired since: what is connected stays, and nothing new is let in."""
    wire.connect()
    for proxy in wire.proxies:
        proxy.next_budget = lambda: 0
    source = wire.here.register(pattern(1, NBYTES))
    target = wire.there.register(np.zeros(NBYTES, np.uint8))

    wire.here.submit_write(source, target.descriptor, imm=1).wait(WAIT_S)

    expect_count(wire.there, 1, 1)
    said = ", connected; long operations have no connection of their own: "
    eventually(
        lambda: any(said in path.reason for path in wire.here.explain(wire.there.address).paths),
        "the other lane in the explanation",
    )


@pytest.mark.parametrize("kind", ["write", "short write", "read", "message"])
@pytest.mark.parametrize("lanes", ["small", "both"])
def test_connections_that_something_on_the_way_forgot_are_made_anew(wire: Wire, kind: str, lanes: str) -> None:
    """Firewalls and address translators lose their tables: what they carried is dropped, what is new gets through."""
    wire.here.connect(wire.way_there.address, WAIT_S)
    source = wire.here.register(pattern(1, NBYTES))
    target = wire.there.register(np.zeros(NBYTES, np.uint8))
    back = wire.here.register(np.zeros(NBYTES, np.uint8))
    pool = wire.there.submit_recvs(1, 16)
    if lanes == "both":
        for _ in range(2):
            wire.here.submit_write(source, target.descriptor).wait(WAIT_S)
    operations = {
        "write": lambda: wire.here.submit_write(source, target.descriptor, imm=1),
        "short write": lambda: wire.here.submit_write(source, target.descriptor, 8, imm=1),
        "read": lambda: wire.here.submit_read(back, target.descriptor),
        "message": lambda: wire.here.submit_send(wire.there.address, b"hello"),
    }

    for proxy in wire.proxies:
        proxy.forget()
    operations[kind]().wait(WAIT_S)

    if "write" in kind:
        expect_count(wire.there, 1, 1)
        length = 8 if "short" in kind else NBYTES
        assert_same_bytes(target.array()[:length], source.array()[:length])
    elif kind == "read":
        assert_same_bytes(back.array(), target.array())
    else:
        assert bytes(pool.recv(WAIT_S).data) == b"hello"
    eventually(lambda: wire.here.peer_state(wire.there.address) == "connected", "the peer connected")


def test_peer_that_stays_away_is_lost_after_its_timeout(open_engine: EngineFactory) -> None:
    common = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 1.0}
    here, there = open_engine("here", **common), open_engine("there", **common)
    with proxied(there.address) as way:
        here.connect(way.address, WAIT_S)
        src, dst = here.alloc(64), there.alloc(64)
        way.proxies[0].go_away()

        with pytest.raises(xr.PeerLost, match="no rail of it could be reached"):
            here.submit_write(src, dst.descriptor, 8).wait(WAIT_S)


# Where in the four messages: of the Hello mark, version, length, tag, nonce, channel, flags, sender's address; of the
# Proof, which comes behind it; of the Challenge head, nonce, proof; of the Accept, behind that.
@pytest.mark.parametrize(
    ("forward", "at"),
    [(True, at) for at in (0, 4, 7, 9, 20, 57, 65, 80, -20)] + [(False, at) for at in (1, 5, 20, 50, 74)],
)
@pytest.mark.parametrize("resumes", [False, True], ids=["first", "again"])
def test_corrupt_handshake_is_tried_again(open_engine: EngineFactory, forward: bool, at: int, resumes: bool) -> None:
    common = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 15.0}
    here, there = open_engine("here", **common), open_engine("there", **common)
    with proxied(there.address) as way:
        if at < 0:  # from the end of the Proof, and the Hello is as long as the address makes it
            here.connect(way.address, WAIT_S)
            at += way.proxies[0].passed_bytes()[0][0]
            here.forget_peer(way.address)
        if resumes:
            here.connect(way.address, WAIT_S)
        made = way.proxies[0].connections_made
        way.proxies[0].corrupt(forward=forward, after_bytes=at)
        way.proxies[0].cut()
        src, dst = here.alloc(64), there.alloc(64)

        here.connect(way.address, WAIT_S)
        here.submit_write(src, dst.descriptor, 0, imm=1).wait(WAIT_S)

        expect_count(there, 1, 1)
        assert way.proxies[0].connections_made == made + 2


@pytest.mark.parametrize("forward", [True, False])
def test_corrupt_heads_break_the_connection_and_nothing_else(open_engine: EngineFactory, forward: bool) -> None:
    common = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": 15.0}
    here, there = open_engine("here", **common), open_engine("there", **common)
    events: list[xr.EngineEvent] = []
    there.on_event(events.append)
    # Each byte of the frame that comes next: of a write header, region and entry; of an acknowledgement all.
    head_bytes, every = 40, 5
    count = head_bytes * every
    with proxied(there.address) as way:
        here.connect(way.address, WAIT_S)
        src, dst = here.alloc(64), there.alloc(64)
        for i in range(count):
            if i % every == 0:
                (ahead, back), *_ = way.proxies[0].passed_bytes()
                way.proxies[0].corrupt(forward=forward, after_bytes=(ahead if forward else back) + i // every)
            here.submit_write(src, dst.descriptor, 0, imm=1).wait(WAIT_S)
            if i % every == 0:
                eventually(lambda: way.proxies[0].passed_bytes(), "connected again")

    expect_count(there, 1, count)
    assert way.proxies[0].connections_made >= head_bytes
    if forward:
        assert any(event.kind == "protocol-error" for event in events)


# --- rails that refuse ---

TWO = {"transport": "tcp", "rails": ["127.0.0.1", "127.0.0.2"]}


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Of this host, at which nobody listens, at either address."""
    with ExitStack() as taken:
        while True:
            one, two = (taken.enter_context(socket.socket()) for _ in range(2))
            one.bind(("127.0.0.1", 0))
            with suppress(OSError):  # another has it
                two.bind(("127.0.0.2", one.getsockname()[1]))
                break
        yield one.getsockname()[1]


def with_closed(address: xr.Address, rail: int, closed_port: int) -> xr.Address:
    """As a firewall, or another host of this address, makes it look."""
    ports = [port for _, port in endpoints_of(address.to_bytes())]
    ports[rail] = closed_port
    return xr.Address.from_bytes(with_ports(address.to_bytes(), ports))


@pytest.mark.parametrize("rail", [0, 1])
def test_peer_is_reached_by_the_rail_that_does_not_refuse(
    open_engine: EngineFactory, closed_port: int, rail: int
) -> None:
    here, there = open_engine("here", **TWO), open_engine("there", **TWO)
    address = with_closed(there.address, rail, closed_port)

    here.connect(address, WAIT_S)
    with there.submit_recvs(1, 100) as pool:
        here.submit_send(address, b"through").wait(WAIT_S)
        assert pool.recv(WAIT_S).data == b"through"


def test_peer_whose_last_rail_is_away_is_not_lost_because_another_refuses(
    open_engine: EngineFactory, closed_port: int
) -> None:
    here, there = open_engine("here", peer_timeout_s=30.0, **TWO), open_engine("there", **TWO)
    with proxied(there.address) as way, there.submit_recvs(1, 100) as pool:
        address = with_closed(way.address, 1, closed_port)
        here.connect(address, WAIT_S)
        way.proxies[0].go_away()
        message = here.submit_send(address, b"through")

        never(lambda: message.done, "lost", 2.0)
        way.proxies[0].go_away(False)

        message.wait(WAIT_S)
        assert pool.recv(WAIT_S).data == b"through"


def test_peer_that_refuses_at_all_rails_is_lost_at_once(open_engine: EngineFactory, closed_port: int) -> None:
    here, there = open_engine("here", **TWO), open_engine("there", **TWO)
    address = with_closed(with_closed(there.address, 0, closed_port), 1, closed_port)

    with pytest.raises(xr.PeerLost, match="Connection refused"):
        here.connect(address, WAIT_S)

"""A peer that we connected to, and that says what is not so, stops at any step, or uses our connection."""

import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

import crossrail as xr
from crossrail.observe import read_traffic
from tests.conftest import EngineFactory
from tests.support import tcp_wire as wire
from tests.support.limits import WAIT_S, eventually
from tests.support.tcp_engines import TCP, descriptor_of, events_of, region_id, still_serves
from tests.support.tcp_wire import Frame, Kind, RawAcceptor, RawPeer

pytestmark = pytest.mark.timeout(120)

REGION_CLOSED = 4  # Status, native/transport/types.h
STALE = 6  # RefusalCode, native/transport/tcp/handshake.h


@pytest.fixture
def target(open_engine: EngineFactory) -> xr.Engine:
    return open_engine("target", **TCP)


# --- a target that lies ---

LIES = {
    "acknowledges what was never sent": wire.frame(Frame.ACK, struct.pack("<QQII", 0, 1 << 40, 0, 0)),
    "data of no read": wire.frame(Frame.READ_DATA, struct.pack("<QQ", 99, 0), b"boo"),
    "end of no read": wire.frame(Frame.READ_END, struct.pack("<QQ", 99, 1)),
    "refuses what was never sent": wire.frame(Frame.REFUSED, struct.pack("<QII", 1 << 40, 0, 4)),
    "refuses with no status": wire.frame(Frame.REFUSED, struct.pack("<QII", 1, 0, 999)),
    "says that we are closed": wire.frame(Frame.REFUSED, struct.pack("<QII", 1, 0, 9)),
    "an answer nobody asked for": wire.frame(Frame.RESOLVED, struct.pack("<QQII", 5, 0, 700, 1)),
    "gives a write back": wire.frame(Frame.REFUSED, struct.pack("<QII", 1, 0, 2)),
    "takes too many messages": wire.frame(Frame.TAKEN, struct.pack("<QQ", 1, 1 << 60)),
    "a frame of initiators": wire.frame(Frame.WRITE, bytes(24), count=1),
}


@pytest.mark.parametrize("lie", LIES)
def test_target_that_lies_harms_only_itself(open_engine: EngineFactory, target: xr.Engine, lie: str) -> None:
    engine = open_engine("here", peer_timeout_s=1.0, **TCP)
    mine, good = engine.alloc(1000), target.alloc(1000)
    liar = RawAcceptor(engine.address)
    region = xr.RegionDescriptor.from_bytes(descriptor_of(good, liar.address))
    with closing(liar):
        transfer = engine.submit_write(mine, region, 100)
        with liar.accept() as connection:
            link_id = liar.handshake(connection)
            told = bytearray(LIES[lie])
            if lie.startswith("acknowledges"):
                struct.pack_into("<Q", told, wire.FRAME_HEAD.size, link_id)
                told[:] = wire.with_sum(bytes(told))
            connection.sendall(told)
            with suppress(ConnectionResetError):  # it hangs up before it has read all
                while wire.receive_frame(connection)[0] != 0:  # until it hangs up
                    pass
    with pytest.raises(xr.PeerLost):
        transfer.wait(WAIT_S)
    engine.submit_write(mine, good.descriptor, imm=1).wait(WAIT_S)
    target.imm_counter(1).wait(1, WAIT_S)


def test_what_a_target_says_can_be_shown_whatever_it_is(open_engine: EngineFactory) -> None:
    engine = open_engine("here", **TCP)
    events = events_of(engine)
    mine = engine.alloc(1000)
    with closing(RawAcceptor(engine.address)) as there:
        region = xr.RegionDescriptor.from_bytes(descriptor_of(mine, there.address))
        transfer = engine.submit_write(mine, region, 100)
        with there.accept() as connection:
            link_id = there.handshake(connection)
            wire.receive_frame(connection)
            said = b"\xff\xfe\0 no \x80"
            connection.sendall(wire.frame(Frame.REFUSED, struct.pack("<QII", 1, 0, 4) + said))
            connection.sendall(wire.frame(Frame.ACK, struct.pack("<QQII", link_id, 1, 0, 0)))
            with pytest.raises(xr.TransferError, match=" no "):
                transfer.wait(WAIT_S)
            connection.sendall(wire.frame(Frame.CLOSING, said))
            eventually(lambda: [e for e in events if e.kind == "peer-left" and " no " in e.detail], "the goodbye")


STEPS = ("connected", "hello", "challenge", "proof", "accept", "frames")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_target_that_stops_at_each_step(open_engine: EngineFactory, step: str, how: str) -> None:
    """Frozen: says nothing more. Killed: its kernel resets the connection, and nobody listens any more."""
    engine = open_engine("here", connect_timeout_s=1.0, peer_timeout_s=1.0, **TCP)
    mine = engine.alloc(1000)
    with closing(RawAcceptor(engine.address)) as there:
        region = xr.RegionDescriptor.from_bytes(descriptor_of(mine, there.address))
        transfers = [engine.submit_write(mine, region, 100), engine.submit_read(mine, region, 10)]
        transfers.append(engine.submit_send(there.address, b"x"))
        with there.accept() as connection:
            advance(there, connection, STEPS.index(step))
            if how == "killed":
                there.close()
                wire.reset(connection)
            for transfer in transfers:
                with pytest.raises(xr.PeerLost):
                    transfer.wait(WAIT_S)


def advance(there: RawAcceptor, connection: socket.socket, steps: int) -> None:
    if steps == 0:
        return
    if steps == 1:
        wire.receive_message(connection)
        return
    there.challenge(connection)
    if steps == 2:
        return
    wire.receive_message(connection)
    if steps == 3:
        return
    connection.sendall(wire.message(Kind.ACCEPT, b""))
    if steps == 4:
        return
    wire.receive_frame(connection)


def test_who_waits_for_a_connection_hears_why_there_is_none(open_engine: EngineFactory, target: xr.Engine) -> None:
    """The engine gives up first, and knows the port: the wait for it has only a clock."""
    engine = open_engine("here", **TCP)
    silent = RawAcceptor(target.address)
    with closing(silent), pytest.raises(xr.PeerLost, match=f":{silent.listener.getsockname()[1]}"):
        engine.connect(silent.address)


def test_disconnect_at_each_step(open_engine: EngineFactory) -> None:
    engine = open_engine("here", **TCP)
    for steps in range(len(STEPS)):
        with closing(RawAcceptor(engine.address)) as there:
            transfer = engine.submit_send(there.address, b"x")
            with there.accept() as connection:
                advance(there, connection, steps)
                engine.forget_peer(there.address)
                with pytest.raises(xr.PeerLost):
                    transfer.wait(WAIT_S)
    # Attempts that are refused just when they are forgotten.
    for _ in range(20):
        there = RawAcceptor(engine.address)
        there.close()
        engine.submit_send(there.address, b"x")
        engine.forget_peer(there.address)
    engine.submit_send(engine.address, b"self")
    eventually(lambda: engine.peer_state(engine.address) == "connected", "connected to itself")


# --- a target that uses our connection for operations of its own ---


@contextmanager
def connection_to(there: RawAcceptor, engine: xr.Engine) -> Iterator[tuple[socket.socket, int]]:
    """The one that the engine makes, and the id of its link."""
    connecting = threading.Thread(target=lambda: engine.connect(there.address, WAIT_S))
    connecting.start()
    with there.accept() as connection:
        link_id = there.handshake(connection)
        connecting.join(WAIT_S)
        yield connection, link_id


def share_frame(link_id: int, *, epoch: int = 1, resumes: bool = False) -> bytes:
    return wire.frame(Frame.SHARE, struct.pack("<QIIQ", link_id, 0, epoch, resumes))


def shared_answer(connection: socket.socket) -> tuple[int, ...]:
    """Channel, epoch and code of the next answer."""
    while True:
        kind, meta, _ = wire.receive_frame(connection)
        assert kind != 0, "the connection ended"
        if kind == Frame.SHARED:
            return struct.unpack("<IIQ", meta[:16])


def test_connection_is_shared_by_one_link_after_another(open_engine: EngineFactory) -> None:
    """Each without a word about the one before. Its operations are carried out; what is not for it to ask ends it."""
    engine = open_engine("here", **TCP)
    region = engine.alloc(1000)
    key = region_id(region)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, _):
        for link_id in range(10, 20):
            connection.sendall(share_frame(link_id))
            connection.sendall(wire.write_frame(key, [(link_id, b"x", 7)]))
            assert shared_answer(connection) == (0, 1, 0)
        engine.imm_counter(7).wait(10, WAIT_S)
        assert bytes(region.array()[10:20]) == b"x" * 10

        connection.sendall(share_frame(99, epoch=2, resumes=True))
        assert shared_answer(connection)[2] != 0, "a link that was never there was resumed"
    still_serves(engine)


def test_answers_and_questions_on_one_connection_come_whole(open_engine: EngineFactory) -> None:
    """More refusals than a batch holds, the data of reads, and between them an answer of the other stream."""
    engine = open_engine("here", **TCP)
    region = engine.alloc(1 << 20)
    key = region_id(region)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, _):
        connection.sendall(share_frame(10))
        assert shared_answer(connection) == (0, 1, 0)
        for reads in range(1, 9):
            said = [wire.read_frame(key, 0, 1 << 20, number) for number in range(reads)]
            said.append(wire.write_frame(0xBAD, [(0, b"x", None)] * 1000))
            said.append(share_frame(99, resumes=True))
            connection.sendall(b"".join(said))

            expected = {Frame.READ_DATA: reads << 20, Frame.READ_END: reads, Frame.REFUSED: 1000, Frame.SHARED: 1}
            assert answers(connection, expected) == expected


def answers(connection: socket.socket, expected: dict[Frame, int]) -> dict[Frame, int]:
    """How many come of each kind, of data how many bytes, until there are as many as expected."""
    seen = Counter[int]()
    while any(seen[kind] < count for kind, count in expected.items()):
        kind, _, payload = wire.receive_frame(connection)
        assert kind != 0, f"the connection ended after {seen}"
        seen[kind] += len(payload) if kind == Frame.READ_DATA else 1
    return {kind: seen[kind] for kind in expected}


def test_target_that_asks_and_does_not_read_the_answers_is_cut_off(open_engine: EngineFactory) -> None:
    engine = open_engine("here", **TCP)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, _):
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(share_frame(99, resumes=True) * 400_000)
    still_serves(engine)


def test_link_is_over_once_its_peer_has_begun_another(open_engine: EngineFactory) -> None:
    engine = open_engine("here", **TCP)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, _):
        for link_id in (10, 11):
            connection.sendall(share_frame(link_id))
            assert shared_answer(connection) == (0, 1, 0)

        connection.sendall(share_frame(10, epoch=2, resumes=True))

        assert shared_answer(connection)[2] != 0, "resumed"


def test_link_after_link_costs_no_memory(open_engine: EngineFactory) -> None:
    engine = open_engine("here", **TCP)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, _):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for first in range(0, 50_000, 500):
            connection.sendall(b"".join(share_frame(first + number) for number in range(500)))
            for _ in range(500):
                assert shared_answer(connection) == (0, 1, 0)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert after - before < 16 << 10, "KiB of memory more"


def share_asked(connection: socket.socket) -> tuple[int, ...]:
    """Link, channel, epoch and flags of the next question."""
    while True:
        kind, meta, _ = wire.receive_frame(connection)
        assert kind != 0, "the connection ended"
        if kind == Frame.SHARE:
            return struct.unpack("<QIIQ", meta)


def test_answers_to_a_link_that_was_forgotten_are_not_taken_for_anothers(open_engine: EngineFactory) -> None:
    engine = open_engine("here", **TCP)
    events = events_of(engine)
    with closing(RawAcceptor(engine.address)) as there:
        peer = RawPeer(engine.address)
        peer.sender = there.address.to_bytes()
        with peer.connected() as connection:
            forgotten = engine.submit_send(there.address, b"one")
            _, channel, old_epoch, _ = share_asked(connection)
            engine.forget_peer(there.address)
            with pytest.raises(xr.PeerLost):
                forgotten.wait(WAIT_S)
            sent = engine.submit_send(there.address, b"two")
            link_id, channel, epoch, _ = share_asked(connection)

            connection.sendall(wire.frame(Frame.PONG, struct.pack("<Q", 1)))
            connection.sendall(wire.frame(Frame.SHARED, struct.pack("<IIQ", channel, old_epoch, 0)))
            connection.sendall(wire.frame(Frame.SHARED, struct.pack("<IIQ", channel, epoch, 0)))
            kind, meta, payload = wire.receive_frame(connection)
            assert (kind, payload) == (Frame.MESSAGE, b"two")
            (message_id,) = struct.unpack("<Q", meta)
            connection.sendall(wire.frame(Frame.ACK, struct.pack("<QQII", link_id, 1, channel, 0)))
            connection.sendall(wire.frame(Frame.TAKEN, struct.pack("<QQQ", link_id, message_id, 1)))
            sent.wait(WAIT_S)
    assert not [event for event in events if event.kind == "protocol-error"]


SMALLEST = bytes(15) + b"\1"  # an incarnation: of two that connected to each other the larger one moves


@pytest.mark.parametrize("first", ["answer", "end"])
def test_moving_over_to_the_connection_that_the_peer_made_is_no_trouble(open_engine: EngineFactory, first: str) -> None:
    """Both connected at the same time. The peer may end the other connection before its answer comes."""
    engine = open_engine("here", **TCP)
    mine = engine.alloc(8)
    with (
        closing(RawAcceptor(engine.address, incarnation=SMALLEST)) as there,
        connection_to(there, engine) as (own, link_id),
    ):
        peer = RawPeer(engine.address)
        peer.sender = there.address.to_bytes()
        with peer.connected() as shared:
            asked, channel, epoch, _ = share_asked(shared)
            if first == "end":
                own.shutdown(socket.SHUT_WR)
                assert wire.receive_frame(own)[0] == 0
            shared.sendall(wire.frame(Frame.SHARED, struct.pack("<IIQ", channel, epoch, 0)))
            if first == "answer":
                assert wire.receive_frame(own)[0] == 0
            engine.submit_write(mine, xr.RegionDescriptor.from_bytes(descriptor_of(mine, there.address)), 8)
            while wire.receive_frame(shared)[0] != Frame.WRITE:
                pass

            assert asked == link_id
            assert read_traffic(engine).rails[0].counts.broken == 0


def test_connection_that_breaks_as_it_is_to_be_moved_is_counted(open_engine: EngineFactory) -> None:
    """That it ended may be the move's own doing, until the peer refuses the move."""
    engine = open_engine("here", **TCP)
    with (
        closing(RawAcceptor(engine.address, incarnation=SMALLEST)) as there,
        connection_to(there, engine) as (own, _),
    ):
        peer = RawPeer(engine.address)
        peer.sender = there.address.to_bytes()
        with peer.connected() as shared:
            _, channel, epoch, _ = share_asked(shared)
            own.shutdown(socket.SHUT_WR)
            assert wire.receive_frame(own)[0] == 0

            shared.sendall(wire.frame(Frame.SHARED, struct.pack("<IIQ", channel, epoch, STALE)))
            with there.accept() as again:
                there.handshake(again)
                eventually(lambda: engine.peer_state(there.address) == "connected", "connected again")

                assert read_traffic(engine).rails[0].counts.broken == 1


def test_links_that_both_came_back_share_a_connection_again(open_engine: EngineFactory) -> None:
    """Ours was begun anew while the peer's was away: they belong together all the same."""
    engine = open_engine("here", **TCP)
    with closing(RawAcceptor(engine.address, incarnation=SMALLEST)) as there:
        peer = RawPeer(engine.address)
        peer.sender = there.address.to_bytes()
        with peer.connected() as first:
            first.shutdown(socket.SHUT_WR)
            assert wire.receive_frame(first)[0] == 0
        with connection_to(there, engine) as (_, link_id), peer.connected(resumes=True) as shared:
            shared.settimeout(WAIT_S)

            assert share_asked(shared)[0] == link_id


def test_attempts_to_reach_others_do_not_use_up_the_epochs_of_a_link(open_engine: EngineFactory) -> None:
    """A rail that is away is tried once a second, with each of a thousand peers: 32 bits would last for 50 days."""
    engine = open_engine("here", **TCP)

    def first_epoch(there: RawAcceptor) -> int:
        engine.submit_send(there.address, b"x")
        with there.accept() as connection:
            body, _ = there.challenge(connection)
        return int(struct.unpack_from("<I", body, 52)[0])

    with ExitStack() as stack:
        peers = [stack.enter_context(closing(RawAcceptor(engine.address))) for _ in range(3)]
        assert [first_epoch(there) for there in peers] == [1, 1, 1]

        engine.forget_peer(peers[0].address)

        assert first_epoch(peers[0]) > 1, "an answer to the link that ended may be taken for one to the other"


# --- a target that refuses ---


@pytest.mark.no_sanitizer  # it measures time
def test_refusals_acknowledged_at_once_cost_no_more_than_in_turns(open_engine: EngineFactory) -> None:
    """As of a region that is revoked under thousands of writes."""
    engine = open_engine("here", **TCP)
    mine = engine.alloc(8)
    with closing(RawAcceptor(engine.address)) as there, connection_to(there, engine) as (connection, link_id):
        region = xr.RegionDescriptor.from_bytes(descriptor_of(mine, there.address))
        placed = 0

        def cpu_s(count: int) -> float:
            """Of the whole process, from the acknowledgement to the last transfer's end."""
            nonlocal placed
            transfers = [engine.submit_write(mine, region, 8) for _ in range(count)]
            took_in(connection, count)
            refused = [
                struct.pack("<QII", placed + 1 + number, 0, REGION_CLOSED) + b"is gone" for number in range(count)
            ]
            connection.sendall(b"".join(wire.frame(Frame.REFUSED, meta) for meta in refused))
            placed += count
            begin_s = time.process_time()
            connection.sendall(wire.frame(Frame.ACK, struct.pack("<QQII", link_id, placed, 0, 0)))
            with pytest.raises(xr.RemoteRegionClosed):
                transfers[-1].wait(WAIT_S)
            took_s = time.process_time() - begin_s
            for transfer in transfers:
                with pytest.raises(xr.RemoteRegionClosed):
                    transfer.wait(WAIT_S)
            return took_s

        turns_s = min(sum(cpu_s(1000) for _ in range(8)) for _ in range(3))
        at_once_s = min(cpu_s(8000) for _ in range(3))

    assert at_once_s < 2 * turns_s, f"{at_once_s:.3f} s, in turns {turns_s:.3f} s"


def took_in(connection: socket.socket, count: int) -> None:
    """So many writes, and what else comes."""
    while count > 0:
        head = wire.receive_exactly(connection, wire.FRAME_HEAD.size)
        kind, _, _, operations, meta_bytes, payload_bytes, _ = wire.FRAME_HEAD.unpack(head)
        wire.receive_exactly(connection, meta_bytes + payload_bytes)
        count -= operations if kind == Frame.WRITE else 0

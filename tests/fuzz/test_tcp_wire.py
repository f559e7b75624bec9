"""Garbage over tcp at every stage of a connection, towards a live engine: it is cut off; nobody else notices.

`./dev fuzz` runs it longer.
"""

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import sealing
from tests.support import tcp_wire as wire
from tests.support.leaks import open_fds
from tests.support.limits import WAIT_S, eventually
from tests.support.patterns import CANARY
from tests.support.seeds import Seed
from tests.support.tcp_wire import Kind, RawAcceptor, RawPeer

SECONDS = float(os.environ.get("CROSSRAIL_FUZZ_SECONDS", "2"))
GUARD = 65_536
NBYTES = 100_000
TCP = {"transport": "tcp", "rails": ["127.0.0.1"]}

pytestmark = pytest.mark.timeout(120 + 8 * SECONDS)


@pytest.fixture
def victim(open_engine: EngineFactory) -> Iterator[xr.Engine]:
    """An engine with a peer. Afterwards both must work as before, with no fds and hardly any memory more."""
    engine, peer = open_engine("victim", **TCP), open_engine("peer", **TCP)
    src, dst = peer.register(np.ones(NBYTES, np.uint8)), engine.alloc(NBYTES)
    back = engine.alloc(NBYTES)

    def both_work() -> None:
        peer.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
        engine.imm_counter(1).wait(1, WAIT_S)
        engine.submit_read(back, src.descriptor).wait(WAIT_S)

    both_work()
    # The first operations may have been served before all connections that they want were up.
    eventually(has_settled, "connections up")
    before, memory = len(open_fds()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield engine
    both_work()
    with xr.Engine("newcomer", **TCP) as newcomer:
        newcomer.submit_write(newcomer.alloc(10), dst.descriptor, 10, imm=2).wait(WAIT_S)
        engine.imm_counter(2).wait(1, WAIT_S)
    del newcomer
    eventually(lambda: len(open_fds()) <= before, "the fds of garbage closed")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 256 << 10, "KiB of memory more"
    assert engine.stats()["peers_lost"] == 0


def has_settled() -> bool:
    count = len(open_fds())
    time.sleep(0.2)
    return len(open_fds()) == count


def rounds() -> Iterator[int]:
    deadline = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < deadline:
        yield number
        number += 1


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Near `data`: some bytes changed, a part cut out, doubled, or garbage put in."""
    result = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not result:
            return rng.bytes(20)
        at = int(rng.integers(len(result)))
        match int(rng.integers(6)):
            case 0 | 1 | 2:
                result[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))]))
            case 3:
                del result[at : at + int(rng.integers(1, 30))]
            case 4:
                result[at:at] = result[at : at + int(rng.integers(1, 60))]
            case _:
                result[at:at] = rng.bytes(int(rng.integers(1, 20)))
    return bytes(result)


def throw(connection: socket.socket, data: bytes) -> None:
    """Sends and reads until the engine hangs up, or does not answer for a moment."""
    connection.settimeout(0.002)
    try:
        connection.sendall(data)
        while connection.recv(65_536):
            pass
    except OSError:  # reset, broken or silent
        pass


def test_random_and_mutated_handshakes(victim: xr.Engine, seed: Seed) -> None:
    rng = seed.rng()
    peer = RawPeer(victim.address)
    for number in rounds():
        with peer.dial() as connection:
            match number % 4:
                case 0:
                    throw(connection, rng.bytes(int(rng.integers(1, 3000))))
                case 1:
                    throw(connection, struct.pack("<IHH", wire.MAGIC, 1, int(rng.integers(0, 65536))) + rng.bytes(500))
                case 2:
                    throw(connection, mutated(peer.hello(), rng))
                case _:
                    hello = peer.hello()
                    connection.sendall(hello)
                    kind, challenge = wire.receive_message(connection)
                    if kind == Kind.CHALLENGE:
                        throw(connection, mutated(peer.answer(hello, challenge), rng))


def frames(region: int, rng: np.random.Generator) -> list[bytes]:
    """A conversation as an honest initiator might have it; region of NBYTES."""

    def write() -> bytes:
        entries: list[tuple[int, bytes, int | None]] = []
        for _ in range(int(rng.integers(1, 6))):
            entries.append(
                (int(rng.integers(0, NBYTES - 200)), rng.bytes(int(rng.integers(0, 200))), int(rng.integers(100, 200)))
            )
        return wire.write_frame(region, entries)

    made: list[Callable[[], bytes]] = [
        write,
        write,
        lambda: (
            wire.write_frame(region, [(0, rng.bytes(300), None)], operations=0)
            + wire.write_frame(region, [(300, b"end", 150)])
        ),
        lambda: wire.read_frame(
            region, int(rng.integers(0, 1000)), int(rng.integers(0, 5000)), int(rng.integers(1, 1 << 30))
        ),
        lambda: wire.message_frame(int(rng.integers(1, 50)), rng.bytes(int(rng.integers(0, 100)))),
        lambda: wire.frame(wire.Frame.RECALL, struct.pack("<Q", int(rng.integers(0, 50)))),
        lambda: wire.ping_frame(),
        lambda: wire.service_frame(wire.SERVICE_PING),
        lambda: wire.service_frame(rng.bytes(int(rng.integers(0, 200)))),
        lambda: wire.resolve_frame(int(rng.integers(0, 3)), int(rng.integers(0, 3)), int(rng.integers(0, 5))),
        lambda: wire.frame(wire.Frame.ACK, struct.pack("<QQII", int(rng.integers(0, 9)), 1, 0, 0)),
        lambda: wire.frame(wire.Frame.BYE, b"so long"),
    ]
    return [made[int(rng.integers(len(made)))]() for _ in range(int(rng.integers(1, 8)))]


def test_mutated_frames_after_a_true_handshake(victim: xr.Engine, seed: Seed) -> None:
    rng = seed.rng()
    memory = np.full(NBYTES + 2 * GUARD, CANARY, np.uint8)
    region = victim.register(memory[GUARD:-GUARD])
    key = sealing.region_id_of(region.descriptor.to_bytes())
    with victim.submit_recvs(4, 50, on_message=lambda _: None):
        for _ in rounds():
            peer = RawPeer(victim.address)
            for channel in range(int(rng.integers(1, 3))):
                with peer.connected(channel, bulk=bool(rng.integers(2))) as connection:
                    conversation = frames(key, rng)
                    broken = int(rng.integers(len(conversation)))
                    conversation[broken] = mutated(conversation[broken], rng)
                    throw(connection, b"".join(conversation))

    assert (memory[:GUARD] == CANARY).all() and (memory[-GUARD:] == CANARY).all()
    region.close(WAIT_S)


def test_honest_conversation_is_taken(victim: xr.Engine, seed: Seed) -> None:
    """What the fuzzer starts from is no garbage."""
    rng = seed.rng()
    region = victim.alloc(NBYTES)
    key = sealing.region_id_of(region.descriptor.to_bytes())
    with RawPeer(victim.address).connected() as connection:
        connection.sendall(b"".join(frame for _ in range(5) for frame in frames(key, rng) if frame[0] in (1, 2, 5)))
        connection.sendall(wire.ping_frame())
        while wire.receive_frame(connection)[0] != wire.Frame.PONG:
            pass


def answers(link_id: int, rng: np.random.Generator) -> bytes:
    """What a target might say."""

    def number() -> int:
        return (0, 1, 2, 5, 1 << 20, (1 << 64) - 1)[int(rng.integers(6))]

    channel, status, read_id = (int(rng.integers(limit)) for limit in (3, 12, 4))
    made = [
        wire.frame(wire.Frame.ACK, struct.pack("<QQII", link_id, number(), channel, 0)),
        wire.frame(wire.Frame.TAKEN, struct.pack("<QQQ", link_id, number(), number())),
        wire.frame(wire.Frame.REFUSED, struct.pack("<QII", number(), channel, status) + b"no"),
        wire.frame(wire.Frame.REFUSED, struct.pack("<QII", number(), (1 << 32) - 1, status)),
        wire.frame(wire.Frame.RESOLVED, struct.pack("<QQII", number(), number(), channel, 1)),
        wire.frame(wire.Frame.READ_DATA, struct.pack("<QQ", read_id, number()), rng.bytes(int(rng.integers(0, 300)))),
        wire.frame(wire.Frame.READ_END, struct.pack("<QQ", read_id, status)),
        wire.frame(wire.Frame.PONG, bytes(8)),
        wire.frame(wire.Frame.SHARE, struct.pack("<QIIQ", number(), 2 * channel, status, number())),
        wire.frame(wire.Frame.SHARED, struct.pack("<IIQ", channel, status, read_id) + b"why"),
        wire.frame(wire.Frame.CLOSING, b"so long"),
        wire.service_frame(wire.SERVICE_PING),
        wire.write_frame(number(), [(number(), rng.bytes(20), 5)]),
        wire.ping_frame(),
    ]
    return b"".join(made[int(rng.integers(len(made)))] for _ in range(int(rng.integers(1, 6))))


def test_target_that_answers_garbage(victim: xr.Engine, seed: Seed) -> None:
    rng = seed.rng()
    engine = xr.Engine("misled", peer_timeout_s=0.5, connect_timeout_s=0.5, **TCP)
    memory = np.full(4096 + 2 * GUARD, CANARY, np.uint8)
    mine = engine.register(memory[GUARD:-GUARD])
    for number in rounds():
        with closing(RawAcceptor(engine.address)) as there:
            serving = threading.Thread(target=serve_garbage, args=(there, np.random.default_rng([number, seed.value])))
            serving.start()
            data, address = mine.descriptor.to_bytes(), there.address.to_bytes()
            region = xr.RegionDescriptor.from_bytes(sealing.with_owner(data, address))
            transfers = [
                engine.submit_write(mine, region, 1000),
                engine.submit_read(mine, region, 1000),
                engine.submit_send(there.address, rng.bytes(40)),
            ]
            serving.join(WAIT_S)
            there.close()
            engine.forget_peer(there.address)
            for transfer in transfers:
                try:
                    transfer.wait(WAIT_S)
                except xr.TransferError:
                    pass
    assert (memory[:GUARD] == CANARY).all() and (memory[-GUARD:] == CANARY).all()
    mine.close(WAIT_S)
    engine.close()


def serve_garbage(there: RawAcceptor, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(1, 3))):
        try:
            with there.accept() as connection:
                there.listener.settimeout(0.05)  # it may not come back
                if rng.random() < 0.2:
                    throw(connection, mutated(wire.message(Kind.CHALLENGE, bytes(64)), rng))
                    continue
                said = answers(there.handshake(connection), rng)
                throw(connection, mutated(said, rng) if rng.random() < 0.5 else said)
        except (AssertionError, OSError):  # it has hung up before
            pass

"""Acknowledgements that ride with operations of the other direction, and refusals, which they must not overtake."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.faults.test_tcp_targets import connection_to
from tests.support import tcp_wire as wire
from tests.support.limits import WAIT_S, eventually
from tests.support.tcp_engines import TCP, descriptor_of
from tests.support.tcp_wire import Frame, RawAcceptor, RawPeer

pytestmark = pytest.mark.timeout(120)

UNDER_WAY_MAX = 8192  # kOperationsUnderWayMax, native/transport/tcp/wire.h
IMM = 7


@contextmanager
def driven(engine: xr.Engine) -> Iterator[None]:
    """By a thread of its own."""
    over = threading.Event()

    def drive() -> None:
        while not over.wait(0.001):
            engine.progress()

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(WAIT_S)


class PingPong(ExitStack):
    """A peer made of sockets that writes by a connection of its own, while the engine answers by another one.

    The engine is driven by this thread alone (polling="manual"), so an acknowledgement waits for the answer however
    busy the machine is. A worker would send it alone after 30 us, and once that was so a few times let none wait.
    """

    def __init__(self, engine: xr.Engine) -> None:
        super().__init__()
        self.engine = engine
        there = self.enter_context(closing(RawAcceptor(engine.address)))
        peer = RawPeer(engine.address)
        peer.sender = there.address.to_bytes()
        self._mine = engine.alloc(8)
        self._region = xr.RegionDescriptor.from_bytes(descriptor_of(self._mine, there.address))
        with driven(engine):  # while this thread waits for what it says
            self._back, self._link_id = self.enter_context(connection_to(there, engine))
            self._forth = self.enter_context(peer.connected(1, bulk=True))  # of the lane that no two links share
        self.sent = 0
        self.told = 0  # acknowledged by the connection itself
        self.rode: list[int] = []  # acknowledged by the other
        self._answers = 0
        for connection, on_frame in ((self._forth, self._on_forth), (self._back, self._on_back)):
            reader = threading.Thread(target=self._read, args=(connection, on_frame))
            reader.start()
            self.callback(reader.join, WAIT_S)
            self.callback(connection.shutdown, socket.SHUT_RDWR)

    def send(self, region: int, count: int, imm: int | None = None) -> None:
        self._forth.sendall(wire.write_frame(region, [(0, b"", imm)] * count))
        self.sent += count

    def play(self) -> None:
        """A write, and the engine's answer."""
        self.send(0, 1, IMM)
        eventually(lambda: (self.engine.progress(), self.engine.imm_counter(IMM).poll())[1] > 0, "the write")
        self.engine.imm_counter(IMM).wait(1, WAIT_S)
        self.engine.submit_write(self._mine, self._region, 8).wait(WAIT_S)

    def play_until_one_rides(self, later_than: int) -> None:
        def rides() -> bool:
            self.play()
            return any(placed > later_than for placed in self.rode)

        eventually(rides, f"an acknowledgement of more than {later_than} that rides")

    def settle(self) -> None:
        def is_settled() -> bool:
            self.engine.progress()
            return max([self.told, *self.rode]) == self.sent

        eventually(is_settled, "all acknowledged")

    @staticmethod
    def _read(connection: socket.socket, on_frame: Callable[[int, bytes], None]) -> None:
        with suppress(OSError):  # until the end
            while (frame := wire.receive_frame(connection))[0] != 0:
                on_frame(*frame[:2])

    def _on_forth(self, kind: int, meta: bytes) -> None:
        if kind == Frame.ACK:
            self.told = struct.unpack("<QQII", meta)[1]

    def _on_back(self, kind: int, meta: bytes) -> None:
        if kind == Frame.ACK:
            self.rode.append(struct.unpack("<QQII", meta)[1])
        if kind == Frame.WRITE:
            self._answers += 1
            self._back.sendall(wire.frame(Frame.ACK, struct.pack("<QQII", self._link_id, self._answers, 0, 0)))


def test_acknowledgements_ride_again_once_they_cannot_overtake_a_refusal(open_engine: EngineFactory) -> None:
    with PingPong(open_engine("here", polling="manual", **TCP)) as game:
        game.play_until_one_rides(later_than=0)

        game.send(0xBAD, 1)
        refused = game.sent
        game.settle()
        for _ in range(30):
            game.play()
        game.settle()
        assert max(game.rode) < refused, "it may come before the refusal"

        for _ in range(0, UNDER_WAY_MAX, 512):
            game.send(0, 512)
        game.settle()
        game.play_until_one_rides(later_than=refused + UNDER_WAY_MAX)


def test_first_acknowledgement_waits_for_nothing(open_engine: EngineFactory) -> None:
    engine = open_engine("here", polling="manual", **TCP)
    counter = engine.imm_counter(IMM)
    with ExitStack() as connections:
        with driven(engine):
            connection = connections.enter_context(RawPeer(engine.address).connected())
        connection.sendall(wire.write_frame(0, [(0, b"", IMM)]))
        eventually(lambda: (engine.progress(), counter.poll())[1] > 0, "the write")
        # By the call that placed it: nobody drives the engine any more.
        assert wire.receive_frame(connection)[0] == Frame.ACK

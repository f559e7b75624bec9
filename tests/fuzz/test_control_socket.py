"""Garbage thrown at an engine's control socket: it is cut off; nobody else notices."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support.leaks import open_fds
from tests.support.limits import WAIT_S, eventually
from tests.support.seeds import Seed


def control_socket(address: xr.Address) -> socket.socket:
    """Connected to the engine as a peer would."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(WAIT_S)
    connection.connect(f"\0crossrail.{address.incarnation}")
    return connection


def throw(address: xr.Address, packets: list[bytes], fds: list[int] | None = None) -> None:
    """Sends packets until the engine hangs up."""
    with closing(control_socket(address)) as connection:
        try:
            for packet in packets:
                socket.send_fds(connection, [packet], fds or [])
        except (BrokenPipeError, ConnectionResetError):
            pass


@pytest.fixture
def victim(open_engine: EngineFactory) -> Iterator[xr.Engine]:
    """An engine with a peer. Afterwards both must work as before, with no fds more."""
    engine, peer = open_engine("victim", rails=2), open_engine("peer")
    src, dst = peer.register(np.ones(100_000, np.uint8)), engine.alloc(100_000)
    peer.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(1, WAIT_S)
    before = len(open_fds())
    yield engine
    peer.submit_write(src, dst.descriptor, imm=1).wait(WAIT_S)
    engine.imm_counter(1).wait(1, WAIT_S)
    with xr.Engine("newcomer") as newcomer:
        newcomer.submit_write(newcomer.alloc(10), dst.descriptor, 10, imm=2).wait(WAIT_S)
        engine.imm_counter(2).wait(1, WAIT_S)
    del newcomer
    eventually(lambda: len(open_fds()) <= before, "the fds of garbage closed")


def captured_hello() -> bytes:
    """The first packet a real engine sends: it connects to a socket of ours that poses as an engine."""
    with xr.Engine("impostor") as impostor:
        address = impostor.address
    with xr.Engine("captured") as real, closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.settimeout(WAIT_S)
        listener.bind(f"\0crossrail.{address.incarnation}")
        listener.listen(4)
        real.submit_send(address, b"x")
        packet, fds = b"", []
        while not packet:  # who asks whether it would be let in says nothing
            connection, _ = listener.accept()
            with closing(connection):
                connection.settimeout(WAIT_S)
                packet, fds, _, _ = socket.recv_fds(connection, 65_536, 16)
        for fd in fds:
            socket.close(fd)
    return packet


def test_random_packets(victim: xr.Engine, seed: Seed) -> None:
    rng = seed.rng()
    for _ in range(200):
        packets = [rng.bytes(int(rng.integers(1, 3000))) for _ in range(int(rng.integers(1, 4)))]
        throw(victim.address, packets)


@pytest.mark.parametrize("packet", [b"\0", b"\0" * 4096, b"\xff" * 4096, b"A" * 60_000, b"GET / HTTP/1.0\r\n\r\n"])
def test_fixed_garbage(victim: xr.Engine, packet: bytes) -> None:
    throw(victim.address, [packet] * 5)


def test_connections_that_say_nothing_do_not_block_others(victim: xr.Engine) -> None:
    silent = [control_socket(victim.address) for _ in range(50)]

    with xr.Engine("in-between") as engine:
        engine.connect(victim.address, WAIT_S)

    for connection in silent:
        connection.close()


def test_mutated_handshakes(victim: xr.Engine, seed: Seed) -> None:
    hello = captured_hello()
    rng = seed.rng()
    for i in range(300):
        changed = bytearray(hello)
        for _ in range(int(rng.integers(1, 5))):
            changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
        length = int(rng.integers(1, len(changed) + 1)) if i % 3 == 0 else len(changed)
        throw(victim.address, [bytes(changed[:length])])


def test_true_handshake_without_its_fds(victim: xr.Engine) -> None:
    hello = captured_hello()

    for _ in range(20):
        throw(victim.address, [hello, hello])


@pytest.mark.parametrize("make_fd", ["pipe", "socket", "empty-memfd", "file"])
def test_true_handshake_with_wrong_fds(victim: xr.Engine, make_fd: str, tmp_path: Path) -> None:
    hello = captured_hello()
    fds = wrong_fds(make_fd, tmp_path)

    for count in (1, 2, 3, 8):
        throw(victim.address, [hello], (fds * count)[:count])
        throw(victim.address, [hello[: len(hello) // 2]], (fds * count)[:count])

    for fd in fds:
        os.close(fd)


def wrong_fds(kind: str, folder: Path) -> list[int]:
    if kind == "pipe":
        return list(os.pipe())
    if kind == "socket":
        return [end.detach() for end in socket.socketpair()]
    if kind == "empty-memfd":
        return [os.memfd_create("empty")]
    return [os.open(folder / "file", os.O_RDWR | os.O_CREAT)]


def test_memory_that_shrinks_after_the_handshake_is_no_crash(victim: xr.Engine, spawn_peer: PeerFactory) -> None:
    there = spawn_peer().open()
    remote = there.memory(100)
    mine = victim.alloc(100)
    there.operate("write", remote, [mine.descriptor], imm=3)
    victim.imm_counter(3).wait(1, WAIT_S)

    for _ in range(30):
        throw(victim.address, [bytes([i]) * 40 for i in range(60)])

    there.operate("write", remote, [mine.descriptor], imm=3)
    victim.imm_counter(3).wait(1, WAIT_S)


def test_flood_of_connections(victim: xr.Engine) -> None:
    started = time.monotonic()
    for _ in range(500):
        try:
            control_socket(victim.address).close()
        except BlockingIOError:  # its backlog is full: as it should be
            time.sleep(0.01)
    assert time.monotonic() - started < WAIT_S

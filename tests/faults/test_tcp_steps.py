"""A peer at every step of an operation over tcp: killed and back at once under its name and port; silent; frozen."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import crossrail as xr
from tests.conftest import EngineFactory, PeerFactory
from tests.support import sealing
from tests.support.limits import WAIT_S, eventually
from tests.support.node import RemoteEngine, RemoteMemory
from tests.support.operations import KINDS, Operations
from tests.support.patterns import CANARY, assert_same_bytes, pattern
from tests.support.ports import free_port
from tests.support.process import PeerProcess
from tests.support.proxy import ProxiedAddress, TcpProxy, proxied
from tests.support.tcp_engines import TCP

pytestmark = pytest.mark.timeout(120)

NBYTES = 300_001
OLD, NEW = 5, 6  # immediates of what was under way, and of what follows
# Bytes that have passed: in the handshake, whose messages have some 50 to 250; then in the operation.
OF_HANDSHAKE = (0, 60, 200, 400, 600, 900)
SHARES = (0.1, 0.5, 0.9, 0.999)


class Phoenix:
    """An engine in a process of its own, that can be killed and born again under the same name and port."""

    def __init__(self, spawn_peer: PeerFactory) -> None:
        self._spawn_peer = spawn_peer
        self._options = TCP | {"name": "phoenix", "port": free_port()}
        self.child: PeerProcess
        self.engine: RemoteEngine
        self.memory: RemoteMemory
        self._be_born()

    def restart(self) -> None:
        self.child.kill()
        self.child.wait_dead()
        self._be_born()

    def _be_born(self) -> None:
        self.child = self._spawn_peer()
        self.engine = self.child.open(**self._options)
        self.memory = self.engine.memory(NBYTES)
        self.engine.receive(1, 1000)


def by(way: ProxiedAddress, descriptor: xr.RegionDescriptor) -> xr.RegionDescriptor:
    owner = way.instead_of(descriptor.owner)
    return xr.RegionDescriptor.from_bytes(sealing.with_owner(descriptor.to_bytes(), owner.to_bytes()))


def steps_of(whole_bytes: int) -> Iterator[int]:
    """Of an operation that takes so many bytes on the wire, with its handshakes."""
    yield from (step for step in OF_HANDSHAKE if step < whole_bytes)
    yield from (int(share * whole_bytes) for share in SHARES)
    yield whole_bytes - 1


def only_proxy(way: ProxiedAddress) -> TcpProxy:
    (proxy,) = way.proxies
    return proxy


@pytest.mark.parametrize("kind", KINDS)
def test_target_restarts_at_any_step(open_engine: EngineFactory, spawn_peer: PeerFactory, kind: str) -> None:
    engine = open_engine(**TCP)
    mine = engine.register(pattern(1, NBYTES))
    phoenix = Phoenix(spawn_peer)
    with proxied(phoenix.engine.address) as way:
        Operations(engine, mine, [by(way, phoenix.memory.descriptor)], imm=OLD).submit(kind).wait(WAIT_S)
        whole_bytes = only_proxy(way).all_passed_bytes()
    failures = []
    for step in steps_of(whole_bytes):
        phoenix.restart()
        with proxied(phoenix.engine.address) as way:
            proxy, gone = only_proxy(way), by(way, phoenix.memory.descriptor)
            proxy.stall_after(step)
            transfer = Operations(engine, mine, [gone], imm=OLD).submit(kind)
            eventually(lambda p=proxy, t=transfer: p.is_stalled or t.done, f"{step} of {whole_bytes} bytes pass")

            phoenix.restart()
            proxy.stall(False)
            eventually(lambda t=transfer: t.done, "the transfer has ended")
            failures.append(transfer.exception())
            with pytest.raises(xr.PeerLost):
                engine.submit_write(mine, gone, imm=OLD).wait(WAIT_S)

            assert (phoenix.memory.content() == CANARY).all(), f"bytes for the old one came to the new one: {step}"
            assert phoenix.engine.count(OLD) == 0
            again = Operations(engine, mine, [by(way, phoenix.memory.descriptor)], imm=NEW)
            again.submit(kind).wait(WAIT_S)
            expect_once(phoenix.engine, again, kind)
    assert {type(failure) for failure in failures} <= {xr.PeerLost, type(None)}, failures
    assert isinstance(failures[0], xr.PeerLost)


def expect_once(there: RemoteEngine, operations: Operations, kind: str) -> None:
    if kind == "send":
        assert there.take()[1] == bytes(1000)
    elif kind != "read":
        there.expect_count(NEW, operations.counts(kind))


@pytest.mark.parametrize("kind", ["write", "paged_writes", "scatter", "barrier"])
def test_initiator_restarts_at_any_step(open_engine: EngineFactory, spawn_peer: PeerFactory, kind: str) -> None:
    engine = open_engine(**TCP)
    old, new = engine.alloc(NBYTES), engine.alloc(NBYTES)
    counts = Operations(engine, old, [old.descriptor]).counts(kind)
    phoenix = Phoenix(spawn_peer)
    with proxied(engine.address) as way:
        phoenix.engine.operate(kind, phoenix.memory, [by(way, old.descriptor)], imm=OLD)
        whole_bytes = only_proxy(way).all_passed_bytes()
    came = []
    for number, step in enumerate(steps_of(whole_bytes)):
        phoenix.restart()
        before, after = 100 + 2 * number, 101 + 2 * number  # immediates
        with proxied(engine.address) as way:
            proxy, memory = only_proxy(way), phoenix.memory
            proxy.stall_after(step)
            target = by(way, old.descriptor).to_bytes().hex()
            arguments = {"kind": kind, "number": memory.number, "descriptors": [target], "imm": before}
            phoenix.child.start("operate", engine=phoenix.engine.key, **arguments)
            eventually(lambda p=proxy, s=step: p.all_passed_bytes() >= s, f"{step} of {whole_bytes} bytes pass")

            phoenix.restart()
            proxy.stall(False)
            phoenix.memory.fill(step)
            phoenix.engine.operate(kind, phoenix.memory, [by(way, new.descriptor)], imm=after)

            engine.imm_counter(after).wait(counts, WAIT_S)
            assert engine.imm_counter(after).poll() == 0
            if kind in ("write", "scatter"):
                assert_same_bytes(new.array(), pattern(step, NBYTES))
            came.append(engine.imm_counter(before).poll())
            assert came[-1] <= counts, f"counted twice: {step}"
    assert came[0] == 0


@pytest.mark.parametrize("how", ["unplugged", "frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_target_is_silent_from_any_step_on(
    open_engine: EngineFactory, spawn_peer: PeerFactory, kind: str, how: str
) -> None:
    """All steps at once, each with a target of its own: every one takes the whole of its deadline."""
    engine = open_engine(peer_timeout_s=1.0, connect_timeout_s=1.0, **TCP)
    mine = engine.register(pattern(1, NBYTES))
    with ExitStack() as ways:
        first = Phoenix(spawn_peer)
        way = ways.enter_context(proxied(first.engine.address))
        spared = by(way, first.memory.descriptor)
        Operations(engine, mine, [spared], imm=OLD).submit(kind).wait(WAIT_S)
        under_way = []
        for step in steps_of(only_proxy(way).all_passed_bytes()):
            there = Phoenix(spawn_peer)
            way = ways.enter_context(proxied(there.engine.address))
            proxy, target = only_proxy(way), by(way, there.memory.descriptor)
            proxy.stall_after(step)
            transfer = Operations(engine, mine, [target], imm=OLD).submit(kind)
            eventually(lambda p=proxy, t=transfer: p.is_stalled or t.done, "so many bytes pass")
            if how == "frozen":
                there.child.stop()
                proxy.stall(False)
            under_way.append((step, there, proxy, target, transfer))

        for step, *_, transfer in under_way:
            eventually(lambda t=transfer: t.done, f"the transfer ends that stood still at {step}")
        outcomes = {step: type(transfer.exception()) for step, *_, transfer in under_way}
        assert set(outcomes.values()) <= {xr.PeerLost, type(None)}, outcomes
        assert outcomes[0] is xr.PeerLost

        for step, there, proxy, target, transfer in under_way:  # what comes back late
            there.child.resume() if how == "frozen" else proxy.stall(False)
            count = there.engine.count(OLD)
            assert count <= Operations(engine, mine, [mine.descriptor]).counts(kind), f"counted twice: {step}"
            if transfer.exception() is not None:
                with pytest.raises(xr.PeerLost):
                    engine.submit_write(mine, target, imm=NEW).wait(WAIT_S)
                assert there.engine.count(NEW) == 0
        engine.submit_write(mine, spared, imm=NEW).wait(WAIT_S)
        first.engine.expect_count(NEW, 1)

"""Ways over tcp that are slow, or of which one part is slower than another."""

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import NEVER_S, WAIT_S, eventually
from tests.support.proxy import ProxiedAddress, TcpProxy, proxied

pytestmark = pytest.mark.timeout(120)

TIMEOUT_S = 2.0
BYTES_PER_S = 2e6


class Slow:
    """A path whose bulk lane is open and slow."""

    def __init__(self, open_engine: EngineFactory, way: contextlib.ExitStack) -> None:
        common = {"transport": "tcp", "rails": ["127.0.0.1"], "peer_timeout_s": TIMEOUT_S}
        self.here, self.there = open_engine("here", **common), open_engine("there", **common)
        self.path: ProxiedAddress = way.enter_context(proxied(self.there.address))
        self.proxy: TcpProxy = self.path.proxies[0]
        self.proxy.bytes_per_s = BYTES_PER_S
        self.here.connect(self.path.address, WAIT_S)
        self.src = self.here.register(np.ones(6 << 20, np.uint8))
        self.dst = self.there.register(np.zeros(6 << 20, np.uint8))
        self.here.submit_write(self.src, self.dst.descriptor, 32 << 10).wait(WAIT_S)
        eventually(lambda: len(self.proxy.connections()) == 2, "the bulk lane's connection")
        self.bulk = self.proxy.connections()[1]
        for _ in range(2):
            self.here.submit_write(self.src, self.dst.descriptor, 32 << 10).wait(WAIT_S)


@pytest.fixture
def slow(open_engine: EngineFactory) -> Iterator[Slow]:
    with contextlib.ExitStack() as way:
        yield Slow(open_engine, way)


@pytest.mark.parametrize("life_s", [0.3, 0.001])
def test_connections_that_break_beside_a_slow_transfer_do_not_cost_the_peer(slow: Slow, life_s: float) -> None:
    began_s = time.monotonic()
    writes = [slow.here.submit_write(slow.src, slow.dst.descriptor, imm=1) for _ in range(2)]  # one is queued
    writes.append(slow.here.submit_write(slow.src, slow.dst.descriptor, 8, imm=1))

    while not writes[0].done and time.monotonic() < began_s + WAIT_S:
        time.sleep(life_s)
        slow.proxy.cut(spare=[slow.bulk])

    for write in writes:
        write.wait(WAIT_S)
    assert time.monotonic() - began_s > TIMEOUT_S
    slow.there.imm_counter(1).wait(3, WAIT_S)
    assert slow.there.imm_counter(1).poll() == 0


def test_way_that_has_carried_much_of_a_write_is_not_taken_for_one_that_drops_long_packets(slow: Slow) -> None:
    before = sum(forward for forward, _ in slow.proxy.passed_bytes())
    write = slow.here.submit_write(slow.src, slow.dst.descriptor)
    eventually(lambda: sum(forward for forward, _ in slow.proxy.passed_bytes()) > before + (2 << 20), "a part of it")
    connections = slow.proxy.connections()

    slow.proxy.forget(spare=[connection for connection in connections if connection is not slow.bulk])
    write.wait(WAIT_S)

    assert slow.bulk not in slow.proxy.connections()[:1]
    assert "short packets" not in str(slow.here.explain(slow.path.address))


@pytest.mark.parametrize("kind", ["write", "refused", "refused-often", "refused-before", "message"])
def test_what_was_counted_before_its_receiver_closed_is_done_whatever_rail_is_slow(
    open_engine: EngineFactory, kind: str
) -> None:
    """The goodbye comes by the fast rail, before the acknowledgement."""
    common = {"transport": "tcp", "rails": ["127.0.0.1", "127.0.0.2"]}
    here, there = open_engine("here", **common), open_engine("there", **common)
    with proxied(there.address) as way:
        way.proxies[1].delay_s = 0.1
        here.connect(way.address, WAIT_S)
        src, dst = here.register(np.ones(1 << 20, np.uint8)), there.register(np.zeros(1 << 20, np.uint8))
        closed = there.alloc(8)
        old = closed.descriptor
        closed.close(WAIT_S)
        here.submit_write(src, dst.descriptor, rail=1).wait(WAIT_S)
        pool = there.submit_recvs(4, 100)

        if kind == "refused-before":

            def goes_alone() -> bool:
                before = way.proxies[1].passed_bytes()[0]
                here.submit_write(src, dst.descriptor, 8, rail=1).wait(WAIT_S)
                return way.proxies[1].passed_bytes()[0] == before

            eventually(goes_alone, "small writes go by a connection of their own")
            for early in [here.submit_write(src, old, 8, rail=1) for _ in range(1000)]:
                with pytest.raises(xr.TransferError, match="closed"):
                    early.wait(WAIT_S)
            for early in [here.submit_write(src, dst.descriptor, 8, rail=1) for _ in range(8192)]:
                early.wait(WAIT_S)
        if kind == "refused-often":
            for early in [here.submit_write(src, old, 8, rail=1) for _ in range(100)]:
                with pytest.raises(xr.TransferError, match="closed"):
                    early.wait(WAIT_S)
        refused = here.submit_write(src, old, 8, rail=1) if kind == "refused" else None
        message = here.submit_send(way.address, b"x") if kind == "message" else None
        write = here.submit_write(src, dst.descriptor, imm=1, rail=1)
        if message is not None:
            pool.recv(WAIT_S)
        there.imm_counter(1).wait(1, WAIT_S)
        there.close()

        write.wait(WAIT_S)
        if message is not None:
            message.wait(WAIT_S)
        if refused is not None:
            with pytest.raises(xr.TransferError, match="closed"):
                refused.wait(WAIT_S)


@pytest.mark.parametrize("is_refused", [False, True])
def test_last_words_settle_what_a_rail_that_broke_before_them_has_carried(
    open_engine: EngineFactory, is_refused: bool
) -> None:
    """Whoever closes is asked no more about it."""
    common = {"transport": "tcp", "rails": ["127.0.0.1", "127.0.0.2"]}
    here, there = open_engine("here", **common), open_engine("there", **common)
    with proxied(there.address) as way:
        good, bad = way.proxies
        here.connect(way.address, WAIT_S)
        src, dst = here.register(np.ones(1 << 20, np.uint8)), there.register(np.zeros(1 << 20, np.uint8))
        closed = there.alloc(8)
        old = closed.descriptor
        closed.close(WAIT_S)
        for rail in (0, 1):
            here.submit_write(src, dst.descriptor, rail=rail).wait(WAIT_S)
        bad.delay_s = 0.5  # for as long nothing is told by it
        refused = here.submit_write(src, old, 8, rail=1) if is_refused else None
        write = here.submit_write(src, dst.descriptor, imm=1, rail=1)
        there.imm_counter(1).wait(1, WAIT_S)

        good.stall()
        bad.go_away()
        time.sleep(NEVER_S)
        assert not write.done
        there.close()
        good.stall(False)

        write.wait(WAIT_S)
        if refused is not None:
            with pytest.raises(xr.TransferError, match="closed"):
                refused.wait(WAIT_S)

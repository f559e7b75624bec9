"""A peer that writes garbage into the shared rings of its links: it may harm itself, never the other side."""

import contextlib

import numpy as np
import pytest

from tests.conftest import EngineFactory, PeerFactory
from tests.support.limits import WAIT_S
from tests.support.node import CommandError
from tests.support.operations import KINDS, Operations
from tests.support.patterns import CANARY
from tests.support.scribble import CHANNEL_BYTES, HEADER_BYTES, link_mappings
from tests.support.seeds import Seed
from tests.support.streams import Stream

NBYTES = 300_000
GUARD = 65_536


def test_scribbler_knows_where_the_rings_lie(open_engine: EngineFactory) -> None:
    one, other = open_engine("one", rails=2), open_engine("other")
    one.connect(other.address, WAIT_S)

    lengths = [length for _, length in link_mappings()]

    assert lengths
    assert [(length - HEADER_BYTES) % CHANNEL_BYTES for length in lengths] == [0] * len(lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("round_number", range(3))
def test_garbage_in_the_rings_harms_only_the_peer_that_wrote_it(
    open_engine: EngineFactory, spawn_peer: PeerFactory, seed: Seed, kind: str, round_number: int
) -> None:
    victim, bystander = open_engine("victim", rails=2), open_engine("bystander")
    memory = np.full(NBYTES + 2 * GUARD, CANARY, np.uint8)
    target = victim.register(memory[GUARD:-GUARD])
    pool = victim.submit_recvs(8, 1000, on_message=lambda _: None)
    child = spawn_peer()
    there = child.open("mad", rails=2, private_path="staged")
    remote = there.memory(NBYTES, "private")
    there.stream(kind, remote, [target.descriptor], imm=1)

    with contextlib.suppress(AssertionError, CommandError):  # it may well kill itself
        written = -1
        written = child.call("scribble", seed=seed.number(round_number), for_s=0.3)
    child.kill()
    child.wait_dead()

    assert written != 0
    assert (memory[:GUARD] == CANARY).all() and (memory[-GUARD:] == CANARY).all()
    src, dst = bystander.alloc(1000), victim.alloc(1000)
    src.array()[:] = 7
    bystander.submit_write(src, dst.descriptor, imm=2**20).wait(WAIT_S)
    victim.imm_counter(2**20).wait(1, WAIT_S)
    assert (dst.array() == 7).all()
    victim.submit_write(dst, src.descriptor).wait(WAIT_S)
    pool.close()
    target.close(WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("round_number", range(3))
def test_garbage_in_the_rings_of_a_target_harms_no_initiator(
    open_engine: EngineFactory, spawn_peer: PeerFactory, seed: Seed, kind: str, round_number: int
) -> None:
    """What it says it has taken, its statuses, and its answers to reads are garbage."""
    victim, bystander = open_engine("victim", rails=2, private_path="staged"), open_engine("bystander")
    memory = np.full(NBYTES + 2 * GUARD, CANARY, np.uint8)
    ours = victim.register(memory[GUARD:-GUARD])
    child = spawn_peer()
    there = child.open("mad", rails=2)
    there.receive(1000, 1000)
    there.call("discard_messages")
    target = there.memory(NBYTES, "private")
    stream = Stream(Operations(victim, ours, [target.descriptor], imm=1), kind, window=4)
    stream.wait_until_flowing()

    with contextlib.suppress(AssertionError, CommandError):  # it may well kill itself
        child.call("scribble", seed=seed.number(round_number), for_s=0.3)
    child.kill()
    child.wait_dead()
    stream.finish()

    assert (memory[:GUARD] == CANARY).all() and (memory[-GUARD:] == CANARY).all()
    src, dst = victim.alloc(1000), bystander.alloc(1000)
    src.array()[:] = 7
    victim.submit_write(src, dst.descriptor, imm=2**20).wait(WAIT_S)
    bystander.imm_counter(2**20).wait(1, WAIT_S)
    assert (dst.array() == 7).all()
    ours.close(WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_in_what_all_peers_share_keeps_no_other_peer_from_its_work(
    open_engine: EngineFactory, spawn_peer: PeerFactory, kind: str
) -> None:
    victim, bystander = open_engine("victim"), open_engine("bystander")
    pool = victim.submit_recvs(8, 1000)
    target, source = victim.alloc(NBYTES), bystander.alloc(NBYTES)
    operations = Operations(bystander, source, [target.descriptor], imm=1)
    operations.submit(kind).wait(WAIT_S)
    child = spawn_peer()
    child.open().call("connect", peer=victim.address.to_bytes().hex())

    assert child.call("overwrite_homes") > 0

    operations.submit(kind).wait(WAIT_S)
    pool.close()

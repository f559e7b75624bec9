"""Peers that were lost and that an engine was never told to forget: some are kept, and whom the program names."""

import pytest

import crossrail as xr
from crossrail.observe import read_traffic
from tests.support.limits import DEATH_S, WAIT_S, eventually

MANY = 300
KEPT_MAX = 128  # kLostPeersKept and as many again before the next look (native/engine/core.h)


def lose_one(engine: xr.Engine, src: xr.Region, writes: int = 1) -> xr.Address:
    lost = engine.stats()["peers_lost"]
    with xr.Engine("passing by") as peer:
        target = peer.alloc(64)
        for transfer in [engine.submit_write(src, target.descriptor, imm=1) for _ in range(writes)]:
            transfer.wait(WAIT_S)
        address = peer.address
    eventually(lambda: engine.stats()["peers_lost"] > lost, "the peer is seen to leave", DEATH_S)
    return address


def works(engine: xr.Engine) -> int:
    return sum(rail.counts.works for rail in read_traffic(engine).rails)


def test_lost_peers_that_nothing_names_are_forgotten_in_the_end(engine: xr.Engine) -> None:
    src = engine.alloc(64)

    addresses = [lose_one(engine, src) for _ in range(MANY)]

    known = engine.peers()
    assert len(known) <= KEPT_MAX
    assert addresses[-1] in known and engine.peer_state(addresses[-1]) == "lost"  # the newest stay
    assert addresses[0] not in known
    assert works(engine) == MANY  # what went to the others is counted still


def test_recycled_transfers_hold_on_to_no_lost_peer(engine: xr.Engine) -> None:
    src = engine.alloc(64)

    for writes in range(MANY, 0, -1):  # at once: the last of them is not needed again for any peer after it
        lose_one(engine, src, writes)

    assert len(engine.peers()) <= KEPT_MAX


def test_lost_peers_that_the_program_names_stay_lost(engine: xr.Engine) -> None:
    src = engine.alloc(64)
    named = lose_one(engine, src)
    group = engine.add_peer_group([named])

    for _ in range(MANY):
        lose_one(engine, src)

    assert named in engine.peers() and engine.peer_state(named) == "lost"
    with pytest.raises(xr.PeerLost):
        engine.submit_barrier(group, imm=1).wait(WAIT_S)


def test_a_peer_that_was_forgotten_so_is_lost_again(engine: xr.Engine) -> None:
    src = engine.alloc(64)
    addresses = [lose_one(engine, src) for _ in range(MANY)]

    with pytest.raises(xr.PeerLost, match="no engine of this incarnation"):
        engine.submit_send(addresses[0], b"anybody there?").wait(WAIT_S)

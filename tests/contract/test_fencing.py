"""revoke() and renew(): descriptors are of one generation of peers."""

import pytest

import crossrail as xr
from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import SOME_MEMORY, setups
from tests.support.limits import NEVER_S, WAIT_S, eventually, never
from tests.support.operations import DATA_KINDS, Operations
from tests.support.patterns import CANARY, assert_same_bytes, pattern


@setups([(1, 1), (4, 4)], SOME_MEMORY)
@pytest.mark.parametrize("kind", DATA_KINDS)
def test_revoked_region_of_the_peer_refuses(pair: Pair, kind: str) -> None:
    mine, remote, neighbour = pair.source(20_000), pair.target(20_000), pair.target(20_000)
    operations = Operations(pair.here, mine, [remote.descriptor], imm=7)
    operations.submit(kind).wait(WAIT_S)
    if operations.counts(kind) and kind != "read":
        pair.there.expect_count(7, operations.counts(kind))

    remote.revoke()
    remote.fill()

    with pytest.raises(xr.RemoteRegionRevoked, match=pair.there.address.name):
        operations.submit(kind).wait(WAIT_S)
    pair.here.submit_write(mine, neighbour.descriptor, imm=1).wait(WAIT_S)  # the peer itself is fine
    pair.there.expect_count(1, 1)
    assert (remote.content() == CANARY).all()
    assert pair.there.count(7) == 0


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_refusal_names_region_offset_and_length(pair: Pair) -> None:
    mine, remote = pair.source(5000), pair.target(20_000)
    remote.revoke()

    transfer = pair.here.submit_write(mine, remote.descriptor, 4000, dst_offset=3000)

    with pytest.raises(xr.RemoteRegionRevoked) as failed:
        transfer.wait(WAIT_S)
    assert (failed.value.peer, failed.value.region) == (pair.there.address.name, remote.descriptor.region)
    assert (failed.value.offset, failed.value.nbytes) == (3000, 4000)


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_renewed_region_takes_its_new_descriptor_and_never_the_old(pair: Pair) -> None:
    mine, remote = pair.source(20_000), pair.target(20_000)
    generations = [remote.descriptor]
    for _ in range(3):
        remote.revoke()
        remote.renew()
        generations.append(remote.descriptor)

    for old in generations[:-1]:
        with pytest.raises(xr.RemoteRegionRevoked):
            pair.here.submit_write(mine, old, imm=1).wait(WAIT_S)
    assert (remote.content() == CANARY).all()
    pair.here.submit_write(mine, generations[-1], imm=2).wait(WAIT_S)

    pair.there.expect_count(2, 1)
    assert pair.there.count(1) == 0
    assert len(set(generations)) == len(generations)
    assert_same_bytes(remote.content(), bytes_of(mine))


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_peer_cannot_touch_memory_after_revoke_returned(pair: Pair) -> None:
    mine, remote = pair.memory(2_000_000), pair.target(2_000_000, fill=3)
    stream = pair.there.stream("write", remote, [mine.descriptor], imm=9)
    array = mine.array()

    mine.revoke(WAIT_S)
    array[:] = CANARY
    outcome = pair.there.caller.call("failed_stream", stream=stream)

    assert set(outcome["failures"]) == {"RemoteRegionRevoked"}
    assert (array == CANARY).all()
    if pair.setup.rails_there == 1:  # in one piece: failed writes left no fractions
        counter = pair.here.imm_counter(9)
        eventually(lambda: counter.poll() >= outcome["done"], f"{outcome['done']} counted")
        assert counter.poll() == outcome["done"]


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_own_transfers_go_on_while_and_after_peers_are_locked_out(pair: Pair) -> None:
    mine, remote = pair.source(300_000, fill=5), pair.target(300_000)
    pair.here.connect(pair.there.address, WAIT_S)
    transfers = [pair.here.submit_write(mine, remote.descriptor, imm=1) for _ in range(20)]

    mine.revoke(WAIT_S)
    transfers += [pair.here.submit_write(mine, remote.descriptor, imm=1) for _ in range(20)]
    mine.renew()
    transfers += [pair.here.submit_write(mine, remote.descriptor, imm=1) for _ in range(20)]
    for transfer in transfers:
        transfer.wait(WAIT_S)
    pair.here.submit_read(mine, remote.descriptor).wait(WAIT_S)

    pair.there.expect_count(1, 60)
    assert_same_bytes(remote.content(), pattern(5, 300_000))
    mine.close(WAIT_S)


@setups([(1, 1), (4, 4)])
def test_fence_is_used_in_order(pair: Pair) -> None:
    region = pair.memory(1000)

    with pytest.raises(xr.UsageError, match="not revoked"):
        region.renew()
    region.revoke(WAIT_S)
    region.revoke(WAIT_S)  # idempotent
    assert region.revoked and not region.quarantined
    with pytest.raises(xr.UsageError, match="revoked"):
        _ = region.descriptor
    assert region.renew() == region.descriptor
    assert not region.revoked
    region.close(WAIT_S)
    for call in (region.revoke, region.renew):
        with pytest.raises(xr.UsageError, match="closed"):
            call()


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_closing_a_revoked_and_a_renewed_region(pair: Pair) -> None:
    for renewed in (False, True):
        remote = pair.target(1000)
        remote.revoke()
        if renewed:
            remote.renew()
        remote.close()
        with pytest.raises(xr.RemoteRegionClosed) as failed:
            pair.here.submit_write(pair.source(1000), remote.descriptor).wait(WAIT_S)
        assert isinstance(failed.value, xr.RemoteRegionRevoked) != renewed


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_undrained_close_cancels_what_no_peer_has_begun(pair: Pair) -> None:
    mine, remote, other = pair.source(200_000), pair.target(200_000), pair.source(10_000)
    pair.here.connect(pair.there.address, WAIT_S)
    transfers = [pair.here.submit_write(mine, remote.descriptor, imm=1) for _ in range(200)]
    unrelated = pair.here.submit_write(other, remote.descriptor, imm=2)

    mine.close(WAIT_S, drain=False)

    assert all(transfer.done for transfer in transfers)
    done = sum(transfer.status == "done" for transfer in transfers)
    assert {transfer.status for transfer in transfers} <= {"done", "cancelled"}
    unrelated.wait(WAIT_S)
    pair.there.expect_count(2, 1)
    if done:
        pair.there.expect_count(1, done)
    never(lambda: pair.there.count(1) > 0, "a cancelled write counted", NEVER_S)


@setups([(1, 1), (4, 4)])
def test_undrained_close_ends_transfers_to_a_peer_that_never_answers(pair: Pair) -> None:
    """Queued for an engine that is gone from its address: nothing of it was begun."""
    ghost = pair.another("ghost")
    remote = ghost.memory(1000)
    ghost.close()
    mine = pair.source(1000)
    transfer = pair.here.submit_write(mine, remote.descriptor)

    mine.close(WAIT_S, drain=False)

    assert transfer.status in ("cancelled", "peer-lost")

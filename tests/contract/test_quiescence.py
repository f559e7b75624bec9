"""After a completion of any kind nothing of the transfer touches source or target any more."""

import contextlib
import time

import pytest

import crossrail as xr
from tests.contract.conftest import Pair
from tests.contract.setups import SOME_MEMORY, setups
from tests.support.limits import WAIT_S
from tests.support.operations import Operations
from tests.support.patterns import CANARY

NBYTES = 600_000
WRITES = ("write", "paged_writes", "scatter", "verified_write")


@setups([(1, 1), (4, 4)], SOME_MEMORY)
@pytest.mark.parametrize("kind", WRITES)
def test_nothing_lands_after_a_cancelled_write_completed(pair: Pair, kind: str) -> None:
    mine, remote = pair.source(NBYTES, fill=1), pair.target(NBYTES)
    operations = Operations(pair.here, mine, [remote.descriptor], imm=4)
    operations.submit(kind).wait(WAIT_S)
    pair.there.expect_count(4, operations.counts(kind))
    for pause_s in (0, 0.0005, 0.003):
        transfers = [operations.submit(kind) for _ in range(12)]
        time.sleep(pause_s)
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            assert isinstance(ended(transfer), xr.TransferCancelled | None)

        remote.fill()  # what lands from here on destroys the canary
        mine.array()[:] = 0xEE  # what is read from here on is not what was sent
        pair.here.submit_write(mine, remote.descriptor, 0, imm=5).wait(WAIT_S)
        pair.there.expect_count(5, 1)
        time.sleep(0.02)

        assert (remote.content() == CANARY).all()


@setups([(1, 1), (4, 4)], SOME_MEMORY)
def test_nothing_is_put_into_the_target_of_a_cancelled_read(pair: Pair) -> None:
    mine, remote = pair.memory(NBYTES), pair.target(NBYTES, fill=3)
    pair.here.submit_read(mine, remote.descriptor).wait(WAIT_S)
    for pause_s in (0, 0.0005, 0.003):
        transfers = [pair.here.submit_read(mine, remote.descriptor) for _ in range(12)]
        time.sleep(pause_s)
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            assert isinstance(ended(transfer), xr.TransferCancelled | None)

        mine.array()[:] = CANARY
        time.sleep(0.02)

        assert (mine.array() == CANARY).all()


def ended(transfer: xr.Transfer) -> Exception | None:
    """How it ended, once it has."""
    with contextlib.suppress(xr.TransferError):
        transfer.wait(WAIT_S)
    return transfer.exception()

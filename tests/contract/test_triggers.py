"""Writes with a trigger: they begin once a watched word has got there, without anybody's help."""

import threading

import numpy as np
import pytest

import crossrail as xr
from tests.contract.conftest import Pair, bytes_of
from tests.contract.setups import ALL_MEMORY, SOME_MEMORY, SOME_RAILS, setups
from tests.support.limits import WAIT_S, eventually, never
from tests.support.patterns import CANARY, assert_same_bytes, pattern

IMM = 5
PAGE = 512


def nothing(old: int, new: int) -> None:
    """These watchers tell nobody."""


@pytest.fixture
def word(pair: Pair) -> xr.Watcher:
    return pair.here.alloc_watcher(nothing)


@setups(SOME_RAILS, ALL_MEMORY)
def test_write_begins_when_the_word_has_got_there(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(300_007), pair.target(300_007)

    transfer = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 3))
    word.add(2)
    never(lambda: transfer.done or pair.there.count(IMM), "a write before its trigger")
    assert transfer.triggered_at is None
    with pytest.raises(xr.WaitTimeout, match="its watched word has not reached"):
        transfer.wait(0.01)
    assert "waits for its trigger" in repr(transfer)
    src.array()[:] = pattern(99, 300_007)  # it is read when it begins
    word.add()

    transfer.wait(WAIT_S)
    pair.there.expect_count(IMM, 1)
    assert_same_bytes(dst.content(), bytes_of(src))
    assert transfer.triggered_at is not None


@setups(SOME_RAILS)
def test_write_says_when_it_completed(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(300_007), pair.target(300_007)
    begins, never_begins = (pair.here.submit_write(src, dst.descriptor, trigger=(word, value)) for value in (1, 2))
    plain = pair.here.submit_write(src, dst.descriptor)
    assert begins.completed_at is None

    word.add()
    begins.wait(WAIT_S)
    plain.wait(WAIT_S)
    assert never_begins.cancel()
    with pytest.raises(xr.TransferCancelled):
        never_begins.wait(WAIT_S)

    assert begins.triggered_at is not None and begins.completed_at is not None
    assert begins.triggered_at <= begins.completed_at
    assert never_begins.triggered_at is None and never_begins.completed_at is not None
    assert never_begins.completed_at >= begins.completed_at
    assert plain.completed_at is None


@setups(SOME_RAILS, SOME_MEMORY)
def test_each_of_many_paged_writes_waits_for_its_own_value(pair: Pair, word: xr.Watcher) -> None:
    layers, pages = 12, 7
    src, dst = pair.source(layers * pages * PAGE), pair.target(layers * pages * PAGE)
    order = pair.seed.rng().permutation(pages).astype(np.uint32)
    layer_bytes = pages * PAGE
    transfers = [
        pair.here.submit_paged_writes(
            src,
            order,
            dst.descriptor,
            order,
            PAGE,
            src_offset=layer * layer_bytes,
            dst_offset=layer * layer_bytes,
            imm=IMM,
            trigger=(word, layer + 1),
        )
        for layer in range(layers)
    ]

    passed = 0
    for steps in (1, 4, 1, 6):
        word.add(steps)
        passed += steps
        for transfer in transfers[:passed]:
            transfer.wait(WAIT_S)
        assert not any(transfer.done for transfer in transfers[passed:])
        pair.there.expect_count(IMM, steps * pages)

    assert_same_bytes(dst.content(), bytes_of(src))


@setups(SOME_RAILS)
def test_word_that_is_there_or_past_it_holds_nothing_back(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(100), pair.target(100)
    word.store(7)

    for value in (7, 6, 0, 2**64 - 1):  # the last: 8 steps behind, modulo 2**64
        pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, value)).wait(WAIT_S)
    pair.there.expect_count(IMM, 4)

    word.store(2**64 - 1)
    transfer = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 1))
    never(lambda: transfer.done, "a write two steps ahead of its trigger")
    word.add(2)
    transfer.wait(WAIT_S)
    pair.there.expect_count(IMM, 1)


@setups(SOME_RAILS)
def test_cancel_ends_a_write_that_waits(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(1000), pair.target(1000)
    first, second = (pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 1)) for _ in range(2))

    first.cancel()
    with pytest.raises(xr.TransferCancelled):
        first.wait(WAIT_S)
    assert (dst.content() == CANARY).all()
    word.add()

    second.wait(WAIT_S)
    pair.there.expect_count(IMM, 1)


@setups(SOME_RAILS)
def test_closing_the_watcher_cancels_what_waits_for_it(pair: Pair, word: xr.Watcher) -> None:
    other = pair.here.alloc_watcher(nothing)
    src, dst = pair.source(1000), pair.target(1000)
    waits = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 1))
    goes_on = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(other, 1))

    word.close()

    with pytest.raises(xr.TransferCancelled):
        waits.wait(WAIT_S)
    with pytest.raises(xr.UsageError, match="trigger is a watcher that is closed"):
        pair.here.submit_write(src, dst.descriptor, trigger=(word, 1))
    other.add()
    goes_on.wait(WAIT_S)
    pair.there.expect_count(IMM, 1)


@setups(SOME_RAILS)
def test_closing_the_source_cancels_what_waits(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(1000), pair.target(1000)
    transfer = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 1))

    src.close(WAIT_S, drain=False)

    with pytest.raises(xr.TransferCancelled):
        transfer.wait(WAIT_S)
    word.add()
    never(lambda: pair.there.count(IMM), "a write of a region that is closed")


@setups(SOME_RAILS)
def test_losing_the_peer_fails_what_waits(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(1000), pair.target(1000)
    pair.here.submit_write(src, dst.descriptor).wait(WAIT_S)  # connects
    transfer = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 1))

    pair.there.close()

    with pytest.raises(xr.PeerLost):
        transfer.wait(WAIT_S)
    late = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 1))
    with pytest.raises(xr.PeerLost):
        late.wait(WAIT_S)


@setups(SOME_RAILS)
def test_forgetting_the_peer_fails_what_waits(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(1000), pair.target(1000)
    transfer = pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, 1))

    pair.here.forget_peer(pair.there.address)

    with pytest.raises(xr.PeerLost):
        transfer.wait(WAIT_S)


@setups(SOME_RAILS)
def test_closing_the_engine_ends_what_waits(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(1000), pair.target(1000)
    transfers = [pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, n)) for n in range(1, 50)]

    pair.here.close(0)

    for transfer in transfers:
        with pytest.raises(xr.EngineClosed):
            transfer.wait(WAIT_S)
    word.add()  # of nobody


@setups([(1, 1)])
def test_many_threads_count_and_submit_and_each_write_is_counted_once(pair: Pair, word: xr.Watcher) -> None:
    threads_of_a_kind, each = 3, 300
    last = threads_of_a_kind * each
    src, dst = pair.source(64), pair.target(64)
    transfers: list[xr.Transfer] = []

    def submit(thread: int) -> None:
        rng = pair.seed.rng(thread)
        for value in rng.integers(1, last + 1, each):
            transfers.append(pair.here.submit_write(src, dst.descriptor, imm=IMM, trigger=(word, int(value))))

    def count() -> None:
        for _ in range(each):
            word.add()

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(threads_of_a_kind)]
    threads += [threading.Thread(target=count) for _ in range(threads_of_a_kind)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)

    for transfer in transfers:
        transfer.wait(WAIT_S)
    assert len(transfers) == last
    pair.there.expect_count(IMM, last)


@setups(SOME_RAILS)
def test_bad_triggers_are_refused(pair: Pair, word: xr.Watcher) -> None:
    src, dst = pair.source(100), pair.target(100)
    submit = pair.here.submit_write

    for wrong in (word, 3, (word,), (word, 1, 2), (3, word), [word, 3], ("word", 3)):
        with pytest.raises(xr.UsageError, match=r"trigger must be a pair \(watcher, value\)"):
            submit(src, dst.descriptor, trigger=wrong)  # type: ignore[arg-type]
    for value in (-1, 2**64, 1.5, None):
        with pytest.raises(xr.UsageError, match=r"trigger\[1\]"):
            submit(src, dst.descriptor, trigger=(word, value))  # type: ignore[arg-type]
    with pytest.raises(xr.UsageError, match="verify takes the checksum of src now"):
        submit(src, dst.descriptor, verify=True, trigger=(word, 1))
    eventually(lambda: pair.here.stats()["transfers_inflight"] == 0, "nothing accepted")

"""Requests that the decoder gives up: its pages are nobody else's until nothing can land in them any more."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

import crossrail as xr
from crossrail.kv import (
    KvLayout,
    KvTarget,
    LayoutMismatch,
    NoPages,
    PagePool,
    PagesInUse,
    PageState,
    SurplusCount,
)
from crossrail.kv.transfer import receiver as receiver_module
from crossrail.kv.transfer.reception import Reception
from tests.conftest import EngineFactory
from tests.kv.conftest import until
from tests.kv.instances import Decoder, Prefiller, assert_all_free, closing
from tests.support.kv_copies import Held
from tests.support.limits import WAIT_S, eventually

LAYOUT = KvLayout(layers=4, pages=8, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)
S = PageState


@pytest.fixture
def prefiller(open_engine: EngineFactory) -> Prefiller:
    return Prefiller(LAYOUT, [open_engine("prefiller")])


@pytest.fixture
def decoder(open_engine: EngineFactory) -> Decoder:
    return Decoder(LAYOUT, [open_engine("decoder")])


async def never() -> None:
    await asyncio.Event().wait()


async def confirmed() -> None:
    """What a prefiller says that has nothing under way."""


async def test_withdrawn_pages_serve_another_attempt(open_engine: EngineFactory, decoder: Decoder) -> None:
    """What a re-dispatch is: the same pages, another prefiller of another shape, another immediate."""
    first = Prefiller(LAYOUT, [open_engine("first")])
    second = Prefiller(replace(LAYOUT, tp=4, order="NHD"), [open_engine("second")], seed=2)
    reception = decoder.reserve("request", 30)
    async with closing(first, second):
        target = reception.dispatch(first.layout)
        job = first.open(target)
        first.sender.begin_step([(job, 30)])
        first.sender.layer_done(3)
        await reception.withdraw(job.cancel, WAIT_S)
        assert reception.state is S.RESERVED

        again = reception.dispatch(second.layout)

        assert again.ranks[0].imm != target.ranks[0].imm and list(again.pages) == list(target.pages)
        await asyncio.gather(second.prefill(second.open(again), [9, 30]), reception.arrived(WAIT_S))
        with pytest.raises(xr.UsageError, match=r"has arrived, .* release\(\) it"):
            await reception.withdraw(never, WAIT_S)
        decoder.assert_holds(reception, second.kv_of("request", 30))
        reception.release()
    assert_all_free(decoder.pool)


async def test_without_confirmation_pages_and_immediate_are_quarantined(decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    imm = reception.dispatch(LAYOUT, "prefiller").ranks[0].imm

    with pytest.raises(xr.WaitTimeout, match=r"has not confirmed within 0\.05 s"):
        await reception.withdraw(never, 0.05)

    assert decoder.pool.report().leases == [("request", S.QUARANTINED, 4, 0)]
    with pytest.raises(PagesInUse):
        reception.release()
    with pytest.raises(PagesInUse, match="its pages are quarantined"):
        reception.dispatch(LAYOUT)
    with pytest.raises(NoPages):
        decoder.reserve("other", 40)
    other = decoder.reserve("small", 8).dispatch(LAYOUT)
    assert other.ranks[0].imm != imm

    await decoder.receiver.fence("prefiller", WAIT_S)

    await reception.withdraw(never, WAIT_S)
    reception.release()
    assert decoder.pool.available == 7


async def test_what_is_quarantined_can_be_withdrawn_again(prefiller: Prefiller, decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT, "prefiller"))
        with pytest.raises(xr.WaitTimeout):
            await reception.withdraw(never, 0.05)

        await reception.withdraw(job.cancel, WAIT_S)

    reception.release()
    assert_all_free(decoder.pool)


async def test_the_full_count_is_as_good_as_a_confirmation(prefiller: Prefiller, decoder: Decoder) -> None:
    """A cancel that comes too late, and whose answer is lost."""
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        withdrawal = asyncio.create_task(reception.withdraw(never, WAIT_S))
        await asyncio.sleep(0)

        await prefiller.prefill(job, [30])

        await withdrawal
    reception.release()
    assert_all_free(decoder.pool)


async def test_an_error_of_asking_quarantines_and_is_raised(decoder: Decoder) -> None:
    async def ask() -> None:
        raise xr.UsageError("the router forgot who the prefiller is")

    reception = decoder.reserve("request", 30)
    reception.dispatch(LAYOUT, "prefiller")

    with pytest.raises(xr.UsageError, match="the router forgot"):
        await reception.withdraw(ask, WAIT_S)

    assert reception.state is S.QUARANTINED


async def test_of_two_errors_at_once_that_of_asking_is_raised(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        raise xr.UsageError("the router forgot who the prefiller is")

    async def count(reception: Reception, timeout_s: float | None) -> None:
        raise xr.EngineClosed("while it counted")

    monkeypatch.setattr(Reception, "_count", count)
    receptions = [decoder.reserve(f"request {n}", 1) for n in range(6)]
    for reception in receptions:
        reception.dispatch(LAYOUT, "prefiller")

    withdrawals = [reception.withdraw(ask, WAIT_S) for reception in receptions]
    errors = await asyncio.gather(*withdrawals, return_exceptions=True)

    assert [type(error) for error in errors] == [xr.UsageError] * len(receptions)


async def late_write(prefiller: Prefiller, target: KvTarget) -> None:
    """What a prefiller that was given up does when it comes to: it fails, and no byte and no count get through."""
    job = prefiller.open(replace(target, request="late"))
    await prefiller.step([(job, target.tokens)])
    with pytest.raises(xr.RemoteRegionClosed):
        await asyncio.wait_for(job.finish(), WAIT_S)
    job.lease.release()


async def test_an_attempt_with_registrations_of_its_own_ends_without_an_answer(
    prefiller: Prefiller, decoder: Decoder
) -> None:
    reception, other = decoder.reserve("request", 30), decoder.reserve("other", 30)
    target = reception.dispatch(LAYOUT)
    others = other.dispatch(LAYOUT)
    async with closing(prefiller):
        await reception.withdraw(never, 0.05)

        assert reception.state is S.RESERVED
        await late_write(prefiller, target)
        decoder.assert_untouched(reception.lease.pages)
        assert decoder.ranks[0].engine.imm_counter(target.ranks[0].imm).poll() == 0
        await asyncio.gather(prefiller.prefill(prefiller.open(others), [30]), other.arrived(WAIT_S))


@pytest.mark.parametrize("error", [xr.UsageError, ConnectionRefusedError, TimeoutError])
async def test_whatever_asking_raises_an_attempt_with_registrations_of_its_own_ends(
    prefiller: Prefiller, decoder: Decoder, error: type[Exception]
) -> None:
    async def ask() -> None:
        raise error("it does not answer")

    reception = decoder.reserve("request", 30)
    target = reception.dispatch(LAYOUT)
    async with closing(prefiller):
        await reception.withdraw(ask, WAIT_S)

        assert reception.state is S.RESERVED
        await late_write(prefiller, target)
    decoder.assert_untouched(reception.lease.pages)
    reception.release()
    assert_all_free(decoder.pool)


async def test_what_was_released_cannot_be_withdrawn(decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    reception.dispatch(LAYOUT, "prefiller")
    await reception.withdraw(confirmed, WAIT_S)
    reception.release()

    with pytest.raises(xr.UsageError, match="request 'request' was released"):
        await reception.withdraw(confirmed, WAIT_S)


async def test_a_fence_shuts_out_one_writer_and_no_other(open_engine: EngineFactory, decoder: Decoder) -> None:
    frozen, good = (Prefiller(LAYOUT, [open_engine(name)]) for name in ("frozen", "good"))
    async with closing(frozen, good):
        kept = decoder.reserve("kept", 20)
        job = good.open(kept.dispatch(LAYOUT, "good"))
        good.sender.begin_step([(job, 20)])
        lost = decoder.reserve("lost", 20)
        target = lost.dispatch(LAYOUT, "frozen")
        waiting = asyncio.create_task(lost.withdraw(never, WAIT_S))
        await asyncio.sleep(0)

        await decoder.receiver.fence("frozen", WAIT_S)
        await decoder.receiver.fence("frozen", WAIT_S)
        await decoder.receiver.fence("nobody", WAIT_S)

        await waiting
        await late_write(frozen, target)
        decoder.assert_untouched(lost.lease.pages)
        for layer in range(LAYOUT.layers):
            good.compute(job, layer)
        good.sender.layer_done(LAYOUT.layers)
        await kept.arrived(WAIT_S)
        decoder.assert_holds(kept, good.kv_of("kept", 20))
        again = frozen.open(lost.dispatch(LAYOUT, "frozen"))  # it came back
        await asyncio.gather(frozen.prefill(again, [20]), lost.arrived(WAIT_S))


async def test_registrations_of_writers_that_are_idle_for_long_are_closed(
    prefiller: Prefiller, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefillers that are restarted under the decoder: each is another writer, and the old ones end quietly."""
    monkeypatch.setattr(receiver_module, "_IDLE_KEPT", 2)
    kept = decoder.reserve("kept", 8)
    waiting = prefiller.open(kept.dispatch(LAYOUT, "busy"))
    targets = []
    async with closing(prefiller):
        for index in range(5):
            reception = decoder.reserve(f"request {index}", 8)
            targets.append(reception.dispatch(LAYOUT, f"incarnation {index}"))
            await asyncio.gather(prefiller.prefill(prefiller.open(targets[-1]), [8]), reception.arrived(WAIT_S))
            reception.release()

        assert list(decoder.receiver._accesses) == ["busy", "incarnation 3", "incarnation 4"]
        await until(lambda: not decoder.receiver._retired, "what was retired is shut")
        await late_write(prefiller, targets[0])
        again = decoder.reserve("again", 8)  # it was only idle
        job = prefiller.open(again.dispatch(LAYOUT, "incarnation 0"))
        await asyncio.gather(prefiller.prefill(job, [8]), again.arrived(WAIT_S))
        await asyncio.gather(prefiller.prefill(waiting, [8]), kept.arrived(WAIT_S))
        decoder.assert_holds(kept, prefiller.kv_of("kept", 8))


async def test_a_prefiller_known_to_be_dead_needs_no_confirmation(decoder: Decoder) -> None:
    async def ask() -> None:
        raise xr.PeerLost("peer 'prefiller' lost: killed")

    reception = decoder.reserve("request", 30)
    reception.dispatch(LAYOUT)

    await reception.withdraw(ask, WAIT_S)

    assert reception.state is S.RESERVED


async def test_an_engine_of_ours_that_closes_is_no_confirmation(open_engine: EngineFactory) -> None:
    engine = open_engine("decoder")
    decoder = Decoder(LAYOUT, [engine])
    reception = decoder.reserve("request", 30)
    reception.dispatch(LAYOUT, "prefiller")
    withdrawal = asyncio.create_task(reception.withdraw(never, WAIT_S))
    await asyncio.sleep(0)

    await asyncio.to_thread(engine.close)

    with pytest.raises(xr.EngineClosed):
        await withdrawal
    assert reception.state is S.QUARANTINED


async def test_a_writer_that_was_lost_may_come_back_under_its_name(prefiller: Prefiller, decoder: Decoder) -> None:
    async def ask() -> None:
        raise xr.PeerLost("peer 'prefiller' lost: killed")

    reception = decoder.reserve("request", 30)
    lost = reception.dispatch(LAYOUT, "prefiller")
    await reception.withdraw(ask, WAIT_S)
    async with closing(prefiller):
        await late_write(prefiller, lost)

        job = prefiller.open(reception.dispatch(LAYOUT, "prefiller"))

        await asyncio.gather(prefiller.prefill(job, [30]), reception.arrived(WAIT_S))


async def test_withdrawing_twice_asks_once(decoder: Decoder) -> None:
    asked = 0
    confirmed = asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await confirmed.wait()

    reception = decoder.reserve("request", 30)
    reception.dispatch(LAYOUT)
    both = [asyncio.create_task(reception.withdraw(ask, WAIT_S)) for _ in range(2)]
    await asyncio.sleep(0)
    both[0].cancel()  # who gives up waiting does not stop it
    confirmed.set()

    await both[1]

    assert asked == 1 and reception.state is S.RESERVED
    await reception.withdraw(ask, WAIT_S)  # nothing is out: nobody is asked
    assert asked == 1


async def test_withdraw_and_arrived_do_not_wait_at_once(decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    with pytest.raises(xr.UsageError, match="it is reserved"):
        await reception.arrived(WAIT_S)
    reception.dispatch(LAYOUT, "prefiller")
    waiting = asyncio.create_task(reception.arrived(WAIT_S))
    await asyncio.sleep(0)

    with pytest.raises(xr.UsageError, match="end that first"):
        await reception.withdraw(never, WAIT_S)
    with pytest.raises(xr.UsageError, match="another task"):
        await reception.arrived(WAIT_S)

    waiting.cancel()
    await asyncio.wait([waiting])
    with pytest.raises(xr.WaitTimeout):
        await reception.withdraw(never, 0.01)


async def test_two_prefillers_of_one_request_are_noticed(open_engine: EngineFactory, decoder: Decoder) -> None:
    """A dispatch that was delivered twice, to prefillers that do not know of each other."""
    prefillers = [Prefiller(LAYOUT, [open_engine(name)]) for name in ("first", "second")]
    reception = decoder.reserve("request", 30)
    async with closing(*prefillers):
        target = reception.dispatch(LAYOUT, "first")
        for prefiller in prefillers:
            await prefiller.prefill(prefiller.open(target), [30])
        counter = decoder.ranks[0].engine.imm_counter(target.ranks[0].imm)
        eventually(lambda: counter.poll() == 128, "all of both")  # 2 x 4 layers x 4 pages x K and V x 2 ranks

        with pytest.raises(SurplusCount, match="64 more counts"):
            await reception.arrived(WAIT_S)

        with pytest.raises(xr.WaitTimeout):  # that the count is full says nothing any more
            await reception.withdraw(never, 0.05)
        assert reception.state is S.QUARANTINED
        await decoder.receiver.fence("first", WAIT_S)
        await reception.withdraw(never, WAIT_S)
        assert reception.state is S.RESERVED


async def test_a_wait_that_ran_out_is_taken_up_again(prefiller: Prefiller, decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        with pytest.raises(xr.WaitTimeout, match="0 of 64 arrived"):
            await reception.arrived(0.02)

        await asyncio.gather(prefiller.prefill(job, [30]), reception.arrived(WAIT_S))

    await reception.arrived(0)  # it has
    assert reception.state is S.IN_USE


async def test_counts_of_several_engines_are_taken_one_by_one(open_engine: EngineFactory, prefiller: Prefiller) -> None:
    decoder = Decoder(LAYOUT, [open_engine(name) for name in ("rank0", "rank1")])
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        target = reception.dispatch(LAYOUT)
        only_first = replace(target, ranks=(target.ranks[0], replace(target.ranks[1], imm=5)))
        job = prefiller.open(only_first)
        await prefiller.prefill(job, [30])
        with pytest.raises(xr.WaitTimeout):
            await reception.arrived(0.2)  # rank 0 is taken, rank 1 is not there

        src, dst = prefiller.tail, decoder.ranks[1].regions[0].descriptor
        for _ in range(32):
            prefiller.engines[0].submit_write(src, dst, 0, imm=target.ranks[1].imm)

        await reception.arrived(WAIT_S)


async def test_dispatch_refuses_a_layout_that_does_not_fit_and_changes_nothing(decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)

    with pytest.raises(LayoutMismatch, match="head_dim: prefiller 8, decoder 16"):
        reception.dispatch(replace(LAYOUT, head_dim=8))

    assert reception.state is S.RESERVED
    reception.dispatch(LAYOUT)
    with pytest.raises(PagesInUse, match="its pages are filling"):
        reception.dispatch(LAYOUT)


async def test_without_an_immediate_to_spare_nothing_is_dispatched(open_engine: EngineFactory) -> None:
    decoder = Decoder(LAYOUT, [open_engine("roomy"), open_engine("tight", imm_counters_max=1)])
    first, second = decoder.reserve("first", 8), decoder.reserve("second", 8)
    first.dispatch(LAYOUT, "prefiller")

    with pytest.raises(xr.UsageError, match="imm_counters_max = 1"):
        second.dispatch(LAYOUT, "prefiller")

    assert second.state is S.RESERVED
    await decoder.receiver.fence("prefiller", WAIT_S)
    await first.withdraw(never, WAIT_S)
    second.dispatch(LAYOUT, "prefiller")  # what the first gave back is enough


# ---- writers that stand still in the middle of a copy


async def fence_again_and_again(decoder: Decoder, writer: str) -> None:
    while True:
        try:
            return await decoder.receiver.fence(writer, 0.2)
        except xr.WaitTimeout:
            pass


async def test_requests_of_a_writer_that_stands_still_keep_nobody_else_waiting(open_engine: EngineFactory) -> None:
    decoder = Decoder(replace(LAYOUT, pages=64), [open_engine("decoder")])
    for index in range(40):
        decoder.reserve(f"request {index}", 8).dispatch(LAYOUT, "frozen")
    decoder.reserve("other", 8).dispatch(LAYOUT, "dead")
    held = Held(decoder.receiver._accesses["frozen"])
    fences = [asyncio.create_task(fence_again_and_again(decoder, "frozen")) for _ in range(40)]
    await asyncio.sleep(0.3)
    begun_s = time.monotonic()

    await decoder.receiver.fence("dead", WAIT_S)
    await asyncio.to_thread(int)  # as a step of a model

    assert time.monotonic() - begun_s < 2.0
    assert sum(thread.name.startswith("crossrail-kv-shut") for thread in threading.enumerate()) <= 4
    assert not any(fence.done() for fence in fences)
    held.end()
    await asyncio.wait_for(asyncio.gather(*fences), WAIT_S)


async def test_a_writer_that_came_back_is_not_taken_for_an_idle_one(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "_IDLE_KEPT", 2)
    decoder = Decoder(LAYOUT, [open_engine("decoder")])
    receptions = [decoder.reserve(f"request {index}", 8) for index in range(5)]
    for index, reception in enumerate(receptions):
        reception.dispatch(LAYOUT, f"writer {index}")

    async def lost() -> None:
        raise xr.PeerLost("cut off for long")

    async def quiet() -> None:
        pass

    await receptions[0].withdraw(lost, WAIT_S)
    for reception in receptions[1:]:
        await reception.withdraw(quiet, WAIT_S)

    receptions[0].dispatch(LAYOUT, "writer 0")

    assert receptions[0].state is S.FILLING


async def test_registrations_that_nobody_uses_are_closed_once_their_writer_is_out_of_its_copy(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receiver_module, "_IDLE_KEPT", 1)
    monkeypatch.setattr(receiver_module, "_SHUT_S", 0.1)
    decoder = Decoder(LAYOUT, [open_engine("decoder")])
    reception = decoder.reserve("request", 8)

    async def quiet() -> None:
        pass

    reception.dispatch(LAYOUT, "frozen")
    held = Held(decoder.receiver._accesses["frozen"])
    await reception.withdraw(quiet, WAIT_S)
    reception.dispatch(LAYOUT, "next")
    await until(lambda: "not closed yet" in caplog.text, "it is told")
    await asyncio.sleep(0.3)
    assert decoder.receiver._retired and caplog.text.count("not closed yet") == 1

    held.end()

    await until(lambda: not decoder.receiver._retired, "they are closed")


@pytest.mark.parametrize("is_blocking", [True, False])
async def test_closing_ends_all_writers_but_the_one_that_stands_still(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, is_blocking: bool
) -> None:
    monkeypatch.setattr(receiver_module, "_SHUT_S", 0.3)
    decoder = Decoder(LAYOUT, [open_engine("decoder")])
    receiver = decoder.receiver
    for writer in ("frozen", "good"):
        decoder.reserve(writer, 8).dispatch(LAYOUT, writer)
    held, good = Held(receiver._accesses["frozen"]), receiver._accesses["good"]

    async def close() -> None:
        if is_blocking:
            receiver.close()
        else:
            await receiver.shut()

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(xr.WaitTimeout, match="in the middle of a copy"):
        await close()
    ticking.cancel()

    assert all(region.closed for region in good._regions)
    assert is_blocking or ticks > 5
    held.end()
    await close()
    await close()


@pytest.mark.parametrize(
    ("tokens", "room", "name"), [(-1, 0, "a"), (0, -1, "a"), (1, 0, ""), (1, 0, "x" * 257), (1, 0, 5)]
)
async def test_requests_that_are_none_are_refused(decoder: Decoder, tokens: int, room: int, name: str) -> None:
    with pytest.raises(xr.UsageError):
        decoder.reserve(name, tokens, room_tokens=room)
    assert_all_free(decoder.pool)


async def test_more_tokens_than_pages_take_none(decoder: Decoder) -> None:
    with pytest.raises(NoPages, match="request 'request': 9 pages are needed beside 0 shared ones, 8 of 8 are free"):
        decoder.reserve("request", 64, room_tokens=1)
    assert_all_free(decoder.pool)


async def test_a_pool_of_another_layout_is_refused(decoder: Decoder) -> None:
    with pytest.raises(xr.UsageError, match="the pool has 9 pages of 8 tokens, the layout 8 of 8"):
        xr.kv.KvReceiver(LAYOUT, decoder.ranks, PagePool(9, 8))
    with pytest.raises(xr.UsageError, match="1 ranks are given, the layout has 2"):
        xr.kv.KvReceiver(LAYOUT, decoder.ranks[:1], PagePool(8, 8))

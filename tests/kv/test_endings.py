"""Requests that end otherwise: cancelled at any moment, given up by either side, hit by errors. Nothing lands late."""

import asyncio
import ctypes
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import (
    DuplicateRequest,
    KvLayout,
    KvTarget,
    LayoutMismatch,
    PagesInUse,
    PageState,
    Reception,
    SendJob,
    TransferStopped,
)
from tests.conftest import EngineFactory
from tests.kv.instances import CANARY, Decoder, Prefiller, assert_all_free, closing
from tests.support.limits import WAIT_S, never

LAYOUT = KvLayout(layers=4, pages=32, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)
S = PageState


@pytest.fixture
def engines(open_engine: EngineFactory) -> tuple[xr.Engine, xr.Engine]:
    return open_engine("prefiller"), open_engine("decoder")


@pytest.fixture
def prefiller(engines: tuple[xr.Engine, xr.Engine]) -> Prefiller:
    return Prefiller(LAYOUT, engines[:1])


@pytest.fixture
def decoder(engines: tuple[xr.Engine, xr.Engine]) -> Decoder:
    return Decoder(LAYOUT, engines[1:], tail=True)


# ---- cancelled at the prefiller


async def nothing(prefiller: Prefiller, job: SendJob) -> int:
    return 0


async def a_step_begun(prefiller: Prefiller, job: SendJob) -> int:
    prefiller.sender.begin_step([(job, 16)])
    return LAYOUT.layers


async def half_a_chunk(prefiller: Prefiller, job: SendJob) -> int:
    prefiller.sender.begin_step([(job, 16)])
    prefiller.sender.layer_done(2)
    return LAYOUT.layers - 2


async def a_chunk(prefiller: Prefiller, job: SendJob) -> int:
    await prefiller.step([(job, 16)])
    return 0


async def all_but_the_tail(prefiller: Prefiller, job: SendJob) -> int:
    await prefiller.step([(job, 16)])
    await prefiller.step([(job, 30)])
    return 0


# What was done for the request when it was cancelled; each returns the layers that its step still owes.
Moment = Callable[[Prefiller, SendJob], Awaitable[int]]
MOMENTS: list[Moment] = [nothing, a_step_begun, half_a_chunk, a_chunk, all_but_the_tail]


async def whole_transfer(prefiller: Prefiller, decoder: Decoder, request: str, tokens: int) -> Reception:
    """A request that goes well; it stays at the decoder."""
    reception = decoder.reserve(request, tokens)
    job = prefiller.open(reception.dispatch(prefiller.layout, "prefiller"))
    await asyncio.gather(prefiller.prefill(job, [tokens]), reception.arrived(WAIT_S))
    decoder.assert_holds(reception, prefiller.kv_of(request, tokens))
    return reception


@pytest.mark.parametrize("moment", MOMENTS)
async def test_after_a_confirmed_cancel_nothing_lands(prefiller: Prefiller, decoder: Decoder, moment: Moment) -> None:
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT, "prefiller"))
        layers_left = await moment(prefiller, job)

        await reception.withdraw(lambda: job.cancel("the client left"), WAIT_S)

        for memory in decoder.ranks:
            memory.regions[0].array()[:] = CANARY
        prefiller.sender.layer_done(layers_left)  # the model does not know, and goes on
        await whole_transfer(prefiller, decoder, "another", 17)
        decoder.assert_untouched(reception.lease.pages)
        with pytest.raises(TransferStopped, match="the client left"):
            await asyncio.wait_for(job.finish(), WAIT_S)
        job.lease.release()
        reception.release()
    assert_all_free(prefiller.pool)


async def test_pages_are_kept_while_the_model_fills_them(prefiller: Prefiller, decoder: Decoder) -> None:
    """A confirmed cancel says nothing of the prefiller's own pages: its step is still under way."""
    async with closing(prefiller):
        job = prefiller.open(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller"))
        prefiller.sender.begin_step([(job, 16)])
        prefiller.sender.begin_step([(job, 30)])

        await job.cancel()

        assert job.lease.state is S.DRAINING and not job.settled
        with pytest.raises(xr.WaitTimeout, match="is not settled"):
            await job.finish(0.01)
        prefiller.sender.layer_done(2 * LAYOUT.layers - 1)
        await asyncio.sleep(0.05)
        with pytest.raises(PagesInUse):
            job.lease.release()
        prefiller.sender.layer_done()
        with pytest.raises(TransferStopped):
            await asyncio.wait_for(job.finish(), WAIT_S)
        job.lease.release()


async def test_a_stopped_job_may_still_be_in_a_step_and_a_settled_one_not(
    prefiller: Prefiller, decoder: Decoder
) -> None:
    async with closing(prefiller):
        job = prefiller.open(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller"))
        prefiller.sender.begin_step([(job, 16)])
        await job.cancel()
        prefiller.sender.begin_step([(job, 24)])  # the scheduler had it in its batch already
        prefiller.sender.layer_done(2 * LAYOUT.layers)
        with pytest.raises(TransferStopped):
            await asyncio.wait_for(job.finish(), WAIT_S)

        with pytest.raises(TransferStopped, match="'request': cancelled"):
            prefiller.sender.begin_step([(job, 30)])

        assert job.posted == []


async def test_cancel_twice_and_after_the_end(prefiller: Prefiller, decoder: Decoder) -> None:
    async with closing(prefiller):
        job = prefiller.open(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller"))
        await asyncio.gather(job.cancel("first"), job.cancel("second"))
        await job.cancel("third")
        with pytest.raises(TransferStopped, match="first"):
            await job.finish()

        done = prefiller.open(decoder.reserve("other", 30).dispatch(LAYOUT, "prefiller"))
        await prefiller.prefill(done, [30])
        await done.cancel()
        await done.finish()  # all was written before: it went well


async def test_cancelling_a_waiter_stops_nothing(prefiller: Prefiller, decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT, "prefiller"))
        waiters = [asyncio.create_task(job.finish()), asyncio.create_task(reception.arrived())]
        await asyncio.sleep(0)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)

        await asyncio.gather(prefiller.prefill(job, [30]), reception.arrived(WAIT_S))

    decoder.assert_holds(reception, prefiller.kv_of("request", 30))


# ---- errors at the prefiller


async def test_a_model_that_fails_stops_its_requests_and_no_others(prefiller: Prefiller, decoder: Decoder) -> None:
    async with closing(prefiller):
        failing = prefiller.open(decoder.reserve("failing", 30).dispatch(LAYOUT, "prefiller"))
        step = prefiller.sender.begin_step([(failing, 30)])
        ahead = decoder.reserve("ahead", 11)
        job = prefiller.open(ahead.dispatch(LAYOUT))
        prefiller.sender.begin_step([(job, 11)])
        prefiller.sender.layer_done(2)

        step.abandon("out of memory in layer 2")
        step.abandon("again")

        with pytest.raises(TransferStopped, match="request 'failing': out of memory in layer 2"):
            await asyncio.wait_for(failing.finish(), WAIT_S)
        failing.lease.release()
        for layer in range(LAYOUT.layers):
            prefiller.compute(job, layer)
        prefiller.sender.layer_done(LAYOUT.layers)
        prefiller.tail.array()[:] = 5
        job.send_tail(prefiller.tail)
        await ahead.arrived(WAIT_S)
        decoder.assert_holds(ahead, prefiller.kv_of("ahead", 11))
        await whole_transfer(prefiller, decoder, "after", 30)


async def test_a_step_that_never_began_is_abandoned(prefiller: Prefiller, decoder: Decoder) -> None:
    async with closing(prefiller):
        jobs = [prefiller.open(decoder.reserve(name, 9).dispatch(LAYOUT, "prefiller")) for name in ("a", "b", "c")]
        steps = [prefiller.sender.begin_step([(job, 9)]) for job in jobs]

        steps[1].abandon("not worth it")
        prefiller.sender.layer_done(2 * LAYOUT.layers)

        for job in (jobs[0], jobs[2]):
            job.send_tail(prefiller.tail)
            await asyncio.wait_for(job.finish(), WAIT_S)
        with pytest.raises(TransferStopped, match="not worth it"):
            await asyncio.wait_for(jobs[1].finish(), WAIT_S)


@pytest.mark.parametrize("counted", range(2 * LAYOUT.layers + 1))
async def test_what_kernels_have_counted_and_nobody_has_noted_counts_when_a_step_is_abandoned(
    prefiller: Prefiller, decoder: Decoder, counted: int
) -> None:
    """Else the third step's layers would leave before they are computed, or a step that is over would be stopped."""
    layers = LAYOUT.layers
    async with closing(prefiller):
        receptions = [decoder.reserve(name, 9) for name in ("a", "b", "c")]
        jobs = [prefiller.open(reception.dispatch(LAYOUT, "prefiller")) for reception in receptions]
        for job in jobs:
            prefiller.poison(job)
        word = ctypes.c_uint64.from_address(prefiller.sender.word_address)
        steps = [prefiller.sender.begin_step([(job, 9)]) for job in jobs]
        for job in jobs[:2]:
            for layer in range(layers):
                prefiller.compute(job, layer)
        with prefiller.sender._lock:  # the callback thread comes too late
            word.value += counted
            steps[1].abandon("out of memory")
        prefiller.sender.layer_done(max(0, layers - counted))  # what the first step lacks
        never(lambda: jobs[2].posted, "a layer of the third step")
        for layer in range(layers):
            prefiller.compute(jobs[2], layer)
        prefiller.sender.layer_done(layers)

        for job in jobs:
            if not job.stopped:
                job.send_tail(prefiller.tail)
        for number in (0, 2):
            await asyncio.wait_for(jobs[number].finish(), WAIT_S)
            await receptions[number].arrived(WAIT_S)
            decoder.assert_holds(receptions[number], prefiller.kv_of("abc"[number], 9))
        if counted == 2 * layers:  # it was over
            await asyncio.wait_for(jobs[1].finish(), WAIT_S)
        else:
            with pytest.raises(TransferStopped, match="out of memory"):
                await asyncio.wait_for(jobs[1].finish(), WAIT_S)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_decoder_that_goes_stops_what_is_sent_to_it(open_engine: EngineFactory, transport: str) -> None:
    prefiller = Prefiller(LAYOUT, [open_engine("prefiller", transport=transport)])
    going = open_engine("going", transport=transport)
    decoder = Decoder(LAYOUT, [going])
    async with closing(prefiller):
        job = prefiller.open(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller"))
        prefiller.sender.begin_step([(job, 30)])

        await asyncio.to_thread(going.close)
        prefiller.sender.layer_done(LAYOUT.layers)

        with pytest.raises(xr.TransferError):
            await asyncio.wait_for(job.finish(), WAIT_S)
        job.lease.release()
    assert_all_free(prefiller.pool)


async def test_a_decoder_that_fences_its_prefiller_stops_the_request(prefiller: Prefiller, decoder: Decoder) -> None:
    async with closing(prefiller):
        job = prefiller.open(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller"))
        await decoder.receiver.fence("prefiller", WAIT_S)

        await prefiller.step([(job, 30)])

        with pytest.raises(xr.RemoteRegionClosed):
            await asyncio.wait_for(job.finish(), WAIT_S)


def changed(target: KvTarget, **changes: Any) -> KvTarget:
    return replace(target, ranks=tuple(replace(rank, **changes) for rank in target.ranks))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda target: changed(target, imm=1 << 28),
        lambda target: changed(target, imm=-1),
        lambda target: changed(target, tail_offset=1 << 30),
        lambda target: changed(target, regions=(target.ranks[0].tail,)),  # far too short for KV
    ],
)
async def test_a_target_that_does_not_fit_stops_the_request(
    prefiller: Prefiller, decoder: Decoder, spoil: Callable[[KvTarget], KvTarget]
) -> None:
    async with closing(prefiller):
        job = prefiller.open(spoil(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller")))

        await prefiller.step([(job, 30)])
        job.send_tail(prefiller.tail)

        with pytest.raises(xr.UsageError):
            await asyncio.wait_for(job.finish(), WAIT_S)
        job.lease.release()


async def test_open_refuses_and_leaves_the_lease_alone(prefiller: Prefiller, decoder: Decoder) -> None:
    target = decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller")
    async with closing(prefiller):
        lease = prefiller.pool.reserve(3, "short")
        with pytest.raises(xr.UsageError, match="has 3 pages, 30 tokens take 4"):
            prefiller.sender.open(target, lease)
        with pytest.raises(LayoutMismatch, match="layers: prefiller 4, decoder 3"):
            prefiller.sender.open(replace(target, layout=replace(LAYOUT, layers=3)), lease)
        with pytest.raises(xr.UsageError, match=r"dst_pages has 0\.\.32, must be pages"):
            prefiller.sender.open(replace(target, pages=np.array([0, 1, 2, 32], np.uint32)), lease)
        assert lease.state is S.RESERVED
        prefiller.open(target)
        with pytest.raises(DuplicateRequest, match="'request' is under way"):
            prefiller.sender.open(target, lease)
        assert lease.state is S.RESERVED


@pytest.mark.parametrize(("end", "message"), [(16, "behind 16"), (31, "at most at 30"), (0, "behind 16")])
async def test_chunks_that_do_not_follow_are_refused_and_no_step_begins(
    prefiller: Prefiller, decoder: Decoder, end: int, message: str
) -> None:
    async with closing(prefiller):
        jobs = [prefiller.open(decoder.reserve(name, 30).dispatch(LAYOUT, "prefiller")) for name in ("a", "b")]
        await prefiller.step([(job, 16) for job in jobs])

        with pytest.raises(xr.UsageError, match=message):
            prefiller.sender.begin_step([(jobs[0], 30), (jobs[1], end)])

        await prefiller.step([(job, 30) for job in jobs])
        for job in jobs:
            job.send_tail(prefiller.tail)
            await asyncio.wait_for(job.finish(), WAIT_S)


async def test_a_step_that_names_a_job_twice_takes_chunks_that_follow(prefiller: Prefiller, decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT, "prefiller"))
        with pytest.raises(xr.UsageError, match="a chunk up to token 11 must end behind 16"):
            prefiller.sender.begin_step([(job, 16), (job, 11)])

        await prefiller.step([(job, 16), (job, 30)])

        job.send_tail(prefiller.tail)
        await asyncio.wait_for(job.finish(), WAIT_S)
    await reception.arrived(WAIT_S)
    decoder.assert_holds(reception, prefiller.kv_of("request", 30))


async def test_closing_a_sender_ends_its_requests(prefiller: Prefiller, decoder: Decoder) -> None:
    job = prefiller.open(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller"))
    prefiller.sender.begin_step([(job, 16)])

    await asyncio.wait_for(prefiller.sender.close(), WAIT_S)
    await prefiller.sender.close()

    assert job.settled
    with pytest.raises(TransferStopped, match="the sender was closed"):
        await job.finish()
    job.lease.release()
    assert_all_free(prefiller.pool)


async def test_a_closed_sender_takes_nothing(prefiller: Prefiller, decoder: Decoder) -> None:
    """Nobody would ever end what it is given while, or after, it closes."""
    job = prefiller.open(decoder.reserve("request", 30).dispatch(LAYOUT, "prefiller"))
    late = decoder.reserve("late", 30).dispatch(LAYOUT, "prefiller")
    step = prefiller.sender.begin_step([(job, 16)])
    closing = asyncio.create_task(prefiller.sender.close())
    await asyncio.sleep(0)

    for _ in range(2):  # while it closes, and then
        with pytest.raises(xr.UsageError, match="is closed"):
            prefiller.open(late)
        with pytest.raises(xr.UsageError, match="is closed"):
            prefiller.sender.begin_step([(job, 30)])
        await asyncio.wait_for(closing, WAIT_S)

    with pytest.raises(xr.UsageError, match="layers=1 must be 0 to 0"):
        prefiller.sender.layer_done()
    assert job.settled and not step.layers_left
    job.lease.release()
    assert_all_free(prefiller.pool)


# ---- shut out by the decoder while it waits


@pytest.mark.parametrize("how", ["fence", "close"])
async def test_whoever_awaits_a_writer_hears_that_it_was_shut_out(decoder: Decoder, how: str) -> None:
    reception = decoder.reserve("request", 30)
    reception.dispatch(LAYOUT, "prefiller")
    arriving = asyncio.ensure_future(reception.arrived())
    await asyncio.sleep(0.05)
    assert not arriving.done()

    if how == "fence":
        await decoder.receiver.fence("prefiller", WAIT_S)
    else:
        decoder.receiver.close()

    with pytest.raises(TransferStopped, match="its writer was shut out"):
        await asyncio.wait_for(arriving, WAIT_S)
    assert reception.state is S.FILLING
    await reception.withdraw(asyncio.Event().wait, WAIT_S)  # nobody answers, and need not
    reception.release()


async def test_what_had_come_before_its_writer_was_shut_out_has_arrived(prefiller: Prefiller, decoder: Decoder) -> None:
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT, "prefiller"))
        await prefiller.prefill(job, [30])
        await decoder.receiver.fence("prefiller", WAIT_S)

        await reception.arrived()

    assert reception.state is S.IN_USE

"""A request from a prefiller to a decoder over real engines: right bytes, exact counts, nothing sent too early."""

import asyncio
import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import KvLayout, KvTarget, PageState, RankMemory, expected_count, page_hashes
from crossrail.kv.transfer import sender
from tests.conftest import EngineFactory
from tests.kv.instances import CANARY, TAIL_BYTES, Decoder, Prefiller, assert_all_free, closing
from tests.support.gil import nobody_else_in_python
from tests.support.limits import NEVER_S, WAIT_S, eventually

LAYOUT = KvLayout(layers=3, pages=32, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])


@pytest.fixture
def engines(open_engine: EngineFactory, transport: str) -> tuple[xr.Engine, xr.Engine]:
    return open_engine("prefiller", transport=transport), open_engine("decoder", transport=transport)


@pytest.fixture
def transport() -> str:
    """Where the way does not matter."""
    return "shm"


PAIRS = [
    # What differs from LAYOUT: at the prefiller, at the decoder.
    ({}, {}),
    ({"tp": 1}, {"tp": 4}),
    ({"tp": 4}, {"tp": 1}),
    ({"tp": 8}, {"tp": 2}),
    ({"page_tokens": 4, "pages": 64}, {"page_tokens": 16, "pages": 11}),
    ({"order": "NHD"}, {"order": "NHD", "tp": 4}),
    ({"order": "NHD", "separate_kv": False}, {"order": "HND", "page_tokens": 6}),
    ({"kind": "MLA", "kv_heads": 1, "tp": 4}, {"kind": "MLA", "kv_heads": 1, "tp": 2}),
]


async def transfer(prefiller: Prefiller, decoder: Decoder, request: str, tokens: int, ends: Sequence[int]) -> None:
    reception = decoder.reserve(request, tokens)
    job = prefiller.open(reception.dispatch(prefiller.layout))

    await asyncio.gather(prefiller.prefill(job, ends), reception.arrived(WAIT_S))

    decoder.assert_holds(reception, prefiller.kv_of(request, tokens))
    reception.release()


@TRANSPORTS
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
async def test_kv_arrives(engines: tuple[xr.Engine, xr.Engine], source: dict[str, Any], target: dict[str, Any]) -> None:
    prefiller = Prefiller(replace(LAYOUT, **source), [engines[0]])
    decoder = Decoder(replace(LAYOUT, **target), [engines[1]])
    async with closing(prefiller):
        await transfer(prefiller, decoder, "one", 61, [61])
        await transfer(prefiller, decoder, "in chunks", 64, [13, 24, 25, 64])

    assert_all_free(prefiller.pool, decoder.pool)


async def test_an_engine_for_each_rank(open_engine: EngineFactory) -> None:
    prefiller = Prefiller(LAYOUT, [open_engine(f"prefill-{rank}") for rank in range(2)])
    decoder = Decoder(replace(LAYOUT, tp=4), [open_engine(f"decode-{rank}") for rank in range(4)])
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        target = reception.dispatch(LAYOUT)
        await asyncio.gather(prefiller.prefill(prefiller.open(target), [30]), reception.arrived(WAIT_S))

    decoder.assert_holds(reception, prefiller.kv_of("request", 30))


async def test_ranks_in_processes_of_their_own_send_each_their_part(
    engines: tuple[xr.Engine, xr.Engine], other: xr.Engine
) -> None:
    """As one sender a process would: each has a word of its own, and a lease of the same pages."""
    parts = [Prefiller(LAYOUT, [engine]) for engine in (engines[0], other)]
    for rank, part in enumerate(parts):
        await part.sender.close()
        part.sender = type(part.sender)(LAYOUT, {rank: part.ranks[rank]})
    decoder = Decoder(LAYOUT, [engines[1]], tail=True)
    reception = decoder.reserve("request", 30)
    target = reception.dispatch(LAYOUT)
    async with closing(*parts):
        jobs = [part.open(target) for part in parts]
        for part, job in zip(parts, jobs, strict=True):
            await part.step([(job, 30)])
        with pytest.raises(xr.UsageError, match="owes no tail"):
            jobs[1].send_tail(parts[1].tail)
        jobs[0].send_tail(parts[0].tail)
        await asyncio.wait_for(asyncio.gather(*(job.finish() for job in jobs)), WAIT_S)
        await reception.arrived(WAIT_S)

    decoder.assert_holds(reception, parts[0].kv_of("request", 30))


async def test_layers_in_memory_of_their_own(engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    for side, engine in ((prefiller, engines[0]), (decoder, engines[1])):
        for rank in range(2):
            arrays = [np.zeros(LAYOUT.layer_bytes, np.uint8) for _ in range(LAYOUT.layers)]
            side.ranks[rank] = RankMemory.register(engine, LAYOUT, arrays)
    await prefiller.sender.close()
    prefiller.sender = type(prefiller.sender)(LAYOUT, dict(enumerate(prefiller.ranks)))
    decoder.receiver = type(decoder.receiver)(LAYOUT, decoder.ranks, decoder.pool)
    async with closing(prefiller):
        await transfer(prefiller, decoder, "request", 50, [20, 50])


@pytest.mark.parametrize("counts", [(3,), (1, 2), (2, 1), (1, 1, 1)])
async def test_values_of_the_word_may_be_missed(engines: tuple[xr.Engine, xr.Engine], counts: Sequence[int]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        prefiller.sender.begin_step([(job, 30)])
        layer = 0
        for count in counts:
            for _ in range(count):
                prefiller.compute(job, layer)
                layer += 1
            prefiller.sender.layer_done(count)
        await asyncio.wait_for(job.finish(), WAIT_S)
        await reception.arrived(WAIT_S)

    decoder.assert_holds(reception, prefiller.kv_of("request", 30))
    assert [(posted.end_tokens, posted.layer) for posted in job.posted] == [(30, 0), (30, 1), (30, 2)]
    assert [(written.end_tokens, written.layer) for written in job.written] == [(30, 0), (30, 1), (30, 2)]
    assert all(before.at_s <= after.at_s for before, after in zip(job.posted, job.written, strict=True))


async def test_steps_begun_ahead_post_when_their_layers_come(engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    first, second = (decoder.reserve(name, 30) for name in ("first", "second"))
    async with closing(prefiller):
        jobs = [prefiller.open(reception.dispatch(LAYOUT)) for reception in (first, second)]
        for end in (10, 30):
            prefiller.sender.begin_step([(job, end) for job in jobs])
        for layer in range(3):
            for job in jobs:
                prefiller.compute(job, layer)
        prefiller.sender.layer_done(4)  # all of the first step, and a layer of the second
        with pytest.raises(xr.WaitTimeout):
            await first.arrived(0.1)
        assert [(p.end_tokens, p.layer) for p in jobs[1].posted] == [(10, 0), (10, 1), (10, 2), (30, 0)]
        prefiller.sender.layer_done(2)
        for reception in (first, second):
            await reception.arrived(WAIT_S)

    for reception in (first, second):
        decoder.assert_holds(reception, prefiller.kv_of(reception.request, 30))


@pytest.mark.parametrize("ahead", [(1, 1 << 20), (256, 1), (5, 1 << 20)], ids=str)
async def test_however_few_layers_are_submitted_ahead_all_arrive(
    engines: tuple[xr.Engine, xr.Engine], other: xr.Engine, ahead: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_AHEAD_TRANSFERS", ahead[0])
    monkeypatch.setattr(sender, "_AHEAD_PAGES", ahead[1])
    layout = replace(LAYOUT, layers=11)
    prefiller, decoder = Prefiller(layout, [engines[0], other]), Decoder(layout, [engines[1]])
    receptions = [decoder.reserve(f"request {n}", 30) for n in range(3)]
    async with closing(prefiller):
        jobs = [prefiller.open(reception.dispatch(layout)) for reception in receptions]
        for job in jobs:
            prefiller.poison(job)
        for end in (10, 30):
            prefiller.sender.begin_step([(job, end) for job in jobs])
        for count in (1, 4, 1, 5, 3, 8):
            for layer in range(11):  # more than what is counted: none of it may be missing
                for job in jobs:
                    prefiller.compute(job, layer)
            prefiller.sender.layer_done(count)
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*(job.finish() for job in jobs)), WAIT_S)
        await asyncio.gather(*(reception.arrived(WAIT_S) for reception in receptions))

    for reception in receptions:
        decoder.assert_holds(reception, prefiller.kv_of(reception.request, 30))


async def test_layers_leave_while_somebody_else_has_the_gil(engines: tuple[xr.Engine, xr.Engine]) -> None:
    """As the thread that launches a model's kernels: no Python of ours runs until all is there."""
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        word = ctypes.c_uint64.from_address(prefiller.sender.word_address)
        prefiller.sender.begin_step([(job, 30)])
        writes = list(job._transfers)
        for layer in range(LAYOUT.layers):
            prefiller.compute(job, layer)
        with nobody_else_in_python() as eventually:
            word.value = LAYOUT.layers  # a kernel's store
            eventually(lambda: all(write.done for write in writes), "all layers written")
        assert writes
        await asyncio.wait_for(job.finish(), WAIT_S)
        await reception.arrived(WAIT_S)

    decoder.assert_holds(reception, prefiller.kv_of("request", 30))


async def test_layer_of_a_step_that_is_not_begun_is_refused(engines: tuple[xr.Engine, xr.Engine]) -> None:
    """It would count for the next step, whose first layer would leave before it is computed."""
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        with pytest.raises(xr.UsageError, match="layers=1 must be 0 to 0"):
            prefiller.sender.layer_done()
        job = prefiller.open(reception.dispatch(LAYOUT))
        prefiller.sender.begin_step([(job, 30)])
        assert not job.posted
        for layer in range(3):
            prefiller.compute(job, layer)
        with pytest.raises(xr.UsageError, match="layers=4 must be 0 to 3"):
            prefiller.sender.layer_done(4)
        prefiller.sender.layer_done(3)
        with pytest.raises(xr.UsageError, match="layers=1 must be 0 to 0"):
            prefiller.sender.layer_done()
        await reception.arrived(WAIT_S)

    decoder.assert_holds(reception, prefiller.kv_of("request", 30))


@pytest.mark.parametrize("layer", [-1, 3])
def test_layer_that_there_is_not_is_refused(engines: tuple[xr.Engine, xr.Engine], layer: int) -> None:
    with pytest.raises(xr.UsageError, match=f"layer={layer} must be 0 to 2"):
        RankMemory.alloc(engines[0], LAYOUT).layer(layer)


def test_buffers_are_one_or_one_a_layer(engines: tuple[xr.Engine, xr.Engine]) -> None:
    with pytest.raises(xr.UsageError, match=f"{LAYOUT.rank_bytes} buffers for 3 layers: there must be 1 or one a"):
        RankMemory.register(engines[0], LAYOUT, np.zeros(LAYOUT.rank_bytes, np.uint8))
    with pytest.raises(xr.UsageError, match="2 buffers for 3 layers"):
        RankMemory.register(engines[0], LAYOUT, [np.zeros(LAYOUT.layer_bytes, np.uint8)] * 2)


async def test_nothing_goes_before_its_layer(engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    reception = decoder.reserve("request", 30)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        prefiller.sender.begin_step([(job, 30)])
        prefiller.compute(job, 0)
        prefiller.sender.layer_done()
        with pytest.raises(xr.WaitTimeout, match="of 48 arrived"):  # 3 layers x 4 pages x K and V x 2 ranks
            await reception.arrived(0.1)

        received = decoder.received(reception)

        assert all((bits == CANARY).all() for rank in received for bits in (rank[1:].view(np.uint8),))
        await job.cancel()


async def test_pages_that_the_decoder_has_are_not_sent(engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    names = page_hashes(range(40), LAYOUT.page_tokens)
    async with closing(prefiller):
        first = decoder.reserve("first", 20, names=names)
        job = prefiller.open(first.dispatch(LAYOUT))
        await asyncio.gather(prefiller.prefill(job, [20]), first.arrived(WAIT_S))
        first.lease.publish(names[:2])  # the third page is not full
        first.release()
        second = decoder.reserve("second", 37, names=names)
        assert second.prefix_tokens == 16
        for memory in decoder.ranks:
            for layer in range(LAYOUT.layers):
                memory.layer(layer)[:, second.lease.pages[:2]] = 0x1234

        await asyncio.gather(
            prefiller.prefill(prefiller.open(second.dispatch(LAYOUT)), [7, 37]), second.arrived(WAIT_S)
        )

    decoder.assert_holds(second, prefiller.kv_of("second", 37))
    for memory in decoder.ranks:
        assert (memory.layer(1)[:, second.lease.pages[:2]] == 0x1234).all()


async def test_a_prompt_that_the_decoder_knows_wholly_needs_only_its_tail(
    engines: tuple[xr.Engine, xr.Engine],
) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]], tail=True)
    names = page_hashes(range(16), LAYOUT.page_tokens)
    holder = decoder.pool.reserve(2, "before")
    holder.fill()
    holder.use()
    holder.publish(names)
    async with closing(prefiller):
        reception = decoder.reserve("request", 16, names=names)
        job = prefiller.open(reception.dispatch(LAYOUT))

        job.send_tail(prefiller.tail)

        await asyncio.wait_for(job.finish(), WAIT_S)
        await reception.arrived(WAIT_S)
    assert bytes(reception.tail()) == bytes(prefiller.tail.view())


async def test_a_prompt_that_the_decoder_knows_wholly_needs_nobody(engines: tuple[xr.Engine, xr.Engine]) -> None:
    decoder = Decoder(LAYOUT, [engines[1]])
    names = page_hashes(range(16), LAYOUT.page_tokens)
    holder = decoder.pool.reserve(2, "before")
    holder.fill()
    holder.use()
    holder.publish(names)

    known = decoder.reserve("known", 16, room_tokens=5, names=names)
    await known.arrived(0)

    assert known.state is PageState.IN_USE and len(known.lease.own) == 1
    unknown = decoder.reserve("unknown", 17, names=names)
    with pytest.raises(xr.UsageError, match="it is reserved"):
        await unknown.arrived(0)


@TRANSPORTS
async def test_tails_arrive_each_in_its_place(engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]], tail=True, slots=2)
    async with closing(prefiller):
        receptions = [decoder.reserve(name, 10) for name in ("a", "b")]
        with pytest.raises(xr.kv.NoPages, match="tails"):
            decoder.reserve("c", 10)
        for number, reception in enumerate(receptions):
            prefiller.tail.array()[:] = number + 1
            job = prefiller.open(reception.dispatch(LAYOUT))
            await asyncio.gather(prefiller.prefill(job, [10]), reception.arrived(WAIT_S))

    assert [bytes(r.tail()) for r in receptions] == [b"\1" * TAIL_BYTES, b"\2" * TAIL_BYTES]
    for reception in receptions:
        reception.release()
        with pytest.raises(xr.UsageError, match="no tail"):
            reception.tail()
    assert decoder.reserve("c", 10).state is PageState.RESERVED


async def test_without_its_tail_a_request_has_not_arrived(engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]], tail=True)
    reception = decoder.reserve("request", 10)
    count = sum(expected_count(LAYOUT, LAYOUT, rank, 10, tail=rank == 0) for rank in range(2))
    async with closing(prefiller):
        target = reception.dispatch(LAYOUT)
        job = prefiller.open(target)
        await prefiller.step([(job, 10)])
        counter = engines[1].imm_counter(target.ranks[0].imm)  # of both ranks
        eventually(lambda: counter.poll() == count - 1, "all but the tail")

        with pytest.raises(xr.WaitTimeout, match=f"{count - 1} of {count} arrived"):
            await reception.arrived(NEVER_S)

        assert not job.settled
        job.send_tail(prefiller.tail)
        with pytest.raises(xr.UsageError, match="owes no tail"):
            job.send_tail(prefiller.tail)
        await reception.arrived(WAIT_S)


async def test_decoders_own_tokens_get_room_behind_the_prompt(engines: tuple[xr.Engine, xr.Engine]) -> None:
    decoder = Decoder(LAYOUT, [engines[1]])

    reception = decoder.reserve("request", 12, room_tokens=21)

    assert len(reception.lease.pages) == 5  # 33 tokens of 8 a page
    assert len(reception.dispatch(LAYOUT).pages) == 2


async def test_wire_form_of_a_target_comes_back(engines: tuple[xr.Engine, xr.Engine]) -> None:
    target = Decoder(LAYOUT, [engines[1]], tail=True).reserve("request", 30).dispatch(LAYOUT)

    again = KvTarget.from_wire(target.to_wire())

    assert again.to_wire() == target.to_wire()
    assert again.ranks == target.ranks and np.array_equal(again.pages, target.pages)


async def test_what_is_no_target_or_lease_is_refused(engines: tuple[xr.Engine, xr.Engine]) -> None:
    prefiller, decoder = Prefiller(LAYOUT, [engines[0]]), Decoder(LAYOUT, [engines[1]])
    lease = prefiller.pool.reserve(2, "r")
    target = decoder.reserve("r", 16).dispatch(LAYOUT)
    async with closing(prefiller):
        with pytest.raises(xr.UsageError, match="takes a KvTarget there, not an object of type NoneType"):
            prefiller.sender.open(None, lease)
        with pytest.raises(xr.UsageError, match="takes a PageLease there, not an object of type NoneType"):
            prefiller.sender.open(target, None)
    assert lease.state is PageState.RESERVED

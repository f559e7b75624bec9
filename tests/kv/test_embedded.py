"""crossrail.kv inside an engine that has its ranks in several processes, and an allocator of its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import crossrail as xr
from crossrail.kv import (
    NOT_YET,
    KvLayout,
    KvReceiver,
    KvTarget,
    PagePool,
    PagesInUse,
    RankMemory,
    Reception,
    SendJob,
    foreign_lease,
)
from tests.conftest import EngineFactory
from tests.kv.instances import Prefiller, assert_all_free, closing
from tests.kv.worlds import bits, fill, rows
from tests.support.limits import WAIT_S

LAYOUT = KvLayout(layers=3, pages=8, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16")
TOKENS = 30
PAGES = np.array([6, 1, 3, 0], np.uint32)


class Rank:
    """One rank of a decoder, alone in its process as far as it knows."""

    def __init__(self, engine: xr.Engine, layout: KvLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.memory = RankMemory.alloc(engine, layout)
        self.receiver = KvReceiver(layout, {rank: self.memory}, None)

    def adopt(self, request: str, prefix_tokens: int = 0) -> Reception:
        lease = foreign_lease(request, PAGES.copy(), self.layout.page_tokens, prefix_tokens=prefix_tokens)
        return self.receiver.adopt(request, TOKENS, lease)

    def assert_holds(self, prefiller: Prefiller, request: str, begin: int = 0) -> None:
        heads = self.layout.heads_of(self.rank)
        kv = prefiller.kv_of(request, TOKENS)[:, :, heads.start : heads.stop, begin:]
        for layer in range(self.layout.layers):
            got = rows(self.layout, self.memory.layer(layer), PAGES, range(begin, TOKENS))
            assert np.array_equal(bits(got), bits(kv[layer]))


@pytest.mark.parametrize("tp", [1, 4])
async def test_each_rank_asks_for_its_own_part(open_engine: EngineFactory, tp: int) -> None:
    layout = replace(LAYOUT, tp=2)
    prefiller = Prefiller(replace(LAYOUT, tp=tp), [open_engine("prefiller")])
    ranks = [Rank(open_engine(f"rank {rank}"), layout, rank) for rank in range(2)]
    async with closing(prefiller):
        for rank in ranks:
            request = f"request@{rank.rank}"
            reception = rank.adopt(request)
            target = reception.dispatch(prefiller.layout)
            assert [other is None for other in target.ranks] == [other != rank.rank for other in range(2)]
            await prefiller.prefill(prefiller.open(target), [13, TOKENS])
            await reception.arrived(WAIT_S)
            reception.release()
            rank.assert_holds(prefiller, request)
    for rank in ranks:
        rank.receiver.close()


async def test_known_prefix_of_adopted_pages_is_not_written(open_engine: EngineFactory) -> None:
    prefiller, rank = Prefiller(LAYOUT, [open_engine("prefiller")]), Rank(open_engine("decoder"), LAYOUT, 0)
    reception = rank.adopt("request", prefix_tokens=16)
    async with closing(prefiller):
        await prefiller.prefill(prefiller.open(reception.dispatch(LAYOUT)), [TOKENS])
        await reception.arrived(WAIT_S)
    reception.release()

    rank.assert_holds(prefiller, "request", begin=16)
    assert not rank.memory.layer(0)[:, PAGES[:2]].any()
    rank.receiver.close()


async def test_pages_come_and_go_while_the_prompt_is_computed(open_engine: EngineFactory) -> None:
    """As in an engine that allocates chunk by chunk, and preempts: it computes again into other pages what was sent."""
    prefiller, rank = Prefiller(LAYOUT, [open_engine("prefiller")]), Rank(open_engine("decoder"), LAYOUT, 0)
    reception = rank.adopt("request")
    pages = np.full(4, NOT_YET, np.uint32)
    lease = foreign_lease("request", pages, 8)
    async with closing(prefiller):
        job = prefiller.sender.open(KvTarget.from_wire(reception.dispatch(LAYOUT).to_wire()), lease)
        with pytest.raises(xr.UsageError, match="src_pages"):
            prefiller.sender.begin_step([(job, 16)])
        pages[:2] = [2, 7]
        _compute(prefiller, job, pages[:2], 16)
        await job.at_rest(WAIT_S)
        for layer in range(LAYOUT.layers):  # somebody else's now
            prefiller.ranks[0].layer(layer)[:, [2, 7]] = 0
        pages[:] = [4, 5, 2, 7]
        _compute(prefiller, job, pages, TOKENS)
        await job.finish(WAIT_S)
        lease.release()
        await reception.arrived(WAIT_S)

    reception.release()
    rank.assert_holds(prefiller, "request")
    rank.receiver.close()


async def test_a_step_refused_for_one_request_leaves_the_others_of_it_alone(open_engine: EngineFactory) -> None:
    prefiller, rank = Prefiller(LAYOUT, [open_engine("prefiller")]), Rank(open_engine("decoder"), LAYOUT, 0)
    reception = rank.adopt("whole")
    lacking = foreign_lease("lacking", np.full(4, NOT_YET, np.uint32), 8)
    async with closing(prefiller):
        whole = prefiller.open(reception.dispatch(LAYOUT))
        job = prefiller.sender.open(rank.adopt("lacking").dispatch(LAYOUT), lacking)
        with pytest.raises(xr.UsageError, match="src_pages"):
            prefiller.sender.begin_step([(whole, TOKENS), (job, TOKENS)])

        await job.cancel("its pages are missing", WAIT_S)
        await prefiller.prefill(whole, [TOKENS])
        await reception.arrived(WAIT_S)

    reception.release()
    rank.assert_holds(prefiller, "whole")
    rank.receiver.close()


async def test_at_rest_waits_for_steps_under_way(open_engine: EngineFactory) -> None:
    prefiller, rank = Prefiller(LAYOUT, [open_engine("prefiller")]), Rank(open_engine("decoder"), LAYOUT, 0)
    reception = rank.adopt("request")
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        prefiller.sender.begin_step([(job, 16)])
        prefiller.sender.layer_done(2)
        with pytest.raises(xr.WaitTimeout, match="at rest"):
            await job.at_rest(0.05)
        prefiller.sender.layer_done()
        await job.at_rest(WAIT_S)
        assert not job.settled
        await reception.withdraw(job.cancel, WAIT_S)
    reception.release()
    rank.receiver.close()


async def test_a_layer_counts_for_the_step_that_announces_it_alone(open_engine: EngineFactory) -> None:
    """Of steps that were begun in advance."""
    prefiller, rank = Prefiller(LAYOUT, [open_engine("prefiller")]), Rank(open_engine("decoder"), LAYOUT, 0)
    reception = rank.adopt("request")
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        first, second = (prefiller.sender.begin_step([(job, end)]) for end in (16, TOKENS))
        for _ in range(LAYOUT.layers - 1):
            first.layer_done()

        with pytest.raises(xr.UsageError, match="one begun before it still lacks 1"):
            second.layer_done()
        assert (first.layers_left, second.layers_left) == (1, LAYOUT.layers)

        first.layer_done()
        with pytest.raises(xr.UsageError, match="a step that is over"):
            first.layer_done()
        second.layer_done()
        assert (first.layers_left, second.layers_left) == (0, LAYOUT.layers - 1)
        await reception.withdraw(job.cancel, WAIT_S)
    reception.release()
    rank.receiver.close()


async def test_a_layer_may_be_announced_once_the_step_before_was_abandoned(open_engine: EngineFactory) -> None:
    prefiller, rank = Prefiller(LAYOUT, [open_engine("prefiller")]), Rank(open_engine("decoder"), LAYOUT, 0)
    dropped, reception = rank.adopt("dropped"), rank.adopt("request")
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))
        steps = [
            prefiller.sender.begin_step([(prefiller.open(dropped.dispatch(LAYOUT)), TOKENS)]),
            prefiller.sender.begin_step([(job, 16)]),
            prefiller.sender.begin_step([(job, TOKENS)]),
        ]
        steps[1].abandon("the model gave up")
        with pytest.raises(xr.UsageError, match="one begun before it still lacks 3"):
            steps[2].layer_done()
        steps[0].abandon("the model gave up")
        steps[2].layer_done()
        assert [step.layers_left for step in steps] == [0, 0, LAYOUT.layers - 1]
    rank.receiver.close()


def test_adopted_pages_are_released_when_quiet(open_engine: EngineFactory) -> None:
    rank = Rank(open_engine("decoder"), LAYOUT, 0)
    reception = rank.adopt("request")
    reception.dispatch(LAYOUT)

    with pytest.raises(PagesInUse):
        reception.release()
    rank.receiver.close()


@pytest.mark.parametrize(("prefix_tokens", "message"), [(5, "whole pages of 8"), (40, "at most 4"), (-8, "at most 4")])
def test_prefix_that_is_no_whole_pages_is_refused(prefix_tokens: int, message: str) -> None:
    with pytest.raises(xr.UsageError, match=message):
        foreign_lease("request", PAGES.copy(), 8, prefix_tokens=prefix_tokens)


def test_lease_with_too_few_pages_is_refused(open_engine: EngineFactory) -> None:
    lease = foreign_lease("request", PAGES.copy(), 8)

    with pytest.raises(xr.UsageError, match="the lease has 4 pages"):
        Rank(open_engine("decoder"), LAYOUT, 0).receiver.adopt("request", 33, lease)


def test_receiver_without_a_pool_reserves_nothing(open_engine: EngineFactory) -> None:
    with pytest.raises(xr.UsageError, match="no pool of pages"):
        Rank(open_engine("decoder"), LAYOUT, 0).receiver.reserve("request", 5)


@pytest.mark.parametrize("tokens", [True, 5.0, "5", None], ids=repr)
def test_tokens_are_whole_numbers(open_engine: EngineFactory, tokens: Any) -> None:
    memory = RankMemory.alloc(open_engine("decoder"), LAYOUT)
    pool = PagePool(LAYOUT.pages, LAYOUT.page_tokens)

    with pytest.raises(xr.UsageError, match="tokens must be a whole number"):
        KvReceiver(LAYOUT, [memory], pool).reserve("request", tokens)
    with pytest.raises(xr.UsageError, match="tokens must be a whole number"):
        KvReceiver(LAYOUT, [memory], None).adopt("request", tokens, foreign_lease("request", PAGES.copy(), 8))

    assert_all_free(pool)


async def test_whole_numbers_may_be_those_of_numpy(open_engine: EngineFactory) -> None:
    """An engine that counts tokens with numpy has them; in a message they are none."""
    number: Callable[[int], Any] = np.int64
    memory = RankMemory.alloc(open_engine("decoder"), LAYOUT)
    pool = PagePool(number(8), number(8))
    receiver = KvReceiver(LAYOUT, [memory], pool, tail_bytes=number(40), tail_slots=number(2))
    lease = foreign_lease("adopted", PAGES.copy(), number(8), prefix_tokens=number(16))
    receptions = [receiver.reserve("reserved", number(30)), receiver.adopt("adopted", number(30), lease)]

    wires = [msgspec.msgpack.encode(reception.dispatch(LAYOUT, "prefiller").to_wire()) for reception in receptions]

    targets = [KvTarget.from_wire(msgspec.msgpack.decode(wire)) for wire in wires]
    assert [(target.tokens, target.prefix_tokens, target.tail_bytes) for target in targets] == [
        (30, 0, 40),
        (30, 16, 0),
    ]
    for reception in receptions:
        await reception.withdraw(_confirmed, WAIT_S)
        reception.release()
    receiver.close()
    assert_all_free(pool)


async def _confirmed() -> None:
    """What a prefiller says that has nothing under way."""


def _compute(prefiller: Prefiller, job: SendJob, pages: np.ndarray, end: int) -> None:
    """A step of the model that fills all pages the request has."""
    prefiller.sender.begin_step([(job, end)])
    kv = prefiller.kv_of("request", TOKENS)[:, :, :, :end]
    for layer in range(LAYOUT.layers):
        fill(LAYOUT, 0, layer, prefiller.ranks[0].layer(layer), pages, kv)
        prefiller.sender.layer_done()

"""What an engine that embeds the library gets wrong is said at the call, in words, and nothing else has changed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import crossrail as xr
from crossrail.kv import (
    KvLayout,
    KvReceiver,
    KvSender,
    PagePool,
    PageState,
    RankMemory,
    expected_count,
    foreign_lease,
    page_hashes,
    plan_transfer,
)
from crossrail.kv import messages as m
from crossrail.kv.nodes.decoder import Decoder as DecoderNode
from crossrail.kv.nodes.node import Node
from crossrail.kv.nodes.prefiller import Prefiller as PrefillerNode
from crossrail.kv.router.router import Router
from crossrail.kv.toy import ToyModel
from tests.conftest import EngineFactory
from tests.kv.instances import TAIL_BYTES, Decoder, Prefiller, assert_all_free, closing
from tests.support.kv_cluster import Cluster, node_record
from tests.support.kv_copies import Held
from tests.support.limits import WAIT_S

LAYOUT = KvLayout(layers=3, pages=8, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16")


@pytest.fixture
def prefiller(open_engine: EngineFactory) -> Prefiller:
    return Prefiller(LAYOUT, [open_engine("prefiller")])


@pytest.fixture
def decoder(open_engine: EngineFactory) -> Decoder:
    return Decoder(LAYOUT, [open_engine("decoder")], tail=True)


async def never() -> None:
    await asyncio.Event().wait()


async def test_a_job_of_another_sender_is_refused(
    open_engine: EngineFactory, prefiller: Prefiller, decoder: Decoder
) -> None:
    """Its writes would wait for this sender's word, and count as layers of the other's."""
    other = Prefiller(LAYOUT, [open_engine("other")])
    reception = decoder.reserve("request", 16)
    async with closing(prefiller, other):
        job = prefiller.open(reception.dispatch(LAYOUT))

        with pytest.raises(
            xr.UsageError, match=r"takes jobs that this sender's open\(\) has made, not <SendJob 'request'"
        ):
            other.sender.begin_step([(job, 16)])
        with pytest.raises(xr.UsageError, match=r"takes jobs that this sender's open\(\) has made, not None"):
            other.sender.begin_step([(None, 16)])  # type: ignore[list-item]

        with pytest.raises(xr.UsageError, match="layers=1 must be 0 to 0"):  # no step has begun
            other.sender.layer_done()
        await asyncio.gather(prefiller.prefill(job, [16]), reception.arrived(WAIT_S))
    decoder.assert_holds(reception, prefiller.kv_of("request", 16))


@pytest.mark.parametrize("end", [True, 16.0, np.float64(16), "16", None], ids=repr)
async def test_the_end_of_a_chunk_is_a_whole_number(prefiller: Prefiller, decoder: Decoder, end: Any) -> None:
    reception = decoder.reserve("request", 16)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))

        with pytest.raises(xr.UsageError, match="end must be a whole number"):
            prefiller.sender.begin_step([(job, end)])

        await asyncio.gather(prefiller.prefill(job, [np.int64(16)]), reception.arrived(WAIT_S))


async def test_a_step_for_what_the_decoder_has_wholly_is_refused_in_words(
    prefiller: Prefiller, decoder: Decoder
) -> None:
    names = page_hashes(range(16), LAYOUT.page_tokens)
    holder = decoder.pool.reserve(2, "before")
    holder.fill()
    holder.use()
    holder.publish(names)
    reception = decoder.reserve("request", 16, names=names)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))

        with pytest.raises(xr.UsageError, match="the decoder has the KV of all 16 tokens: no step is begun for it"):
            prefiller.sender.begin_step([(job, 16)])

        job.send_tail(prefiller.tail)
        await asyncio.gather(job.finish(WAIT_S), reception.arrived(WAIT_S))


async def test_leases_of_pages_of_another_size_are_refused(
    open_engine: EngineFactory, prefiller: Prefiller, decoder: Decoder
) -> None:
    """Their prefix would be tokens of other pages, and the pages' numbers are those of another memory."""
    receiver = KvReceiver(LAYOUT, decoder.ranks, None)
    other = PagePool(64, 4)
    lease = other.reserve(8, "request")
    adopted = foreign_lease("request", np.arange(4, dtype=np.uint32), 16, prefix_tokens=16)

    with pytest.raises(xr.UsageError, match="of pages of 4 tokens, those of the layout have 8"):
        receiver.adopt("request", 16, lease)
    with pytest.raises(xr.UsageError, match="of pages of 16 tokens, those of the layout have 8"):
        receiver.adopt("request", 16, adopted)
    with pytest.raises(xr.UsageError, match="lease must be a PageLease, not list"):
        receiver.adopt("request", 16, [0, 1])  # type: ignore[arg-type]
    async with closing(prefiller):
        with pytest.raises(xr.UsageError, match="of pages of 4 tokens, those of the layout have 8"):
            prefiller.sender.open(decoder.reserve("request", 16).dispatch(LAYOUT), lease)

    assert lease.state is adopted.state is PageState.RESERVED
    lease.release()
    assert_all_free(other)
    receiver.close()


REGIONS: dict[str, tuple[Callable[[xr.Engine, xr.Engine], Any], Any, str]] = {
    "too short": (lambda own, _: own.alloc(TAIL_BYTES - 1), 0, "of 40 bytes from offset 0 on exceeds the region's"),
    "too late": (lambda own, _: own.alloc(2 * TAIL_BYTES), 41, "of 40 bytes from offset 41 on exceeds the region's"),
    "another engine's": (lambda _, other: other.alloc(TAIL_BYTES), 0, "region of another engine than rank 0's"),
    "no region": (lambda _own, _: bytes(TAIL_BYTES), 0, "region must be a Region .*, not bytes"),
    "negative": (lambda own, _: own.alloc(TAIL_BYTES), -1, "offset is -1, must be 0 or more"),
    "no number": (lambda own, _: own.alloc(TAIL_BYTES), 0.0, "offset must be a whole number, not float"),
}  # fmt: skip


@pytest.mark.parametrize("case", REGIONS)
async def test_a_tail_that_cannot_be_written_is_refused_and_owed_on(
    open_engine: EngineFactory, prefiller: Prefiller, decoder: Decoder, case: str
) -> None:
    make, offset, words = REGIONS[case]
    region = make(prefiller.engines[0], open_engine("other"))
    reception = decoder.reserve("request", 16)
    async with closing(prefiller):
        job = prefiller.open(reception.dispatch(LAYOUT))

        with pytest.raises(xr.UsageError, match=words):
            job.send_tail(region, offset)

        assert not job.stopped
        await asyncio.gather(prefiller.prefill(job, [16]), reception.arrived(WAIT_S))
    assert bytes(reception.tail()) == bytes(prefiller.tail.view())


async def test_a_tail_in_a_region_that_is_closed_is_refused(prefiller: Prefiller, decoder: Decoder) -> None:
    region = prefiller.engines[0].alloc(TAIL_BYTES)
    region.close()
    async with closing(prefiller):
        job = prefiller.open(decoder.reserve("request", 16).dispatch(LAYOUT))

        with pytest.raises(xr.UsageError, match="the region of its tail is closed"):
            job.send_tail(region)

        assert not job.stopped


@pytest.mark.parametrize("is_blocking", [True, False])
async def test_a_closed_receiver_takes_no_requests(decoder: Decoder, is_blocking: bool) -> None:
    receiver = decoder.receiver
    reserved, dispatched = decoder.reserve("reserved", 8), decoder.reserve("dispatched", 8)
    dispatched.dispatch(LAYOUT, "prefiller")
    embedded = KvReceiver(LAYOUT, decoder.ranks, None)
    lease = foreign_lease("foreign", np.arange(1, dtype=np.uint32), 8)

    for closed in (receiver, embedded):
        if is_blocking:
            closed.close()
        else:
            await closed.shut()

    with pytest.raises(xr.UsageError, match=r"<KvReceiver of ranks \[0\]> is closed"):
        receiver.reserve("new", 8)
    with pytest.raises(xr.UsageError, match="is closed"):
        embedded.adopt("foreign", 8, lease)
    for writer in ("prefiller", None):
        with pytest.raises(xr.UsageError, match="is closed"):
            reserved.dispatch(LAYOUT, writer)
    assert reserved.state is lease.state is PageState.RESERVED
    await dispatched.withdraw(never, WAIT_S)  # nothing can arrive any more: nobody is asked
    for reception in (reserved, dispatched):
        reception.release()
    assert_all_free(decoder.pool)


async def lost() -> None:
    raise xr.PeerLost("peer 'prefiller' lost: killed")


@pytest.mark.parametrize(("writer", "ask"), [(None, never), ("prefiller", lost)], ids=["own", "shared"])
async def test_the_time_for_an_answer_is_not_that_for_closing(
    decoder: Decoder, writer: str | None, ask: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """However short it is, an attempt ends whose registrations only have to be closed, once they are."""
    reception = decoder.reserve("request", 16)
    reception.dispatch(LAYOUT, writer)
    assert reception._access is not None
    held = Held(reception._access)
    asyncio.get_running_loop().call_later(0.5, held.end)  # as a NIC that takes its time to let go of the memory

    await reception.withdraw(ask, 0.01)

    assert reception.state is PageState.RESERVED
    reception.release()
    assert_all_free(decoder.pool)


KINDS: dict[str, tuple[Callable[[xr.Engine, RankMemory], object], str]] = {
    "sender's layout": (lambda _, one: KvSender(None, {0: one}), "layout must be a KvLayout, not None"),
    "sender's ranks": (
        lambda _, one: KvSender(LAYOUT, one),
        "ranks must be a list of RankMemory, or a mapping from rank to RankMemory, not RankMemory",
    ),
    "sender's rank": (lambda _, one: KvSender(LAYOUT, {"0": one}), "rank must be a whole number, not str"),
    "sender's memory": (lambda _, one: KvSender(LAYOUT, {0: None}), "rank 0 must be a RankMemory, not None"),
    "receiver's ranks": (
        lambda _, one: KvReceiver(LAYOUT, one, None),
        "ranks must be a list of RankMemory, or a mapping from rank to RankMemory, not RankMemory",
    ),
    "receiver's layout": (lambda _, one: KvReceiver(None, [one], None), "layout must be a KvLayout, not None"),
    "receiver's memory": (lambda _, one: KvReceiver(LAYOUT, [None], None), "rank 0 must be a RankMemory, not None"),
    "receiver's pool": (lambda _, one: KvReceiver(LAYOUT, [one], 8), "pool must be a PagePool or None, not int"),
    "engine of memory": (lambda engine, _: RankMemory.alloc(None, LAYOUT), "engine must be an Engine, not None"),
    "layout of memory": (lambda engine, _: RankMemory.alloc(engine, 5), "layout must be a KvLayout, not int"),
    "pages": (lambda _, one: foreign_lease("request", [1, 2], 8), "pages must be an array of numpy, not list"),
    "count of pages": (
        lambda _, one: PagePool(8, 8).reserve(1.0, "request"),
        "count must be a whole number, not float",
    ),
    "source": (
        lambda _, one: KvReceiver(LAYOUT, [one], PagePool(8, 8)).reserve("request", 8).dispatch(None),
        "source must be a KvLayout, not None",
    ),
    "writer": (
        lambda _, one: KvReceiver(LAYOUT, [one], PagePool(8, 8)).reserve("request", 8).dispatch(LAYOUT, 5),
        "writer must be text, not int",
    ),
    "layers": (lambda _, one: KvSender(LAYOUT, {0: one}).layer_done("1"), "layers must be a whole number, not str"),
    "plan": (lambda _, one: plan_transfer(LAYOUT, None), "dst must be a KvLayout, not None"),
    "tokens": (lambda _, one: expected_count(LAYOUT, LAYOUT, 0, 8.0), "tokens must be a whole number, not float"),
}


@pytest.mark.parametrize("case", KINDS)
async def test_arguments_of_another_kind_are_named(open_engine: EngineFactory, case: str) -> None:
    call, words = KINDS[case]
    engine = open_engine("engine")

    with pytest.raises(xr.UsageError, match=words):
        call(engine, RankMemory.alloc(engine, LAYOUT))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("name", None, "the model's name must be text, not None"),
        ("name", "", "the model's name '' has 0 characters, must have 1..128"),
        ("name", "x" * 129, "the model's name 'x+.*' has 129 characters, must have 1..128"),
        ("name", "a\nb", r"the model's name 'a\\nb' must be printable text"),
        ("layout", None, "the model's layout must be a KvLayout, not None"),
        ("tail_bytes", -1, "the model's tail_bytes is -1, must be 0 or more"),
        ("tail_bytes", None, "the model's tail_bytes must be a whole number, not None"),
        ("end_tokens", None, "the model's end_tokens must be a set of tokens, not None"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [PrefillerNode, DecoderNode])
async def test_models_that_no_node_can_serve_are_refused(
    cluster: Cluster, kind: type[Node], field: str, value: object, words: str
) -> None:
    """With such a name a node would ask its router for ever; all requests would fail by the rest."""
    model = ToyModel(LAYOUT)
    ranks = {0: RankMemory.alloc(cluster.engines["router"], LAYOUT)}
    setattr(model, field, value)

    with pytest.raises(xr.UsageError, match=words):
        kind("node", cluster.router.mailbox, model, ranks, [cluster.where])


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\u2028b", "\udcff"], ids=ascii)
async def test_names_that_no_line_should_have_are_refused_by_whoever_would_have_them(
    cluster: Cluster, name: str
) -> None:
    """Logs and metrics show them, also those of nodes that do not look themselves."""
    mailbox, ranks = cluster.router.mailbox, {0: RankMemory.alloc(cluster.engines["router"], LAYOUT)}

    with pytest.raises(xr.UsageError, match="must be printable text"):
        Router(name, mailbox)
    with pytest.raises(xr.UsageError, match="must be printable text"):
        DecoderNode(name, mailbox, ToyModel(LAYOUT), ranks, [cluster.where])
    for record in (node_record(name, address=b"d0"), structs.replace(node_record("d0"), model=name)):
        with pytest.raises(xr.UsageError, match=r"the (node|model)'s name .* must be printable text"):
            cluster.router.roster.join(record, m.Load(), 0.0)


async def test_ranks_of_a_sender_may_be_a_list_as_those_of_a_receiver(engine: xr.Engine) -> None:
    both = KvLayout(layers=1, pages=2, page_tokens=8, kv_heads=4, head_dim=16, dtype="bfloat16", tp=2)
    memories = [RankMemory.alloc(engine, both) for _ in range(2)]

    with pytest.raises(xr.UsageError, match="1 ranks are given, the layout has 2"):
        KvSender(both, memories[:1])
    await KvSender(both, memories).close()

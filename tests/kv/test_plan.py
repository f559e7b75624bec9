"""Plans of transfers: every byte from where it is to where it belongs, once, and the count that both sides expect."""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossrail as xr
from crossrail.kv import (
    KvLayout,
    LayoutMismatch,
    PagePool,
    PageWrites,
    TransferPlan,
    expected_count,
    page_hashes,
    plan_transfer,
)
from tests.kv.worlds import POWERS, Request, bits, fill, layout_pairs, requests, rows, whole_kv

MODEL: dict[str, Any] = {"layers": 2, "pages": 16, "page_tokens": 4, "kv_heads": 8, "head_dim": 2, "dtype": "float32"}


class Memory:
    """The bytes of all ranks of an instance, layer by layer, and how often each was written."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.bytes = np.zeros((layout.tp, layout.layers, layout.layer_bytes), np.uint8)
        self.written = np.zeros_like(self.bytes, np.int32)

    def view(self, rank: int, layer: int) -> Any:
        return self.layout.layer_view(self.bytes[rank, layer])

    def written_rows(self, rank: int, layer: int) -> Any:
        """How often each row was written: shape (parts, pages, heads, tokens). Its bytes must agree."""
        one_byte = replace(self.layout, dtype="uint8", head_dim=self.layout.row_bytes)
        counts = self.written[rank, layer].astype(np.uint8)
        assert (counts == self.written[rank, layer]).all()
        view = one_byte.layer_view(counts)
        assert (view == view[..., :1]).all(), "a row was written in part"
        return view[..., 0]


def positions(offset: int, stride: int, pages: Any, nbytes: int) -> Any:
    """Index of every byte, as submit_paged_writes defines it: one line a page."""
    return (offset + stride * pages.astype(np.int64))[:, np.newaxis] + np.arange(nbytes)


def carry_out(write: PageWrites, layer: int, src: Memory, dst: Memory) -> int:
    """What the engine does with it; the count it makes."""
    source, target = src.bytes[write.source, layer], dst.bytes[write.target, layer]
    here = positions(write.src_offset, write.src_stride, write.src_pages, write.page_bytes)
    there = positions(write.dst_offset, write.dst_stride, write.dst_pages, write.page_bytes)
    target[there] = source[here]
    np.add.at(dst.written[write.target, layer], there, 1)
    return len(write.dst_pages)


def transfer(plan: TransferPlan, request: Request, src: Memory, dst: Memory) -> list[int]:
    """All chunks and layers; the counts at each target rank."""
    counts = [0] * plan.dst.tp
    for begin, end in request.chunks:
        units = plan.ready(request.tokens, request.prefix_tokens, begin, end)
        for write in plan.writes(request.src_pages, request.dst_pages, units):
            for layer in range(plan.src.layers):
                counts[write.target] += carry_out(write, layer, src, dst)
    return counts


@settings(max_examples=400)
@given(layouts=layout_pairs(), data=st.data(), name=st.text(min_size=1, max_size=9))
def test_every_byte_once_and_where_it_belongs(
    layouts: tuple[KvLayout, KvLayout], data: st.DataObject, name: str
) -> None:
    src_layout, dst_layout = layouts
    request = data.draw(requests(src_layout, dst_layout))
    plan = plan_transfer(src_layout, dst_layout, name)
    kv = whole_kv(src_layout, request.tokens, seed=request.tokens)
    src, dst = Memory(src_layout), Memory(dst_layout)
    for rank in range(src_layout.tp):
        for layer in range(src_layout.layers):
            fill(src_layout, rank, layer, src.view(rank, layer), request.src_pages, kv)

    counts = transfer(plan, request, src, dst)

    sent_tokens = np.arange(request.prefix_tokens, -(-request.tokens // plan.unit_tokens) * plan.unit_tokens)
    if request.prefix_tokens == request.tokens:
        sent_tokens = sent_tokens[:0]
    for rank in range(dst_layout.tp):
        heads = dst_layout.heads_of(rank)
        for layer in range(dst_layout.layers):
            arrived = rows(
                dst_layout, dst.view(rank, layer), request.dst_pages, range(request.prefix_tokens, request.tokens)
            )
            expected = kv[layer, :, heads.start : heads.stop, request.prefix_tokens :]
            assert (bits(arrived) == bits(expected)).all()
            written = dst.written_rows(rank, layer).copy()
            page, token = request.dst_pages[sent_tokens // dst_layout.page_tokens], sent_tokens % dst_layout.page_tokens
            assert (written[:, page, :, token] == 1).all()
            written[:, page, :, token] = 0
            assert not written.any(), "something else was written"
    assert counts == [
        expected_count(src_layout, dst_layout, rank, request.tokens, prefix_tokens=request.prefix_tokens)
        for rank in range(dst_layout.tp)
    ]


@given(layouts=layout_pairs(), data=st.data())
def test_chunks_change_neither_count_nor_bytes(layouts: tuple[KvLayout, KvLayout], data: st.DataObject) -> None:
    request = data.draw(requests(*layouts))
    plan = plan_transfer(*layouts)

    parts = [plan.ready(request.tokens, request.prefix_tokens, begin, end) for begin, end in request.chunks]

    whole = plan.ready(request.tokens, request.prefix_tokens, 0, request.tokens)
    assert [unit for units in parts for unit in units] == list(whole)


@given(layouts=layout_pairs(), data=st.data())
def test_processes_with_some_ranks_send_together_what_one_with_all_does(
    layouts: tuple[KvLayout, KvLayout], data: st.DataObject
) -> None:
    request = data.draw(requests(*layouts))
    plan = plan_transfer(*layouts)
    units = plan.ready(request.tokens, request.prefix_tokens, 0, request.tokens)
    mine = data.draw(st.sets(st.integers(0, layouts[0].tp - 1)))

    parts = [
        plan.writes(request.src_pages, request.dst_pages, units, sources)
        for sources in (mine, set(range(layouts[0].tp)) - mine)
    ]

    def key(write: PageWrites) -> tuple[int, int, int, int]:
        return (write.source, write.target, write.src_offset, write.dst_offset)

    whole = plan.writes(request.src_pages, request.dst_pages, units)
    assert sorted(map(key, [*parts[0], *parts[1]])) == sorted(map(key, whole))
    assert {write.source for write in parts[0]} <= mine


@pytest.mark.parametrize("prefill_tp", POWERS)
@pytest.mark.parametrize("decode_tp", POWERS)
def test_heads_of_a_page_stay_in_one_piece(prefill_tp: int, decode_tp: int) -> None:
    src, dst = KvLayout(**MODEL, tp=prefill_tp), KvLayout(**MODEL, tp=decode_tp)

    plan = plan_transfer(src, dst)

    heads = min(src.rank_heads, dst.rank_heads)
    assert {route.piece_bytes for route in plan.routes} == {heads * 4 * 2 * 4}
    assert plan.unit_counts == (2 * max(dst.rank_heads // src.rank_heads, 1),) * decode_tp


def test_equal_pages_with_k_and_v_together_are_one_piece() -> None:
    layout = KvLayout(**MODEL, separate_kv=False)

    (route,) = plan_transfer(layout, layout).routes

    assert (route.piece_bytes, route.pieces) == (layout.page_stride, 1)


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_neighbouring_pages_stay_neighbours(order: str) -> None:
    layout = KvLayout(**MODEL, order=order)
    plan = plan_transfer(layout, layout)

    (write,) = plan.writes(np.arange(16), np.arange(16), range(16))

    assert (np.diff(write.src_pages.astype(int)) == 1).sum() == 31 and (write.src_pages == write.dst_pages).all()


@pytest.mark.parametrize("prefill_tp", POWERS)
@pytest.mark.parametrize("decode_tp", POWERS)
@pytest.mark.parametrize(("kind", "kv_heads"), [("MLA", 1), ("GQA", 1), ("GQA", 2), ("GQA", 4)])
def test_replicas_share_the_sending(prefill_tp: int, decode_tp: int, kind: str, kv_heads: int) -> None:
    model = MODEL | {"kv_heads": kv_heads, "kind": kind}
    src, dst = KvLayout(**model, tp=prefill_tp), KvLayout(**model, tp=decode_tp)

    plans = [plan_transfer(src, dst, f"request-{i}") for i in range(200)]

    for plan in plans:
        senders = [route.lane.source for route in plan.routes]
        assert max(map(senders.count, senders)) == -(-len(senders) // prefill_tp), "as even as can be"
    busy = [sum(source in {r.lane.source for r in plan.routes} for plan in plans) for source in range(prefill_tp)]
    assert min(busy) > 0.5 * max(busy), "over many requests all sources send about as much"


def test_the_same_request_has_the_same_plan_everywhere() -> None:
    """The decoder does not know which replica sends, but all ranks of a prefiller must agree; so it is no chance."""
    src, dst = KvLayout(**MODEL | {"kv_heads": 1}, tp=8), KvLayout(**MODEL | {"kv_heads": 1}, tp=1)

    sources = [plan_transfer(src, dst, name).routes[0].lane.source for name in ("a", "b", "c", "d", "e", "f")]

    assert sources == [3, 1, 7, 4, 2, 0]  # CRC-32 modulo 8: a change breaks talk between releases


def test_the_tail_counts_one() -> None:
    layout = KvLayout(**MODEL)

    assert expected_count(layout, layout, 0, 9, tail=True) == expected_count(layout, layout, 0, 9) + 1
    assert expected_count(layout, layout, 0, 8, prefix_tokens=8, tail=True) == 1


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call executes; not those of gc.callbacks, of which hypothesis has one."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_hundred_thousand_pages_take_no_more_python_than_a_hundred() -> None:
    src = KvLayout(**MODEL | {"pages": 100_000}, tp=2)
    dst = KvLayout(**MODEL | {"pages": 100_000}, tp=4)
    plan = plan_transfer(src, dst)
    pages = np.random.default_rng(1).permutation(100_000)

    few, many = (lines_run(lambda n=n: plan.writes(pages, pages, range(n))) for n in (100, 100_000))

    assert few == many
    assert sum(len(write.src_pages) for write in plan.writes(pages, pages, range(100_000))) == 100_000 * 4 * 2


def test_names_of_hundred_thousand_pages_take_no_more_python_than_of_a_hundred() -> None:
    """Hashing, publishing, sharing what is there, and giving it up."""

    def share(pages: int) -> None:
        pool = PagePool(pages, 4)
        names = page_hashes(np.arange(4 * pages), 4)
        first = pool.reserve(pages, "first", names=names)
        first.fill()
        first.publish_computed(names)
        first.use()
        first.release()
        second = pool.reserve(pages, "second", names=names)
        assert second.shared == pages
        second.release()
        pool.reserve(pages, "third").release()
        assert pool.match(names) == 0

    few, many = (lines_run(lambda n=n: share(n)) for n in (100, 100_000))

    assert few == many


@pytest.mark.parametrize(
    ("tokens", "prefix_tokens", "message"),
    [(-1, 0, "tokens=-1"), (10, 3, "multiple of the target's 4 tokens"), (10, 12, "at most the 10 tokens")],
)
def test_tokens_out_of_range_are_refused(tokens: int, prefix_tokens: int, message: str) -> None:
    with pytest.raises(xr.UsageError, match=message):
        expected_count(KvLayout(**MODEL), KvLayout(**MODEL), 0, tokens, prefix_tokens=prefix_tokens)


@pytest.mark.parametrize(
    "pages", [np.array([0, 16]), np.array([-1, 0]), np.zeros((2, 2), int), np.zeros(2), np.arange(1)]
)
def test_pages_that_are_none_are_refused(pages: Any) -> None:
    plan = plan_transfer(KvLayout(**MODEL), KvLayout(**MODEL))

    with pytest.raises(xr.UsageError, match="dst_pages"):
        plan.writes(np.arange(2), pages, range(2))


@pytest.mark.parametrize(("begin", "end"), [(3, 2), (-1, 4), (0, 11)])
def test_chunk_out_of_range_is_refused(begin: int, end: int) -> None:
    with pytest.raises(xr.UsageError, match="chunk"):
        plan_transfer(KvLayout(**MODEL), KvLayout(**MODEL)).ready(10, 0, begin, end)


def test_layouts_of_different_models_have_no_plan() -> None:
    with pytest.raises(LayoutMismatch, match="head_dim: prefiller 2, decoder 3"):
        plan_transfer(KvLayout(**MODEL), KvLayout(**MODEL | {"head_dim": 3}))


def test_pieces_too_small_to_be_numbered_are_refused() -> None:
    """Of different orders every row is a piece: 2**32 rows is where indices end."""
    model = MODEL | {"pages": 1 << 24, "page_tokens": 64, "kv_heads": 8}

    with pytest.raises(xr.UsageError, match="indices up to"):
        plan_transfer(KvLayout(**model, order="HND"), KvLayout(**model, order="NHD"))


def test_rank_out_of_range_is_refused() -> None:
    with pytest.raises(xr.UsageError, match="rank=1"):
        expected_count(KvLayout(**MODEL), KvLayout(**MODEL), 1, 9)
